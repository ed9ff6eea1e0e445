"""What each waiting request waits for, for operators whose requests do not advance."""

from collections.abc import Iterator
from dataclasses import dataclass

from longshore.protocol.statistics import WaitingReport
from longshore.scheduler.features.encoder import EncoderCache
from longshore.scheduler.features.transfers import Transfers
from longshore.scheduler.request import Request, RequestStatus
from longshore.scheduler.step.planner import PauseState, StepPlanner


@dataclass(frozen=True, slots=True)
class WaitingReasons:
    """Finds what each waiting request waits for, from the tables that planning reads."""

    planner: StepPlanner
    encoder: EncoderCache | None
    transfers: Transfers | None

    def describe(self, now: float, limit: int) -> tuple[WaitingReport, ...]:
        """The first `limit` waiting requests, in the order in which they are tried."""
        reports: list[WaitingReport] = []
        for request, waits_for in self._reasons(now):
            if len(reports) == limit:
                break
            reports.append(
                WaitingReport(
                    request_id=request.request_id,
                    status=request.status.name,
                    waits_for=waits_for,
                    waited_s=max(now - request.events[-1][1], 0.0),
                    num_tokens=request.num_tokens,
                    num_preemptions=request.num_preemptions,
                )
            )
        return tuple(reports)

    def _reasons(self, now: float) -> Iterator[tuple[Request, str]]:
        num_ahead = 0
        for request in self.planner.waiting:
            own = self._own_reason(request, now)
            if own is not None:
                yield request, own
            elif num_ahead:
                yield request, f"its turn: {num_ahead} ahead of it could run first"
                num_ahead += 1
            else:
                yield request, self._shared_reason(request)
                num_ahead += 1

    def _own_reason(self, request: Request, now: float) -> str | None:
        """A reason that concerns this request alone; later requests can be admitted."""
        planner = self.planner
        match request.status:
            case RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                return "its grammar, which is being compiled"
            case RequestStatus.WAITING_FOR_STREAMING_REQ:
                return "the next input of its session, from its client"
        if request.resume_after_step > planner.in_flight.last_answered_step:
            return (
                f"the output of step {request.resume_after_step}, which has a token sampled "
                "before its preemption"
            )
        for feature in planner.hooks.waits_for:
            if (reason := feature.waits_for(request, now)) is not None:
                return reason
        return request.waits_for if planner.pause is PauseState.UNPAUSED else None

    def _shared_reason(self, request: Request) -> str:
        """A reason that blocks the head of the queue, and all requests after it."""
        planner, gates = self.planner, self.planner.admission.gates
        running, kv_cache = planner.running, planner.kv_cache
        if planner.pause is not PauseState.UNPAUSED:
            return f"the engine to be unpaused: it is {planner.pause.value}"
        if planner.waits_for_transfers:
            return (
                "transfers to end: the running request needs more blocks than are free"
                + self._blocks_of_transfers()
            )
        if running.num_rows == running.max_num_seqs:
            return f"a row: all max_num_seqs={running.max_num_seqs} are held"
        if planner.waiting.peek() is None:
            return "a row: those that are free are reserved for keys with less than their share"
        num_free = kv_cache.num_free_blocks
        if gates.is_closed and running.num_rows and not request.is_owed:
            return (
                f"memory pressure to fall: {kv_cache.usage:.0%} of the blocks are held; "
                "admissions continue below admit_threshold"
            )
        num_kept = gates.num_kept(is_owed=request.is_owed) if running.num_rows else 0
        num_needed = self._num_blocks_needed(request)
        if num_free - num_needed < num_kept:
            return (
                f"blocks: its next chunk needs {num_needed}, {num_free} are free"
                + (f", of which {num_kept} are reserved" if num_kept else "")
                + self._blocks_of_transfers()
            )
        reason = None if self.encoder is None else self.encoder.waits_for(request)
        return reason or "the next step"

    def _num_blocks_needed(self, request: Request) -> int:
        """Free blocks that the request takes if it starts with all the tokens a step may give."""
        planner, hold = self.planner, request.hold
        kv_cache, config = planner.kv_cache, planner.config
        prefix = kv_cache.get_computed_blocks(request)
        num_computed = prefix.num_tokens if hold is None else hold.num_computed_tokens
        num_now = config.long_prefill_token_threshold or config.token_budget
        num_now = min(num_now, config.token_budget)
        num_slots = min(request.num_tokens, num_computed + num_now)
        num_slots = min(num_slots + config.num_lookahead_tokens, config.max_model_len)
        if config.scheduler_reserve_full_isl and planner.running.num_rows:
            num_slots = max(num_slots, request.num_tokens)
        if hold is not None:
            answered_step = planner.in_flight.last_answered_step
            return kv_cache.num_blocks_to_resume(
                hold.blocks, num_computed, num_slots, answered_step
            )
        demand = kv_cache.demand(prefix, num_slots, num_encoder_tokens=request.num_encoder_tokens)
        return demand.num_needed

    def _blocks_of_transfers(self) -> str:
        transfers = self.transfers
        if transfers is None:
            return ""
        loading = transfers.num_loading_blocks + self.planner.holds.num_loaded_blocks
        quarantined = transfers.num_quarantined_blocks
        text = f"; loads hold {loading}" if loading else ""
        return text + (f"; {quarantined} are in quarantine" if quarantined else "")
