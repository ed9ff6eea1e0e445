"""Offloading: tokens after a restore, copies of pages as a share of one large copy, decodes while
all blocks are stored, and the time to the first token of a prompt from host memory and disk."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import dma
import offloading
import torch

from benchmarks.gpu.engine_speed import generate, steady_load
from benchmarks.gpu.results import Run, at_least, at_most
from benchmarks.gpu.shapes import QWEN_0_6B, QWEN_8B, TINY
from longshore import LLM, SamplingParams
from tests.models import make_tiny_llama
from tests.reference import ReferenceAnswer, assert_greedy_equal, greedy_reference

COPY_SHARE: Final = 0.9
SLOWER: Final = 1.05
NUM_TOKENS: Final = 12
PROMPT_LENS: Final = range(90, 170, 10)


def check_tokens(run: Run) -> None:
    """A pool that holds few of the prompts; they come back from host memory, and from disk after a
    restart."""
    folder = run.folder / "offload"
    model = make_tiny_llama(folder)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in PROMPT_LENS]
    references = [greedy_reference(model, prompt, NUM_TOKENS) for prompt in prompts]
    tiers: dict[str, Any] = {
        "cpu_bytes_to_use": "64MiB",
        "disk_path": str(run.folder / "disk"),
        "disk_bytes": "64MiB",
        "verify_kv": "always",
    }
    check = partial(_check_restored, run, folder, prompts, references, tiers)
    run.check("tokens are equal after a restore from host memory", partial(check, 2))
    run.check("tokens are equal after a restore from disk", partial(check, 1))


def _check_restored(
    run: Run,
    folder: Path,
    prompts: Sequence[list[int]],
    references: Sequence[ReferenceAnswer],
    tiers: dict[str, Any],
    num_rounds: int,
) -> None:
    """In the last of the rounds, most of the prompts must be restored."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    state = run.folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    with LLM(
        folder,
        device=run.device,
        dtype="float32",
        num_blocks=40,
        max_model_len=256,
        max_num_seqs=4,
        kv_connector="offloading",
        kv_connector_config=json.dumps(tiers),
        state_dir=str(state),
    ) as llm:
        for _ in range(num_rounds):
            outputs = [
                llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
                for prompt in prompts
            ]
            assert_greedy_equal([output.outputs[0].token_ids for output in outputs], references)
        num_restored = sum(output.num_cached_tokens for output in outputs)
        assert num_restored > 0.7 * sum(PROMPT_LENS), f"only {num_restored} tokens were restored"
        time.sleep(2)  # the disk tier is written in the background


def measure_copies(run: Run) -> None:
    def measure() -> None:
        device, num_bytes = torch.device(run.device), (2 if run.is_dry else 64) << 20
        with dma.sides_of(device, num_bytes) as sides:
            for page_bytes in dma.PAGES[:2] if run.is_dry else dma.PAGES:
                for row in dma.measure(sides, page_bytes, 10):
                    if row["is_chosen"] and "error" not in row:
                        _record_copies(run, row)

    run.check("pages are copied", measure)


def _record_copies(run: Run, row: dict[str, Any]) -> None:
    run.figure(
        f"pages of {row['page_bytes'] >> 10} KiB, {row['direction']}",
        row["gb_s"],
        "GB/s",
        ceiling=row["peak_gb_s"],
        target=at_least(COPY_SHARE),
        way=row["way"],
    )


def measure_decodes(run: Run) -> None:
    run.check("decodes are measured with offloading", partial(_measure_decodes, run))


def _measure_decodes(run: Run) -> None:
    """The time of rows that decode while all their blocks are stored in host memory, relative to
    that without a connector."""
    num_rows, num_tokens = (4, 32) if run.is_dry else (256, 256)
    shape, most = (TINY, 512) if run.is_dry else (QWEN_0_6B, 4096)
    connector = {
        "kv_connector": "offloading",
        "kv_connector_config": json.dumps({"cpu_bytes_to_use": "64MiB" if run.is_dry else "16GiB"}),
    }
    settings: dict[str, Any] = {"num_blocks": 400} if run.is_dry else {}
    seconds = []
    for more in ({}, connector):
        with LLM(
            shape.write(run.folder, most),
            device=run.device,
            load_format="dummy",
            dtype="bfloat16",
            max_num_seqs=num_rows,
            **(settings | more),
        ) as llm:
            times = [generate(llm, steady_load(num_rows, num_tokens, seed)) for seed in range(4)]
            seconds.append(statistics.median(times[1:]))  # the first one warms up
    run.figure(
        f"decodes of {num_rows} rows whose blocks are all stored, relative to none",
        seconds[1] / seconds[0],
        "times",
        target=at_most(SLOWER),
        seconds=seconds,
    )


def measure_first_tokens(run: Run) -> None:
    """Measure the first tokens of prompts that are computed, and that come from host memory and
    from disk."""
    shape = TINY if run.is_dry else QWEN_8B
    for length in (256,) if run.is_dry else (8192, 32_768):
        run.check(
            f"first tokens of {length:,}-token prompts are equal from each tier",
            partial(_measure_first_tokens, run, shape.write(run.folder, length + 128), length),
        )


def _measure_first_tokens(run: Run, model: Path, length: int) -> None:
    scratch = run.folder / f"first-tokens-{length}"
    (scratch / "state").mkdir(mode=0o700, parents=True)
    options = argparse.Namespace(
        model=model,
        device=run.device,
        load_format="dummy",
        dtype="bfloat16",
        length=length,
        prompts=2,
        host_bytes="64MiB" if run.is_dry else "16GiB",
        scratch=scratch,
    )
    for row in offloading.first_tokens(options):
        run.figure(
            f"time to first token, {length:,} tokens, {row['kv_from']}",
            row["ttft_s"] * 1e3,
            "ms",
            times_faster=row["times_faster"],
        )
