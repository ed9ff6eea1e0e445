"""Which engine gets the next prompt."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.deploy.gateway.engines.engine_choice import TOKENS_PER_REQUEST, EngineChoice
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.protocol.sampling import SamplingParams


def prompt(num_tokens: int) -> LiveRequest:
    live, _ = LiveRequests().open("r", [1] * num_tokens, SamplingParams(), on_change=lambda: None)
    return live


class Gateway:
    """A client that reports to its `EngineChoice` which requests it has on which engine."""

    def __init__(self, num_engines: int, **settings: Any) -> None:
        self.choice = EngineChoice(num_engines, **settings)
        self.num_own = [0] * num_engines

    def send(self, num_tokens: int, is_usable: Sequence[bool] | None = None) -> int | None:
        engine = self.choice.choose(self.num_own, is_usable or [True] * len(self.num_own))
        if engine is not None:
            self.num_own[engine] += 1
            self.choice.note_prompt(engine, prompt(num_tokens))
        return engine


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
    choice, long = EngineChoice(2), prompt(10 * TOKENS_PER_REQUEST)
    choice.note_prompt(0, long)
    assert [choice.load(0, 1), choice.load(1, 5)] == [11, 5]
    assert choice.choose([1, 5], [True, True]) == 1
    choice.note_answer(long)
    assert choice.load(0, 1) == 1
    assert choice.choose([1, 5], [True, True]) == 0


def test_an_answer_is_counted_once() -> None:
    choice, long = EngineChoice(1), prompt(900)
    choice.note_prompt(0, long)
    for _ in range(2):
        choice.note_answer(long)
    assert choice.load(0, 0) == 0


@pytest.mark.parametrize(("num_gateways", "num_others", "weight"), [(1, 0, 0), (2, 7, 3.5)])
def test_an_engine_s_report_tells_of_other_gateways_if_there_are_any(
    num_gateways: int, num_others: int, weight: float
) -> None:
    choice = EngineChoice(2, num_gateways=num_gateways)
    choice.note_report(0, num_requests=10, num_own=3)
    choice.note_report(1, num_requests=2, num_own=6)  # four have ended, without a message yet
    assert choice.num_others == num_others
    assert [choice.load(0, 3), choice.load(1, 6)] == [3 + weight, 6]


NUM_ENGINES = 3
NUM_GATEWAYS = 4


class SeveralGateways(RuleBasedStateMachine):
    """Compare with a model that counts everything again at each step."""

    @initialize(number=st.integers(0, 3))
    def start(self, number: int) -> None:
        self.gateway = Gateway(NUM_ENGINES, number=number, num_gateways=NUM_GATEWAYS)
        self.others = [0] * NUM_ENGINES
        self.waiting: list[list[LiveRequest]] = [[] for _ in range(NUM_ENGINES)]
        self.begun: list[list[LiveRequest]] = [[] for _ in range(NUM_ENGINES)]
        self.is_usable = [True] * NUM_ENGINES

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
        loads = [self.brute_force_load(engine) for engine in range(NUM_ENGINES)]
        usable = [loads[engine] for engine in range(NUM_ENGINES) if self.is_usable[engine]]
        engine = self.gateway.choice.choose(self.gateway.num_own, self.is_usable)
        if engine is None:
            assert not usable
            return
        assert self.is_usable[engine]
        assert loads[engine] == min(usable)
        live = prompt(num_tokens)
        self.gateway.num_own[engine] += 1
        self.gateway.choice.note_prompt(engine, live)
        self.waiting[engine].append(live)

    @rule(engine=st.integers(0, NUM_ENGINES - 1), place=st.integers(0, 9))
    def one_gets_its_first_token(self, engine: int, place: int) -> None:
        if place < len(self.waiting[engine]):
            live = self.waiting[engine].pop(place)
            self.gateway.choice.note_answer(live)
            self.begun[engine].append(live)

    @rule(engine=st.integers(0, NUM_ENGINES - 1), place=st.integers(0, 9), waits=st.booleans())
    def one_ends_or_is_given_up(self, engine: int, place: int, waits: bool) -> None:
        requests = (self.waiting if waits else self.begun)[engine]
        if place < len(requests):
            self.gateway.choice.note_answer(requests.pop(place))
            self.gateway.num_own[engine] -= 1

    @rule(engine=st.integers(0, NUM_ENGINES - 1), num_requests=st.integers(0, 50))
    def an_engine_reports(self, engine: int, num_requests: int) -> None:
        num_own = self.gateway.num_own[engine]
        self.gateway.choice.note_report(engine, num_requests=num_requests, num_own=num_own)
        self.others[engine] = max(0, num_requests - num_own)

    @rule(engine=st.integers(0, NUM_ENGINES - 1))
    def an_engine_dies_or_comes_back(self, engine: int) -> None:
        self.is_usable[engine] = not self.is_usable[engine]

    @invariant()
    def loads_are_those_of_the_model(self) -> None:
        for engine in range(NUM_ENGINES):
            load = self.gateway.choice.load(engine, self.gateway.num_own[engine])
            assert load == self.brute_force_load(engine)


TestSeveralGateways = SeveralGateways.TestCase


def test_gateways_that_read_an_old_report_do_not_overshoot_by_what_they_make_up_for() -> None:
    num_fewer = 40
    gateways = [Gateway(4, number=number, num_gateways=4) for number in range(4)]
    for gateway in gateways:
        gateway.num_own = [25, 25, 25, 25 - num_fewer // 4]
        for engine, num_own in enumerate(gateway.num_own):
            gateway.choice.note_report(engine, num_requests=4 * num_own, num_own=num_own)
    for _ in range(80):
        for gateway in gateways:
            gateway.send(1)
    totals = [sum(gateway.num_own[engine] for gateway in gateways) for engine in range(4)]
    assert max(totals) - min(totals) < num_fewer
