"""Multimodal items in steps: rows compute only tokens whose items are encoded, or can be in the
same step. `EncoderCache` decides which."""

from collections.abc import Collection
from typing import Any

from longshore.connectors.base import EncoderConnector
from longshore.protocol.arrays import Int64Array
from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.features.encoder import EncoderCache
from longshore.scheduler.hooks import Attempt, PlanChanges, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.queue.queues import SharedEvent, WaitingRequests
from longshore.scheduler.request import Request
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.step.plan_builder import PlanBuilder
from longshore.scheduler.step.running import RunningTable


class EncoderInputs(SchedulerFeature):
    """Has the items of requests encoded. It is attached if requests can have items. connector:
    hands over encoder outputs of other engines; None: each item is encoded here."""

    def __init__(
        self,
        cache: EncoderCache,
        running: RunningTable,
        waiting: WaitingRequests,
        plan: PlanBuilder,
        connector: EncoderConnector | None,
    ) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._plan = plan
        self._connector = connector
        self._before: EncoderCache | None = None  # `grant`, unless that is void

    # A request

    def gate(self, request: Request) -> Attempt | None:
        """The output of its item may come from another engine."""
        if not request.options.multimodal or not self._cache.is_loading(request):
            return None
        request.waits_for = "the output of its encoder, for which other engines are asked"
        self._waiting.park_head(SharedEvent.ENCODER)
        return Attempt.PARKED

    def allowed(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """Tokens up to the first item that cannot be encoded yet. A running request that wants
        tokens and cannot advance releases what it holds for a drafter alone."""
        cache, runs = self._cache, request.row >= 0
        if runs and self._before is not None:
            cache.restore(self._before)
            self._before = None
        if not (request.request_id in cache.pending if runs else request.options.multimodal):
            return num_tokens
        num_allowed = cache.would_limit(request, num_computed, num_tokens)
        if num_tokens and not num_allowed and cache.release_passed(request, num_computed):
            num_allowed = cache.would_limit(request, num_computed, num_tokens)
        return num_allowed

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """Encode the request's items of these tokens in this step."""
        if request.options.multimodal:
            self._cache.admit(request, num_computed, num_tokens)

    def scheduled(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """Encode the items of these tokens of a running request in this step."""
        if request.request_id in self._cache.pending:
            self._cache.limit(request, num_computed, num_tokens)

    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        """The request's row needs no items any more."""
        self._cache.release(request)

    # A step

    def is_eventful(self) -> bool:
        """Whether a row has not passed its items."""
        return bool(self._cache.pending)

    def begin_step(self, step: int, budget: int, now: float) -> None:
        """A step has a budget of encoded tokens. The items of rewound rows may have to be encoded
        again."""
        self._cache.begin_step()
        for row in self._plan.rewound:
            request = self._running.requests[row]
            if request is not None and request.options.multimodal:
                self._cache.rewound(request)

    def grant(self, wanted: Int64Array, granted: Int64Array, budget: int) -> Int64Array:
        """`granted`, reduced for requests with an item that cannot be encoded yet, which leaves
        more tokens for requests admitted later."""
        running, cache = self._running, self._cache
        self._before = None
        if not cache.pending:
            return granted
        self._before = cache.checkpoint()
        pending = cache.pending.values()
        for request in sorted(pending, key=lambda request: int(running.generation[request.row])):
            row = request.row
            num_computed, num_tokens = int(running.num_computed[row]), int(granted[row])
            allowed = cache.limit(request, num_computed, num_tokens)
            if allowed < num_tokens:
                wanted = wanted.copy()
                wanted[row] = allowed
                granted = running.grant(wanted, budget)
        return granted

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        """What the workers encode, and which outputs they drop."""
        fields: dict[str, Any] = {
            "encoder_inputs": self._cache.take_encoder_inputs(),
            "freed_encoder_hashes": self._cache.take_freed(),
        }
        if self._connector is not None:
            metadata = self._connector.build_connector_meta(plan.step, answered_step)
            fields["ec_connector_metadata"] = metadata
        return fields

    def steady_fields(self, plan: PlanChanges, answered_step: int) -> dict[str, Any]:
        """Outputs may have been evicted on request."""
        return {"freed_encoder_hashes": self._cache.take_freed()}

    def has_work(self) -> bool:
        """Whether the connector has instructions for the workers."""
        return self._connector is not None and self._connector.has_pending_work

    def built(self, plan: SchedulerOutput, planned: PlannedStep, now: float) -> None:
        """Rows have passed items."""
        for request in list(self._cache.pending.values()):
            self._cache.advanced(request, int(self._running.num_computed[request.row]))

    # The engine

    def begin_epoch(self, epoch: int) -> None:
        """The workers have no outputs."""
        self._cache.clear()

    def counts(self) -> dict[str, Any]:
        """See `EncoderCache.counts`."""
        return self._cache.counts()

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """See `EncoderCache.check`."""
        self._cache.check(running)
