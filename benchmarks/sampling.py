"""Sampling: a decode step of rows with one setting, compared with transformers' logits processors
and `multinomial` on the same logits.

    python benchmarks/sampling.py [--json F] [--repeats N] [--threads N]

Ours is a whole step of the worker's runner with a model that only copies given logits: rows, draws,
copies, and the answer. Theirs is what `generate` does with logits. Both take turns; times are
minima, in microseconds per row. `over_greedy` compares ours with our greedy step.
"""

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import report
import torch
import transformers as hf
from torch import Tensor

from longshore.protocol.arrays import int32_array
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.plan import RowStart, SchedulerOutput, digest_changes
from longshore.protocol.sampling import SamplingParams
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.queues.compute_queue import open_compute_queue
from longshore.worker.step.model_runner import ModelRunner

CASES = [(4_096, 64), (151_936, 8)]
PROMPT_LEN = 256
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024

SETTINGS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "greedy": ({"temperature": 0.0}, []),
    "temperature": ({"temperature": 0.8}, [hf.TemperatureLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.05}, [hf.MinPLogitsWarper(0.05)]),
    "top_k": ({"top_k": 20}, [hf.TopKLogitsWarper(20)]),
    "top_p": ({"top_p": 0.8}, [hf.TopPLogitsWarper(0.8)]),
    "top_k, top_p": (
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        [hf.TemperatureLogitsWarper(0.6), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.95)],
    ),
    "repetition_penalty": (
        {"temperature": 0.0, "repetition_penalty": 1.1},
        [hf.RepetitionPenaltyLogitsProcessor(1.1)],
    ),
    "bad_words": (
        {"temperature": 0.0, "bad_words_token_ids": ((5, 6), (7,))},
        [hf.NoBadWordsLogitsProcessor([[5, 6], [7]])],
    ),
    "logprobs": ({"temperature": 0.0, "logprobs": 5}, []),
}


class GivenLogits:
    """A model that returns given logits: (rows, vocab_size)."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.config = SimpleNamespace(
            vocab_size=logits.shape[1], max_encoder_tokens=0, max_audio_samples=0
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attention: object) -> Tensor:
        return token_ids

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[: len(hidden)].clone()


class NoAttention:
    shares_blocks = False

    def begin_step(self, metadata: object, hooks: object = None) -> None:
        return None


def given_logits(vocab_size: int, num_rows: int) -> Tensor:
    """Peaked like a language model's: probabilities decrease with the rank's power of 1.5."""
    generator = torch.Generator().manual_seed(0)
    falling = -1.5 * torch.arange(1, vocab_size + 1).log()
    orders = [torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)]
    return torch.stack([falling[order] for order in orders])


class Ours:
    """Rows that decode without end, one step per call."""

    def __init__(self, logits: Tensor, sampling: SamplingParams, prompt: list[int]) -> None:
        num_rows = len(logits)
        device = torch.device("cpu")
        blocks = num_rows * (MAX_MODEL_LEN // BLOCK_SIZE)
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype_bytes=4)
        config = KVCacheConfig(blocks + 1, (KVCacheGroup(("layer",), spec),), "float32")
        cache = KVCache(config, dtype=torch.float32, device=device)
        self._queue = open_compute_queue(device)
        self._runner = ModelRunner(
            cast(Any, GivenLogits(logits)),
            cache,
            cast(Any, NoAttention()),
            self._queue,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * PROMPT_LEN,
            max_model_len=MAX_MODEL_LEN,
        )
        ids = np.arange(1, blocks + 1, dtype=np.int32).reshape(num_rows, -1)
        self._step = self._digest = 0
        self._num_rows = num_rows
        rows = int32_array(list(range(num_rows)))
        added = tuple(
            RowStart(
                row=row,
                generation=row + 1,
                request_id=str(row),
                num_computed_tokens=0,
                last_computed=MAX_MODEL_LEN - 1,
                prompt_token_ids=int32_array(prompt),
                block_ids=(ids[row],),
                sampling=sampling,
            )
            for row in range(num_rows)
        )
        tokens = int32_array([PROMPT_LEN] * num_rows)
        self._execute(
            PROMPT_LEN * num_rows, added=added, scheduled_rows=rows, scheduled_tokens=tokens
        )

    def _execute(self, num_tokens: int, **changes: Any) -> None:
        self._digest = digest_changes(self._digest, **changes)
        self._step += 1
        plan = SchedulerOutput(
            epoch=1,
            step=self._step,
            previous_step=self._step - 1,
            num_rows=self._num_rows,
            num_scheduled_tokens=num_tokens,
            digest=self._digest,
            **changes,
        )
        self._runner.execute(plan)

    def __call__(self) -> None:
        self._execute(self._num_rows)

    def close(self) -> None:
        self._queue.close()


def theirs(
    logits: Tensor,
    processors: list[Any],
    token_ids: Tensor,
    *,
    draws: bool,
    num_best: int | None,
) -> Tensor:
    with torch.inference_mode():
        if num_best is not None:
            logits.log_softmax(-1).topk(num_best)
        scores = hf.LogitsProcessorList(processors)(token_ids, logits.clone())
        if draws:
            return scores.softmax(-1).multinomial(1)
        return scores.argmax(-1)


def elapsed_us(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1e6


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=20, metavar="N")
    arguments.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for vocab_size, num_rows in CASES:
        logits = given_logits(vocab_size, num_rows)
        prompt = np.random.default_rng(0).integers(10, vocab_size, PROMPT_LEN).tolist()
        token_ids = torch.tensor([prompt] * num_rows)
        greedy_us = 0.0
        for name, (settings, processors) in SETTINGS.items():
            sampling = SamplingParams(**{"seed": 1, "max_tokens": None, **settings})
            step = Ours(logits, sampling, prompt)
            other = partial(
                theirs,
                logits,
                deepcopy(processors),  # some keep data for one vocabulary size
                token_ids,
                draws=sampling.temperature > 0,
                num_best=sampling.logprobs,
            )
            ours_us = theirs_us = float("inf")
            for _ in range(options.repeats):
                ours_us = min(ours_us, elapsed_us(step))
                theirs_us = min(theirs_us, elapsed_us(other))
            step.close()
            greedy_us = greedy_us or ours_us
            rows.append(
                {
                    "vocab": vocab_size,
                    "rows": num_rows,
                    "setting": name,
                    "us_per_row": ours_us / num_rows,
                    "transformers_us": theirs_us / num_rows,
                    "ratio": theirs_us / ours_us,
                    "over_greedy": ours_us / greedy_us,
                }
            )
    report.write(options.json, rows, threads=options.threads, repeats=options.repeats)


if __name__ == "__main__":
    main()
