"""The live requests of a client: creates messages and applies outputs, without I/O.

The gateway and `LLM` both use this table; each sends and receives the messages in its own way.
"""

import random
import time
from array import array
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from longshore.deploy.requests.token_scores import TokenScore, scores_of
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import EngineDead
from longshore.protocol.outputs import EngineOutputs, FinishedRequest
from longshore.protocol.requests import (
    NO_OPTIONS,
    AbortRequests,
    AddRequest,
    RequestOptions,
    StopFound,
)
from longshore.protocol.sampling import SamplingParams

SEED_BITS = 63

MAX_LOST: Final = 3
"""An engine that dies of a request would else die of it for ever."""


def seed_source(seed: int | None, number: int = 0) -> random.Random:
    """Source of seeds for requests without one: random, or reproducible from a deployment's seed,
    different for each of its clients (`number`)."""
    if seed is None:
        return random.SystemRandom()
    return random.Random(seed if number == 0 else f"{seed} of client {number}")


AT_NO_ENGINE: Final = -1


@dataclass(eq=False, slots=True)
class Leg:
    """A request at one engine, or AT_NO_ENGINE while it waits for one; by `time.monotonic`.

    sent_s: when it was sent there.
    end:    what the engine has said of its end there; None if it is there, was aborted or was lost.
    ended_s: when that arrived.
    """

    engine: int
    sent_s: float
    end: FinishedRequest | None = None
    ended_s: float | None = None


@dataclass(eq=False)
class LiveRequest:
    """One request on the client's side.

    message:       the message that queued it first; its handle may be an earlier one.
    new_token_ids: output tokens that the consumer has not taken yet, in order.
    taken_token_ids: output tokens before those.
    num_primed:    see `LiveRequests.open`.
    is_stopped:    a stop string was found; only the engine's answer is missing.
    num_lost:      engines (or an engine's workers) in a row that were lost without giving it a
                   token.
    num_tokens_sent: output tokens when it was sent to its engine, or when that got new workers.
    scores:        log probabilities that the consumer has not taken yet, by position (the prompt's
                   first token is at 0), if requested.
    finished:      set when the request has finished; no token comes after it.
    failure:       set if the engine died before that.
    engine:        number of the engine that has the request.
    is_prefill_leg: its engine computes its next token only.
    kv_transfer_params: for the connector of the next engine that it is sent to.
    session_key:   requests with the same one belong together, for routing.
    legs:          the engines that it was sent to, in order.
    on_change:     called after new tokens, the finish or a failure.
    """

    request_id: str
    handle: int
    prompt_token_ids: Sequence[int]
    message: AddRequest
    on_change: Callable[[], None]
    new_token_ids: list[int] = field(default_factory=list)
    taken_token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_primed: int = 0
    is_stopped: bool = False
    num_lost: int = 0
    num_tokens_sent: int = 0
    scores: dict[int, TokenScore] = field(default_factory=dict)
    finished: FinishedRequest | None = None
    failure: EngineDead | None = None
    engine: int = 0
    is_prefill_leg: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    session_key: str | None = None
    legs: list[Leg] = field(default_factory=lambda: [Leg(0, time.monotonic())])

    @property
    def opened_s(self) -> float:
        """When it was opened, by `time.monotonic`."""
        return self.legs[0].sent_s

    @property
    def is_live(self) -> bool:
        return self.finished is None and self.failure is None

    @property
    def num_taken(self) -> int:
        return len(self.taken_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return self.num_taken + len(self.new_token_ids)

    def take_token_ids(self) -> list[int]:
        """The tokens since the last call."""
        token_ids, self.new_token_ids = self.new_token_ids, []
        self.taken_token_ids.extend(token_ids)
        return token_ids

    def take_scores(self, num_tokens: int) -> list[TokenScore]:
        """Scores of the `num_tokens` output tokens taken last."""
        end = len(self.prompt_token_ids) + self.num_taken
        return [self.scores.pop(position) for position in range(end - num_tokens, end)]

    def take_prompt_scores(self) -> list[TokenScore | None]:
        """Scores of all prompt tokens; None for the first. Call it after the first output token."""
        positions = range(1, len(self.prompt_token_ids))
        return [None, *(self.scores.pop(position) for position in positions)]


MAX_JOB_ID_CHARACTERS: Final = 256
"""The scheduler's name of a job begins with that of its tenant."""


class RequestClient(Protocol):
    """Submits requests to an engine and aborts them."""

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = ...,
        *,
        on_change: Callable[[], None],
        fork_of: LiveRequest | None = ...,
        num_primed: int = ...,
    ) -> LiveRequest:
        """Queue a request; see `LiveRequests.open`. Raises EngineDead."""

    def abort(self, requests: Sequence[LiveRequest]) -> None: ...


