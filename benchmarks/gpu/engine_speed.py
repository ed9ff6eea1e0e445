"""Whole engines in their processes: whether the device waits for plans, and the time for loads
that transformers' continuous batching gets as well."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.gpu.results import Run, at_least, at_most
from benchmarks.gpu.shapes import QWEN_0_6B, TINY, ModelShape
from longshore import LLM, SamplingParams
from longshore.deploy.llm.metrics import Histogram

RUN_AHEAD_SHARE: Final = 0.995
MAX_GAP_US: Final = 100.0
TIMES_FASTER: Final = 5.0
MAX_MODEL_LEN: Final = 4096
REPORTED_AFTER_S: Final = 2.5
"""Workers report about once a second, and what is known can be a second old."""

THEIR_LIMIT_S: Final = 110.0
"""A load that takes longer is not compared: tokens of requests that have not ended are unknown."""


class Load(NamedTuple):
    """Requests, all sent at once.

    output_lens: tokens to generate for each prompt.
    """

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def measure(run: Run) -> None:
    shape, num_requests, lens = (TINY, 6, (4, 16)) if run.is_dry else (QWEN_0_6B, 256, (100, 1024))
    folder = shape.write(run.folder, 512 if run.is_dry else MAX_MODEL_LEN)
    loads = [
        random_load(shape, max(2, num_requests // 8), *lens, seed=9),  # warms up
        random_load(shape, num_requests, *lens),
        _shared_load(shape, num_requests, lens[1]),
    ]
    ours: dict[str, float] = {}
    run.check("our engine answers the loads", partial(_measure_ours, run, folder, loads, ours))
    theirs: dict[str, float] = {}
    try:
        _measure_theirs(run, folder, loads, theirs)
    except Exception as error:  # theirs, not ours
        run.not_verified("transformers' continuous batching", f"{type(error).__name__}: {error}")
    for name in ours.keys() & theirs.keys():
        run.figure(
            f"{name}, relative to transformers",
            ours[name] / theirs[name],
            "times",
            target=at_least(TIMES_FASTER),
        )


def _measure_ours(run: Run, folder: Path, loads: Sequence[Load], rates: dict[str, float]) -> None:
    """loads: the first one is not measured."""
    settings: dict[str, Any] = {"num_blocks": 400} if run.is_dry else {"max_num_seqs": 256}
    settings |= {"max_num_batched_tokens": 128 if run.is_dry else 8192}
    num_rows, num_tokens = (4, 16) if run.is_dry else (256, 512)
    steady = steady_load(num_rows, num_tokens, seed=7)
    with LLM(folder, device=run.device, load_format="dummy", dtype="bfloat16", **settings) as llm:
        generate(llm, steady)  # warms up
        before = _reported(llm)
        generate(llm, steady)
        _record_gaps(run, before, _reported(llm), num_rows)
        generate(llm, loads[0])
        for load in loads[1:]:
            seconds = generate(llm, load)
            rates[load.name] = load.num_output_tokens / seconds
            run.figure(load.name, rates[load.name], "tokens/s", seconds=seconds)
            llm.reset_prefix_cache()


def _record_gaps(
    run: Run, before: dict[str, Histogram], after: dict[str, Histogram], num_rows: int
) -> None:
    """Of the steps of a load: how many were planned before the step before them had ended, and how
    long the device was idle before these."""
    gaps, last_gaps = (found["longshore_worker_step_gap_seconds"] for found in (after, before))
    steps, last_steps = (found["longshore_worker_step_seconds"] for found in (after, before))
    num_ahead, num_steps = gaps.count - last_gaps.count, steps.count - last_steps.count
    name = f"steps of {num_rows} rows planned before the step before had ended"
    run.figure(name, num_ahead / num_steps, "", target=at_least(RUN_AHEAD_SHARE), steps=num_steps)
    short = {bound: count - last_gaps.buckets[bound] for bound, count in gaps.buckets.items()}
    run.figure(
        f"mean gap between steps of {num_rows} rows",
        (gaps.sum - last_gaps.sum) / max(1, num_ahead) * 1e6,
        "µs",
        target=at_most(MAX_GAP_US),
        steps_by_seconds=short,
    )


def _reported(llm: LLM) -> dict[str, Histogram]:
    """The metrics of all steps so far."""
    time.sleep(REPORTED_AFTER_S)
    return {metric.name: metric for metric in llm.get_metrics() if isinstance(metric, Histogram)}


def generate(llm: LLM, load: Load) -> float:
    """Seconds from the first prompt to the last token."""
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count in load.output_lens
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in load.prompts]
    started_s = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert counts == load.output_lens, "answers have other lengths"
    return seconds


def _measure_theirs(run: Run, folder: Path, loads: Sequence[Load], rates: dict[str, float]) -> None:
    """loads: the first one is not measured."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    config = GenerationConfig(max_new_tokens=MAX_MODEL_LEN, do_sample=False, eos_token_id=-1)
    # Otherwise it takes most of the memory: of a device, as it should, or of this machine.
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256) if run.is_dry else None
    for load in loads:
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=small
        ) as manager:
            started_s, num_tokens, num_ended = time.perf_counter(), 0, 0
            for prompt, count in zip(load.prompts, load.output_lens, strict=True):
                manager.add_request(prompt, max_new_tokens=count)
            while num_ended < len(load.prompts):
                result = manager.get_result(timeout=1)
                elapsed_s = time.perf_counter() - started_s
                if result is not None and result.is_finished():
                    num_ended, num_tokens = num_ended + 1, num_tokens + len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("it ended before the requests")
                if elapsed_s > THEIR_LIMIT_S:
                    raise RuntimeError(f"{num_ended} requests ended in {THEIR_LIMIT_S} s")
        if load is loads[0]:
            continue
        rates[load.name] = num_tokens / elapsed_s
        name = f"{load.name}, transformers"
        run.figure(name, rates[load.name], "tokens/s", seconds=elapsed_s)


def random_load(
    shape: ModelShape, num_requests: int, shortest: int, longest: int, seed: int = 0
) -> Load:
    """Prompts and answers of random lengths."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(shortest, longest + 1, (2, num_requests)).tolist()
    prompts = [rng.integers(3, shape.vocab_size, count).tolist() for count in lens[0]]
    name = f"{num_requests} requests of {shortest}-{longest} tokens in and out"
    return Load(name, prompts, lens[1])


def steady_load(num_rows: int, num_tokens: int, seed: int) -> Load:
    """Rows that decode the same number of tokens at the same time, after short prompts."""
    load = random_load(TINY, num_rows, 16, 16, seed)
    return load._replace(output_lens=[num_tokens] * num_rows)


def _shared_load(shape: ModelShape, num_requests: int, num_shared: int) -> Load:
    """Prompts that begin alike."""
    rng = np.random.default_rng(1)
    shared = rng.integers(3, shape.vocab_size, num_shared).tolist()
    own = rng.integers(3, shape.vocab_size, (num_requests, 32)).tolist()
    name = f"{num_requests} requests that share {num_shared} tokens, 32 of their own"
    num_out = 16 if num_requests < 100 else 128
    return Load(name, [[*shared, *ids] for ids in own], [num_out] * num_requests)
