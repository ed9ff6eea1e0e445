"""Encoder outputs: what a step encodes, what its place holds, and what a chunk is cut by."""

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, MultimodalFeature, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.features.encoder import EncoderCache
from longshore.scheduler.request import Request
from tests.harness.driver import Driver
from tests.harness.tokens import expected_output, prompt_of


def items_of(*items: tuple[str, int, int]) -> tuple[MultimodalFeature, ...]:
    """From (hash, offset, tokens)."""
    return tuple(MultimodalFeature(*item) for item in items)


def request_of(name: str, *items: tuple[str, int, int], row: int = 0) -> Request:
    """A request of 100 tokens with these items, on a row."""
    message = AddRequest(
        name,
        0,
        int32_array(range(100)),
        SamplingParams(),
        options=RequestOptions(multimodal=items_of(*items)),
    )
    request = Request(message, client_index=0, now=0.0, max_model_len=200, eos_token_ids=())
    request.row = row
    return request


def step(
    cache: EncoderCache, request: Request, num_computed: int, num_tokens: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """One step in which this request alone gets as many of the tokens as can be computed; returns
    their number and what the workers encode."""
    cache.begin_step()
    count = cache.limit(request, num_computed, num_tokens)
    inputs = cache.take_encoder_inputs()
    cache.advanced(request, num_computed + count)
    return count, inputs


@pytest.mark.req("FEA-03")
@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "expected"),
    [
        (0, 10, 10),  # ends where the first item begins
        (0, 11, 11),  # the first fits the budget
        (0, 40, 30),  # the second does not, and cuts the chunk
        (20, 10, 10),  # the first is computed, the second is not
        (20, 20, 20),
        (30, 5, 5),
        (36, 5, 4),  # the third is cut off
        (40, 50, 50),
    ],
)
def test_a_chunk_ends_before_the_first_item_that_the_step_cannot_encode(
    num_computed: int, num_tokens: int, expected: int
) -> None:
    """Items of 8 tokens at 10, 30 and 40 with a budget of 8 in a step."""
    request = request_of("r", ("a", 10, 8), ("b", 30, 8), ("c", 40, 8))
    cache = EncoderCache(capacity=24, budget=8)
    cache.begin_step()
    assert cache.limit(request, num_computed, num_tokens) == expected


@pytest.mark.req("FEA-03")
def test_an_output_that_is_there_costs_no_budget_and_is_shared() -> None:
    cache = EncoderCache(capacity=16, budget=8)
    one, two = request_of("one", ("a", 2, 8), row=1), request_of("two", ("a", 5, 8), row=2)
    cache.begin_step()
    assert cache.limit(one, 0, 20) == 20
    assert cache.limit(two, 0, 20) == 20
    assert cache.take_encoder_inputs() == ((1, 0),)
    assert cache.usage == pytest.approx(0.5)


@pytest.mark.req("FEA-03")
def test_an_output_is_kept_until_its_tokens_are_computed_and_its_place_is_needed() -> None:
    cache = EncoderCache(capacity=10, budget=10)
    request = request_of("r", ("a", 0, 6), ("b", 10, 6))
    assert step(cache, request, 0, 5) == (5, ((0, 0),))
    assert not cache.reset()  # `a` is needed: one of its tokens is not computed
    assert step(cache, request, 5, 5) == (5, ())
    assert cache.is_cached("a")
    assert cache.take_freed() == ()
    assert step(cache, request, 10, 5) == (5, ((0, 1),))
    assert cache.take_freed() == ("a",)
    assert not cache.is_cached("a")


def test_the_oldest_unneeded_outputs_go_first_and_only_as_many_as_must() -> None:
    cache = EncoderCache(capacity=9, budget=9)
    for name in "abc":
        step(cache, request_of(name, (name, 0, 3)), 0, 3)
    step(cache, request_of("again", ("a", 0, 3)), 0, 3)  # `a` is used again, so `b` is the oldest
    step(cache, request_of("new", ("d", 0, 4)), 0, 4)
    assert cache.take_freed() == ("b", "c")
    assert [cache.is_cached(name) for name in "abcd"] == [True, False, False, True]


def test_an_output_of_the_same_hash_and_another_size_is_not_shared() -> None:
    cache = EncoderCache(capacity=20, budget=20)
    small, big = request_of("small", ("a", 0, 3)), request_of("big", ("a", 0, 6))
    assert step(cache, small, 0, 2) == (2, ((0, 0),))
    # `small` still needs its output: no content of that hash but its own can be there.
    assert step(cache, big, 0, 6) == (0, ())
    assert cache.take_freed() == ()
    assert step(cache, small, 2, 2) == (2, ())
    assert step(cache, big, 0, 6) == (6, ((0, 0),))
    assert cache.take_freed() == ("a",)
    assert cache.usage == pytest.approx(6 / 20)


