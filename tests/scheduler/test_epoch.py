"""New workers: what the scheduler keeps of an epoch that has ended, and what it drops."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.protocol.events import AllBlocksCleared, BlockStored
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput, RequestEvent
from longshore.protocol.requests import LoRARequest, MultimodalFeature
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.tokens import expected_output, prompt_of

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])


@BOTH
def test_running_requests_wait_again_in_the_order_in_which_they_ran(steps_in_flight: int) -> None:
    driver = Driver(max_num_seqs=3, max_steps_in_flight=steps_in_flight)
    keys = [
        driver.add(f"r{index}", prompt_of(5 + index, 9 * index), max_tokens=9) for index in range(5)
    ]
    driver.abort(keys[1])
    driver.steps(4)
    assert driver.running == ["r0", "r2", "r3"]
    received = [list(driver.received[key]) for key in keys]
    assert any(received)
    driver.restart_workers(2)
    assert driver.scheduler.get_request_counts() == (0, 4)
    assert driver.scheduler.num_steps_in_flight == 0
    assert driver.num_free_blocks == 39
    plan = driver.plan()
    assert plan is not None
    assert (plan.epoch, plan.step, plan.previous_step, plan.answered_step) == (2, 1, 0, 0)
    assert driver.running == ["r0", "r2", "r3"]
    assert all(start.resumed for start in plan.added)
    assert [start.output_token_ids.tolist() for start in plan.added] == [
        received[index] for index in (0, 2, 3)
    ]
    driver.run()
    for index in (0, 2, 3, 4):
        assert driver.received[keys[index]] == expected_output(f"r{index}", 9)


@BOTH
def test_no_prefix_of_the_old_workers_is_found(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    driver.add("old", prompt_of(20), max_tokens=2)
    driver.run()
    driver.restart_workers(2)
    key = driver.add("same", prompt_of(20), max_tokens=2)
    driver.run()
    assert driver.finished[key].num_cached_tokens == 0


@BOTH
@pytest.mark.parametrize("keeps_kv", [False, True])
def test_cached_tokens_of_a_running_request_count_from_the_new_workers(
    keeps_kv: bool, steps_in_flight: int
) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    driver.add("first", prompt_of(20), max_tokens=1)
    driver.run()
    cached = driver.add("cached", prompt_of(20), max_tokens=9)
    computed = driver.add("computed", prompt_of(20, 50), max_tokens=9)
    driver.steps(4)
    assert driver.running == ["cached", "computed"]
    driver.restart_workers(2, keeps_kv=keeps_kv)
    driver.run()
    expected = 20 if keeps_kv else 0
    assert driver.finished[cached].num_cached_tokens == expected
    assert driver.finished[computed].num_cached_tokens == expected


def test_the_first_event_of_an_epoch_is_that_all_blocks_are_cleared() -> None:
    driver = Driver(cache={"enable_kv_cache_events": True})
    driver.add("r", prompt_of(20), max_tokens=3)
    driver.steps(2)
    assert driver.scheduler.take_kv_events()
    driver.step()
    driver.restart_workers(2)
    driver.run()
    events = driver.scheduler.take_kv_events()
    assert isinstance(events[0], AllBlocksCleared)
    assert not any(isinstance(event, AllBlocksCleared) for event in events[1:])


@BOTH
def test_blocks_of_answered_plans_are_found_again_if_their_memory_is_kept(
    steps_in_flight: int,
) -> None:
    """Blocks have 4 tokens. Each plan computes 8 of the prompt; of 3 plans, one or two are not
    answered."""
    driver = Driver(max_steps_in_flight=steps_in_flight, max_num_scheduled_tokens=8, max_num_seqs=1)
    key = driver.add("long", prompt_of(30), max_tokens=4)
    driver.steps(2)
    driver.plan()
    num_answered = 3 - len(driver.unanswered)
    driver.restart_workers(2, keeps_kv=True)
    assert driver.num_free_blocks == 39
    plan = driver.plan()
    assert plan is not None
    assert [start.num_computed_tokens for start in plan.added] == [8 * num_answered]
    driver.run()
    assert driver.received[key] == expected_output("long", 4)


def test_kept_blocks_of_the_oldest_requests_are_evicted_last() -> None:
    """Of 9 blocks, two requests have filled 4 and 3, and begun another one each. A third request
    needs 4: it gets those without a hash and the last ones of the younger request."""
    driver = Driver(num_blocks=10, max_model_len=32, max_num_seqs=2)
    keys = [
        driver.add("old", prompt_of(16), max_tokens=9),
        driver.add("young", prompt_of(12, 40), max_tokens=9),
    ]
    driver.steps(2)
    kv_cache = driver.scheduler.kv_cache
    blocks = [*kv_cache.block_ids(0)[0][:4].tolist(), *kv_cache.block_ids(1)[0][:3].tolist()]
    hashes = list(map(kv_cache.pool.block_hash, blocks))
    assert None not in hashes
    driver.restart_workers(2, keeps_kv=True)
    driver.abort(*keys)
    driver.add("third", prompt_of(16, 70), max_tokens=1)
    driver.run()
    now = map(kv_cache.pool.block_hash, blocks)
    is_kept = [after == before for after, before in zip(now, hashes, strict=True)]
    assert is_kept == [True] * 5 + [False] * 2


def test_events_say_which_blocks_are_not_kept() -> None:
    """Those of the unanswered plan were not announced yet, so nothing is said about them."""
    driver = Driver(cache={"enable_kv_cache_events": True}, max_num_scheduled_tokens=8)
    driver.add("r", prompt_of(20), max_tokens=3)
    driver.step()
    assert len(driver.scheduler.take_kv_events()) == 2
    driver.plan()
    driver.restart_workers(2, keeps_kv=True)
    assert driver.scheduler.take_kv_events() == []
    driver.run()
    events = driver.scheduler.take_kv_events()
    assert {type(event) for event in events} == {BlockStored}
    assert len(events) == 3


@BOTH
def test_outputs_of_the_old_workers_are_counted_and_dropped(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("r", prompt_of(5))
    driver.plan()
    late = driver.take_output()
    driver.restart_workers(2)
    driver.scheduler.update_from_output(late, driver.now)
    driver.collect()
    assert driver.received[key] == []
    assert driver.scheduler.make_stats().num_stale_tokens == 1
    driver.plan()
    stale = ModelRunnerOutput(1, 1, sampled_tokens=int32_array([9]))
    driver.scheduler.update_from_output(stale, driver.now)  # of a step that the new ones have too
    driver.run()
    assert driver.received[key] == expected_output("r", 8)


def test_a_restart_is_one_more_preemption_of_each_request_that_ran() -> None:
    driver = Driver(max_num_seqs=1)
    ran = driver.add("ran", prompt_of(5), max_tokens=3)
    waited = driver.add("waited", prompt_of(5, 40), max_tokens=3)
    driver.step()
    driver.restart_workers(2)
    driver.run()
    assert [driver.finished[key].num_preemptions for key in (ran, waited)] == [1, 0]
    assert [event for event, _ in driver.finished[ran].events] == [
        RequestEvent.QUEUED,
        RequestEvent.SCHEDULED,
        RequestEvent.PREEMPTED,
        RequestEvent.SCHEDULED,
    ]


def test_a_request_whose_token_was_on_its_way_runs_again_at_once() -> None:
    """Preempted with a token in flight it would wait for it; that answer never comes."""
    driver = Driver(
        num_blocks=9,
        max_model_len=32,
        enable_prefix_caching=False,
        max_steps_in_flight=2,
    )
    driver.add("old", prompt_of(15, 0), max_tokens=10)
    driver.add("young", prompt_of(15, 40), max_tokens=10)
    while not driver.requests["young"].num_preemptions:
        driver.plan() or driver.answer()
    driver.restart_workers(2)
    driver.plan()
    assert driver.running == ["old", "young"]
    driver.run()
    for index, name in enumerate(("old", "young")):
        assert driver.received[0, index] == expected_output(name, 10)


@BOTH
def test_encoder_outputs_adapters_and_masks_start_anew(steps_in_flight: int) -> None:
    compiler = FakeCompiler({"all"})
    driver = Driver(
        max_loras=1,
        max_num_encoder_input_tokens=8,
        max_steps_in_flight=steps_in_flight,
        grammars=compiler,
    )
    item = MultimodalFeature("a", 2, 8)
    sees = driver.add("sees", prompt_of(20), multimodal=(item,), max_tokens=9)
    adapted = driver.add("adapted", prompt_of(6, 40), lora=LoRARequest("a"), max_tokens=9)
    strict = driver.add("strict", prompt_of(6, 60), structured_output=grammar_for("strict"))
    driver.steps(3)
    driver.restart_workers(2)
    assert driver.scheduler.make_stats().encoder_cache_usage == 0.0
    driver.abort(adapted)
    other = driver.add("other", prompt_of(6, 70), lora=LoRARequest("b"), max_tokens=2)
    driver.run()
    assert any(plan.epoch == 2 and plan.encoder_inputs for plan in driver.plans)
    assert driver.received[sees] == expected_output("sees", 9)
    assert driver.received[strict] == expected_output("strict", 8)
    assert driver.received[other] == expected_output("other", 2)
    assert compiler.grammars["strict"].tokens == expected_output("strict", 8)


@BOTH
def test_masks_are_sent_again_in_a_new_epoch(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight, grammars=FakeCompiler({"strict"}))
    key = driver.add("strict", prompt_of(6), structured_output=grammar_for("strict"))
    driver.plan()
    assert [mask.epoch for mask in driver.masks.values()] == [1]
    driver.restart_workers(2)
    driver.plan()
    assert [(mask.epoch, mask.step) for mask in driver.masks.values()] == [(2, 1)]
    driver.run()
    assert driver.received[key] == expected_output("strict", 8)


@BOTH
def test_sessions_outlive_their_workers(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    key = driver.add("s", prompt_of(6), max_tokens=2, resumable=True)
    while not driver.continued[key]:
        driver.step()
    driver.restart_workers(2)
    assert driver.step() is None
    driver.continue_session(key, [70], max_tokens=2, resumable=False)
    driver.run()
    assert driver.received[key] == expected_output("s", 2) * 2


engines = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fcfs", "priority", "continuum"]),
        "max_steps_in_flight": st.integers(1, 2),
        "max_num_seqs": st.integers(1, 5),
        "max_num_scheduled_tokens": st.integers(1, 40),
        "num_speculative_tokens": st.integers(0, 2),
        "num_blocks": st.integers(11, 20),
    }
)


@settings(max_examples=60)
@given(engine=engines, data=st.data())
def test_no_restart_loses_or_changes_a_token(engine: dict[str, Any], data: st.DataObject) -> None:
    num_drafts = engine["num_speculative_tokens"]
    driver = Driver(
        max_model_len=40,
        draft=lambda name, position: expected_output(name, position + num_drafts)[position:],
        **engine,
    )
    counts = {}
    epoch = 1
    for index in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 12))
        key = driver.add(
            f"r{index}", prompt_of(3 + 4 * index), max_tokens=count, priority=index % 2
        )
        counts[key] = count
        driver.steps(data.draw(st.integers(0, 5)))
        if data.draw(st.booleans()):
            epoch += 1
            driver.restart_workers(epoch, keeps_kv=data.draw(st.booleans()))
    driver.run()
    for (client, index), count in counts.items():
        assert driver.received[client, index] == expected_output(f"r{index}", count)
        assert driver.reason((client, index)) is FinishReason.LENGTH_CAPPED
    assert driver.num_free_blocks == engine["num_blocks"] - 1
