"""Grammars: which requests wait for one, when masks are sent, and what happens to drafts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.protocol.requests import Tenant
from longshore.scheduler.features.grammar import (
    MAX_COMPILING_PER_TENANT,
    MAX_EVENTS_PER_STEP,
    MIN_AHEAD,
)
from longshore.scheduler.request import RequestStatus
from tests.harness.connector import has_leading
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.shared_drivers import connected, pressed
from tests.harness.tokens import expected_output, prompt_of, steady_token

ODD = 5  # every grammar allows it, and no request ever samples it
EVEN = 6  # nor this, which no grammar allows


def restricted(ready: set[str], **settings: object) -> tuple[Driver, FakeCompiler]:
    compiler = FakeCompiler(ready)
    return Driver(grammars=compiler, **settings), compiler


def add(driver: Driver, name: str, **fields: object) -> tuple[int, int]:
    start = 11 * len(driver.requests)
    return driver.add(name, prompt_of(6, start), structured_output=grammar_for(name), **fields)


# Before admission


@pytest.mark.req("FEA-01")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_waits_for_its_grammar_without_delaying_others(steps_in_flight: int) -> None:
    driver, compiler = restricted({"quick"}, max_steps_in_flight=steps_in_flight)
    slow, quick = add(driver, "slow"), add(driver, "quick")
    plain = driver.add("plain", prompt_of(6, 50))
    for _ in range(3):
        driver.step()
        assert driver.running == ["quick", "plain"]
        status = driver.requests["slow"].status
        assert status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert "slow" not in compiler.polled  # it is parked, and nothing asks for it
    compiler.ready.add("slow")
    driver.step()
    assert driver.running == ["quick", "plain", "slow"]
    driver.run()
    for key, name in ((slow, "slow"), (quick, "quick"), (plain, "plain")):
        assert driver.received[key] == expected_output(name, 8)


def test_a_grammar_that_cannot_be_compiled_ends_its_request_with_the_reason() -> None:
    driver, compiler = restricted({"good"})
    compiler.broken.add("bad")
    bad, good = add(driver, "bad"), add(driver, "good")
    driver.run()
    assert driver.reason(bad) is FinishReason.IGNORED
    assert driver.finished[bad].message == "no grammar: bad"
    assert driver.received[good] == expected_output("good", 8)


def test_a_request_may_be_aborted_while_its_grammar_is_compiled() -> None:
    driver, _ = restricted(set())
    key = add(driver, "r")
    driver.step()
    driver.abort(key)
    assert driver.reason(key) is FinishReason.ABORTED
    assert driver.plan() is None


def test_an_engine_without_a_compiler_rejects_grammars_with_a_reason() -> None:
    driver = Driver()
    key = add(driver, "r")
    assert driver.reason(key) is FinishReason.ERROR
    assert "structured_output" in (driver.finished[key].message or "")


@pytest.mark.req("FEA-01")
@pytest.mark.parametrize("fits", [True, False])
def test_a_request_that_continues_here_begins_after_what_it_has_emitted(fits: bool) -> None:
    driver, compiler = restricted({"r"})
    outputs = expected_output("r", 3) if fits else [*expected_output("r", 2), EVEN]
    key = add(driver, "r", outputs=outputs)
    driver.run()
    if fits:
        assert driver.received[key] == expected_output("r", 8)[3:]
        assert compiler.grammars["r"].tokens == expected_output("r", 8)
    else:
        assert driver.reason(key) is FinishReason.ERROR
        assert "emitted so far" in (driver.finished[key].message or "")


@pytest.mark.req("QUE-05")
def test_a_request_is_tried_at_its_position_after_the_event_of_its_grammar() -> None:
    driver, compiler = restricted({"third"}, max_num_seqs=1, max_tokens=2)
    for name in ("first", "second", "third"):
        add(driver, name)
    driver.add("plain", prompt_of(6, 60))
    driver.step()
    assert driver.running == ["third"]
    compiler.ready |= {"first", "second"}
    driver.run()
    assert list(driver.finished) == [(0, 2), (0, 0), (0, 1), (0, 3)]


def test_a_grammar_that_is_compiled_already_costs_no_step() -> None:
    driver, _ = restricted({"r"})
    add(driver, "r")
    driver.step()
    assert driver.running == ["r"]


# Many requests


class Counting(FakeCompiler):
    """num_asked: calls of `next_compiled` since it was reset."""

    num_asked = 0

    def next_compiled(self) -> int | None:
        self.num_asked += 1
        return super().next_compiled()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "continuum", "fair"])
def test_parked_requests_cost_nothing_in_a_step(policy: str) -> None:
    compiler = Counting()
    driver = Driver(grammars=compiler, policy=policy)
    for number in range(1000):
        add(driver, f"r{number}")
    assert compiler.num_compiled == MAX_COMPILING_PER_TENANT
    driver.add("plain", prompt_of(6, 50), max_tokens=30)
    for _ in range(10):
        driver.step()
    assert (compiler.polled, compiler.num_asked) == ([], 10)
    driver.abort(*driver.names)
    assert compiler.num_compiled == MAX_COMPILING_PER_TENANT  # none is compiled for the others
    driver.run()
    assert not driver.scheduler._grammars._tenants  # type: ignore[union-attr]


def test_no_more_grammars_are_compiled_ahead_than_may_soon_be_needed() -> None:
    driver, compiler = restricted({"all"}, max_num_seqs=2, max_tokens=2)
    for number in range(3 * MIN_AHEAD):
        add(driver, f"r{number}")
    driver.plan()
    num_ahead = MIN_AHEAD
    assert num_ahead <= compiler.num_compiled <= num_ahead + 2 + MAX_COMPILING_PER_TENANT
    driver.run()
    assert [key[1] for key in driver.finished] == list(range(3 * MIN_AHEAD))


def test_slow_grammars_of_one_tenant_do_not_keep_those_of_another_from_being_compiled() -> None:
    driver, _ = restricted({"quick"})
    for number in range(3 * MAX_COMPILING_PER_TENANT):
        add(driver, f"slow {number}", tenant=Tenant("one"))
    add(driver, "quick", tenant=Tenant("other"))
    driver.step()
    assert driver.running == ["quick"]


def test_urgent_grammars_are_compiled_before_others_of_their_tenant() -> None:
    driver, compiler = restricted(set(), policy="priority", max_num_seqs=1)
    names = [f"r{number}" for number in range(2 * MAX_COMPILING_PER_TENANT)]
    for name in names:
        add(driver, name)
    urgent = add(driver, "urgent", priority=-1)
    compiler.ready |= {"r0", "urgent"}
    driver.step()
    assert driver.running == ["urgent"]
    compiler.ready.add("all")
    driver.run()
    assert next(iter(driver.finished)) == urgent


def test_without_priorities_grammars_are_compiled_in_the_order_of_their_arrival() -> None:
    driver, compiler = restricted(set(), policy="fcfs", max_num_seqs=1)
    for number in range(MAX_COMPILING_PER_TENANT + 1):
        add(driver, f"r{number}")
    add(driver, "later", priority=-1)
    last = f"r{MAX_COMPILING_PER_TENANT}"
    compiler.ready |= {"r0", last, "later"}
    driver.step()
    assert compiler.polled.index(last) < compiler.polled.index("later")
    compiler.ready.add("all")
    driver.run()


def test_events_per_step_are_bounded_and_the_rest_is_left_for_the_next_step() -> None:
    driver, compiler = restricted(set())
    names = [f"r{number}" for number in range(MAX_EVENTS_PER_STEP + 10)]
    for name in names:
        add(driver, name)
    compiler.broken |= set(names)
    driver.plan()
    assert len(driver.finished) == MAX_EVENTS_PER_STEP
    driver.plan()
    assert len(driver.finished) == len(names)


# A grammar that is lost


@pytest.mark.req("FEA-01", "OUT-05")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_goes_on_from_its_tokens_when_its_lost_grammar_is_compiled_again(
    steps_in_flight: int,
) -> None:
    driver, compiler = restricted({"r"}, max_steps_in_flight=steps_in_flight)
    key, plain = add(driver, "r"), driver.add("plain", prompt_of(6, 50), max_tokens=20)
    for _ in range(4):
        driver.step()
    received = list(driver.received[key])
    assert received
    compiler.lost.add("r")
    for _ in range(6):  # the other request does not wait
        num_plain = len(driver.received[plain])
        driver.step()
        assert len(driver.received[plain]) == num_plain + 1
    status = driver.requests["r"].status
    assert status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert driver.received[key] == expected_output("r", 8)[: len(driver.received[key])]
    assert len(driver.received[key]) - len(received) < steps_in_flight
    compiler.lost.clear()
    driver.run()
    assert driver.received[key] == compiler.grammars["r"].tokens == expected_output("r", 8)
    assert driver.received[plain] == expected_output("plain", 20)


@pytest.mark.req("FEA-01")
def test_a_grammar_that_is_lost_while_its_request_waits_for_a_row_is_waited_for() -> None:
    driver, compiler = restricted({"all"}, max_num_seqs=1)
    first, second = add(driver, "first"), add(driver, "second")
    driver.step()
    compiler.lost.add("second")
    third = driver.add("plain", prompt_of(6, 50))
    while second not in driver.finished and third not in driver.finished:
        driver.step()
    assert third in driver.finished
    compiler.lost.clear()
    driver.run()
    for key, name in ((first, "first"), (second, "second")):
        assert driver.received[key] == expected_output(name, 8)


def test_a_grammar_may_fail_for_good_after_it_was_lost() -> None:
    driver, compiler = restricted({"r"})
    key = add(driver, "r")
    driver.step()
    compiler.lost.add("r")
    driver.steps(3)
    compiler.broken.add("r")
    driver.run()
    assert driver.reason(key) is FinishReason.IGNORED
    assert driver.finished[key].message == "no grammar: r"


def test_a_request_may_be_aborted_while_its_lost_grammar_is_compiled_again() -> None:
    driver, compiler = restricted({"r"}, max_steps_in_flight=2)
    key = add(driver, "r")
    driver.step()
    compiler.lost.add("r")
    driver.steps(2)
    driver.abort(key)
    driver.run()
    assert driver.reason(key) is FinishReason.ABORTED
    assert compiler.grammars["r"].is_released


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_new_workers_may_begin_while_grammars_are_lost(steps_in_flight: int) -> None:
    driver, compiler = restricted({"r"}, max_steps_in_flight=steps_in_flight)
    key = add(driver, "r")
    driver.steps(3)
    compiler.lost.add("r")
    driver.plan()
    driver.restart_workers()
    driver.steps(3)
    driver.restart_workers()
    compiler.lost.clear()
    driver.run()
    assert driver.received[key] == compiler.grammars["r"].tokens == expected_output("r", 8)


# Masks


@pytest.mark.req("FEA-01", "OUT-05")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_only_steps_in_which_a_restricted_row_samples_have_a_mask(steps_in_flight: int) -> None:
    driver, compiler = restricted(
        {"r"}, max_steps_in_flight=steps_in_flight, max_num_scheduled_tokens=4
    )
    key = add(driver, "r", max_tokens=3)  # 6 prompt tokens: two chunks
    driver.run()
    assert [plan.has_structured_output for plan in driver.plans[:4]] == [False, True, True, True]
    assert not any(plan.has_structured_output for plan in driver.plans[4:])
    assert driver.received[key] == expected_output("r", 3)
    assert compiler.grammars["r"].tokens == expected_output("r", 3)
    assert driver.masks == {}  # each was asked for by an answer


@pytest.mark.req("FEA-01")
def test_a_mask_allows_what_the_grammar_allows_at_that_position() -> None:
    driver, _ = restricted({"a", "b"}, max_steps_in_flight=2)
    add(driver, "a")
    driver.add("plain", prompt_of(6, 40))
    add(driver, "b")
    driver.plan()
    assert driver.running == ["a", "b", "plain"]  # what was set aside is looked at first
    mask = driver.masks[1]
    assert (mask.epoch, mask.step, mask.rows.tolist()) == (1, 1, [0, 1])
    bits = np.unpackbits(mask.bits.reshape(2, -1), axis=1, bitorder="little")
    for name, allowed in zip(("a", "b"), bits, strict=True):
        odd_or_own = {steady_token(name, 0), *range(1, 100, 2)}
        assert set(np.flatnonzero(allowed).tolist()) == odd_or_own
    driver.plan()
    assert list(driver.masks) == [1]  # that of step 2 rests on a token that has not come
    driver.answer()
    assert list(driver.masks) == [2]
    bits = np.unpackbits(driver.masks[2].bits.reshape(2, -1), axis=1, bitorder="little")
    assert bits[0, steady_token("a", 1)] == 1
    driver.run()


@pytest.mark.req("FEA-01")
def test_a_mask_comes_once() -> None:
    driver, _ = restricted({"r"})
    add(driver, "r")
    driver.plan()
    assert list(driver.masks) == [1]
    assert driver.scheduler.take_masks() == []
    driver.run()


def test_a_mask_is_sent_although_its_request_has_ended() -> None:
    """The workers wait for it; what they sample there is void."""
    driver, _ = restricted({"r"}, max_steps_in_flight=2)
    key = add(driver, "r")
    driver.plan()
    driver.plan()
    driver.abort(key)
    driver.answer()
    (mask,) = driver.masks.values()
    assert (mask.step, mask.rows.tolist()) == (2, [0])
    assert (mask.bits == 0xFF).all()
    driver.run()


def test_the_mask_of_void_tokens_allows_everything() -> None:
    """Step 2 follows a token of step 1 that is void, so it has no state of the grammar."""
    driver = connected(
        rules={"match": has_leading(4, is_async=False)},
        fail_sync=lambda load: load.block_ids[0][:1],
        grammars=FakeCompiler({"r"}),
    )
    key = add(driver, "r")
    driver.plan()
    driver.plan()
    driver.answer()
    (mask,) = driver.masks.values()
    assert (mask.step, mask.rows.tolist()) == (2, [0])
    assert (mask.bits == 0xFF).all()
    driver.run()
    driver.check_complete(key)


def test_a_token_that_is_delivered_after_a_preemption_is_masked() -> None:
    """Step 3 preempts a request before the mask of its token in step 2 can be made."""
    driver = Driver(
        grammars=FakeCompiler({"r"}),
        num_blocks=8,
        max_model_len=28,
        max_steps_in_flight=3,
        feed_back_tokens=True,
        long_prefill_token_threshold=8,
        cache={"watermark": 0.0},
    )
    long = driver.add("long", prompt_of(24), max_tokens=4)
    driver.plan()
    key = driver.add("r", prompt_of(8, 40), structured_output=grammar_for("r"))
    driver.plan()
    plan = driver.plan()
    assert plan is not None
    assert plan.preempted_rows.tolist() == [1]
    driver.answer()
    (mask,) = driver.masks.values()
    assert (mask.step, mask.rows.tolist()) == (2, [1])
    allowed = np.flatnonzero(np.unpackbits(mask.bits, bitorder="little"))
    assert set(allowed.tolist()) == {steady_token("r", 0), *range(1, 100, 2)}
    driver.run()
    driver.check_complete(long, key)


def test_a_token_against_the_grammar_ends_its_request() -> None:
    driver, _ = restricted({"r"})
    key = add(driver, "r")
    driver.plan()
    driver.take_output()
    answer = ModelRunnerOutput(1, 1, sampled_tokens=int32_array([EVEN]))
    driver.scheduler.update_from_output(answer, driver.now)
    driver.collect(is_ours=False)
    assert driver.reason(key) is FinishReason.ERROR
    assert "against the grammar" in (driver.finished[key].message or "")


@pytest.mark.req("FEA-01")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_grammar_follows_its_request_through_preemption(steps_in_flight: int) -> None:
    compiler = FakeCompiler({"all"})
    driver = pressed(
        grammars=compiler,
        enable_prefix_caching=False,
        max_steps_in_flight=steps_in_flight,
    )
    for name, start in (("old", 0), ("young", 40)):
        driver.add(name, prompt_of(15, start), max_tokens=10, structured_output=grammar_for(name))
    driver.run()
    assert driver.finished[0, 1].num_preemptions > 0
    for index, name in enumerate(("old", "young")):
        assert driver.received[0, index] == expected_output(name, 10)
        assert compiler.grammars[name].tokens == expected_output(name, 10)
    assert compiler.num_compiled == 2


# Drafts


@pytest.mark.req("FEA-01", "SPD-04", "SPD-05")
def test_drafts_are_cut_at_the_first_one_that_the_grammar_rejects() -> None:
    compiler = FakeCompiler()
    own = expected_output("r", 20)
    proposals = {1: [own[1], EVEN, own[3]], 3: [EVEN, own[4], own[5]], 4: [own[4], ODD, own[6]]}
    driver = Driver(
        grammars=compiler,
        num_speculative_tokens=3,
        draft=lambda name, position: proposals.get(position, []),
    )
    key = add(driver, "r", max_tokens=20)
    assert driver.step() is None
    compiler.ready.add("r")
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert plan.has_structured_output
    assert (plan.draft_tokens.tolist(), plan.num_invalid_draft_tokens) == ([own[1]], 2)
    assert driver.received[key] == own[:3]
    plan = driver.step()
    assert plan is not None
    assert (plan.draft_tokens.tolist(), plan.num_invalid_draft_tokens) == ([], 3)
    plan = driver.step()  # an odd one is allowed, and then not what is sampled
    assert plan is not None
    assert (plan.draft_tokens.tolist(), plan.num_invalid_draft_tokens) == ([own[4], ODD, own[6]], 0)
    assert driver.received[key] == own[:6]
    driver.run()
    assert driver.received[key] == compiler.grammars["r"].tokens == own
    end, stats = driver.finished[key], driver.scheduler.make_stats()
    assert (end.num_draft_tokens, end.num_accepted_tokens) == (4, 2)
    assert stats.num_invalid_draft_tokens == 5
    assert end.num_invalid_draft_tokens == 5


@pytest.mark.req("SPD-04")
def test_with_two_steps_in_flight_a_grammar_takes_no_drafts() -> None:
    driver, _ = restricted(
        {"r"},
        max_steps_in_flight=2,
        num_speculative_tokens=2,
        draft=lambda name, position: expected_output(name, position + 2)[position:],
    )
    key, plain = add(driver, "r"), driver.add("plain", prompt_of(6, 50))
    driver.run()
    assert driver.received[key] == expected_output("r", 8)
    assert driver.finished[key].num_draft_tokens == 0
    assert driver.finished[plain].num_draft_tokens > 0


@settings(max_examples=60)
@given(data=st.data())
def test_masks_and_grammars_keep_up_whatever_happens(data: st.DataObject) -> None:
    """The driver checks that each mask comes once, in time, and allows what is sampled."""
    compiler = FakeCompiler(set())
    driver = Driver(
        num_blocks=data.draw(st.integers(11, 20)),
        max_model_len=40,
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_steps_in_flight=data.draw(st.integers(1, 2)),
        max_num_scheduled_tokens=data.draw(st.integers(2, 40)),
        num_speculative_tokens=2,
        draft=lambda name, position: [expected_output(name, position + 1)[-1], EVEN],
        grammars=compiler,
    )
    names = [f"r{index}" for index in range(data.draw(st.integers(1, 6)))]
    aborted = set()
    for index, name in enumerate(names):
        grammar = grammar_for(name) if data.draw(st.booleans()) else None
        driver.add(name, prompt_of(4 + 2 * index), max_tokens=10, structured_output=grammar)
        for _ in range(data.draw(st.integers(0, 3))):
            driver.step()
        compiler.ready.add(data.draw(st.sampled_from(names)))
        if data.draw(st.integers(0, 3)) == 0:
            compiler.lost ^= {data.draw(st.sampled_from(names))}
        if data.draw(st.integers(0, 9)) == 0:
            driver.restart_workers()
        if data.draw(st.integers(0, 4)) == 0:
            aborted.add(data.draw(st.integers(0, index)))
            driver.abort(*((0, number) for number in aborted))
    compiler.ready.add("all")
    driver.steps(data.draw(st.integers(0, 5)))
    compiler.lost.clear()
    driver.run()
    for index, name in enumerate(names):
        tokens = driver.received[0, index]
        assert tokens == expected_output(name, len(tokens))
        if driver.reason((0, index)) is not FinishReason.ABORTED:
            assert len(tokens) == 10
        if name in compiler.grammars:
            assert compiler.grammars[name].tokens == tokens


def test_a_token_against_the_grammar_ends_its_request_also_if_it_was_preempted_meanwhile() -> None:
    driver, _ = restricted({"r"}, max_steps_in_flight=2)
    key = add(driver, "r")
    driver.plan()
    driver.scheduler._lifecycle.preempt(driver.requests["r"], driver.now)
    answer = ModelRunnerOutput(1, 1, int32_array([EVEN]))
    driver.scheduler.update_from_output(answer, driver.now)
    driver.collect(is_ours=False)
    assert driver.reason(key) is FinishReason.ERROR
    assert f"token {EVEN} was sampled against the grammar" == driver.finished[key].message
    assert driver.scheduler.get_request_counts() == (0, 0)
