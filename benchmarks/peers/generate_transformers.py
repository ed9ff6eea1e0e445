"""transformers' `generate` for one padded batch, with the protocol of `report.Peer`.

    {hf environment}/bin/python generate_transformers.py MODEL

The jobs are those of generate_vllm.py. `generate` runs a batch until its longest answer is complete,
so tokens beyond a request's own length take time and are not counted.
"""

import argparse
import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", metavar="MODEL", help="folder of the model")
    options = arguments.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output; it must contain only answers
    import torch
    import transformers

    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    print(json.dumps({"transformers": transformers.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        longest = max(map(len, job["prompts"]))
        padded = [[0] * (longest - len(ids)) + ids for ids in job["prompts"]]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in job["prompts"]]
        begin_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(job["output_lens"]),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        wall_s = time.perf_counter() - begin_s
        print(json.dumps({"wall_s": wall_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
