"""Who is looked at, and what keeps a waiting request out: requirements SCH."""

import pytest

from longshore.protocol.requests import (
    LoRARequest,
    MultimodalFeature,
    StructuredOutput,
    Tenant,
)
from longshore.scheduler.request import RequestStatus
from longshore.scheduler.step.planner import PauseState
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import expected_output, prompt_of

NEVER = StructuredOutput("regex", "never compiled")


def image(offset: int, num_tokens: int, name: str = "image") -> tuple[MultimodalFeature, ...]:
    return (MultimodalFeature(name, offset, num_tokens),)


# Need


@pytest.mark.req("SCH-06")
@pytest.mark.parametrize(
    ("threshold", "budget", "expected"), [(0, 64, 19), (6, 64, 6), (0, 8, 8), (6, 8, 6)]
)
def test_a_resumed_request_needs_all_its_tokens_cut_to_threshold_and_budget(
    threshold: int, budget: int, expected: int
) -> None:
    driver = pressed(
        enable_prefix_caching=False,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        cache={"preempt_threshold": 1.0},
    )
    driver.add("old", prompt_of(9, 0), max_tokens=8)
    key = driver.add("young", prompt_of(13, 40), max_tokens=10)
    young = driver.requests["young"]
    while not young.num_preemptions:
        driver.step()
    assert (young.num_prompt_tokens, young.num_tokens) == (13, 13 + len(driver.received[key]))
    num_outputs = len(driver.received[key])
    while young.row < 0:
        driver.step()
    left = budget - driver.scheduled.get("old", 0)
    assert driver.scheduled["young"] == min(13 + num_outputs, expected, left)
    assert num_outputs > 0
    driver.run()
    assert driver.received[key] == expected_output("young", 10)


# Who is looked at


@pytest.mark.req("SCH-07")
def test_no_waiting_request_is_tried_in_a_step_that_preempted() -> None:
    """It is more urgent than the victim, which would need more blocks than are free."""
    grammars = FakeCompiler({"g"})
    driver = pressed(
        "priority",
        enable_prefix_caching=False,
        cache={"preempt_threshold": 1.0},
        grammars=grammars,
    )
    driver.add("old", prompt_of(15, 0), max_tokens=8, priority=1)
    driver.add("young", prompt_of(16, 40), max_tokens=8, priority=1)
    driver.step()
    assert driver.running == ["old", "young"]
    waits = StructuredOutput("regex", "g")
    driver.add("waits", prompt_of(1, 80), priority=0, structured_output=waits)
    plan = driver.plan()
    assert plan is not None
    assert len(plan.preempted_rows) == 1
    assert driver.running == ["old"]
    assert grammars.polled == ["g"]  # its event
    driver.answer()
    driver.run()
    assert len(grammars.polled) > 1
    assert len(driver.finished) == 3


@pytest.mark.req("SCH-07")
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_no_waiting_request_is_tried_while_the_engine_is_paused(state: PauseState) -> None:
    grammars = FakeCompiler({"g"})
    driver = Driver(grammars=grammars)
    driver.add("runs", prompt_of(5), max_tokens=9)
    driver.step()
    driver.add("waits", prompt_of(5, 40), structured_output=StructuredOutput("regex", "g"))
    driver.scheduler.set_pause(state)
    for _ in range(3):
        driver.step()
    assert (grammars.polled, driver.running) == (["g"], ["runs"])  # its event
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.step()
    assert (grammars.polled, driver.running) == (["g", "g"], ["runs", "waits"])


# The order of the constraints


@pytest.mark.req("SCH-09")
@pytest.mark.parametrize("limit", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 5}])
def test_width_and_budget_come_before_everything_about_the_request(limit: dict[str, int]) -> None:
    grammars = FakeCompiler({"g"})
    driver = Driver(grammars=grammars, **limit)
    driver.add("runs", prompt_of(15), max_tokens=2)
    driver.step()
    driver.add("g", prompt_of(5, 40), structured_output=StructuredOutput("regex", "g"))
    driver.step()
    assert grammars.polled == ["g"]  # its event
    driver.run()
    assert grammars.polled == ["g", "g"]
    assert len(driver.finished) == 2


