"""The requests of one gateway whose prompts one engine computes and whose answers another one
continues; without I/O. The only place that knows of the legs of a request.

A request is queued for capacity at a decode engine, then at a prefill engine. The prefill engine
gets the request with one token to compute (`LiveRequest.is_prefill_leg`). Its token is shown at
once, and its `kv_transfer_params` are sent, unchanged, to the decode engine, with the message that
also resumes a request of a lost engine. A request that gains nothing from a remote prefill, or for
which there is no prefill engine, is sent to the decode engine as a whole.

Capacity is counted in KV blocks: those that a request of this length holds at an engine
(`KVCapacity`). A request has that of its tokens and of the next RESERVED_TOKENS at a decode engine,
from its admission to its end, and that of its prompt at a prefill engine, from its leg there to its
first token of the decode engine, since the KV is kept for that long.

Forks (samples of one prompt) wait until the decode engine has their parent, and start from the KV
that it pulls: one transfer per prompt.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from longshore.deploy.gateway.engines.engine_capacities import EngineCapacities, EngineState
from longshore.deploy.gateway.engines.split_request import (
    Phase,
    SplitRequest,
    joined,
)
from longshore.deploy.gateway.router.policies import ByEngine, Decision
from longshore.deploy.gateway.router.role_queue import Assignment, Refusal, RoleQueue
from longshore.deploy.gateway.router.router import Router, Stage
from longshore.deploy.gateway.router.stages import routed_so_far, stage_of
from longshore.deploy.gateway.settings import SplitSettings
from longshore.deploy.requests.live_requests import AT_NO_ENGINE, LiveRequest, LiveRequests
from longshore.protocol.commands import Role
from longshore.protocol.errors import EngineDead, LongshoreError
from longshore.protocol.outputs import FinishedRequest, FinishReason
from longshore.protocol.requests import RequestOptions
from longshore.protocol.sampling import SamplingParams

RESERVED_TOKENS: Final = 256
"""Output tokens for which a request has capacity, beyond those that it has; not all of them,
because most answers end long before their limit."""

MOVED_PER_CALL: Final = 16
"""Requests that are sent to another engine at a time when one is lost."""

Outcome: TypeAlias = Literal["offered", "refused", "finished", "failed", "aborted"]
"""How a remote prefill has ended; a label of metrics.

offered:  the decode engine was given the KV.
refused:  the prefill engine does not keep the KV, and the decode engine computes the prompt.
finished: the answer has ended with its first token.
failed:   the prefill engine was lost. aborted: by the client.
"""

Skip: TypeAlias = Literal[
    "short_prompt", "cached_prefix", "last_token", "too_large", "no_prefill_engine"
]
"""Why a request was sent to a decode engine as a whole; a label of metrics.

short_prompt, cached_prefix: the decode engine has fewer than `disaggregation_min_tokens` tokens to
           compute, because there are no more, or because it probably has the others.
