"""Calls the hooks of the encoder connector's worker half, and reports for it.

`EncoderWorker` in `connectors/base/encoder.py` says when each hook is called, and on which thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longshore.connectors.base import EncoderWorker
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.outputs import TransferReport
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.transfer.connector import EndTransfers, named


class EncoderRunner:
    """The encoder connector of one rank. All calls are on the worker's loop thread."""

    def __init__(
        self,
        connector: EncoderWorker[Any],
        *,
        epoch: int,
        rank: int,
        wake: Callable[[], None],
    ) -> None:
        """Raises ConfigError if the connector cannot be set up."""
        self.connector = connector
        self._epoch = epoch
        self._rank = rank
        self._end_transfers = EndTransfers(connector)
        connector.register_caches(wake)

    @property
    def poll_interval_s(self) -> float | None:
        return self.connector.poll_interval_s

    def begin_step(self, plan: SchedulerOutput) -> "StepOutputs | None":
        """Begin the transfers of a plan. None if it has no metadata. Raises HookFailed."""
        if not plan.ec_connector_metadata:
            return None
        with named(self.connector, "bind_connector_metadata"):
            metadata = self.connector.bind_connector_metadata(plan.ec_connector_metadata)
        with named(self.connector, "start_load_caches"):
            self.connector.start_load_caches(metadata)
        return StepOutputs(self.connector, metadata)

    def take_report(self) -> TransferReport | None:
        """What the worker half has to say; None: nothing. Raises HookFailed."""
        with named(self.connector, "build_connector_worker_meta"):
            metadata = self.connector.build_connector_worker_meta()
        if not metadata:
            return None
        return TransferReport(self._epoch, self._rank, ec_connector_metadata=metadata)

    def close(self) -> None:
        """End all transfers. No other call may follow. Raises HookFailed if the connector could
        not, then and at every later call."""
        self._end_transfers()


@dataclass(frozen=True)
class StepOutputs:
    """The hooks of one step. They run on the compute queue and its thread."""

    connector: EncoderWorker[Any]
    metadata: Any

    def load(self, row: int) -> Tensor | None:
        with named(self.connector, "load_cache"):
            return self.connector.load_cache(self.metadata, row)

    def save(self, row: int, encoded: Tensor) -> None:
        with named(self.connector, "save_caches"):
            self.connector.save_caches(self.metadata, row, encoded)

    def step_ended(self) -> None:
        with named(self.connector, "step_ended"):
            self.connector.step_ended(self.metadata)


def no_outputs(plan: SchedulerOutput) -> None:
    """Raise PlanMismatch for a plan that this worker, without an encoder connector, cannot
    execute."""
    if plan.ec_connector_metadata:
        raise PlanMismatch(
            f"step {plan.step} has ec_connector_metadata; this worker was started without an "
            "encoder connector. Start scheduler and workers with the same --ec-connector."
        )
