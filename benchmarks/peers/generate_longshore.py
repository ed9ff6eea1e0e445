"""Longshore's `LLM` with the protocol of `report.Peer`.

    python generate_longshore.py MODEL MAX_MODEL_LEN [--processes] [--grammars NAME] [--weights HOW]

The jobs are those of generate_vllm.py; `--grammars` is `llguidance` or `xgrammar`. Without
`--processes`, scheduler and worker run in this process. The model runs in bfloat16, with a KV cache of
at most 2 GiB and vLLM's default batch sizes.
"""

import argparse
import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "2")

KV_CACHE_BYTES = 2 << 30


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("model", metavar="MODEL", help="folder of the model")
    arguments.add_argument("max_model_len", metavar="MAX_MODEL_LEN", type=int)
    arguments.add_argument("--processes", action="store_true", help="run the engine in its own process")
    arguments.add_argument(
        "--grammars", metavar="NAME", default="auto", help="backend of structured output"
    )
    arguments.add_argument("--weights", metavar="HOW", default="auto", help="--quantised-weights")
    options = arguments.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output; it must contain only answers
    from longshore import LLM, SamplingParams, StructuredOutputsParams, __version__

    with LLM(
        options.model,
        in_process=not options.processes,
        dtype="bfloat16",
        max_model_len=options.max_model_len,
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        num_blocks=num_blocks(options.model),
        structured_output_backend=options.grammars,
        quantised_weights=options.weights,
    ) as llm:
        print(json.dumps({"longshore": __version__}), file=answers, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
            schemas = job.get("schemas") or [None] * len(prompts)
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=n,
                    ignore_eos=schema is None,
                    structured_outputs=schema and StructuredOutputsParams(json=schema),
                )
                for n, schema in zip(job["output_lens"], schemas, strict=True)
            ]
            begin_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            wall_s = time.perf_counter() - begin_s
            made = [len(output.outputs[0].token_ids) for output in outputs]
            assert made == job["output_lens"], made
            print(json.dumps({"wall_s": wall_s}), file=answers, flush=True)


def num_blocks(model: str) -> int:
    """The number of blocks of 16 tokens that fit into KV_CACHE_BYTES, with all layers in bfloat16. If a
    model has several KV cache groups, its blocks are smaller, and a token needs one in each group. A
    GGUF file, which has no such config, gets the tokens of generate_llamacpp.py."""
    if os.path.isfile(model):
        return 1024
    with open(os.path.join(model, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 2
    return KV_CACHE_BYTES // (16 * token_bytes)


if __name__ == "__main__":
    main()
