"""Tokens per second of the models that `longshore models` lists, on this machine.

    python benchmarks/known_models.py [--models NAME ...] [--repeats 3] [--json F]

Of a model of text, output tokens of greedy answers, with one request and with 16 at the same time.
Of a model of embeddings, tokens of the texts. In the dtype that `longshore serve` chooses, with its
processes. A model must have been pulled, or be a folder.
"""

import statistics
import time

import numpy as np
import report

from longshore.deploy.bench.prompts import random_prompts
from longshore.deploy.bench.throughput import check_answered
from longshore.deploy.llm.llm import LLM
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.model.known_models import KNOWN_MODELS

NUM_REQUESTS = (1, 16)
INPUT_LEN = 128


def tokens_per_s(llm: LLM, prompts: list[list[int]], output_len: int) -> float:
    """Of the answers, or of the prompts if output_len is 0, which asks for embeddings."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    begin_s = time.perf_counter()
    if not output_len:
        llm.embed(given, use_tqdm=False)
        return sum(map(len, prompts)) / (time.perf_counter() - begin_s)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    outputs = llm.generate(given, params, use_tqdm=False)
    wall_s = time.perf_counter() - begin_s
    check_answered(outputs)
    return len(prompts) * output_len / wall_s


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(KNOWN_MODELS), metavar="NAME")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="after a run that is not counted")
    options = parser.parse_args()
    rows = []
    generator = np.random.default_rng(0)
    for name in options.models:
        model = read_model_folder(name)
        is_text = not (model.embedding and model.embedding.is_only)
        output_len = options.output_len if is_text else 0
        with LLM(name) as llm:
            for num_requests in NUM_REQUESTS:
                rates = [
                    tokens_per_s(
                        llm,
                        random_prompts(
                            num_requests,
                            input_len=INPUT_LEN,
                            shared_prefix=0,
                            vocab_size=model.vocab_size,
                            generator=generator,
                        ),
                        output_len,
                    )
                    for _ in range(options.repeats + 1)
                ][1:]
                rows.append(
                    {
                        "model": model.name,
                        "tokens": "output" if is_text else "input",
                        "requests": num_requests,
                        "tokens_per_s": statistics.median(rates),
                        "least": min(rates),
                        "most": max(rates),
                    }
                )
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
