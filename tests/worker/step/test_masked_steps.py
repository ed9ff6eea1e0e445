"""Steps with structured output: they compute at once, sample when their mask arrives, and plans
after them keep their order."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.outputs import ModelRunnerOutput, WorkerReport
from longshore.protocol.plan import SampleMask, SchedulerOutput
from longshore.worker.queues.compute_queue import CpuComputeQueue
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.step.step_launcher import PreparedStep, StepLauncher
from tests.worker.bigram import BLOCK_SIZE, NUM_BLOCKS, BigramModel, bigram_runner, bigram_table
from tests.worker.models.thread_ranks import Meeting, ThreadParallel
from tests.worker.plans import Entry, Planner

VOCAB_SIZE = 24
TIMEOUT_S = 60.0


class Bench:
    """A runner whose steps are computed on a thread, and its answers."""

    def __init__(
        self, before_each: Callable[[], None] | None = None, parallel: Parallel = ALONE
    ) -> None:
        self.queue = CpuComputeQueue(before_each)
        self.runner: ModelRunner = bigram_runner(
            bigram_table(VOCAB_SIZE, 0), queue=self.queue, parallel=parallel
        )
        self.plans = Planner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.answers: dict[int, ModelRunnerOutput] = {}
        self.answered = threading.Condition()

    def submit(self, plan: SchedulerOutput) -> None:
        assert self.runner.submit(plan, self._on_report) is not None

    def _on_report(self, report: WorkerReport) -> None:
        assert isinstance(report, ModelRunnerOutput), report
        with self.answered:
            self.answers[report.step] = report
            self.answered.notify()

    def answer(self, step: int) -> list[int]:
        """The tokens of a step, once they are there."""
        with self.answered:
            assert self.answered.wait_for(lambda: step in self.answers, TIMEOUT_S)
            return self.answers[step].sampled_tokens.tolist()

    def idle(self) -> None:
        """Wait until everything submitted so far has been computed."""
        assert self.queue.submit(lambda: None).wait(TIMEOUT_S)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def masked(row: int, prompt: list[int]) -> Entry:
    return Entry(row, prompt, has_structured_output=True)


def first_plan(bench: Bench) -> SchedulerOutput:
    return bench.plans.plan({0: 3, 1: 2}, added=[masked(0, [4, 5, 6]), Entry(1, [7, 8])])


def test_the_model_is_computed_before_the_mask_arrives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = threading.Event()
    logits = BigramModel.logits

    def spy(self: BigramModel, hidden: torch.Tensor) -> torch.Tensor:
        computed.set()
        return logits(self, hidden)

    monkeypatch.setattr(BigramModel, "logits", spy)
    bench.submit(first_plan(bench))
    assert computed.wait(TIMEOUT_S)
    bench.idle()
    assert bench.answers == {}
    assert bench.runner.step_without_mask == 1
    bench.runner.add_mask(mask_of_row_0(1, 17))
    assert bench.answer(1)[0] == 17
    assert bench.runner.step_without_mask is None


def test_plans_after_a_step_without_its_mask_are_answered_after_it(bench: Bench) -> None:
    bench.submit(first_plan(bench))
    bench.submit(bench.plans.plan())
    third = bench.plans.plan(finished=[0])
    bench.submit(third)
    bench.idle()
    assert bench.answers == {}
    bench.runner.add_mask(mask_of_row_0(1, 17))
    assert bench.answer(1)[0] == 17
    assert bench.runner.step_without_mask == 2
    bench.idle()
    assert list(bench.answers) == [1]
    bench.runner.add_mask(mask_of_row_0(2, 3))
    assert bench.answer(2)[0] == 3
    assert len(bench.answer(3)) == 1  # no row of it has structured output
    assert list(bench.answers) == [1, 2, 3]


def test_the_next_plan_is_prepared_while_the_mask_is_awaited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[int | None] = []
    prepare = StepLauncher.prepare

    def spy(self: StepLauncher, *arguments: Any, **named: Any) -> PreparedStep:
        prepared.append(named["step_id"])
        return prepare(self, *arguments, **named)

    monkeypatch.setattr(StepLauncher, "prepare", spy)
    bench.submit(first_plan(bench))
    bench.submit(bench.plans.plan())
    bench.submit(bench.plans.plan())
    assert prepared == [1, 2]  # a third one would need a staging set more
    bench.runner.add_mask(mask_of_row_0(1, 17))
    assert prepared == [1, 2, 3]


def mask_of_row_0(step: int, token_id: int, *, epoch: int = 1, num_rows: int = 1) -> SampleMask:
    bits = np.packbits(np.arange(VOCAB_SIZE) == token_id, bitorder="little")
    rows = int32_array(list(range(num_rows)))
    return SampleMask(epoch, step, rows, np.tile(bits, num_rows))


def test_steps_without_structured_output_wait_for_nothing(bench: Bench) -> None:
    bench.submit(bench.plans.plan({1: 2, 0: 2}, added=[Entry(1, [7, 8]), masked(0, [4, 5, 6])]))
    assert len(bench.answer(1)) == 1  # row 0 is still in its prompt
    bench.submit(bench.plans.plan({0: 1}))
    bench.runner.add_mask(mask_of_row_0(2, 11))
    assert bench.answer(2)[0] == 11


@pytest.mark.parametrize("seed", range(3))
def test_two_steps_in_flight_with_late_masks_give_the_tokens_of_one_at_a_time(seed: int) -> None:
    def tokens(in_flight: int) -> list[list[int]]:
        choose = random.Random(seed)
        bench = Bench(lambda: time.sleep(random.choice([0, 0, 0.002])))
        only = [choose.randrange(VOCAB_SIZE) for _ in range(13)]
        bench.submit(first_plan(bench))
        for step in range(1, 13):
            if in_flight == 2:  # the mask comes after the next plan
                bench.submit(bench.plans.plan())
            bench.runner.add_mask(mask_of_row_0(step, only[step]))
            assert bench.answer(step)[0] == only[step]
            if in_flight == 1:
                bench.submit(bench.plans.plan())
        return [bench.answer(step) for step in range(1, 13)]

    assert tokens(2) == tokens(1)


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (mask_of_row_0(2, 5), "for step 2 of epoch 1, but step 1 waits"),
        (mask_of_row_0(1, 5, epoch=2), "of epoch 2"),
        (mask_of_row_0(1, 5, num_rows=2), r"for rows \[0, 1\], but rows \[0\]"),
        (SampleMask(1, 1, int32_array([1]), mask_of_row_0(1, 5).bits), r"for rows \[1\]"),
        (SampleMask(1, 1, int32_array([0]), np.zeros(4, np.uint8)), "4 bytes.*need 3"),
        (SampleMask(1, 1, int32_array([]), np.zeros(0, np.uint8)), r"for rows \[\]"),
    ],
)
def test_a_mask_that_does_not_fit_is_rejected(mask: SampleMask, reason: str, bench: Bench) -> None:
    bench.submit(first_plan(bench))
    with pytest.raises(PlanMismatch, match=reason):
        bench.runner.add_mask(mask)
    assert bench.runner.step_without_mask == 1


def test_a_mask_for_no_step_is_rejected(bench: Bench) -> None:
    with pytest.raises(PlanMismatch, match="no step waits"):
        bench.runner.add_mask(mask_of_row_0(1, 5))
    bench.submit(first_plan(bench))
    bench.runner.add_mask(mask_of_row_0(1, 5))
    with pytest.raises(PlanMismatch, match="no step waits"):
        bench.runner.add_mask(mask_of_row_0(1, 5))


def test_a_repeat_of_a_plan_that_waits_is_ignored(bench: Bench) -> None:
    bench.submit(first_plan(bench))
    second = bench.plans.plan()
    bench.submit(second)
    assert bench.runner.submit(second, print) is None
    bench.runner.add_mask(mask_of_row_0(1, 5))
    bench.runner.add_mask(mask_of_row_0(2, 6))
    assert bench.answer(2)[0] == 6
    assert bench.runner.submit(second, print) is None


def test_without_further_masks_every_plan_is_answered(bench: Bench) -> None:
    """The scheduler has died; other ranks wait for this one's tokens."""
    bench.submit(first_plan(bench))
    bench.submit(bench.plans.plan())
    bench.runner.stop_masking()
    bench.submit(bench.plans.plan())
    assert len(bench.answer(3)) == 2
    assert list(bench.answers) == [1, 2, 3]