class LiveRequests:
    """Assigns handles to requests and delivers tokens to them. Not thread-safe.

    seeds: source of seeds for requests without one; None: random.
    on_late_end: called with the end of a request that is not live any more.
    notify: calls `on_change` of each request that has changed, perhaps later; None: at once.
    engine: number of the engine that the messages are for.
    """

    def __init__(
        self,
        seeds: random.Random | None = None,
        on_late_end: Callable[[FinishedRequest], None] = lambda finished: None,
        notify: Callable[[Collection[LiveRequest]], None] | None = None,
        *,
        engine: int = 0,
    ) -> None:
        self._engine = engine
        self._on_late_end = on_late_end
        self._notify = notify or _notify_at_once
        self._by_handle: dict[int, LiveRequest] = {}
        self._next_handle = 0
        self._seeds = seeds or seed_source(None)

    def __len__(self) -> int:
        return len(self._by_handle)

    def __contains__(self, live: LiveRequest) -> bool:
        return self._by_handle.get(live.handle) is live

    def all(self) -> list[LiveRequest]:
        """All live requests."""
        return list(self._by_handle.values())

    def open(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
        *,
        on_change: Callable[[], None],
        fork_of: LiveRequest | None = None,
        num_primed: int = 0,
    ) -> tuple[LiveRequest, AddRequest]:
        """A new request, and the message that queues it.

        options:    a job is one of the request's tenant. With `no_store`, give it a salt that no
                    other request has.
        fork_of:    request whose KV it starts with.
        num_primed: number of tokens at the prompt's end that are sent as previous output. They
                    count for limits and bad words of `sampling`, but not for the answer.
        """
        handle = self._next_handle
        self._next_handle = (handle + 1) & 0x7FFFFFFF
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(SEED_BITS))
        if options.job_id is not None and options.tenant.name:
            job_id = f"{options.tenant.name}/{options.job_id}"
            options = msgspec.structs.replace(options, job_id=job_id)
        num_prompt = len(prompt_token_ids) - num_primed
        message = AddRequest(
            request_id=request_id,
            handle=handle,
            prompt_token_ids=int32_array(prompt_token_ids[:num_prompt]),
            output_token_ids=int32_array(prompt_token_ids[num_prompt:]),
            sampling=sampling,
            options=options,
            fork_of=None if fork_of is None else fork_of.handle,
        )
        live = LiveRequest(
            request_id,
            handle,
            prompt_token_ids,
            message,
            on_change,
            num_primed=num_primed,
            engine=self._engine,
            legs=[Leg(self._engine, time.monotonic())],
        )
        params = options.kv_transfer_params
        if params is not None and not params.get("do_remote_prefill"):
            live.kv_transfer_params = params  # what it asks for, of any engine
        self._by_handle[handle] = live
        return live, message

    def resume(self, live: LiveRequest, fork_of: LiveRequest | None = None) -> AddRequest:
        """Take over a request of another engine, or whose engine was lost; returns the message that
        continues it after its last token, on any engine. Positions of random draws, limits and
        penalties include the tokens so far.

        fork_of: as for `open`. Without it the request is no fork any more, because the KV of the
                 request that it forked is elsewhere, or lost.
        """
        if live in self:
            del self._by_handle[live.handle]
        live.handle, self._next_handle = self._next_handle, (self._next_handle + 1) & 0x7FFFFFFF
        self._by_handle[live.handle] = live
        live.num_tokens_sent = live.num_tokens
        now_s = time.monotonic()
        live.engine = self._engine
        live.legs.append(Leg(self._engine, now_s))
        first = live.message
        token_ids = int32_array(
            [*first.output_token_ids.tolist(), *live.taken_token_ids, *live.new_token_ids]
        )
        sampling = first.sampling
        if len(token_ids) > live.num_primed:  # the prompt's scores came with the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        if live.is_prefill_leg:
            max_tokens = len(token_ids) + 1
            min_tokens = min(sampling.min_tokens, max_tokens)
            sampling = msgspec.structs.replace(
                sampling, max_tokens=max_tokens, min_tokens=min_tokens
            )
        params = live.kv_transfer_params
        if params is not None and params.get("do_remote_prefill"):
            live.kv_transfer_params = None  # the KV can be pulled once
        options = first.options
        if params is not options.kv_transfer_params:
            options = msgspec.structs.replace(options, kv_transfer_params=params)
        return msgspec.structs.replace(
            first,
            handle=live.handle,
            output_token_ids=token_ids,
            sampling=sampling,
            options=options,
            age_s=now_s - live.opened_s,
            fork_of=None if fork_of is None else fork_of.handle,
        )

    def remove_finished(self) -> list[LiveRequest]:
        """The engine, or what it kept of finished requests, is lost: remove those. Returns the live
        ones, in the order in which they came."""
        for live in self.all():
            if not live.is_live:
                del self._by_handle[live.handle]
        return sorted(self.all(), key=lambda live: live.opened_s)

    def release(self, live: LiveRequest) -> bool:
        """Remove a request, for another engine to resume. False if it is not live here."""
        if live not in self:
            return False
        del self._by_handle[live.handle]
        return True

    def abort(self, requests: Sequence[LiveRequest]) -> AbortRequests | None:
        """Remove the requests that are still live; returns the message that aborts them, if any.

        Later outputs for them are dropped.
        """
        handles = [live.handle for live in requests if self._by_handle.pop(live.handle, None)]
        return AbortRequests(int32_array(handles)) if handles else None

    def stop(self, live: LiveRequest, num_tokens: int) -> StopFound | None:
        """The message that ends a request with its first `num_tokens` output tokens; None if it has
        finished. `finished` is set later, and tokens computed meanwhile may still arrive."""
        if self._by_handle.get(live.handle) is not live:
            return None
        live.is_stopped = True
        return StopFound(live.handle, live.num_primed + num_tokens)

    def apply(self, *steps: EngineOutputs) -> None:
        """Deliver the outputs of one or more steps. Handles that are no longer live are skipped."""
        changed: dict[int, LiveRequest] = {}
        for outputs in steps:
            self._apply(outputs, changed)
        if changed:
            self._notify(changed.values())

    def _apply(self, outputs: EngineOutputs, changed: dict[int, LiveRequest]) -> None:
        by_handle = self._by_handle
        for handle, token_id in zip(outputs.handles.tolist(), outputs.tokens.tolist(), strict=True):
            if (live := by_handle.get(handle)) is not None:
                live.new_token_ids.append(token_id)
                changed[handle] = live
        if outputs.logprobs is not None:
            for handle, position, score in scores_of(outputs.logprobs):
                if (live := by_handle.get(handle)) is not None:
                    live.scores[position] = score
        for finished in outputs.finished:
            if (live := by_handle.get(finished.handle)) is not None:
                if not finished.session_continues:
                    del by_handle[finished.handle]
                live.finished = finished
                live.legs[-1].end, live.legs[-1].ended_s = finished, time.monotonic()
                changed[finished.handle] = live
            else:
                self._on_late_end(finished)

    def fail_all(self, failure: EngineDead) -> None:
        """The engine will not return: fail every live request with `failure`."""
        self.fail(self.all(), failure)

    def fail_stopped(self, failure: EngineDead) -> None:
        """The engine is lost: end requests that need nothing more of it, because a stop string was
        found."""
        self.fail([live for live in self.all() if live.is_stopped], failure)

    def fail_fatal(
        self, failure: EngineDead, unsent: Container[LiveRequest] = ()
    ) -> AbortRequests | None:
        """The engine is lost, or its workers: fail requests that have lost MAX_LOST of them in a
        row without a token. One of them may be what kills the engines. Returns the message that
        aborts them, if any. unsent: those that the engine has not got."""
        requests = [live for live in self.all() if live not in unsent]
        for live in requests:
            live.num_lost = live.num_lost + 1 if live.num_tokens == live.num_tokens_sent else 0
            live.num_tokens_sent = live.num_tokens
        fatal = [live for live in requests if live.num_lost >= MAX_LOST]
        self.fail(fatal, failure)
        handles = [live.handle for live in fatal]
        return AbortRequests(int32_array(handles)) if handles else None

    def fail(self, requests: Sequence[LiveRequest], failure: EngineDead) -> None:
        """Fail these live requests with `failure`."""
        for live in requests:
            del self._by_handle[live.handle]
            live.failure = failure
        self._notify(requests)


def _notify_at_once(requests: Collection[LiveRequest]) -> None:
    for live in requests:
        live.on_change()
