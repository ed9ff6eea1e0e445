"""Longshore's `LLM`, behind the protocol of `report.Peer`.

    python generate_longshore.py MODEL MAX_MODEL_LEN [--processes]

Jobs as in generate_vllm.py; without `--processes` scheduler and worker run in this process. bf16,
a KV cache of at most 2 GiB, and vLLM's default batch sizes.
"""

import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "2")

KV_CACHE_BYTES = 2 << 30


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    from longshore import LLM, SamplingParams, __version__

    with LLM(
        sys.argv[1],
        in_process="--processes" not in sys.argv,
        dtype="bfloat16",
        max_model_len=int(sys.argv[2]),
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        num_blocks=num_blocks(sys.argv[1]),
    ) as llm:
        print(json.dumps({"longshore": __version__}), file=answers, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
            params = [
                SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
                for n in job["output_lens"]
            ]
            begin_s = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            wall_s = time.perf_counter() - begin_s
            made = [len(output.token_ids) for output in outputs]
            assert made == job["output_lens"], made
            print(json.dumps({"wall_s": wall_s}), file=answers, flush=True)


def num_blocks(model: str) -> int:
    """Blocks of 16 tokens of all layers in bf16 that fit into KV_CACHE_BYTES. Where a model's layers are in
    several groups, a block is smaller, and a token needs one in each."""
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2
    return KV_CACHE_BYTES // (16 * token_bytes)


if __name__ == "__main__":
    main()