@pytest.mark.req("SCH-09")
@pytest.mark.parametrize("obstacle", ["blocked", "adapter", "nothing"])
def test_a_blocked_request_or_a_new_adapter_is_set_aside_before_blocks_are_counted(
    obstacle: str,
) -> None:
    driver = Driver(num_blocks=9, max_model_len=32, max_loras=1, grammars=FakeCompiler())
    driver.add("runs", prompt_of(12, 0), max_tokens=8, lora=LoRARequest("a"))
    driver.step()
    fields = {
        "blocked": {"structured_output": NEVER},
        "adapter": {"lora": LoRARequest("b")},
        "nothing": {},
    }
    driver.add("big", prompt_of(28, 40), max_tokens=1, **fields[obstacle])  # 7 of 5 free blocks
    driver.add("small", prompt_of(3, 80), max_tokens=8, lora=LoRARequest("a"))
    driver.step()
    expected = ["runs"] if obstacle == "nothing" else ["runs", "small"]
    assert driver.running == expected
    assert driver.scheduler.make_stats().num_preemptions == 0


@pytest.mark.req("SCH-09")
def test_a_blocked_request_is_set_aside_before_its_adapter_is_asked_about() -> None:
    grammars = FakeCompiler()
    driver = Driver(max_loras=1, grammars=grammars)
    driver.add("runs", prompt_of(5), max_tokens=30, lora=LoRARequest("a"))
    driver.step()
    driver.add("both", prompt_of(5, 40), structured_output=NEVER, lora=LoRARequest("b"))
    driver.step()
    (waiting,) = driver.scheduler.make_report(driver.now, "engine").waiting
    assert waiting.request_id == "both"
    assert waiting.waits_for == "its grammar, which is being compiled"
    assert driver.requests["both"].status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


@pytest.mark.req("SCH-09")
def test_a_shortage_of_blocks_preempts_running_requests_and_ends_admission() -> None:
    driver = pressed(enable_prefix_caching=False, cache={"preempt_threshold": 1.0})
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(11, 40), max_tokens=8)
    driver.step()
    driver.add("big", prompt_of(9, 60), max_tokens=1)  # three blocks
    driver.add("small", prompt_of(2, 80), max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    assert (plan.preempted_rows.size, plan.added) == (0, ())
    assert driver.num_free_blocks == 1  # enough for `small`, which does not go first
    assert driver.running == ["old", "young"]
    driver.answer()
    while not driver.scheduler.make_stats().num_preemptions:
        plan = driver.step()
    assert plan is not None
    assert driver.scheduled == {"old": 1}  # tried again, and served, once `young` had given way
    driver.run()
    assert len(driver.finished) == 4


@pytest.mark.req("SCH-09")
@pytest.mark.parametrize("short_of", ["blocks", "rows"])
def test_the_fair_policy_preempts_nobody_for_a_tenant_that_waits(short_of: str) -> None:
    settings = {"max_num_seqs": 2} if short_of == "rows" else {}
    driver = pressed("fair", enable_prefix_caching=False, **settings)
    length = 3 if short_of == "rows" else 13  # 13 + 3 tokens fill four of the eight blocks
    for number in range(4):
        name = f"flood {number}"
        driver.add(name, prompt_of(length, 20 * number), max_tokens=3, tenant=Tenant("flood"))
    driver.step()
    assert driver.running == ["flood 0", "flood 1"]
    driver.add("other", prompt_of(5, 90), max_tokens=2, tenant=Tenant("other", weight=9))
    while len(driver.finished) < 2:
        assert driver.running == ["flood 0", "flood 1"]
        driver.step()
    while "other" not in driver.running:
        assert len(driver.finished) == 2
        driver.step()
    assert "flood 3" not in driver.running
    driver.run()
    assert len(driver.finished) == 5
    assert driver.scheduler.make_stats().num_preemptions == 0


@pytest.mark.req("SCH-09")
def test_a_request_that_encoder_or_blocks_leave_nothing_ends_admission_and_takes_nothing() -> None:
    driver = Driver(max_num_encoder_input_tokens=4, encoder_cache_size=8)
    driver.add("first", prompt_of(6), max_tokens=4, multimodal=image(0, 3, "a"))
    driver.add("head", prompt_of(6, 30), max_tokens=4, multimodal=image(0, 2, "b"))
    driver.add("small", prompt_of(2, 60), max_tokens=4)
    plan = driver.plan()  # one token of the encoder's budget is left, the head's item needs two
    assert plan is not None
    assert driver.scheduled == {"first": 6}
    assert plan.encoder_inputs == ((0, 0),)
    driver.answer()
    driver.step()
    assert driver.scheduled == {"first": 1, "head": 6, "small": 2}
    # Blocks: the item of a head that finds none is not encoded, and has no place in the cache.
    full = pressed(enable_prefix_caching=False, max_num_encoder_input_tokens=4)
    full.add("runs", prompt_of(20), max_tokens=2)
    full.step()
    full.add("head", prompt_of(17, 50), max_tokens=2, multimodal=image(0, 4))
    plan = full.plan()
    assert plan is not None
    assert (full.running, plan.encoder_inputs) == (["runs"], ())
    assert full.scheduler.make_stats().encoder_cache_usage == 0.0
    full.answer()
    full.run()
    assert sum(len(plan.encoder_inputs) for plan in full.plans) == 1


# Lookups


@pytest.mark.req("SCH-12")
def test_prefixes_are_looked_up_once_per_life_and_a_miss_is_one_shared_object() -> None:
    driver = pressed(max_num_batched_tokens=9, cache={"preempt_threshold": 1.0})
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(13, 40), max_tokens=8)
    stats = driver.scheduler.kv_cache.stats
    for _ in range(3):
        driver.step()
    assert driver.running == ["old", "young"]  # both in two chunks
    assert (stats.num_queried_tokens, stats.num_preempted_queried_tokens) == (15 + 13, 0)
    while not driver.requests["young"].num_preemptions:
        driver.step()
    num_tokens = driver.requests["young"].num_tokens
    driver.run()
    assert stats.num_preempted_queried_tokens == num_tokens  # it had nothing, and looked again
    manager = driver.scheduler.kv_cache
    misses = []
    for name in ("a", "b"):
        driver.add(name, [ord(name)] * 9, max_tokens=1)
        misses.append(manager.get_computed_blocks(driver.requests[name]))
    assert misses[0] is misses[1]


