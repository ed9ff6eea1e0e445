"""--poison-kv: what a request has not written is a pattern, and full blocks do not change."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import EngineDead
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.plan import Rewind
from longshore.worker.config import WorkerConfig
from longshore.worker.kv_cache.block_guard import BlockChanged, BlockGuard
from longshore.worker.kv_cache.block_table import BlockTable, MultiGroupBlockTable
from longshore.worker.kv_cache.buffer import POISON, KVCache, KVMemory
from longshore.worker.kv_cache.fp8 import FP8
from longshore.worker.process.device import dtype_name
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.worker import Worker
from tests.worker.caches import attention_group
from tests.worker.plans import Entry, Planner

NUM_BLOCKS = 80
BLOCK_SIZE = 4
PROMPT = random.Random(0).choices(range(3, 128), k=22)
CPU = torch.device("cpu")


class Poisoned:
    """A runner whose blocks are guarded, and the tokens of plans."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.plans = Planner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.tokens: list[int] = []

    @property
    def buffer(self) -> torch.Tensor:
        return self.runner._launcher.state.cache.buffer

    def step(self, **changes: Any) -> None:
        output = self.runner.execute(self.plans.plan(**changes))
        self.tokens += self.plans.tokens_of(output).values()


@pytest.fixture
def poisoned(checkpoint: tuple[Path, Any]) -> Iterator[Poisoned]:
    config = WorkerConfig(
        model=str(checkpoint[0]),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        show_progress=False,
        poison_kv=True,
    )
    with Worker(config) as worker:
        yield Poisoned(worker.start())


