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
from longshore.deploy.cli.options import EngineOptions

UTILIZATION: Final = 0.9


def check(run: Run) -> None:
    shape = TINY if run.is_dry else QWEN_0_6B
    folder = shape.write(run.folder, 512 if run.is_dry else 16_384)
    setting = "gpu_memory_utilization"
    if setting in {field.name for field in fields(EngineOptions)}:
        run.check("the peak is within gpu_memory_utilization", partial(_check_peak, run, folder))
    else:
        run.not_verified("the peak is within gpu_memory_utilization", f"no setting {setting}")
    if hasattr(LLM, "sleep"):
        run.check("a sleeping engine returns its memory", partial(_check_sleep, run, folder))
    else:
        run.not_verified("a sleeping engine returns its memory", "LLM has no method sleep")


def _open(run: Run, folder: Path, **settings: Any) -> LLM:
    if run.is_dry:
        settings |= {"num_blocks": 200, "max_num_batched_tokens": 128}
    elif "num_blocks" not in settings:
        settings |= {"gpu_memory_utilization": UTILIZATION, "max_num_batched_tokens": 8192}
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
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # torch keeps what it has once allocated
            share = (total - free) / total
            run.figure("peak memory, of the whole device", share, "")
            assert share <= UTILIZATION + 0.01, f"{share:.3f} of the memory is taken"


def _check_sleep(run: Run, folder: Path) -> None:
    """The tokens after it are those of before."""
    with _open(run, folder, num_blocks=2000) as llm:
        before = _answer(llm, 4, 100)
        llm.sleep()
        if run.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            run.figure(
                "memory of the device while the engine sleeps", (total - free) / 2**30, "GiB"
            )
        llm.wake_up()
        assert _answer(llm, 4, 100) == before


def _answer(llm: LLM, num_prompts: int, length: int, **settings: Any) -> list[list[int]]:
    prompts = np.random.default_rng(0).integers(3, 4000, (num_prompts, length)).tolist()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **settings)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0].token_ids for output in llm.generate(inputs, params, use_tqdm=False)]
