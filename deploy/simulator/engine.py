"""One simulated engine: a real scheduler, whose plans a simulated worker executes in virtual time.

It does what `scheduler.process.engine_loop` does: after each message it plans as long as the
scheduler has plans, so with asynchronous scheduling a step is planned while another one runs.
"""

from collections.abc import Callable

from longshore.deploy.simulator.clock import Clock
from longshore.deploy.simulator.cost_model import CostModel
from longshore.deploy.simulator.pulls import SimulatedPulls
from longshore.deploy.simulator.transfers import SimulatedTransfers
from longshore.deploy.simulator.worker import SimulatedWorker
from longshore.protocol.errors import LongshoreError
from longshore.protocol.events import KVEvent
from longshore.protocol.outputs import EngineOutputs, ModelRunnerOutput, TransferReport
from longshore.protocol.requests import AddRequest
from longshore.scheduler.process.engine_loop import POLL_INTERVAL_S
from longshore.scheduler.scheduler import Scheduler

CLIENT = 0
MAX_STALL_S = 3600.0


class SimulationStalled(LongshoreError):
    """Requests wait for something that never happens."""


class SimulatedEngine:
    """
    deliver: receives outputs at the times at which clients get them.
    publish: receives KV events, if the scheduler records them; None: it does not.
    busy_s:  for which the device has computed. num_steps: with tokens.
    """

    def __init__(
        self,
        number: int,
        scheduler: Scheduler,
        worker: SimulatedWorker,
        cost: CostModel,
        clock: Clock,
        *,
        transfers: SimulatedTransfers | SimulatedPulls | None,
        deliver: Callable[[int, EngineOutputs], None],
        publish: Callable[[int, list[KVEvent]], None] | None,
    ) -> None:
        self.number, self.scheduler = number, scheduler
        self.busy_s, self.num_steps = 0.0, 0
        self._worker, self._transfers = worker, transfers
        self._cost, self._clock = cost, clock
        self._deliver, self._publish = deliver, publish
        self._free_at_s = 0.0  # the end of the last step that is planned
        self._is_polling = False

    def receive(self, message: AddRequest) -> None:
        """A request arrives in the scheduler."""
        self.scheduler.add_request(message, client=CLIENT, now=self._clock.now_s)
        self._advance()

    def receive_report(self, report: TransferReport) -> None:
        """Transfers have ended."""
        self.scheduler.update_from_transfers(report, self._clock.now_s)
        self._advance()

    def _answer(self, output: ModelRunnerOutput) -> None:
        """The worker has executed a step."""
        self.scheduler.update_from_output(output, self._clock.now_s)
        self._advance()

    def _advance(self) -> None:
        """Send outputs and plans."""
        scheduler, clock = self.scheduler, self._clock
        for _, outputs in scheduler.take_outputs():
            clock.at(clock.now_s + self._cost.host.output_s, self._deliver, self.number, outputs)
        while (plan := scheduler.schedule(clock.now_s)) is not None:
            work, tokens = self._worker.execute(plan)
            received_s = clock.now_s + self._cost.host.plan_s
            begin_s = max(received_s, self._free_at_s)
            compute_s = self._cost.step_s(work) if work.num_tokens else 0.0
            self._free_at_s = begin_s + compute_s
            self.busy_s += compute_s
            self.num_steps += work.num_tokens > 0
            if plan.connector_metadata and self._transfers is not None:
                self._transfers.begin(plan.connector_metadata, received_s, begin_s)
            output = ModelRunnerOutput(
                epoch=1, step=plan.step, sampled_tokens=tokens, compute_s=compute_s
            )
            clock.at(self._free_at_s, self._answer, output)
        if self._publish is not None and (events := scheduler.take_kv_events()):
            self._publish(self.number, events)
        if not (scheduler.num_steps_in_flight or self._is_polling) and scheduler.is_waited_for():
            self._is_polling = True
            clock.at(clock.now_s + POLL_INTERVAL_S, self._poll)

    def _poll(self) -> None:
        """Requests may wait for an event without a message, such as a deadline."""
        self._is_polling = False
        now_s = self._clock.now_s
        if self.scheduler.idle_s(now_s) > MAX_STALL_S:
            report = self.scheduler.make_report(now_s, f"engine-{self.number}")
            reasons = sorted({waiting.waits_for for waiting in report.waiting})
            raise SimulationStalled(
                f"engine {self.number} has not computed a token for {MAX_STALL_S:.0f} simulated "
                f"seconds, but {report.num_waiting} requests wait. Reasons: {'; '.join(reasons)}"
            )
        self._advance()