# The whole input


@pytest.mark.req("ERR-32")
@pytest.mark.parametrize("reserve", [False, True])
@pytest.mark.parametrize(("length", "fits"), [(24, True), (25, False)])
def test_the_full_sequence_gate_counts_the_input_and_not_the_output(
    reserve: bool, length: int, fits: bool
) -> None:
    driver = pressed(
        enable_prefix_caching=False,
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=reserve,
        cache={"preempt_threshold": 1.0},
    )
    driver.add("runs", prompt_of(4, 0), max_tokens=5)
    driver.step()
    driver.step()
    assert driver.num_free_blocks == 6  # 24 tokens; with all its output it would need 8 blocks
    driver.add("waits", prompt_of(length, 40), max_tokens=32 - length)
    driver.step()
    assert driver.running == (["runs", "waits"] if fits or not reserve else ["runs"])
    driver.run()
    assert len(driver.finished) == 2


@pytest.mark.req("ERR-32")
def test_the_input_of_a_resumed_request_includes_what_it_had_sampled() -> None:
    driver = pressed(
        enable_prefix_caching=False,
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=True,
        cache={"preempt_threshold": 1.0},
    )
    driver.add("runs", prompt_of(4, 0), max_tokens=5)
    driver.step()
    driver.step()
    driver.add("comes back", prompt_of(22, 40), outputs=[50, 51, 52], max_tokens=5)
    driver.step()
    assert driver.running == ["runs"]  # 25 tokens need 7 blocks, 6 are free
    driver.run()


@pytest.mark.req("ERR-38")
def test_admission_keeps_the_watermark_that_the_check_has_promised() -> None:
    # 40 usable blocks, int(41 * 0.1) = 4 are reserved while a request runs.
    driver = Driver(
        num_blocks=41, max_num_batched_tokens=256, cache={"watermark": 0.1}, max_model_len=64
    )
    for index in range(4):
        driver.add(f"r{index}", prompt_of(35, 18 * index), max_tokens=9)  # nine blocks each
    driver.step()
    assert driver.running == ["r0", "r1", "r2", "r3"]
    assert driver.num_free_blocks == 4
    driver.add("tiny", prompt_of(1, 80), max_tokens=1)
    driver.step()
    assert "tiny" not in driver.scheduled
    for _ in range(2):
        driver.step()
    assert driver.num_free_blocks < 4  # those who run may take what was kept back
    driver.run()
    assert len(driver.finished) == 5
