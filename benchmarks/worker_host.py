"""The host's part of a worker's steps: rows, slots, random numbers and inputs of the steps of
real plans, without what the device does of them."""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from peers import workload

from longshore.protocol.outputs import ModelRunnerOutput, WorkerReport
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.queues.compute_queue import Completion
from longshore.worker.step.model_runner import ModelRunner
from tests.worker.bigram import BigramModel, InlineQueue, NoAttention
from tests.worker.caches import attention_cache

MAX_MODEL_LEN: Final = 4096


class HostQueue(InlineQueue):
    """Runs no operation, so the sampled tokens are what the staging memory has."""

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        return super().submit(lambda: None, on_done, step_id=step_id)


class HostSteps:
    """Executes plans, one per call of `step`. Their rows have no more than MAX_MODEL_LEN tokens.

    num_rows, num_blocks: of the scheduler that made the plans.
    """

    def __init__(self, plans: Sequence[SchedulerOutput], num_rows: int, num_blocks: int) -> None:
        self._plans = iter(plans)
        self._runner = ModelRunner(
            cast(Any, BigramModel(torch.zeros(workload.VOCAB_SIZE, 1))),
            attention_cache(
                num_blocks,
                num_layers=1,
                block_size=workload.BLOCK_SIZE,
                num_kv_heads=1,
                head_dim=1,
            ),
            cast(Any, NoAttention()),
            cast(Any, HostQueue()),
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(plan.num_scheduled_tokens for plan in plans),
            max_model_len=MAX_MODEL_LEN,
        )

    def step(self) -> None:
        self._runner.submit(next(self._plans), self._receive)

    def _receive(self, report: WorkerReport) -> None:
        assert isinstance(report, ModelRunnerOutput)
