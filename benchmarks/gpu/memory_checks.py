"""The memory of the device: what a worker takes at most, and what it returns while it sleeps."""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu.results import Run
from benchmarks.gpu.shapes import QWEN_0_6B, TINY
from longshore import LLM, SamplingParams
from longshore.deploy.settings.options import EngineOptions
from longshore.worker.config import WorkerConfig
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner

NUM_TOKENS: Final = 16
UTILIZATION: Final = 0.9
AWAKE_SHARE: Final = 0.2
"""Of the memory of a worker that is awake, at most this much is taken while it sleeps: mainly the
context of the device."""


def check(run: Run) -> None:
    shape = TINY if run.is_dry else QWEN_0_6B
    folder = shape.write(run.folder, 512 if run.is_dry else 16_384)
    setting = "gpu_memory_utilization"
    if setting in {field.name for field in fields(EngineOptions)}:
        run.check("the peak is within gpu_memory_utilization", partial(_check_peak, run, folder))
    else:
        run.not_verified("the peak is within gpu_memory_utilization", f"no setting {setting}")
    if hasattr(Worker, "sleep"):
        run.check("a worker that sleeps returns its memory", partial(_check_sleep, run, folder))
    else:
        run.not_verified("a worker that sleeps returns its memory", "Worker has no method sleep")


def _open(run: Run, folder: Path) -> LLM:
    settings: dict[str, Any] = {"gpu_memory_utilization": UTILIZATION}
    if run.is_dry:
        settings = {"num_blocks": 200}
    settings["max_num_batched_tokens"] = 128 if run.is_dry else 8192
    return LLM(
        folder,
        device=run.device,
        load_format="dummy",
        dtype="bfloat16",
        in_process=True,
        **settings,
    )


def _check_peak(run: Run, folder: Path) -> None:
    """Of prompts that fill steps, and of many rows with log probabilities."""
    with _open(run, folder) as llm:
        _answer(llm, *((4, 200) if run.is_dry else (32, 8000)))
        _answer(llm, *((4, 20) if run.is_dry else (256, 500)), logprobs=5)
        if run.device == "cuda":
            _, total_bytes = torch.cuda.mem_get_info()
            share = _taken_bytes(run) / total_bytes  # torch keeps what it has once allocated
            run.figure("peak memory, of the whole device", share, "")
            assert share <= UTILIZATION + 0.01, f"{share:.3f} of the memory is taken"


def _check_sleep(run: Run, folder: Path) -> None:
    """It leaves little on the device, and the tokens after it are those of before."""
    config = WorkerConfig(
        model=str(folder),
        device=run.device,
        load_format="dummy",
        num_blocks=200 if run.is_dry else 20_000,
        max_model_len=256,
        max_num_seqs=8,
        show_progress=False,
    )
    with Worker(config) as worker:
        before = _greedy_tokens(worker, epoch=1)
        awake_bytes = _taken_bytes(run)
        worker.sleep()
        asleep_bytes = _taken_bytes(run)
        assert _greedy_tokens(worker, epoch=2) == before, "tokens differ after a sleep"
    run.figure("memory of the device, awake", awake_bytes / 2**30, "GiB")
    run.figure("memory of the device, asleep", asleep_bytes / 2**30, "GiB")
    assert asleep_bytes <= AWAKE_SHARE * awake_bytes, (
        f"{asleep_bytes} of {awake_bytes} bytes are left"
    )


def _greedy_tokens(worker: Worker, epoch: int) -> list[int]:
    runner = worker.start(epoch=epoch)
    planner = Planner(num_blocks=worker.kv_cache.num_blocks, block_size=16, epoch=epoch)
    plans = [planner.plan({0: 40}, added=[Entry(0, range(3, 43))])]
    plans += [planner.plan() for _ in range(16)]
    return [int(runner.execute(plan).sampled_tokens[0]) for plan in plans]


def _taken_bytes(run: Run) -> int:
    """By all programs."""
    if run.device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _answer(llm: LLM, num_prompts: int, length: int, **settings: Any) -> None:
    prompts = np.random.default_rng(0).integers(3, 4000, (num_prompts, length)).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **settings)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    for output in llm.generate(inputs, params, use_tqdm=False):
        assert len(output.outputs[0].token_ids) == NUM_TOKENS, output.outputs[0].error