last_token: only one token is left to compute.
too_large: the KV is more than prefill engines may keep.
"""


class TooManyWaiting(LongshoreError):
    """No further request can wait for a decode engine."""


class LegEngine(EngineState, Protocol):
    """What is used of an `EngineClient`."""

    @property
    def num_live_requests(self) -> int: ...

    def resume(
        self, requests: Iterable[LiveRequest], *, fork_of: LiveRequest | None = None
    ) -> None: ...

    def release_transfers(self, transfer_ids: Sequence[str]) -> None: ...


class SplitRequests:
    """engines: by number; they come and go. router: knows their roles.

    usable: returns which engines may get a request as a whole, by number.
    now:    returns the time in seconds.
    on_gap: called with the time between the two legs' first tokens, in seconds.
    outcomes, skips: counts so far.
    """

    def __init__(
        self,
        config: SplitSettings,
        engines: Mapping[int, LegEngine],
        router: Router,
        seeds: random.Random,
        *,
        num_gateways: int,
        usable: Callable[[], ByEngine[bool]],
        now: Callable[[], float],
    ) -> None:
        self._config = config
        self._engines, self._roles, self._router = engines, router.roles, router
        self._capacities = EngineCapacities(
            engines,
            router.roles,
            num_gateways=num_gateways,
        )
        self._usable, self._now = usable, now
        self._new = LiveRequests(seeds, engine=AT_NO_ENGINE)
        self._requests: dict[LiveRequest, SplitRequest] = {}
        self._held: dict[SplitRequest, None] = {}  # which no engine has, in order
        self._num_reserved: Counter[int] = Counter()  # of requests that have not been sent
        self._decode: RoleQueue[SplitRequest] = RoleQueue(
            self._choose_decode, max_waiting=config.disaggregation_max_waiting
        )
        self._prefill: RoleQueue[SplitRequest] = RoleQueue(
            self._choose_prefill, max_waiting=sys.maxsize
        )
        self.on_gap: Callable[[float], None] = lambda seconds: None
        self.outcomes: Counter[Outcome] = Counter()
        self.skips: Counter[Skip] = Counter()

    @property
    def num_held(self) -> int:
        """Requests that no engine has now."""
        return len(self._held)

    @property
    def num_waiting(self) -> dict[Role, int]:
        """Requests that wait for capacity, by the role of the engines."""
        return {"decode": self._decode.num_waiting, "prefill": self._prefill.num_waiting}

    # Requests

    def takes(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions,
        fork_of: LiveRequest | None = None,
        num_primed: int = 0,
    ) -> bool:
        """Whether a request is one of these. Others are sent to one engine as a whole."""
        if fork_of is not None and fork_of.is_live:
            return fork_of in self._requests
        if not (self._capacities.has_engine("prefill") and self._capacities.any_open("decode")):
            return False
        return (
            stage_of(sampling, options, num_primed) == "whole"
            and not options.keeps_blocks
            and not options.multimodal
            and options.kv_transfer_params is None
            and self._capacities.max_model_len - len(prompt_token_ids) > 1
        )

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions,
        *,
        on_change: Callable[[], None],
        fork_of: LiveRequest | None = None,
        num_primed: int = 0,
        session_key: str | None,
    ) -> LiveRequest:
        """Queue a request. Raises TooManyWaiting."""
        live, _ = self._new.open(
            request_id,
            prompt_token_ids,
            sampling,
            options,
            on_change=on_change,
            num_primed=num_primed,
        )
        self._new.abort([live])  # an engine gives it another handle
        live.session_key = session_key
        split = SplitRequest(live, live.on_change)
        live.on_change = partial(self._changed, split)
        self._requests[live] = split
        self._hold(split, Phase.QUEUED)
        parent = None if fork_of is None else self._requests.get(fork_of)
        if parent is not None:
            self._fork(split, parent)
        elif not self._queue(split):
            num_waiting = self._decode.num_waiting
            self._end(split)
            raise TooManyWaiting(
                f"{num_waiting} requests wait for a decode engine, and the limit is "
                f"{self._config.disaggregation_max_waiting} (--disaggregation-max-waiting); retry "
                "later"
            )
        return live

    def abort(self, live: LiveRequest) -> None:
        """The client has gone. If an engine has the request, the caller aborts it there."""
        split = self._requests.get(live)
        if split is None:
            return
        if split.phase is Phase.PREFILL:
            self.outcomes["aborted"] += 1
        self._end(split)

    def stop(self, live: LiveRequest, num_tokens: int) -> bool:
        """A stop string ends the request with its first `num_tokens` output tokens. False if an
        engine has the request, which has to be told."""
        split = self._requests.get(live)
        if split is None or split not in self._held:
            return False
        split.stopped_at, live.is_stopped = live.num_primed + num_tokens, True
        return True

    def late_end(self, engine: int, finished: FinishedRequest) -> None:
        """An engine has ended a request that is not live any more, because it was aborted or moved.
        It may offer KV, which no engine will pull."""
        if finished.kv_transfer_params:
            self._release_transfer(engine, finished.kv_transfer_params)

    def fail_held(self, failure: EngineDead) -> None:
        """No engine will return: fail the requests that none has."""
        held = list(self._held)
        for split in held:
            split.live.failure = failure
        for split in held:
            split.live.on_change()

    # Engines

    def engines_changed(self) -> bool:
        """An engine is ready, lost, paused, closed, open or removed. To be called before `moved`.
        Returns whether to call it again soon: it sends a bounded number of requests elsewhere."""
        self._take_out(self._capacities.closed_engines)
        queues: dict[Role, RoleQueue[SplitRequest]] = {
            "decode": self._decode,
            "prefill": self._prefill,
        }
        for role, queue in queues.items():
            for engine in self._capacities.open_engines(role):
                if (num_tokens := self._capacities.update(engine)) is not None:
                    self._assigned(queue, queue.set_capacity(engine, num_tokens))
        if not self._capacities.any_open("decode"):
            stuck = self._first_held(Phase.QUEUED, Phase.ADMITTED, Phase.OFFERED)
            for split in stuck:
                if split in self._held:  # it was not sent, because others were
                    self._send_anywhere(split)
        elif not self._capacities.any_open("prefill"):
            stuck = self._first_held(Phase.ADMITTED)
            for split in stuck:
                if split.phase is Phase.ADMITTED:
                    self._assigned(self._prefill, self._prefill.release(split))
                    self._begin(split)
        else:
            return False
        return len(stuck) == MOVED_PER_CALL

    def _first_held(self, *phases: Phase) -> list[SplitRequest]:
        return list(islice((each for each in self._held if each.phase in phases), MOVED_PER_CALL))

    def _take_out(self, engines: Sequence[int]) -> None:
        """These engines get no further requests. Those that were to continue there are queued
        again. They have no capacity at a prefill engine meanwhile: a request that has capacity at a
        decode engine may wait for it."""
        lost: list[SplitRequest] = []
        for engine in engines:
            self._capacities.remove(engine)
            self._prefill.remove_engine(engine)
            there = self._decode.remove_engine(engine)
            lost += [split for split in there if split.reserved == engine]
        for split in lost:
            self._reserve(split, None)
            if split.phase is Phase.ADMITTED:
                split.enter(Phase.QUEUED)
        queued = [split for split in lost if split.phase is Phase.QUEUED]
        self._assigned(self._prefill, self._prefill.release(*queued))
        for split in lost:
            if split.reserved is None and split in self._decode:
                self._queue_again(split, has_failed=False)

    def moved(self, live: LiveRequest) -> bool:
        """The engine that had this request was lost. False if the request is none of these."""
        split = self._requests.get(live)
        if split is None:
            return False
        was_prefill = split.phase is Phase.PREFILL
        self._router.note_answer(live, self._now())
        self._end_transfer(split)
        live.is_prefill_leg, split.offered_at = False, None
        self._hold(split, Phase.QUEUED)
        self._assigned(self._prefill, self._prefill.release(split))
        if was_prefill:
            self.outcomes["failed"] += 1
        if split not in self._held:
            return True  # sent, because other requests were
        if not was_prefill:
            self._queue_again(split, has_failed=True)
        elif split.reserved is not None:
            self._begin(split)
        elif split not in self._decode or not self._capacities.any_open("decode"):
            self._send_anywhere(split)  # it has failed too often to wait again, or would for ever
        return True

    # The queues

    def _queue(self, split: SplitRequest) -> bool:
        """Queue for capacity at a decode engine. False if too many wait."""
        outcome = self._decode.add(split, self._decode_blocks(split))
        if isinstance(outcome, Refusal):
            return False
        self._assigned(self._decode, outcome)
        return True

    def _queue_again(self, split: SplitRequest, *, has_failed: bool) -> None:
        """As `_queue`, for a request that was accepted before. has_failed: at its engine."""
        if split in self._held and not self._capacities.any_open("decode"):
            self._send_anywhere(split)
            return
        outcome: list[Assignment[SplitRequest]] | Refusal
        if split in self._decode:
            outcome = self._decode.retry(split, has_failed=has_failed)
        else:
            outcome = self._decode.add(split, self._decode_blocks(split))
        if not isinstance(outcome, Refusal):
            self._assigned(self._decode, outcome)
        elif split in self._held:
            self._send_anywhere(split)

    def _decode_blocks(self, split: SplitRequest) -> int:
        """At least the share of one of the requests that an engine can run at a time."""
        num_tokens = split.num_tokens + min(self._num_left(split), RESERVED_TOKENS)
        num_blocks = self._capacities.blocks_of(num_tokens)
        largest = self._capacities.largest("decode")
        return min(max(num_blocks, self._capacities.blocks_per_request), largest or num_blocks)

    def _num_left(self, split: SplitRequest) -> int:
        """Output tokens that the request may still get."""
        live = split.live
        left = self._capacities.max_model_len - split.num_tokens
        maximum = live.message.sampling.max_tokens
        if maximum is not None:
            left = min(left, maximum - live.num_primed - live.num_tokens)
        return left

    def _choose_decode(self, split: SplitRequest, engines: Sequence[int]) -> int:
        split.decision = self._choose(split, engines, "decode")
        return split.decision.engine

    def _choose_prefill(self, split: SplitRequest, engines: Sequence[int]) -> int:
        decision = self._choose(split, engines, "prefill")
        self._router.note_sent(decision, split.live)
        return decision.engine

    def _choose(self, split: SplitRequest, engines: Sequence[int], stage: Stage) -> Decision:
        is_usable = {engine: engine in engines for engine in self._engines}
        num_own = {
            engine: client.num_live_requests + self._num_reserved[engine]
            for engine, client in self._engines.items()
        }
        decision = self._router.choose(
            routed_so_far(split.live), num_own, is_usable, self._now(), stage
        )
        assert decision is not None
        return decision

    def _assigned(
        self, queue: RoleQueue[SplitRequest], assigned: Sequence[Assignment[SplitRequest]]
    ) -> None:
        """Send requests to their engines. Sending one may lose the engine of a later one."""
        if queue is self._prefill:
            for split, engine in assigned:
                if split.phase is not Phase.ADMITTED or queue.engine_of(split) != engine:
                    continue
                if self._capacities.is_open(engine):
                    self._send_prefill(split, engine)
                    continue
                if engine in self._capacities:
                    self._take_out([engine])
                self._assigned(queue, queue.release(split))
                self._begin(split)
            return
        for split, engine in assigned:
            self._reserve(split, engine)
        for split, _ in assigned:
            self._begin(split)

    def _reserve(self, split: SplitRequest, engine: int | None) -> None:
        if split.reserved is not None:
            self._num_reserved[split.reserved] -= 1
        split.reserved = engine
        if engine is not None:
            self._num_reserved[engine] += 1

    # The legs

    def _begin(self, split: SplitRequest) -> None:
        """The request has capacity at a decode engine, unless it has lost it meanwhile. It may
        still be at a prefill engine."""
        if split.reserved is None or split not in self._held:
            return
        if split.phase is Phase.OFFERED:
            self._send_decode(split)
            return
        if split in self._prefill:
            return
        reason = self._skip_reason(split)
        if reason is not None:
            self.skips[reason] += 1
            self._send_decode(split)
            return
        self._hold(split, Phase.ADMITTED)
        outcome = self._prefill.add(split, self._capacities.blocks_of(split.num_tokens))
        assert not isinstance(outcome, Refusal)
        self._assigned(self._prefill, outcome)

    def _skip_reason(self, split: SplitRequest) -> Skip | None:
        decision, minimum = split.decision, self._config.disaggregation_min_tokens
        if not self._capacities.any_open("prefill"):
            return "no_prefill_engine"
        if self._num_left(split) < 2:
            return "last_token"
        if split.num_tokens < minimum:
            return "short_prompt"
        if decision is not None and split.num_tokens - decision.num_cached_tokens < minimum:
            return "cached_prefix"
        if self._capacities.blocks_of(split.num_tokens) > self._capacities.largest("prefill"):
            return "too_large"
        return None

    def _send_prefill(self, split: SplitRequest, engine: int) -> None:
        live = split.live
        live.is_prefill_leg = True
        live.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
        self._send(split, engine, Phase.PREFILL)

    def _send_decode(self, split: SplitRequest) -> None:
        """To the decode engine at which it has capacity: what comes after the first token, or all
        of it."""
        live, engine, decision = split.live, split.reserved, split.decision
        assert engine is not None
        assert decision is not None
        live.kv_transfer_params, split.params = split.params, None
        if live.kv_transfer_params is not None:  # nothing to compute
            decision = decision._replace(num_cached_tokens=len(live.prompt_token_ids))
        self._reserve(split, None)
        self._router.note_sent(decision, live)
        self._send(split, engine, Phase.SENT)
        self._release_forks(split)

    def _send_anywhere(self, split: SplitRequest) -> None:
        """To any engine: no decode engine is open, or there were too many retries. Only a decode
        engine pulls the KV of an offer."""
        self._release_capacity(split)
        if split not in self._held:
            return  # sent, because other requests were
        live = split.live
        num_own = {each: client.num_live_requests for each, client in self._engines.items()}
        decision = self._router.choose(routed_so_far(live), num_own, self._usable(), self._now())
        if decision is None:
            live.failure = EngineDead("no engine is left")
            live.on_change()
            return
        if self._roles[decision.engine] != "decode":
            self._end_transfer(split)
            split.offered_at = None
        live.is_prefill_leg = False
        live.kv_transfer_params, split.params = split.params, None
        self._router.note_sent(decision, live)
        self._send(split, decision.engine, Phase.SENT)
        self._release_forks(split)

    def _send(
        self, split: SplitRequest, engine: int, phase: Phase, fork_of: LiveRequest | None = None
    ) -> None:
        """Nothing may be done with the request after this: it may have lost the engine."""
        self._held.pop(split, None)
        split.enter(phase)
        split.awaits_token = True
        self._engines[engine].resume([split.live], fork_of=fork_of)

    def _hold(self, split: SplitRequest, phase: Phase) -> None:
        split.enter(phase)
        split.live.engine = AT_NO_ENGINE
        self._held[split] = None

    def _changed(self, split: SplitRequest) -> None:
        live = split.live
        if split.phase is Phase.PREFILL:
            self._router.note_answer(live, self._now())
            end = live.finished
            if end is not None and end.reason is FinishReason.LENGTH_CAPPED:
                self._offered(split, end)
                return
            if not live.is_live:
                self.outcomes["failed" if live.finished is None else "finished"] += 1
        elif split.awaits_token and live.num_tokens > live.num_tokens_sent:
            self._settled(split)
        if not live.is_live:
            if live.finished is not None and split.first_end is not None:
                live.finished = joined(split.first_end, live.finished)
            self._end(split)
        split.on_change()

    def _offered(self, split: SplitRequest, end: FinishedRequest) -> None:
        """The prefill leg has ended with a first token, after which the request continues."""
        live = split.live
        live.finished, live.is_prefill_leg, live.kv_transfer_params = None, False, None
        split.first_end = end if split.first_end is None else split.first_end
        split.params, split.owner = end.kv_transfer_params, live.engine
        split.offered_at = self._now()
        self._hold(split, Phase.OFFERED)
        self.outcomes["offered" if split.params else "refused"] += 1
        split.on_change()
        if split.phase is not Phase.OFFERED:
            return
        if split.stopped_at is not None:
            live.finished = msgspec.structs.replace(
                end,
                reason=FinishReason.STOPPED,
                num_output_tokens=split.stopped_at,
                kv_transfer_params=None,
            )
            self._end(split)
            split.on_change()
        elif split.reserved is not None:
            self._send_decode(split)
        elif split not in self._decode or not self._capacities.any_open("decode"):
            self._send_anywhere(split)
        else:  # it may wait for requests that wait for its capacity at the prefill engine
            self._assigned(self._prefill, self._prefill.release(split))

    def _settled(self, split: SplitRequest) -> None:
        """The engine that computes the rest has sent a token: it has the KV of the prompt."""
        split.awaits_token = False
        if split.offered_at is not None:
            self.on_gap(self._now() - split.offered_at)
            split.offered_at = None
        self._router.note_answer(split.live, self._now())
        self._assigned(self._prefill, self._prefill.release(split))

    def _end(self, split: SplitRequest) -> None:
        self._requests.pop(split.live, None)
        self._held.pop(split, None)
        split.enter(Phase.ENDED)
        self._router.note_answer(split.live, self._now())
        self._end_transfer(split)
        self._release_capacity(split)
        self._release_forks(split)

    def _release_capacity(self, split: SplitRequest) -> None:
        self._reserve(split, None)
        self._assigned(self._decode, self._decode.release(split))
        self._assigned(self._prefill, self._prefill.release(split))

    # Forks

    def _fork(self, split: SplitRequest, parent: SplitRequest) -> None:
        is_sent = parent.phase is Phase.SENT
        if is_sent and parent.live.engine in self._engines:
            self._send(split, parent.live.engine, Phase.SENT, fork_of=parent.live)
        elif is_sent or parent.phase is Phase.ENDED:
            self._hold(split, Phase.QUEUED)
            self._queue_again(split, has_failed=False)
        else:
            self._hold(split, Phase.FORK)
            parent.forks.append(split)

    def _release_forks(self, parent: SplitRequest) -> None:
        """The parent was sent, or it has ended: then one of its forks becomes the parent."""
        forks, parent.forks = parent.forks, []
        for fork in forks:
            if fork.phase is not Phase.FORK or not fork.live.is_live:
                continue
            self._fork(fork, parent)
            if parent.phase is Phase.ENDED:
                parent = fork

    # Offers that are not used

    def _end_transfer(self, split: SplitRequest) -> None:
        """If no engine was sent it; the request may wait for one that is not ready."""
        live = split.live
        for params in (split.params, live.kv_transfer_params):
            if params:
                self._release_transfer(split.owner, params)
        split.params = live.kv_transfer_params = None

    def _release_transfer(self, owner: int, params: Mapping[str, Any]) -> None:
        """No engine will pull the KV: end its lease. An engine that was restarted has none."""
        transfer_id = params.get("transfer_id")
        if isinstance(transfer_id, str) and (engine := self._engines.get(owner)) is not None:
            engine.release_transfers([transfer_id])
