"""vLLM's CPU build with the protocol of `report.Peer`: one line of JSON per job and per answer.

    {cpu environment}/bin/python generate_vllm.py MODEL MAX_MODEL_LEN [--processes] [--grammars NAME]

A job is `{"prompts": [[id, ...], ...], "output_lens": [n, ...]}`, and its answer `{"wall_s": ...}`.
With `--grammars`, the backend of structured output (`xgrammar` or `guidance`), the tokenizer is loaded,
and a job may have `"schemas"`, a JSON schema or null per prompt. `--processes` runs the engine in a
separate process, as vLLM does by default.
"""

import argparse
import json
import os
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "2")
if "--processes" not in sys.argv:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", metavar="MODEL", help="folder of the model")
    arguments.add_argument("max_model_len", metavar="MAX_MODEL_LEN", type=int)
    arguments.add_argument("--processes", action="store_true", help="run the engine in its own process")
    arguments.add_argument("--grammars", metavar="NAME", help="backend of structured output")
    options = arguments.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output; it must contain only answers
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    llm = vllm.LLM(
        model=options.model,
        skip_tokenizer_init=options.grammars is None,
        structured_outputs_config={"backend": options.grammars or "auto"},
        dtype="bfloat16",
        max_model_len=options.max_model_len,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
        schemas = job.get("schemas") or [None] * len(prompts)
        params = [
            vllm.SamplingParams(
                temperature=0,
                max_tokens=n,
                ignore_eos=True,
                detokenize=False,
                structured_outputs=schema and StructuredOutputsParams(json=schema),
            )
            for n, schema in zip(job["output_lens"], schemas)
        ]
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - begin_s
        made = [len(output.outputs[0].token_ids) for output in outputs]
        assert made == job["output_lens"], made
        print(json.dumps({"wall_s": wall_s}), file=answers, flush=True)


if __name__ == "__main__":
    main()
