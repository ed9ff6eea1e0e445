"""Which engine gets the next prompt: loads, turns, roles, and what decisions are counted by."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.deploy.gateway.router.block_index import BlockIndex, GroupInfo, PromptHashes
from longshore.deploy.gateway.router.engine_loads import TOKENS_PER_REQUEST, EngineLoads
from longshore.deploy.gateway.router.expected_blocks import KEPT_S
from longshore.deploy.gateway.router.policies import (
    Decision,
    PrefixAware,
    RoundRobin,
    RoutedPrompt,
)
from longshore.deploy.gateway.router.router import Router, Stage
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.commands import Role
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.kv_cache.block_hash import BlockHasher

NO_PROMPT = RoutedPrompt(())


def prompt(num_tokens: int) -> LiveRequest:
    live, _ = LiveRequests().open("r", [1] * num_tokens, SamplingParams(), on_change=lambda: None)
    return live


def chosen(router: Router, num_own: Sequence[int], **settings: Any) -> int | None:
    decision = router.choose(NO_PROMPT, num_own, [True] * len(num_own), 0.0, **settings)
    return None if decision is None else decision.engine


class Gateway:
    """A client that reports to its router which requests it has on which engine."""

    def __init__(self, num_engines: int, **settings: Any) -> None:
        self.router = Router(num_engines, **settings)
        self.num_own = [0] * num_engines

    def send(self, num_tokens: int, is_usable: Sequence[bool] | None = None) -> int | None:
        usable = is_usable or [True] * len(self.num_own)
        decision = self.router.choose(NO_PROMPT, self.num_own, usable, 0.0)
        if decision is None:
            return None
        self.num_own[decision.engine] += 1
        self.router.note_sent(decision, prompt(num_tokens))
        return decision.engine


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 60), st.integers(1, 2000))
def test_equal_prompts_are_spread_evenly(
    num_engines: int, number: int, num_prompts: int, num_tokens: int
) -> None:
    gateway = Gateway(num_engines, number=number)
    for _ in range(num_prompts):
        gateway.send(num_tokens)
        assert max(gateway.num_own) - min(gateway.num_own) <= 1


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 9))
def test_an_engine_that_is_not_usable_takes_nothing(usable: list[bool], num_prompts: int) -> None:
    gateway = Gateway(len(usable))
    chosen = {gateway.send(5, usable) for _ in range(num_prompts)}
    assert all(engine is None or usable[engine] for engine in chosen)
    assert (None in chosen) == (num_prompts > 0 and not any(usable))


def test_gateways_with_one_report_begin_with_different_engines() -> None:
    gateways = [Gateway(4, number=number, num_gateways=4) for number in range(4)]
    assert sorted(str(gateway.send(5)) for gateway in gateways) == ["0", "1", "2", "3"]


def test_a_long_prompt_weighs_until_its_first_token_has_come() -> None:
    router, long = Router(2), prompt(10 * TOKENS_PER_REQUEST)
    router.note_sent(Decision(0, "load"), long)
    assert [router.loads.load(0, 1), router.loads.load(1, 5)] == [11, 5]
    assert chosen(router, [1, 5]) == 1
    router.note_answer(long, 0.0)
    assert router.loads.load(0, 1) == 1
    assert chosen(router, [1, 5]) == 0


def test_only_tokens_that_the_engine_has_to_compute_weigh() -> None:
    loads, long = EngineLoads(), prompt(10 * TOKENS_PER_REQUEST)
    loads.note_prompt(0, long, num_cached_tokens=9 * TOKENS_PER_REQUEST)
    assert loads.load(0, 0) == 1
    loads.note_answer(long)
    assert loads.load(0, 0) == 0


def test_a_request_that_is_sent_elsewhere_weighs_there_only() -> None:
    loads, live = EngineLoads(), prompt(100)
    loads.note_prompt(0, live)
    loads.note_prompt(1, live)
    assert loads.load(0, 0) == 0
    loads.note_answer(live)
    assert loads.load(1, 0) == 0


def test_an_answer_is_counted_once() -> None:
    loads, long = EngineLoads(), prompt(900)
    loads.note_prompt(0, long)
    for _ in range(2):
        loads.note_answer(long)
    assert loads.load(0, 0) == 0


@pytest.mark.parametrize(("num_gateways", "num_others", "weight"), [(1, 0, 0), (2, 7, 3.5)])
def test_an_engine_s_report_tells_of_other_gateways_if_there_are_any(
    num_gateways: int, num_others: int, weight: float
) -> None:
    loads = EngineLoads(num_gateways=num_gateways)
    loads.note_report(0, num_requests=10, num_own=3)
    loads.note_report(1, num_requests=2, num_own=6)  # four have ended, without a message yet
    assert loads.num_others == num_others
    assert [loads.load(0, 3), loads.load(1, 6)] == [3 + weight, 6]


NUM_ENGINES = 3
NUM_GATEWAYS = 4


class SeveralGateways(RuleBasedStateMachine):
    """Compare with a model that counts everything again at each step."""

    @initialize(number=st.integers(0, 3))
    def start(self, number: int) -> None:
        self.router = Router(0, number=number, num_gateways=NUM_GATEWAYS)
        self.num_own: dict[int, int] = {}
        self.others: dict[int, int] = {}
        self.waiting: dict[int, list[LiveRequest]] = {}
        self.begun: dict[int, list[LiveRequest]] = {}
        self.is_usable: dict[int, bool] = {}
        self.next_number = 0
        for _ in range(NUM_ENGINES):
            self.an_engine_is_added()

    @rule()
    def an_engine_is_added(self) -> None:
        engine, self.next_number = self.next_number, self.next_number + 1
        self.router.add_engine(engine)
        self.num_own[engine] = self.others[engine] = 0
        self.waiting[engine], self.begun[engine] = [], []
        self.is_usable[engine] = True

    @rule(place=st.integers(0, 9))
    def an_engine_is_removed(self, place: int) -> None:
        if len(self.waiting) < 2:
            return
        engine = self.engine_at(place)
        self.router.remove_engine(engine)
        for live in self.waiting[engine]:
            self.router.note_answer(live, 0.0)
        assert self.router.loads.load(engine, 0) == 0
        for by_engine in (self.num_own, self.others, self.waiting, self.begun, self.is_usable):
            del by_engine[engine]  # type: ignore[attr-defined]

    def engine_at(self, place: int) -> int:
        return list(self.waiting)[place % len(self.waiting)]

    def brute_force_load(self, engine: int) -> float:
        waiting = self.waiting[engine]
        num_tokens = sum(len(live.prompt_token_ids) for live in waiting)
        return (
            len(waiting)
            + len(self.begun[engine])
            + self.others[engine] / NUM_GATEWAYS
            + num_tokens / TOKENS_PER_REQUEST
        )

    @rule(num_tokens=st.integers(1, 3000))
    def a_prompt_comes(self, num_tokens: int) -> None:
        loads = {engine: self.brute_force_load(engine) for engine in self.waiting}
        usable = [load for engine, load in loads.items() if self.is_usable[engine]]
        decision = self.router.choose(NO_PROMPT, self.num_own, self.is_usable, 0.0)
        if decision is None:
            assert not usable
            return
        engine = decision.engine
        assert self.is_usable[engine]
        assert loads[engine] == min(usable)
        live = prompt(num_tokens)
        self.num_own[engine] += 1
        self.router.note_sent(decision, live)
        self.waiting[engine].append(live)

    @rule(engine=st.integers(0, 9), place=st.integers(0, 9))
    def one_gets_its_first_token(self, engine: int, place: int) -> None:
        engine = self.engine_at(engine)
        if place < len(self.waiting[engine]):
            live = self.waiting[engine].pop(place)
            self.router.note_answer(live, 0.0)
            self.begun[engine].append(live)

    @rule(engine=st.integers(0, 9), place=st.integers(0, 9), waits=st.booleans())
    def one_ends_or_is_given_up(self, engine: int, place: int, waits: bool) -> None:
        engine = self.engine_at(engine)
        requests = (self.waiting if waits else self.begun)[engine]
        if place < len(requests):
            self.router.note_answer(requests.pop(place), 0.0)
            self.num_own[engine] -= 1

    @rule(engine=st.integers(0, 9), num_requests=st.integers(0, 50))
    def an_engine_reports(self, engine: int, num_requests: int) -> None:
        engine = self.engine_at(engine)
        num_own = self.num_own[engine]
        self.router.loads.note_report(engine, num_requests=num_requests, num_own=num_own)
        self.others[engine] = max(0, num_requests - num_own)

    @rule(engine=st.integers(0, 9))
    def an_engine_dies_or_comes_back(self, engine: int) -> None:
        engine = self.engine_at(engine)
        self.is_usable[engine] = not self.is_usable[engine]

    @invariant()
    def loads_are_those_of_the_model(self) -> None:
        for engine in self.waiting:
            load = self.router.loads.load(engine, self.num_own[engine])
            assert load == self.brute_force_load(engine)
        assert self.router.loads.num_others == sum(self.others.values())


TestSeveralGateways = SeveralGateways.TestCase


def test_gateways_that_read_an_old_report_do_not_overshoot_by_what_they_make_up_for() -> None:
    num_fewer = 40
    gateways = [Gateway(4, number=number, num_gateways=4) for number in range(4)]
    for gateway in gateways:
        gateway.num_own = [25, 25, 25, 25 - num_fewer // 4]
        for engine, num_own in enumerate(gateway.num_own):
            gateway.router.loads.note_report(engine, num_requests=4 * num_own, num_own=num_own)
    for _ in range(80):
        for gateway in gateways:
            gateway.send(1)
    totals = [sum(gateway.num_own[engine] for gateway in gateways) for engine in range(4)]
    assert max(totals) - min(totals) < num_fewer


def test_round_robin_leaves_out_no_engine_and_ignores_loads() -> None:
    gateway = Gateway(3, policy=RoundRobin(), number=1)
    assert [gateway.send(5) for _ in range(4)] == [1, 2, 0, 1]
    assert [gateway.send(5, [True, True, False]) for _ in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("roles", "stage", "num_own", "expected"),
    [
        (("prefill", "decode", "decode"), "prefill", [9, 0, 0], 0),
        (("prefill", "decode", "decode"), "decode", [0, 5, 4], 2),
        (("prefill", "decode", "decode"), "whole", [0, 5, 4], 2),
        (("prefill", "decode", "unified"), "whole", [0, 0, 9], 2),
        (("unified", "decode", "unified"), "prefill", [4, 0, 3], 2),
        (("unified", "prefill", "unified"), "decode", [4, 0, 3], 2),
        (("prefill", "prefill", "prefill"), "decode", [3, 1, 2], 1),
    ],
)
def test_a_stage_goes_to_an_engine_of_its_role_else_to_one_that_can_do_it(
    roles: Sequence[Role], stage: Stage, num_own: list[int], expected: int
) -> None:
    assert chosen(Router(3, roles=roles), num_own, stage=stage) == expected


def test_a_role_without_a_usable_engine_is_taken_over() -> None:
    router = Router(3, roles=("prefill", "unified", "decode"))
    usable = [False, True, True]
    decision = router.choose(NO_PROMPT, [0, 9, 0], usable, 0.0, "prefill")
    assert decision is not None
    assert decision.engine == 1
    decision = router.choose(NO_PROMPT, [0, 0, 0], [False, False, True], 0.0, "prefill")
    assert decision is not None
    assert decision.engine == 2
    assert router.choose(NO_PROMPT, [0, 0, 0], [False] * 3, 0.0, "prefill") is None


SIZE = 4
TOKENS = list(range(40 * SIZE + 1))


def prefix_router(**settings: Any) -> tuple[Router, BlockIndex]:
    index = BlockIndex(2, tokens_per_hash=SIZE, max_hashes=1000)
    index.describe_group(0, GroupInfo(SIZE))
    index.is_known.update({0: True, 1: True})
    return Router(2, PrefixAware(index, BlockHasher(SIZE, b"seed")), **settings), index


def decide(router: Router, tokens: Sequence[int] = TOKENS, now_s: float = 0.0) -> Decision:
    decision = router.choose(RoutedPrompt(tokens), [0, 0], [True, True], now_s)
    assert decision is not None
    return decision


def test_a_prompt_that_is_being_computed_attracts_others_with_its_prefix() -> None:
    router, index = prefix_router()
    first, live = decide(router), prompt(len(TOKENS))
    assert (first.engine, first.reason, first.num_cached_tokens) == (0, "load", 0)
    router.note_sent(first, live)
    again = decide(router, [*TOKENS[: 20 * SIZE], 7, 7, 7, 7, 7])
    assert (again.engine, again.reason) == (1, "prefix_overloaded")  # the prompts would wait
    router.note_answer(live, 5.0)
    again = decide(router, [*TOKENS[: 20 * SIZE], 7, 7, 7, 7, 7], 5.0 + KEPT_S / 2)
    assert (again.engine, again.reason, again.num_cached_tokens) == (0, "prefix", 20 * SIZE)
    again = decide(router, now_s=5.0 + KEPT_S)
    assert (again.reason, len(index)) == ("load", 0)


def test_a_block_is_expected_until_the_last_request_that_computes_it_is_answered() -> None:
    router, index = prefix_router()
    decision = decide(router)
    first, second = prompt(len(TOKENS)), prompt(len(TOKENS))
    for live in (first, second):  # the engine was cleared meanwhile, or both were chosen at once
        router.note_sent(decision, live)
    router.note_answer(first, 0.0)
    decide(router, now_s=KEPT_S)
    assert len(index) == 40
    router.note_answer(second, KEPT_S)
    decide(router, now_s=2 * KEPT_S)
    assert len(index) == 0


def test_blocks_are_not_expected_of_an_engine_that_another_one_has_replaced() -> None:
    router, index = prefix_router()
    live, hashes = prompt(len(TOKENS)), decide(router).next_hashes
    for engine in range(2):
        router.note_sent(Decision(engine, "load", 0, hashes), live)
    chain = PromptHashes(40, lambda known, count: known.extend(hashes[len(known) : count]))
    assert index.match(chain, range(2)) == {1: 40 * SIZE}
    router.note_sent(Decision(1, "load"), live)  # nothing is left to compute
    assert len(index) == 0


def test_decisions_are_counted_by_engine_and_reason() -> None:
    router, index = prefix_router(number=1)
    decide(router)
    index.store(0, decide(router).next_hashes, 0, "GPU")
    decide(router)
    index.is_known[1] = False
    decide(router)
    assert router.counts == {(1, "load"): 1, (0, "load"): 1, (0, "prefix"): 1, (0, "unknown"): 1}
