"""What a computation with quantised weights does to the predictions of a model.

    python benchmarks/quantised_quality.py MODEL [--tokens 8192] [--json F]

Sides: `--quantised-weights` auto (in float32 and bfloat16), dequantised and int8 (in bfloat16), the
KV cache in FP8, and llama.cpp if `setup.sh llamacpp` has installed it and MODEL is a GGUF file.
Perplexity of prose in windows of 512 tokens, the share of tokens of which the same one is the most
likely as in float32, and the share of 200 greedy answers of 16 tokens that are equal to those of
dequantised weights.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import report
from end_to_end import BASE

from longshore.deploy.llm.llm import LLM
from longshore.deploy.llm.perplexity import DEFAULT_NUM_TOKENS, WINDOW, default_text, text_tokens
from longshore.deploy.llm.sampling_params import SamplingParams

SIDES = {
    "float32": {"dtype": "float32"},
    "dequantised": {"quantised_weights": "dequantised"},
    "exact": {},
    "int8": {"quantised_weights": "int8"},
    "exact, KV in FP8": {"kv_cache_dtype": "fp8_e4m3"},
}
NUM_ANSWERS = 200
ANSWER_LEN = 16
PROMPT_LEN = 24
MAX_MODEL_LEN = 2048
COMMON = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN}


def scores(llm: LLM, windows: list[list[int]]) -> dict[str, list[Any]]:
    """As a job of generate_llamacpp.py with `windows`."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    found: dict[str, list[Any]] = {"log_probs": [], "best": []}
    prompts = [{"prompt_token_ids": window} for window in windows]
    for window, output in zip(windows, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for token, line in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            found["log_probs"].append(line[token].logprob)
            found["best"].append(max(line, key=lambda each, line=line: line[each].logprob))
    return found


def answers(llm: LLM, tokens: list[int]) -> list[list[int]]:
    step = (len(tokens) - PROMPT_LEN) // NUM_ANSWERS
    prompts = [
        {"prompt_token_ids": tokens[i * step : i * step + PROMPT_LEN]} for i in range(NUM_ANSWERS)
    ]
    params = SamplingParams(temperature=0, max_tokens=ANSWER_LEN, ignore_eos=True)
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, params, use_tqdm=False)
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=DEFAULT_NUM_TOKENS)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name, settings in SIDES.items():
        with LLM(options.model, **{**COMMON, **settings}) as llm:
            tokens = text_tokens(llm, default_text(), options.tokens)
            windows = [tokens[first : first + WINDOW] for first in range(0, len(tokens), WINDOW)]
            found[name] = scores(llm, windows)
            found[name]["answers"] = answers(llm, tokens)
    python = BASE / "llamacpp/bin/python"
    if python.exists() and Path(options.model).is_file():
        with ExitStack() as stack:
            arguments = "generate_llamacpp.py", options.model, str(MAX_MODEL_LEN)
            peer = stack.enter_context(report.peer(python, *arguments))
            found["llama.cpp"] = peer.measure(windows=windows)
    rows = []
    for name, each in found.items():
        same = map(int.__eq__, each["best"], found["float32"]["best"])
        equal = map(list.__eq__, each.get("answers", []), found["dequantised"]["answers"])
        rows.append(
            {
                "side": name,
                "perplexity": math.exp(-sum(each["log_probs"]) / len(each["log_probs"])),
                "most likely as in float32": sum(same) / len(each["best"]),
                "equal answers": sum(equal) / NUM_ANSWERS if "answers" in each else None,
            }
        )
    report.write(options.json, rows, tokens=len(tokens))


if __name__ == "__main__":
    main()