def test_a_new_epoch_waits_for_masks_again(bench: Bench) -> None:
    bench.submit(first_plan(bench))
    bench.runner.finish()
    assert len(bench.answer(1)) == 2
    bench.runner.begin_epoch(2, None)
    bench.plans = Planner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, epoch=2)
    bench.submit(first_plan(bench))
    assert bench.runner.step_without_mask == 1
    bench.runner.add_mask(mask_of_row_0(1, 5, epoch=2))
    bench.idle()
    assert bench.answer(1)[0] == 5


class SharingTokens(ThreadParallel):
    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.meeting.exchange(self.shard, tensor)[0]


def test_two_shards_sample_the_token_that_the_mask_of_the_first_allows() -> None:
    """Both get every mask; the second has no use for it."""
    meeting = Meeting(2)
    shards = [
        Bench(parallel=SharingTokens(shard, 2, shard_group=None, meeting=meeting))
        for shard in range(2)
    ]
    only = [17, 3, 9, 9, 20]
    for step, token_id in enumerate(only, start=1):
        for bench in shards:
            bench.submit(first_plan(bench) if step == 1 else bench.plans.plan())
        for bench in reversed(shards):
            bench.runner.add_mask(mask_of_row_0(step, token_id))
        assert shards[0].answer(step)[0] == token_id
    tables = []
    for bench in shards:
        bench.idle()
        tables.append(bench.runner._launcher.state.tokens.ids[0, 3 : 3 + len(only)].tolist())
    assert tables == [only, only]
