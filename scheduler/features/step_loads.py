"""Loads within a step, on several ranks: the step's output is applied when all ranks have loaded.

The rank that samples reports its own loads in the output; the others report theirs separately.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from longshore.protocol.arrays import int32_array
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loads:
    """Of one step: the ranks that have reported, and the blocks that they failed to fill."""

    ranks: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


class StepLoads:
    """Unanswered steps with loads, and the outputs that wait for them. Unused with one rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: dict[int, _Loads] = {}
        self._outputs: deque[ModelRunnerOutput] = deque()

    def __len__(self) -> int:
        """Number of steps with loads whose outputs have not been applied."""
        return len(self._steps)

    def begin(self, step: int) -> None:
        """Plan `step` loads KV before it is computed."""
        if self._num_ranks > 1:
            self._steps[step] = _Loads()

    def receive(self, report: TransferReport) -> bool:
        """A rank that does not sample has ended its loads of a step. False, and nothing has
        changed, if no loads of this rank were due."""
        loads = self._steps.get(report.step)
        if loads is None or not 0 <= report.rank < self._num_ranks or report.rank in loads.ranks:
            about = fields(step_id=report.step, rank=report.rank)
            logger.warning("rank %d reported loads of a wrong step", report.rank, extra=about)
            return False
        loads.ranks.add(report.rank)
        loads.failed.update(report.failed_block_ids.tolist())
        return True

    def hold(self, output: ModelRunnerOutput) -> None:
        """Keep an output until `take_ready` returns it."""
        self._outputs.append(output)

    def take_ready(self) -> Iterator[ModelRunnerOutput]:
        """The next outputs whose steps all ranks have loaded, each with the blocks that any rank
        failed to fill."""
        while self._outputs:
            step = self._outputs[0].step
            loads = self._steps.get(step)
            if loads is not None and len(loads.ranks) < self._num_ranks - 1:
                return
            output = self._outputs.popleft()
            self._steps.pop(step, None)
            if loads is not None and loads.failed:
                failed = sorted(loads.failed.union(output.failed_block_ids.tolist()))
                output = msgspec.structs.replace(output, failed_block_ids=int32_array(failed))
            yield output

    def clear(self) -> None:
        """A new epoch: no output of the last one is applied."""
        self._steps.clear()
        self._outputs.clear()