def test_looking_ahead_changes_nothing_and_gives_the_result_of_the_step() -> None:
    cache = EncoderCache(capacity=9, budget=8)
    for name in "ab":
        step(cache, request_of(name, (name, 0, 3)), 0, 3)
    request = request_of("r", ("b", 0, 3), ("c", 3, 5), ("d", 8, 4))
    cache.begin_step()
    for _ in range(2):
        assert cache.would_limit(request, 0, 12) == 8
    assert cache.is_cached("a")
    assert cache.take_freed() == ()
    assert cache.limit(request, 0, 12) == 8
    assert cache.take_freed() == ("a",)


def test_what_would_not_fit_after_all_evicts_nothing() -> None:
    cache = EncoderCache(capacity=9, budget=9)
    step(cache, request_of("old", ("a", 0, 3)), 0, 3)
    cache.begin_step()
    assert cache.limit(request_of("holds", ("b", 0, 4)), 0, 2) == 2
    assert cache.limit(request_of("big", ("c", 0, 6)), 0, 6) == 0
    assert cache.is_cached("a")
    assert cache.take_freed() == ()


def test_an_item_that_is_withdrawn_before_its_plan_is_not_encoded_and_costs_nothing() -> None:
    cache = EncoderCache(capacity=8, budget=8)
    one, two = request_of("one", ("a", 0, 8)), request_of("two", ("b", 0, 8), row=3)
    cache.begin_step()
    assert cache.limit(one, 0, 8) == 8
    assert cache.limit(two, 0, 8) == 0
    cache.release(one)
    assert cache.limit(two, 0, 8) == 8
    assert cache.take_encoder_inputs() == ((3, 0),)


def test_another_request_keeps_an_item_that_the_first_one_withdraws() -> None:
    cache = EncoderCache(capacity=8, budget=8)
    one, two = request_of("one", ("a", 0, 8)), request_of("two", ("b", 0, 0), ("a", 9, 8), row=4)
    cache.begin_step()
    cache.limit(one, 0, 8)
    cache.limit(two, 8, 8)
    cache.release(one)
    assert cache.take_encoder_inputs() == ((4, 1),)


