"""Requests whose prompt one engine computes and whose answer another one continues."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longshore.deploy.gateway.engines.split_requests import (
    SplitRequests,
    TooManyWaiting,
)
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.gateway.router.stages import stage_of
from longshore.deploy.gateway.settings import SplitSettings
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.arrays import int32_array
from longshore.protocol.commands import Role
from longshore.protocol.errors import EngineDead
from longshore.protocol.handshake import EngineIdentity, EngineReady
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCapacity, LongestRequest
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import NO_OPTIONS, AddRequest, PoolingParams, RequestOptions
from longshore.protocol.sampling import SamplingParams

PROMPT: Final = list(range(3, 103))
OFFER: Final = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t"}
ASKS: Final = {"do_remote_decode": True, "do_remote_prefill": False}


SPEC: Final = FullAttentionSpec(16, num_kv_heads=1, head_size=2, dtype_bytes=4)
CAPACITY: Final = KVCapacity(100, 50, (SPEC,), LongestRequest(400))


def leasing(num_blocks: int) -> KVCapacity:
    """That of an engine that may lease so many blocks."""
    return msgspec.structs.replace(CAPACITY, num_leasable_blocks=num_blocks)


def released(requests: LiveRequests) -> list[LiveRequest]:
    """All live requests, which are removed."""
    return [live for live in requests.remove_finished() if requests.release(live)]


class FakeEngine:
    """An engine that has 100 blocks of 16 tokens, and the requests that it was sent.

    capacity: by default that of a model with one group, which may lease 50 blocks.
    waiting: requests by handle that it has neither ended nor aborted.
    """

    def __init__(
        self,
        number: int,
        role: Role,
        on_late_end: Callable[[int, FinishedRequest], None],
        capacity: KVCapacity,
    ) -> None:
        self.number, self.role = number, role
        identity = EngineIdentity("model", "float32", 16, 400, 8, 64, "seed")
        self.ready: EngineReady | None = EngineReady("engine", identity, 100, capacity)
        self.is_running = True
        self.closed_reason: str | None = None
        self.requests = LiveRequests(
            random.Random(), lambda finished: on_late_end(self.number, finished), engine=number
        )
        self.sent: list[AddRequest] = []
        self.waiting: dict[int, AddRequest] = {}
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.num_tokens: Counter[int] = Counter()

    @property
    def num_live_requests(self) -> int:
        return len(self.requests)

    def resume(
        self, requests: Iterable[LiveRequest], *, fork_of: LiveRequest | None = None
    ) -> None:
        for live in requests:
            message = self.requests.resume(live, fork_of)
            if not self.is_running:  # it waits at the client
                live.kv_transfer_params = message.options.kv_transfer_params
                continue
            self.sent.append(message)
            self.waiting[message.handle] = message

    def abort(self, requests: Sequence[LiveRequest]) -> None:
        message = self.requests.abort(requests)
        for handle in [] if message is None else message.handles.tolist():
            if (request := self.waiting.pop(handle, None)) is not None:
                self.aborted.append(request.request_id)

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        self.released += transfer_ids

    def answer(self, request: AddRequest, *token_ids: int, end: Any = None, **fields: Any) -> None:
        """Tokens, and an end with this reason."""
        finished: tuple[FinishedRequest, ...] = ()
        self.num_tokens[request.handle] += len(token_ids)
        if end is not None:
            self.waiting.pop(request.handle, None)
            count = len(request.output_token_ids) + self.num_tokens[request.handle]
            finished = (FinishedRequest(request.handle, end, count, **fields),)
        handles = int32_array([request.handle] * len(token_ids))
        self.requests.apply(EngineOutputs(handles, int32_array(token_ids), finished=finished))

    def offer(self, request: AddRequest, token_id: int = 7, **fields: Any) -> None:
        """The end of a prefill leg."""
        fields.setdefault("kv_transfer_params", OFFER)
        self.answer(request, token_id, end=FinishReason.LENGTH_CAPPED, **fields)


class Split:
    """Engines with these roles, and the requests of a gateway."""

    def __init__(
        self,
        *roles: Role,
        num_gateways: int = 1,
        capacity: KVCapacity = CAPACITY,
        **config: Any,
    ) -> None:
        self.capacity = capacity
        self.engines = [
            FakeEngine(number, role, self.late_end, capacity) for number, role in enumerate(roles)
        ]
        self.now = 0.0
        self.by_number = dict(enumerate(self.engines))
        self.router = Router(len(roles), roles=roles)
        self.requests = SplitRequests(
            SplitSettings(**{"disaggregation_min_tokens": 32, **config}),
            self.by_number,
            self.router,
            random.Random(0),
            num_gateways=num_gateways,
            usable=self.usable,
            now=lambda: self.now,
        )
        self.requests.engines_changed()

    def usable(self) -> dict[int, bool]:
        """As `Engines` says."""
        engines = self.by_number.items()
        is_open = {each: one.is_running and one.closed_reason is None for each, one in engines}
        if any(is_open.values()):
            return is_open
        is_running = {each: one.is_running for each, one in engines}
        return is_running if any(is_running.values()) else dict.fromkeys(is_running, True)

    def move_requests(self) -> None:
        """As `Engines` does at every change of an engine."""
        self.requests.engines_changed()
        if any(engine.is_running for engine in self.by_number.values()):
            for engine in self.by_number.values():
                if not engine.is_running:
                    self.resume_elsewhere(engine)

    def resume_elsewhere(self, engine: FakeEngine) -> None:
        for live in released(engine.requests):
            assert self.requests.moved(live)

    def close(self, number: int, reason: str | None = "drained by the operator") -> None:
        """An engine gets no new requests; without a reason it gets them again."""
        self.engines[number].closed_reason = reason
        self.move_requests()

    def reserved(self, live: LiveRequest) -> int:
        """The decode engine at which a request has capacity."""
        engine = self.requests._requests[live].reserved
        assert engine is not None
        return engine

    def add(self, role: Role) -> None:
        engine = FakeEngine(len(self.engines), role, self.late_end, self.capacity)
        self.engines.append(engine)
        self.router.add_engine(engine.number, role)
        self.by_number[engine.number] = engine
        self.move_requests()

    def remove(self, number: int) -> None:
        """An engine is removed, as `Engines` does it."""
        self.router.remove_engine(number)
        engine = self.by_number.pop(number)
        self.requests.engines_changed()
        self.resume_elsewhere(engine)
        engine.waiting.clear()

    def late_end(self, engine: int, finished: FinishedRequest) -> None:
        self.requests.late_end(engine, finished)

    def submit(
        self,
        prompt: Sequence[int] = PROMPT,
        *,
        request_id: str = "r",
        fork_of: LiveRequest | None = None,
        on_change: Callable[[], None] = lambda: None,
        **sampling: Any,
    ) -> LiveRequest:
        sampling.setdefault("max_tokens", 20)
        assert self.requests.takes(prompt, SamplingParams(**sampling), NO_OPTIONS, fork_of)
        return self.requests.submit(
            request_id,
            prompt,
            SamplingParams(**sampling),
            NO_OPTIONS,
            on_change=on_change,
            fork_of=fork_of,
            session_key=None,
        )

    def abort(self, *lives: LiveRequest) -> None:
        for live in lives:
            self.requests.abort(live)
        for engine in self.engines:
            engine.abort([live for live in lives if live.engine == engine.number])

    def lose(self, number: int) -> None:
        engine = self.engines[number]
        engine.is_running = False
        engine.waiting.clear()
        self.move_requests()

    def restore(self, number: int) -> None:
        engine = self.engines[number]
        engine.is_running, engine.closed_reason = True, None
        engine.resume(released(engine.requests))
        self.move_requests()

    def assert_nothing_is_left(self) -> None:
        requests = self.requests
        assert not requests._requests
        assert not requests._held
        assert requests.num_waiting == {"decode": 0, "prefill": 0}
        assert not any(requests._num_reserved.values())
        for number in range(len(self.engines)):
            assert requests._decode.num_used(number) == requests._prefill.num_used(number) == 0


def test_a_request_goes_to_a_prefill_engine_and_then_to_a_decode_engine() -> None:
    split, shown = Split("prefill", "decode"), []
    gaps: list[float] = []
    split.requests.on_gap = gaps.append
    live = split.submit(
        on_change=lambda: shown.append((live.num_tokens, live.finished)),
        seed=5,
        min_tokens=3,
        logprobs=1,
        prompt_logprobs=2,
    )
    prefill, decode = split.engines
    (first,) = prefill.sent
    assert first.options.kv_transfer_params == ASKS
    assert first.sampling == msgspec.structs.replace(
        live.message.sampling, max_tokens=1, min_tokens=1
    )
    assert not decode.sent
    split.now = 2.0
    prefill.offer(first, num_cached_tokens=16)
    assert shown == [(1, None)]  # its end is not shown
    (second,) = decode.sent
    assert second.options.kv_transfer_params == OFFER
    assert second.prompt_token_ids.tolist() == PROMPT
    assert second.output_token_ids.tolist() == [7]
    assert second.sampling == msgspec.structs.replace(live.message.sampling, prompt_logprobs=None)
    split.now = 2.5
    decode.answer(second, 8)
    decode.answer(second, 9, end=FinishReason.STOPPED, num_cached_tokens=96)
    assert live.take_token_ids() == [7, 8, 9]
    assert live.finished is not None
    assert live.finished.num_output_tokens == 3
    assert live.finished.num_cached_tokens == 16  # of the engine that computed the prompt
    assert [count for count, _ in shown] == [1, 2, 3]
    assert split.requests.outcomes == {"offered": 1}
    assert gaps == [0.5]
    split.assert_nothing_is_left()


@pytest.mark.parametrize("reason", [FinishReason.STOPPED, FinishReason.ERROR, FinishReason.IGNORED])
def test_an_answer_that_ends_with_its_first_token_is_complete(reason: FinishReason) -> None:
    split = Split("prefill", "decode")
    live = split.submit()
    split.engines[0].answer(split.engines[0].sent[0], 2, end=reason, message="m")
    assert live.finished is not None
    assert (live.finished.reason, live.finished.message) == (reason, "m")
    assert not split.engines[1].sent
    assert split.requests.outcomes == {"finished": 1}
    split.assert_nothing_is_left()


def test_a_stop_string_in_the_first_token_ends_the_lease() -> None:
    split = Split("prefill", "decode")

    def stop() -> None:
        if live.is_live:
            assert split.requests.stop(live, 1)

    live = split.submit(on_change=stop)
    split.engines[0].offer(split.engines[0].sent[0])
    assert live.finished is not None
    assert live.finished.reason is FinishReason.STOPPED
    assert live.finished.num_output_tokens == 1
    assert split.engines[0].released == ["t"]
    assert not split.engines[1].sent
    split.assert_nothing_is_left()


def test_without_an_offer_the_decode_engine_computes_the_prompt() -> None:
    split = Split("prefill", "decode")
    split.submit()
    split.engines[0].offer(split.engines[0].sent[0], kv_transfer_params=None)
    (second,) = split.engines[1].sent
    assert second.options.kv_transfer_params is None
    assert second.output_token_ids.tolist() == [7]
    assert split.requests.outcomes == {"refused": 1}


def test_short_prompts_are_computed_where_they_are_decoded() -> None:
    split = Split("prefill", "decode")
    split.submit(PROMPT[:31])
    split.submit(PROMPT[:32])
    assert [len(each.sent) for each in split.engines] == [1, 1]
    assert split.engines[1].sent[0].options.kv_transfer_params is None
    assert split.engines[1].sent[0].sampling.max_tokens == 20
    assert split.requests.skips == {"short_prompt": 1}


def test_which_requests_are_not_split() -> None:
    split = Split("prefill", "decode")
    many, one = SamplingParams(max_tokens=5), SamplingParams(max_tokens=1)
    cases: list[tuple[SamplingParams, RequestOptions, str]] = [
        (one, NO_OPTIONS, "prefill"),
        (many, RequestOptions(pooling=PoolingParams()), "prefill"),
        (many, RequestOptions(kv_transfer_params=ASKS), "prefill"),
        (many, RequestOptions(kv_transfer_params=OFFER), "decode"),
        (one, RequestOptions(keeps_blocks=True), "whole"),
    ]
    for sampling, options, stage in cases:
        assert not split.requests.takes(PROMPT, sampling, options)
        assert stage_of(sampling, options) == stage
    assert split.requests.takes(PROMPT, many, NO_OPTIONS)
    assert not split.requests.takes(PROMPT * 4, many, NO_OPTIONS)  # only one token fits
    split.lose(1)
    assert not split.requests.takes(PROMPT, many, NO_OPTIONS)


def test_forks_wait_for_their_parent_and_start_where_its_kv_is() -> None:
    split = Split("prefill", "decode")
    parent = split.submit(seed=1)
    forks = [split.submit(request_id=f"f{i}", fork_of=parent, seed=i + 2) for i in range(2)]
    prefill, decode = split.engines
    assert len(prefill.sent) == 1
    prefill.offer(prefill.sent[0])
    assert [each.request_id for each in decode.sent] == ["r", "f0", "f1"]
    assert [each.fork_of for each in decode.sent] == [None, parent.handle, parent.handle]
    assert [len(each.output_token_ids) for each in decode.sent] == [1, 0, 0]
    assert [each.options.kv_transfer_params for each in decode.sent] == [OFFER, None, None]
    late = split.submit(request_id="f2", fork_of=parent)
    assert decode.sent[-1].fork_of == parent.handle
    for each in list(decode.sent):
        decode.answer(each, 9, end=FinishReason.STOPPED)
    assert not any(live.is_live for live in (parent, *forks, late))
    split.assert_nothing_is_left()


def test_when_a_parent_ends_with_its_first_token_a_fork_becomes_the_parent() -> None:
    split = Split("prefill", "decode")
    parent = split.submit()
    for number in range(2):
        split.submit(request_id=f"f{number}", fork_of=parent)
    prefill, decode = split.engines
    prefill.answer(prefill.sent[0], 2, end=FinishReason.STOPPED)
    assert [each.request_id for each in prefill.sent] == ["r", "f0"]
    prefill.offer(prefill.sent[1])
    assert [each.request_id for each in decode.sent] == ["f0", "f1"]
    assert decode.sent[1].fork_of == decode.sent[0].handle


def test_a_client_that_leaves_frees_both_sides() -> None:
    """At the prefill engine, also if that has just ended the leg, and at the decode engine."""
    split = Split("prefill", "decode")
    prefill, decode = split.engines
    split.abort(split.submit(request_id="at prefill"))
    assert prefill.aborted == ["at prefill"]
    prefill.answer(prefill.sent[0], end=FinishReason.ABORTED)
    assert not decode.sent
    live = split.submit(request_id="crossing")
    request = prefill.sent[1]
    split.abort(live)
    prefill.offer(request)
    assert prefill.released == ["t"]
    assert not decode.sent
    assert split.requests.outcomes == {"aborted": 2}
    live = split.submit(request_id="at decode")
    prefill.offer(prefill.sent[2])
    split.abort(live)
    assert decode.aborted == ["at decode"]
    split.assert_nothing_is_left()


def test_a_client_that_leaves_between_the_legs_ends_the_lease() -> None:
    split = Split("prefill", "decode", "decode")
    live = split.submit()
    reserved = next(i for i in (1, 2) if split.requests._num_reserved[i])
    other = split.engines[3 - reserved]
    filling = [split.submit(PROMPT[:31], max_tokens=300) for _ in range(16)]
    split.lose(reserved)
    split.engines[0].offer(split.engines[0].sent[0])
    assert live.is_live
    assert split.requests._decode.num_waiting > 0
    num_sent = len(other.sent)
    split.abort(live)
    assert split.engines[0].released == ["t"]
    assert len(other.sent) == num_sent
    split.abort(*reversed(filling))
    split.assert_nothing_is_left()


def test_a_prefill_that_is_lost_while_no_decode_engine_is_open_is_computed_elsewhere() -> None:
    split = Split("prefill", "prefill", "decode")
    live = split.submit()
    lost = live.engine
    split.close(2)
    assert live.engine == lost
    split.lose(lost)
    assert live.engine == 1 - lost
    (request,) = split.engines[1 - lost].sent
    assert request.options.kv_transfer_params is None


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_offer_that_waits_for_a_lost_engine_is_released_if_it_is_not_used(
    is_aborted: bool,
) -> None:
    split = Split("prefill", "decode", "decode")
    live = split.submit()
    reserved = split.reserved(live)
    filling = [split.submit(PROMPT[:31], max_tokens=300) for _ in range(16)]
    split.lose(reserved)
    split.engines[0].offer(split.engines[0].sent[0])
    split.lose(0)
    split.lose(3 - reserved)
    assert live.engine in (1, 2)
    assert split.engines[0].released == []
    if is_aborted:
        split.abort(live)
    else:
        split.restore(0)
        assert live.engine == 0
    assert split.engines[0].released == ["t"]
    split.abort(*reversed(filling), *([] if is_aborted else [live]))
    split.assert_nothing_is_left()


def test_a_prefill_starts_with_capacity_at_a_decode_engine_only() -> None:
    """Each request takes 100 + 200 of 1,600 tokens there."""
    split = Split("prefill", "decode", disaggregation_max_waiting=2)
    prefill, decode = split.engines
    lives = [split.submit(max_tokens=200) for _ in range(7)]
    assert len(prefill.sent) == 5
    assert split.requests.num_waiting["decode"] == split.requests.num_held == 2
    with pytest.raises(TooManyWaiting, match=r"the limit is 2 \(--disaggregation-max-waiting\)"):
        split.submit()
    assert len(split.requests._requests) == 7
    prefill.offer(prefill.sent[0])
    assert len(prefill.sent) == 5
    decode.answer(decode.sent[0], 9, end=FinishReason.STOPPED)
    assert len(prefill.sent) == 6
    split.abort(*reversed(lives))
    split.assert_nothing_is_left()


def test_a_prefill_engine_keeps_no_more_than_it_may_lease() -> None:
    """10 of its 100 blocks, which is one prompt of 100 tokens."""
    split = Split("prefill", "decode", capacity=leasing(10))
    prefill, decode = split.engines
    for _ in range(2):
        split.submit()
    assert len(prefill.sent) == 1
    prefill.offer(prefill.sent[0])
    assert len(prefill.sent) == 1  # it keeps the KV until the decode engine has it
    decode.answer(decode.sent[0], 9)
    assert len(prefill.sent) == 2
    split.submit(PROMPT + PROMPT)
    assert split.requests.skips == {"too_large": 1}


def test_gateways_divide_the_capacity_of_the_engines() -> None:
    split = Split("prefill", "decode", num_gateways=2)
    for _ in range(5):
        split.submit(max_tokens=200)
    assert len(split.engines[0].sent) == 2


def test_no_more_requests_than_an_engine_can_run_are_sent_there() -> None:
    split = Split("prefill", "decode")
    for _ in range(20):
        split.submit(PROMPT[:5], max_tokens=2)
    assert len(split.engines[1].sent) == 8


def test_a_lost_prefill_engine_costs_another_prefill() -> None:
    split = Split("prefill", "prefill", "decode")
    live = split.submit()
    lost = live.engine
    split.lose(lost)
    other = split.engines[1 - lost]
    assert [each.options.kv_transfer_params for each in other.sent] == [ASKS]
    split.lose(1 - lost)
    (whole,) = split.engines[2].sent
    assert whole.options.kv_transfer_params is None
    assert whole.sampling.max_tokens == 20
    assert split.requests.outcomes == {"failed": 2}
    assert split.requests.skips == {"no_prefill_engine": 1}


def test_a_lost_decode_engine_costs_no_stream_and_its_transfer_is_not_repeated() -> None:
    split = Split("prefill", "decode", "decode")
    prefill = split.engines[0]
    live = split.submit()
    prefill.offer(prefill.sent[0])
    lost = split.engines[live.engine]
    lost.answer(lost.sent[0], 8, 9)
    split.lose(lost.number)
    again = prefill.sent[1]  # which still has the prompt in its cache
    assert again.options.kv_transfer_params == ASKS
    assert again.output_token_ids.tolist() == [7, 8, 9]
    assert again.sampling.max_tokens == 4
    prefill.offer(again, 10, kv_transfer_params={**OFFER, "transfer_id": "other"})
    other = split.engines[3 - lost.number]
    assert [each.options.kv_transfer_params for each in other.sent] == [
        {**OFFER, "transfer_id": "other"}
    ]
    assert other.sent[0].output_token_ids.tolist() == [7, 8, 9, 10]
    split.lose(other.number)
    whole = prefill.sent[2]  # no decode engine is left
    assert whole.options.kv_transfer_params is None
    assert whole.sampling.max_tokens == 20
    prefill.answer(whole, 11, end=FinishReason.STOPPED)
    assert live.take_token_ids() == [7, 8, 9, 10, 11]
    split.assert_nothing_is_left()


def test_a_request_that_waits_for_its_engine_is_sent_again_as_it_was() -> None:
    split = Split("prefill", "decode")
    prefill, decode = split.engines
    split.submit(request_id="first")
    split.submit(request_id="second")
    prefill.offer(prefill.sent[0])
    split.lose(1)
    split.lose(0)
    split.restore(0)
    split.restore(1)
    again = [each for each in prefill.sent[2:] + decode.sent[1:]]
    assert {each.request_id for each in again} == {"first", "second"}
    assert all(each.options.kv_transfer_params in (None, ASKS) for each in again)


def test_a_closed_decode_engine_gets_no_more_requests() -> None:
    split = Split("prefill", "decode", "decode")
    live = split.submit()
    reserved = next(i for i in (1, 2) if split.requests._num_reserved[i])
    split.engines[reserved].closed_reason = "draining"
    split.requests.engines_changed()
    split.engines[0].offer(split.engines[0].sent[0])
    assert live.engine == 3 - reserved


def test_requests_that_wait_fail_when_the_gateway_stops() -> None:
    split = Split("prefill", "decode", disaggregation_max_waiting=10)
    lives = [split.submit(max_tokens=200) for _ in range(8)]
    fork = split.submit(fork_of=lives[-1])
    split.requests.fail_held(EngineDead("stopping"))
    failed = [live for live in (*lives, fork) if live.failure is not None]
    assert len(failed) == 4
    for engine in split.engines:
        engine.requests.fail_all(EngineDead("stopping"))
    split.assert_nothing_is_left()


def answer_all(split: Split) -> None:
    """Until no engine has a request: offers, and ends of answers."""
    for _ in range(1000):
        there = [(each, r) for each in split.engines for r in each.waiting.values()]
        if not there:
            return
        engine, request = there[0]
        if (request.options.kv_transfer_params or {}).get("do_remote_decode"):
            engine.offer(request)
        else:
            engine.answer(request, 9, end=FinishReason.STOPPED)


@pytest.mark.parametrize("is_lost", [False, True])
def test_capacity_at_both_sides_is_not_awaited_crosswise(is_lost: bool) -> None:
    """The prefill engine has capacity for one prompt. The one that it has loses its decode engine,
    and the other decode engine has capacity only for those that wait for the prefill engine."""
    split = Split("prefill", "decode", "decode", capacity=leasing(10))
    lives = [split.submit(request_id=str(number), max_tokens=200) for number in range(10)]
    assert [live.engine for live in lives] == [0] + [-1] * 9
    if is_lost:
        split.lose(split.reserved(lives[0]))
    else:
        split.close(split.reserved(lives[0]))
    answer_all(split)
    assert not any(live.is_live for live in lives)
    split.assert_nothing_is_left()


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_request_without_a_decode_engine_waits_when_the_prefill_engine_goes(
    is_lost: bool,
) -> None:
    split = Split("prefill", "decode", "decode", capacity=leasing(10))
    lives = [split.submit(request_id=str(number), max_tokens=200) for number in range(11)]
    split.lose(2)
    if is_lost:
        split.lose(0)
    else:
        split.close(0)
    assert all(each.waiting for each in split.engines[:2] if each.is_running)
    answer_all(split)
    assert not any(live.is_live for live in lives)
    split.assert_nothing_is_left()


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class Lives(RuleBasedStateMachine):
    """Whatever happens in whatever order: each request gets consecutive tokens, no offer is used
    twice, each is used or released, and nothing is left at the end.

    offered: engines that have made offers, by transfer id, unless they were lost since.
    """

    @initialize(
        num_prefill=st.integers(1, 2),
        num_decode=st.integers(1, 3),
        num_unified=st.integers(0, 1),
        max_waiting=st.sampled_from([3, 20]),
        num_leasable_blocks=st.sampled_from([10, 20, 50]),
    )
    def start(
        self,
        num_prefill: int,
        num_decode: int,
        num_unified: int,
        max_waiting: int,
        num_leasable_blocks: int,
    ) -> None:
        roles: list[Role] = ["prefill"] * num_prefill + ["decode"] * num_decode
        roles += ["unified"] * num_unified
        self.split = Split(
            *roles, disaggregation_max_waiting=max_waiting, capacity=leasing(num_leasable_blocks)
        )
        self.lives: list[LiveRequest] = []
        self.num_offers = 0
        self.offered: dict[str, int] = {}

    @rule(
        length=st.sampled_from([10, 100, 140, 300]),
        num_forks=st.integers(0, 2),
        max_tokens=st.sampled_from([2, 50, 200]),
        count=st.sampled_from([1, 6]),
    )
    def submit(self, length: int, num_forks: int, max_tokens: int, count: int) -> None:
        for _ in range(count):
            self._submit(length, num_forks, max_tokens)

    def _submit(self, length: int, num_forks: int, max_tokens: int) -> None:
        if not self.split.requests.takes(PROMPT, SamplingParams(max_tokens=50), NO_OPTIONS):
            return
        prompt = (PROMPT * 3)[:length]
        parent: LiveRequest | None = None
        for _ in range(1 + num_forks):
            try:
                live = self.split.submit(
                    prompt, request_id=str(len(self.lives)), fork_of=parent, max_tokens=max_tokens
                )
            except TooManyWaiting:
                return
            parent = parent or live
            self.lives.append(live)

    def requests(self) -> list[tuple[FakeEngine, AddRequest]]:
        return [
            (engine, request)
            for engine in self.split.by_number.values()
            if engine.is_running
            for request in engine.waiting.values()
        ]

    @precondition(lambda self: self.requests())
    @rule(data=st.data(), ends=st.booleans(), offers=st.booleans())
    def answer(self, data: st.DataObject, ends: bool, offers: bool) -> None:
        engine, request = data.draw(st.sampled_from(self.requests()))
        live = engine.requests._by_handle.get(request.handle)
        token = 1000 if live is None else 1000 + live.num_tokens
        if (request.options.kv_transfer_params or {}).get("do_remote_decode"):
            engine.offer(request, token, kv_transfer_params=self.params(engine) if offers else None)
        else:
            engine.answer(request, token, end=FinishReason.STOPPED if ends else None)

    def params(self, engine: FakeEngine) -> dict[str, Any]:
        self.num_offers += 1
        transfer_id = str(self.num_offers)
        self.offered[transfer_id] = engine.number
        return {**OFFER, "transfer_id": transfer_id}

    @precondition(lambda self: any(live.is_live for live in self.lives))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from([live for live in self.lives if live.is_live]))
        self.split.abort(live)
        self.lives.remove(live)

    @rule(data=st.data())
    def close_or_open(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([*self.split.by_number.values()]))
        self.split.close(engine.number, None if engine.closed_reason else "drained")

    @rule(data=st.data())
    def lose_or_restore(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([*self.split.by_number.values()]))
        if engine.is_running:
            self._end_offers(engine)
            self.split.lose(engine.number)
        else:
            self.split.restore(engine.number)

    @rule(role=st.sampled_from(["prefill", "decode"]))
    def add(self, role: Role) -> None:
        if len(self.split.by_number) < 6:
            self.split.add(role)

    @precondition(lambda self: len(self.split.by_number) > 1)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from([*self.split.by_number.values()]))
        self._end_offers(engine)
        self.split.remove(engine.number)

    def _end_offers(self, engine: FakeEngine) -> None:
        self.offered = {t: owner for t, owner in self.offered.items() if owner != engine.number}

    @invariant()
    def tokens_are_consecutive(self) -> None:
        for live in getattr(self, "lives", ()):
            assert live.new_token_ids == [1000 + i for i in range(live.num_tokens)]

    @invariant()
    def an_offer_is_used_once(self) -> None:
        if hasattr(self, "split"):
            used = self.used_offers()
            assert len(used) == len(set(used))

    def used_offers(self) -> list[str]:
        """Transfer ids that decode engines were sent, or that were released."""
        used = [transfer_id for engine in self.split.engines for transfer_id in engine.released]
        for engine in self.split.engines:
            for request in engine.sent:
                if "transfer_id" in (request.options.kv_transfer_params or {}):
                    assert engine.role == "decode"
                    used.append(request.options.kv_transfer_params["transfer_id"])
        return used

    def teardown(self) -> None:
        if not hasattr(self, "split"):
            return
        for engine in self.split.by_number.values():
            if not engine.is_running:
                self.split.restore(engine.number)
        for _ in range(1000):
            if not (requests := self.requests()):
                break
            engine, request = requests[0]
            if (request.options.kv_transfer_params or {}).get("do_remote_decode"):
                live = engine.requests._by_handle.get(request.handle)
                token = 1000 if live is None else 1000 + live.num_tokens
                engine.offer(request, token, kv_transfer_params=self.params(engine))
            else:
                live = engine.requests._by_handle.get(request.handle)
                token = 1000 if live is None else 1000 + live.num_tokens
                engine.answer(request, token, end=FinishReason.STOPPED)
        assert not any(live.is_live for live in self.lives)
        self.split.assert_nothing_is_left()
        assert self.offered.keys() <= set(self.used_offers())


TestLives = Lives.TestCase


def test_the_legs_of_a_removed_engine_begin_again_at_others() -> None:
    split = Split("prefill", "prefill", "decode", "decode")
    live = split.submit()
    assert live.engine in (0, 1)
    split.remove(live.engine)
    assert live.engine in split.by_number
    (leg,) = split.by_number[live.engine].waiting.values()
    if live.engine < 2:
        split.by_number[live.engine].offer(leg)
    decode = live.engine
    assert decode in (2, 3)
    split.remove(decode)
    assert live.engine in split.by_number
    assert live.is_live
    assert split.submit().engine in split.by_number