def test_rows_that_share_blocks_end_and_rewind_with_the_tokens_of_generate(
    poisoned: Poisoned, checkpoint: tuple[Path, Any]
) -> None:
    poisoned.step(scheduled={0: 13}, added=[Entry(0, PROMPT)])
    poisoned.step(scheduled={0: 9})
    shared = poisoned.plans.blocks[0][:5]
    for _ in range(3):
        poisoned.step()
    alone = poisoned.tokens[:4]
    poisoned.step(
        added=[Entry(1, PROMPT, blocks=list(shared), num_computed_tokens=20)],
        scheduled={0: 0, 1: 2},
    )
    assert poisoned.tokens[4:] == alone[:1]
    poisoned.plans.blocks[0] = poisoned.plans.blocks[0][5:]  # row 1 has them, too
    poisoned.step(finished=[0])
    poisoned.step(rewound=[Rewind(1, 9, 22)], scheduled={1: 13})
    poisoned.step(added=[Entry(2, PROMPT[::-1])], scheduled={2: 22})
    reference = checkpoint[1].generate(
        torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert alone == reference[0, len(PROMPT) :].tolist()
    (blocks,) = poisoned.plans.blocks[2][-1:]
    unwritten = poisoned.runner._launcher.state.cache.view(0).planes[blocks, :, :, :, 2:]
    assert (unwritten.contiguous().view(torch.uint8) == POISON[0]).all()


@pytest.mark.parametrize("place", [0, 4])
def test_full_block_that_changes_between_steps_is_named(poisoned: Poisoned, place: int) -> None:
    poisoned.step(scheduled={0: 22}, added=[Entry(0, PROMPT)])
    block = poisoned.plans.blocks[0][place]
    poisoned.buffer[block, 11] ^= 1
    plan = poisoned.plans.plan()
    with pytest.raises(EngineDead, match=f"between steps, before step 2: {block} \\(1 in all"):
        poisoned.runner.execute(plan)


def test_block_that_is_not_full_may_change(poisoned: Poisoned) -> None:
    poisoned.step(scheduled={0: 22}, added=[Entry(0, PROMPT)])
    poisoned.buffer[poisoned.plans.blocks[0][5], -1] ^= 1
    poisoned.step()


class Guarded:
    """A guard of two rows with three blocks each, of which they share the first."""

    def __init__(self) -> None:
        group = attention_group(2, 2, 16, block_size=BLOCK_SIZE, dtype_bytes=4)
        config = KVCacheConfig(NUM_BLOCKS, (group,), "float32")
        self.cache = KVCache(config, dtype=torch.float32, device=CPU)
        table = BlockTable(max_num_seqs=2, max_model_len=12, block_size=BLOCK_SIZE, device=CPU)
        for row, ids in enumerate(([7, 3, 5], [7, 6, 8])):
            table.append_row(row, np.array(ids))
        self.guard = BlockGuard(self.cache, MultiGroupBlockTable([table]))
        self.num_steps = 0

    def step(
        self, ends: list[int], counts: list[int], *, writes: int = 0, added: tuple[int, ...] = ()
    ) -> None:
        self.num_steps += 1
        step = self.guard.plan(self.num_steps, np.array(ends), np.array(counts), added)
        step.begin()
        self.cache.buffer[writes] += 1
        step.end()


def test_full_block_that_a_step_overwrites_is_named() -> None:
    guarded = Guarded()
    guarded.step([8, 8], [8, 8], writes=3)
    with pytest.raises(BlockChanged, match=r"overwritten in step 2: 7 \(1 in all"):
        guarded.step([9, 9], [1, 1], writes=7)


def test_blocks_without_an_owner_and_of_rewound_rows_may_change() -> None:
    guarded = Guarded()
    guarded.step([8, 8], [8, 8])
    guarded.step([0, 9], [0, 1], writes=3)  # the first row has ended
    guarded.step([0, 6], [0, 2], writes=6)  # the second row was rewound to 4 tokens
    with pytest.raises(BlockChanged, match=r"in step 4: 7 \("):
        guarded.step([0, 7], [0, 1], writes=7)


def test_blocks_of_a_row_that_starts_may_be_loaded_in_its_first_step() -> None:
    guarded = Guarded()
    guarded.step([8, 0], [8, 0])
    guarded.step([0, 9], [0, 1], writes=7, added=(1,))
    with pytest.raises(BlockChanged, match=r"in step 3: 7 \("):
        guarded.step([0, 10], [0, 1], writes=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
def test_the_pattern_is_a_finite_number(dtype: torch.dtype) -> None:
    group = attention_group(1, 1, 16, block_size=16, dtype_bytes=dtype.itemsize)
    computed = torch.float32 if dtype == FP8 else dtype
    config = KVCacheConfig(4, (group,), "fp8_e4m3" if dtype == FP8 else dtype_name(dtype))
    cache = KVCache(config, dtype=computed, device=CPU, poison=True)
    cache.clear(torch.tensor([2]))
    assert (cache.buffer[2] == POISON[0]).all()
    assert (cache.buffer[[0, 1, 3]] == 0).all()
    number = cache.buffer[2].view(dtype)[0].float()
    assert number.isfinite()
    assert number != 0


@pytest.mark.parametrize("is_intact", [True, False])
def test_adopted_blocks_are_compared_with_what_the_former_process_recorded(
    checkpoint: tuple[Path, Any], is_intact: bool
) -> None:
    """Only those that a row held when it ended are recorded."""
    config = WorkerConfig(
        model=str(checkpoint[0]),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        show_progress=False,
        poison_kv=True,
    )
    fd = os.memfd_create("kv")
    with Worker(config) as worker:
        former = Poisoned(worker.start(memory=KVMemory(fd, None)))
        former.step(scheduled={0: 22}, added=[Entry(0, PROMPT)])
        full = former.plans.blocks[0][:5]
        if not is_intact:
            former.buffer[full[2], 5] ^= 1
        worker.close()
        memory = KVMemory(fd, int32_array([*full, 70]))
        if is_intact:
            worker.start(memory=memory)
        else:
            with pytest.raises(BlockChanged, match=f"while the worker was replaced: {full[2]} "):
                worker.start(memory=memory)
    os.close(fd)