class EncoderMachine(RuleBasedStateMachine):
    """Steps over requests with items, against a model that keeps plain lists."""

    CAPACITY, BUDGET = 12, 8

    @initialize()
    def begin(self) -> None:
        self.cache = EncoderCache(capacity=self.CAPACITY, budget=self.BUDGET)
        self.requests: dict[str, Request] = {}
        self.computed: dict[str, int] = {}
        self.planned: dict[str, int] = {}
        self.num_cached_blocks = 0
        # The model: sizes in the place, who refers to what, who is unneeded since when.
        self.sizes: dict[str, int] = {}
        self.holders: dict[str, set[tuple[str, int]]] = {}  # name and index of the item
        self.unneeded: OrderedDict[str, None] = OrderedDict()
        self.encoding: list[str] = []
        self.freed: list[str] = []
        self.budget = self.BUDGET
        self.cache.begin_step()

    def release(self, name: str, index: int) -> None:
        """One reference less; an item without references is not encoded."""
        item_hash = self.requests[name].options.multimodal[index].hash
        holders = self.holders.get(item_hash, set())
        if (name, index) not in holders:
            return
        holders.remove((name, index))
        if holders:
            return
        if item_hash in self.encoding:
            self.encoding.remove(item_hash)
            self.budget += self.sizes.pop(item_hash)
        else:
            self.unneeded[item_hash] = None

    def encode(self, item: MultimodalFeature) -> bool:
        room = self.CAPACITY - sum(self.sizes.values())
        evictable = sum(self.sizes[item_hash] for item_hash in self.unneeded)
        if item.num_tokens > self.budget or item.num_tokens > room + evictable:
            return False
        while item.num_tokens > self.CAPACITY - sum(self.sizes.values()):
            oldest, _ = self.unneeded.popitem(last=False)
            del self.sizes[oldest]
            self.freed.append(oldest)
        self.sizes[item.hash] = item.num_tokens
        self.budget -= item.num_tokens
        self.encoding.append(item.hash)
        return True

    @precondition(lambda self: len(self.requests) < 4)
    @rule(
        items=st.lists(
            st.tuples(st.sampled_from("abcdefg"), st.integers(0, 3)), max_size=4, min_size=1
        )
    )
    def add(self, items: list[tuple[str, int]]) -> None:
        offset, placed = 0, []
        for item_hash, gap in items:
            size = 1 + ord(item_hash) % 7  # a hash stands for one content, so for one size
            placed.append((item_hash, offset + gap, size))
            offset += gap + size
        name = f"r{self.num_cached_blocks}"
        self.num_cached_blocks += 1
        self.requests[name] = request_of(name, *placed, row=self.num_cached_blocks)
        self.computed[name] = 0

    @precondition(lambda self: set(self.requests) - set(self.planned))
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def schedule(self, data: st.DataObject, num_tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.requests) - set(self.planned))))
        request, computed = self.requests[name], self.computed[name]
        expected = num_tokens
        for index, item in enumerate(request.options.multimodal):
            if item.offset >= computed + num_tokens:
                break
            if item.offset + item.num_tokens <= computed:
                continue
            if item.hash not in self.sizes and not self.encode(item):
                expected = max(item.offset - computed, 0)
                break
            self.holders.setdefault(item.hash, set()).add((name, index))
            self.unneeded.pop(item.hash, None)
        assert self.cache.limit(request, computed, num_tokens) == expected
        self.planned[name] = expected

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), leaves=st.booleans())
    def withdraw(self, data: st.DataObject, leaves: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.cache.release(self.requests[name])
        for index in range(len(self.requests[name].options.multimodal)):
            self.release(name, index)
        self.planned.pop(name, None)
        self.computed[name] = 0
        if leaves:
            del self.requests[name], self.computed[name]

    @rule()
    def send_plan(self) -> None:
        inputs = self.cache.take_encoder_inputs()
        encoded = []
        for row, index in inputs:
            (request,) = (each for each in self.requests.values() if each.row == row)
            assert (request.request_id, index) in self.holders[
                request.options.multimodal[index].hash
            ]
            encoded.append(request.options.multimodal[index].hash)
        assert encoded == self.encoding
        assert self.cache.take_freed() == tuple(self.freed)
        self.encoding, self.freed = [], []
        for name, count in self.planned.items():
            self.computed[name] += count
            self.cache.advanced(self.requests[name], self.computed[name])
            for index, item in enumerate(self.requests[name].options.multimodal):
                if item.offset + item.num_tokens > self.computed[name]:
                    break
                self.release(name, index)
        self.planned = {}
        self.budget = self.BUDGET
        self.cache.begin_step()

    @precondition(lambda self: not self.planned)
    @rule()
    def reset(self) -> None:
        is_needed = any(self.holders.values())
        assert self.cache.reset() is not is_needed
        if not is_needed:
            for item_hash in self.unneeded:
                del self.sizes[item_hash]
                self.freed.append(item_hash)
            self.unneeded.clear()

    @invariant()
    def the_place_holds_what_the_model_says(self) -> None:
        assert self.cache.usage == pytest.approx(sum(self.sizes.values()) / self.CAPACITY)
        assert sum(self.sizes.values()) <= self.CAPACITY
        for item_hash in "abcdefg":
            assert self.cache.is_cached(item_hash) is (item_hash in self.sizes)


@pytest.mark.req("FEA-03")
def test_the_encoder_cache_behaves_like_plain_lists() -> None:
    run_state_machine_as_test(
        EncoderMachine,
        settings=settings(max_examples=150, stateful_step_count=40, derandomize=True),
    )


# In the scheduler


def seeing(budget: int, size: int | None = None, **settings: Any) -> Driver:
    return Driver(max_num_encoder_input_tokens=budget, encoder_cache_size=size, **settings)


@pytest.mark.req("FEA-03")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_prompt_is_computed_up_to_its_next_item_while_the_encoder_is_busy(
    steps_in_flight: int,
) -> None:
    driver = seeing(8, 16, max_steps_in_flight=steps_in_flight)
    items = items_of(("a", 4, 8), ("b", 14, 8), ("c", 30, 2))
    key = driver.add("r", prompt_of(40), multimodal=items, max_tokens=2)
    driver.run()
    with_prompt = [plan for plan in driver.plans if plan.encoder_inputs]
    assert [plan.num_scheduled_tokens for plan in with_prompt] == [14, 16, 10]
    assert [plan.encoder_inputs for plan in with_prompt] == [((0, 0),), ((0, 1),), ((0, 2),)]
    assert driver.received[key] == expected_output("r", 2)


@pytest.mark.req("FEA-03")
def test_requests_with_the_same_item_encode_it_once() -> None:
    driver = seeing(8, 8)
    driver.add("one", prompt_of(20), multimodal=items_of(("a", 4, 8)), max_tokens=2)
    driver.add("two", prompt_of(20, 50), multimodal=items_of(("a", 6, 8)), max_tokens=2)
    driver.run()
    assert [plan.encoder_inputs for plan in driver.plans if plan.encoder_inputs] == [((0, 0),)]


def test_what_one_request_is_cut_by_goes_to_those_after_it() -> None:
    driver = seeing(8, 16, max_num_batched_tokens=64, max_num_scheduled_tokens=24)
    driver.add("big", prompt_of(60), multimodal=items_of(("a", 0, 8), ("b", 30, 8)), max_tokens=2)
    driver.add("text", prompt_of(40, 50), max_tokens=2)
    driver.step()
    assert driver.scheduled == {"big": 24}
    driver.step()
    assert driver.scheduled == {"big": 24}
    driver.run()
    assert len(driver.finished) == 2


@pytest.mark.req("FEA-03")
def test_a_request_that_cannot_even_begin_waits_and_is_not_passed() -> None:
    driver = seeing(8, 8)
    driver.add("one", prompt_of(20), multimodal=items_of(("a", 0, 8)), max_tokens=4)
    driver.add("two", prompt_of(20, 50), multimodal=items_of(("b", 0, 8)), max_tokens=4)
    driver.add("text", prompt_of(20, 70), max_tokens=4)
    driver.step()
    assert driver.running == ["one"]
    driver.step()
    assert driver.running == ["one", "two", "text"]
    driver.run()


@pytest.mark.parametrize(("budget", "size"), [(7, 100), (100, 7), (7, None)])
def test_an_item_that_could_never_be_encoded_is_rejected_with_a_reason(
    budget: int, size: int | None
) -> None:
    driver = seeing(budget, size)
    key = driver.add("r", prompt_of(20), multimodal=items_of(("a", 4, 8)))
    assert driver.reason(key) is FinishReason.ERROR
    assert "8 tokens" in (driver.finished[key].message or "")


@pytest.mark.req("OUT-05")
def test_plans_list_the_encoder_outputs_to_evict() -> None:
    driver = seeing(8, 8)
    for index, name in enumerate("abc"):
        items = items_of((name, 0, 8))
        driver.add(name, prompt_of(20, 30 * index), multimodal=items, max_tokens=1)
    driver.run()
    freed = [plan.freed_encoder_hashes for plan in driver.plans if plan.encoder_inputs]
    assert freed == [(), ("a",), ("b",)]


@pytest.mark.req("FEA-03", "SCH-22")
def test_the_encoder_cache_can_be_reset_when_no_request_needs_it() -> None:
    driver = seeing(8, 8, max_num_batched_tokens=64, max_num_scheduled_tokens=6)
    driver.add("r", prompt_of(20), multimodal=items_of(("a", 2, 8)), max_tokens=1)
    driver.step()
    assert not driver.scheduler.reset_encoder_cache()
    assert driver.scheduler.make_stats().encoder_cache_usage == 1.0
    driver.run()
    assert driver.scheduler.make_stats().encoder_cache_usage == 1.0
    assert driver.scheduler.reset_encoder_cache()
    assert driver.scheduler.make_stats().encoder_cache_usage == 0.0
    driver.add("again", prompt_of(20, 40), multimodal=items_of(("a", 2, 8)), max_tokens=1)
    driver.run()
    assert sum(bool(plan.encoder_inputs) for plan in driver.plans) == 2


pieces = st.lists(st.tuples(st.integers(0, 6), st.sampled_from("abcdef")), min_size=0, max_size=4)


@pytest.mark.req("FEA-03")
@settings(max_examples=80)
@given(data=st.data(), prompts=st.lists(pieces, min_size=1, max_size=6))
def test_no_position_of_an_item_is_computed_before_the_item_is_encoded(
    data: st.DataObject, prompts: list[list[tuple[int, str]]]
) -> None:
    """The driver looks at each step's encoder inputs, at the place, and at what rows compute."""
    num_drafts = data.draw(st.integers(0, 2))
    driver = seeing(
        data.draw(st.integers(6, 12)),
        data.draw(st.integers(6, 14)),
        num_blocks=data.draw(st.integers(17, 24)),
        max_num_seqs=3,
        max_num_scheduled_tokens=data.draw(st.integers(1, 40)),
        max_steps_in_flight=data.draw(st.integers(1, 2)),
        num_speculative_tokens=num_drafts,
        draft=lambda name, position: expected_output(name, position + num_drafts)[position:],
    )
    for number, prompt in enumerate(prompts):
        offset, items = 0, []
        for gap, item_hash in prompt:
            items.append((item_hash, offset + gap, 1 + ord(item_hash) % 6))
            offset += gap + items[-1][2]
        driver.add(f"r{number}", prompt_of(offset + 1, number % 3), multimodal=items_of(*items))
        driver.steps(data.draw(st.integers(0, 3)))
    driver.run()
    for number in range(len(prompts)):
        assert driver.received[0, number] == expected_output(f"r{number}", 8)
    assert driver.scheduler.reset_encoder_cache()


def test_a_row_that_is_rewound_before_an_item_has_it_encoded_again() -> None:
    """`r` stands on blocks of `bad`, whose item was evicted for `new` before its NaN came."""
    driver = seeing(8, 8, max_steps_in_flight=2)
    bad = driver.add("bad", prompt_of(20), multimodal=items_of(("a", 2, 8)), max_tokens=9)
    key = driver.add("r", prompt_of(20), multimodal=items_of(("a", 2, 8)), max_tokens=9)
    driver.plan()
    driver.add("new", prompt_of(20, 50), multimodal=items_of(("b", 2, 8)), max_tokens=9)
    driver.plan()
    assert driver.plans[-1].freed_encoder_hashes == ("a",)
    driver.answer(nan_rows=[0])
    assert driver.reason(bad) is FinishReason.ERROR
    plan = driver.plan()
    assert plan is not None
    assert [(rewind.row, rewind.num_computed_tokens) for rewind in plan.rewound] == [(1, 0)]
    driver.run()  # which compares what rows compute with what is encoded
    assert driver.received[key] == expected_output("r", 9)


# A drafter with lookahead slots reads one position beyond those of a step


@pytest.mark.req("FEA-03")
@pytest.mark.parametrize(("lookahead", "is_held"), [(0, False), (1, True)])
def test_an_output_is_held_until_a_drafter_has_passed_it(lookahead: int, is_held: bool) -> None:
    cache = EncoderCache(capacity=8, budget=8, lookahead=lookahead)
    request, other = request_of("r", ("a", 2, 8)), request_of("other", ("b", 0, 8))
    assert step(cache, request, 0, 10) == (10, ((0, 0),))  # the chunk ends where the item ends
    assert step(cache, other, 0, 8)[0] == (0 if is_held else 8)
    assert cache.is_cached("a") is is_held
    if is_held:
        step(cache, request, 10, 1)
        assert step(cache, other, 0, 8)[0] == 8


def test_a_request_does_not_wait_for_what_its_drafter_holds() -> None:
    cache = EncoderCache(capacity=8, budget=8, lookahead=1)
    request = request_of("r", ("a", 0, 8), ("b", 8, 8))
    assert step(cache, request, 0, 20) == (8, ((0, 0),))
    assert step(cache, request, 8, 20) == (20, ((0, 1),))
    assert cache.take_freed() == ("a",)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_drafters_of_two_requests_do_not_keep_both_from_their_next_items(
    steps_in_flight: int,
) -> None:
    driver = seeing(16, 16, max_steps_in_flight=steps_in_flight, num_lookahead_tokens=1)
    for index, name in enumerate("ac"):
        items = items_of((name, 0, 6), (name * 2, 6, 12))
        driver.add(name, prompt_of(30, 30 * index), multimodal=items, max_tokens=2)
    driver.run()
    driver.check_complete(*driver.names)


@pytest.mark.parametrize("num_tokens", [8, 9])
def test_an_item_outlives_the_chunk_that_ends_with_it_if_there_are_lookahead_slots(
    num_tokens: int,
) -> None:
    """`two` may evict the item of `one` when the drafter of `one` has passed it."""
    driver = seeing(8, 8, num_lookahead_tokens=1, max_num_scheduled_tokens=num_tokens)
    driver.add("one", prompt_of(24), multimodal=items_of(("a", 0, 8)), max_tokens=2)
    driver.add("two", prompt_of(24, 50), multimodal=items_of(("b", 0, 8)), max_tokens=2)
    driver.step()
    assert driver.scheduled == {"one": num_tokens}
    cache = driver.scheduler._encoder
    assert cache is not None
    assert cache.reset() is (num_tokens == 9)
    driver.run()
    driver.check_complete(*driver.names)


def test_no_step_is_steady_while_a_row_has_not_passed_an_item() -> None:
    driver = Driver(max_num_encoder_input_tokens=8)
    driver.add("r", prompt_of(9), multimodal=(MultimodalFeature("image", 2, 4),))
    (inputs,) = driver.scheduler._hooks.is_eventful
    assert not inputs.is_eventful()
    driver.scheduler._encoder.pending["r"] = driver.requests["r"]
    assert inputs.is_eventful()
