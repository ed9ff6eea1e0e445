"""What an operator wants to know when nothing moves: who waits, and for what."""

from collections.abc import Iterator

from longshore.protocol.statistics import WaitingReport
from longshore.scheduler.parts import Parts
from longshore.scheduler.request import Request, RequestStatus
from longshore.scheduler.step.pause import PauseState


class Progress:
    """When some request last advanced. `now` is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._last: float | None = None

    def advanced(self, now: float) -> None:
        """A plan computes tokens, or the engine has nothing to do."""
        self._last = now

    def idle_s(self, now: float) -> float:
        """Seconds since then; 0 before the first."""
        return 0.0 if self._last is None else max(now - self._last, 0.0)


class WaitingReasons:
    """Names what each waiting request waits for, from the same tables that admission looks at."""

    def __init__(self, parts: Parts) -> None:
        self._config = parts.config
        self._running = parts.running
        self._waiting = parts.waiting
        self._kv_cache = parts.kv_cache
        self._in_flight = parts.in_flight
        self._gates = parts.gates
        self._loras = parts.loras
        self._transfers = parts.transfers
        self._encoder = parts.encoder

    def describe(self, pause: PauseState, now: float, limit: int) -> tuple[WaitingReport, ...]:
        """The first `limit` waiting requests, in the order in which they are tried."""
        reports: list[WaitingReport] = []
        for request, waits_for in self._reasons(pause, now):
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

    def _reasons(self, pause: PauseState, now: float) -> Iterator[tuple[Request, str]]:
        num_ahead = 0
        for request in self._waiting:
            own = self._own_reason(request, pause, now)
            if own is not None:
                yield request, own
            elif num_ahead:
                yield request, f"its turn: {num_ahead} ahead of it could run first"
                num_ahead += 1
            else:
                yield request, self._shared_reason(request, pause)
                num_ahead += 1

    def _own_reason(self, request: Request, pause: PauseState, now: float) -> str | None:
        """Something that concerns this request alone, and lets others pass."""
        match request.status:
            case RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
                return "its grammar, which is being compiled"
            case RequestStatus.WAITING_FOR_REMOTE_KVS:
                left_s = self._transfers.deadline(request) - now
                return f"its KV, which is being loaded; recomputed in {left_s:.1f} s at the latest"
            case RequestStatus.WAITING_FOR_STREAMING_REQ:
                return "the next input of its session, from its client"
        if request.resume_after_step > self._in_flight.last_answered_step:
            return (
                f"the answer to step {request.resume_after_step}, which brings a token sampled "
                "before its preemption"
            )
        if not self._loras.has_slot(request.lora_name):
            return (
                f"a place for its adapter {request.lora_name!r}: max_loras="
                f"{self._config.max_loras} others run"
            )
        return request.waits_for if pause is PauseState.UNPAUSED else None

    def _shared_reason(self, request: Request, pause: PauseState) -> str:
        """What keeps out the head of the queue, and everybody behind it."""
        if pause is not PauseState.UNPAUSED:
            return f"the engine to go on: it is {pause.value}"
        if self._running.is_full:
            return f"a row: all max_num_seqs={self._running.max_num_seqs} are held"
        num_free = self._kv_cache.num_free_blocks
        if self._gates.is_closed and self._running.num_rows:
            return (
                f"memory pressure to fall: {self._kv_cache.usage:.0%} of the blocks are held, "
                "admissions open again below admit_threshold"
            )
        num_kept = self._gates.watermark_blocks if self._running.num_rows else 0
        num_needed = self._kv_cache.num_blocks_for(
            min(request.num_tokens, self._config.token_budget),
            num_encoder_tokens=request.num_encoder_tokens,
        )
        if num_free - num_needed < num_kept:
            return (
                f"blocks: its first chunk needs up to {num_needed}, {num_free} are free"
                + (f", of which {num_kept} are kept back" if num_kept else "")
                + self._blocks_of_transfers()
            )
        return self._encoder.waits_for(request) or "the next step"

    def _blocks_of_transfers(self) -> str:
        transfers = self._transfers
        loading, quarantined = transfers.num_loading_blocks, transfers.num_quarantined_blocks
        text = f"; loads hold {loading}" if loading else ""
        return text + (f"; {quarantined} are in quarantine" if quarantined else "")
