"""The scheduler half of the offloading connector, in a scheduler with a scripted worker half."""

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import (
    ConnectorOutput,
    Matched,
    RequestView,
    StepView,
    StorableBlocks,
)
from longshore.connectors.offloading.gaps import NewBlocks
from longshore.connectors.offloading.messages import Commands, LoadJob, StoreJob
from longshore.protocol.arrays import int32_array
from longshore.protocol.kv_cache_spec import KVCacheSpec
from tests.connectors.holds import Holds
from tests.connectors.offloading.offload_driver import OffloadDriver
from tests.connectors.offloading.random_run import RandomRun
from tests.harness.kv_groups import full, state
from tests.harness.random_runs import run_until_seen
from tests.harness.tokens import prompt_of

OTHER = prompt_of(58, 45)
"""Evicts everything else from a device of 17 blocks."""


def small(*specs: KVCacheSpec, **settings: Any) -> OffloadDriver:
    return OffloadDriver(*specs, **({"num_blocks": 17} | settings))


@pytest.mark.req("LDS-01", "LDS-07", "OFF-12", "CRG-09")
def test_a_prompt_evicted_from_the_device_is_loaded() -> None:
    driver = small()
    driver.ask("first", prompt_of(33))
    driver.ask("other", OTHER)
    assert driver.loaded == []
    driver.ask("again", prompt_of(33))
    assert len(driver.loaded) == 8
    assert driver.scheduler.make_stats().num_external_hit_tokens == 32
    (begun,) = [load for load in [driver.requests["again"].num_external_tokens] if load]
    assert begun == 32


@pytest.mark.req("LDS-01", "LDS-03", "OFF-10")
def test_hits_are_counted_in_offloaded_blocks_and_begin_within_one() -> None:
    """Offloaded blocks of 16 tokens: after 20 local tokens a hit ends at a multiple of 16, and the
    first block of the device is not loaded again."""
    driver = small(options={"block_size": 16})
    driver.ask("first", prompt_of(50))
    driver.ask("other", OTHER)
    driver.ask("short", prompt_of(21), max_tokens=1, skip_reading_prefix_cache=True)
    driver.add("again", prompt_of(50))
    driver.plan()
    (job,) = driver.jobs_of(LoadJob)
    assert isinstance(job.command, LoadJob)
    ids = job.command.blocks.ids(4)
    assert (ids == 0).tolist() == [[True, False, False, False], [False] * 4]
    assert driver.requests["again"].num_external_tokens == 48 - 20
    driver.settle()


def view(request_id: str, num_tokens: int, *, salt: int = 0) -> RequestView:
    tokens = int32_array(range(num_tokens))
    hashes = [bytes((salt, index)) * 4 for index in range(num_tokens // 4)]
    return RequestView(request_id, tokens, num_tokens, hashes)


@pytest.mark.req("OFF-08", "ERR-26", "ERR-27", "CRG-09")
def test_a_request_that_asks_in_every_step_counts_once() -> None:
    """With a threshold of two uses, a block is stored when a second request has it."""
    driver = small(options={"store_threshold": 2})
    connector = driver.offloading
    for _ in range(10):
        connector.get_num_new_matched_tokens(view("waiting", 8), 0)
    assert connector._manager.prepare_store([view("waiting", 8).block_hashes[0] + b"\0"]) == (
        [],
        b"",
    )
    driver = small(options={"store_threshold": 2})
    driver.ask("first", prompt_of(33))
    assert driver.stored_keys == []
    driver.ask("other", OTHER)
    driver.ask("second", prompt_of(33))
    assert len(driver.stored_keys) == 8


@pytest.mark.req("LDS-02", "ERR-26")
def test_a_second_request_waits_for_the_load_of_the_first() -> None:
    """Blocks and `max_loading_blocks` would allow both loads."""
    driver = small(num_blocks=30, max_loading_blocks=1000)
    driver.ask("first", prompt_of(33))
    driver.ask("other", OTHER)
    driver.ask("more", prompt_of(58, 11), max_tokens=1)
    keys = [driver.add("one", prompt_of(33)), driver.add("two", prompt_of(30))]
    other = driver.add("third", prompt_of(9, 70))
    driver.steps(3)
    assert len(driver.jobs_of(LoadJob)) == 1
    assert driver.requests["two"].row < 0
    assert driver.requests["third"].row >= 0 or other in driver.finished, "it need not wait"
    driver.settle()
    driver.check_complete(*keys, other)
    assert len(driver.loaded) == 8, "the blocks were loaded once"


@pytest.mark.req("LDS-02")
@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_nothing_waits_for_a_load_that_was_abandoned(how: str) -> None:
    """It may never end; its blocks stay in quarantine. Blocks and `max_loading_blocks` would allow
    a second load beside it."""
    driver = small(num_blocks=33, load_timeout_s=50.0, max_loading_blocks=1000)
    driver.ask("first", prompt_of(33))
    driver.ask("other", prompt_of(58, 45))
    driver.ask("more", prompt_of(58, 11), max_tokens=1)
    key = driver.add("one", prompt_of(33))
    driver.plan()
    second = driver.add("two", prompt_of(33))
    driver.steps(2)
    assert second not in driver.finished
    assert len(driver.jobs_of(LoadJob)) == 1
    if how == "abort":
        driver.abort(key)
    else:
        driver.now += 50.0
    driver.steps(2)
    old, *_ = driver.jobs_of(LoadJob)
    for job in list(driver.jobs):
        if job is not old:
            driver.end(job, 0)
    driver.run_until_idle()
    for job in list(driver.jobs):
        if job is not old:
            driver.end(job, 0)
    driver.run_until_idle()
    driver.check_complete(second)
    assert driver.scheduler.make_stats().num_quarantined_blocks > 0
    driver.settle()


def test_every_block_is_stored_once() -> None:
    driver = OffloadDriver(num_blocks=40)
    driver.ask("first", prompt_of(33), max_tokens=12)
    assert len(driver.stored_keys) == 11
    driver.ask("longer", prompt_of(49), max_tokens=4)
    driver.ask("equal", prompt_of(33), max_tokens=4)
    assert len(driver.stored_keys) == len(set(driver.stored_keys))


@pytest.mark.req("LDS-05", "CRG-09")
def test_a_store_begins_when_the_step_of_its_blocks_is_answered() -> None:
    driver = OffloadDriver()
    driver.add("request", prompt_of(33), max_tokens=12)
    assert driver.plan() is not None
    assert driver.plan() is not None
    assert driver.jobs_of(StoreJob) == []
    driver.answer()
    driver.plan()
    (job,) = driver.jobs_of(StoreJob)
    assert isinstance(job.command, StoreJob)
    assert len(job.command.blocks.keys) == 8
    driver.settle()


@pytest.mark.req("LDS-06", "TIE-03", "ERR-14")
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_blocks_are_kept_until_their_store_has_ended(end: str) -> None:
    driver = OffloadDriver(num_ranks=2)
    key = driver.add("request", prompt_of(33), max_tokens=1 if end == "finish" else 20)
    driver.steps(3)
    if end == "abort":
        driver.abort(key)
    driver.run_until_idle()
    (job,) = driver.jobs_of(StoreJob)
    assert key in driver.finished
    assert driver.num_free_blocks == 39 - 8
    driver.end(job, 1)
    assert driver.num_free_blocks == 39 - 8
    driver.end(job, 0)
    assert driver.num_free_blocks == 39
    driver.settle()


@pytest.mark.req("MET-05", "MET-06")
def test_a_block_that_could_not_be_read_is_computed_and_not_found_again() -> None:
    driver = small(num_ranks=2)
    driver.ask("first", prompt_of(33))
    driver.ask("other", OTHER)
    key = driver.add("again", prompt_of(33))
    driver.plan()
    (job,) = driver.jobs_of(LoadJob)
    driver.end(job, 1, [3])
    driver.end(job, 0)
    assert driver.offloading._manager.lookup(job.command.blocks.keys, 0.0) == 3
    driver.settle()
    driver.check_complete(key)
    driver.ask("other again", OTHER)
    driver.loaded.clear()
    driver.ask("third", prompt_of(33))
    assert len(driver.loaded) == 8, "it was stored again"


@pytest.mark.req("MET-07")
def test_a_load_of_which_nothing_arrives_is_computed() -> None:
    driver = small()
    driver.ask("first", prompt_of(33))
    driver.ask("other", OTHER)
    key = driver.add("again", prompt_of(33))
    driver.plan()
    driver.end_all(failing=range(8))
    driver.settle()
    driver.check_complete(key)


@pytest.mark.req("OFF-07")
def test_a_block_whose_store_failed_on_one_rank_is_not_found() -> None:
    driver = small(num_ranks=2)
    key = driver.add("first", prompt_of(33))
    driver.run_until_idle()
    job = driver.jobs_of(StoreJob)[0]
    driver.end(job, 0, [2])
    driver.settle()
    driver.check_complete(key)
    driver.ask("other", OTHER)
    driver.ask("again", prompt_of(33))
    assert len(driver.loaded) == 2


@pytest.mark.req("MET-08")
def test_reports_of_unknown_jobs_and_requests_are_ignored() -> None:
    driver = small()
    driver.ask("first", prompt_of(33))
    for index in range(len(driver.said)):
        driver.repeat(index)
    driver.offloading.update_connector_output(ConnectorOutput(finished_receiving=("unknown",)))
    driver.check_settled()
    driver.ask("other", OTHER)
    driver.ask("again", prompt_of(33))


def test_few_blocks_of_the_device_are_held_by_stores() -> None:
    """With stores that do not end, most blocks stay free for requests."""
    driver = OffloadDriver(num_blocks=40, num_slots=200)
    keys = []
    for number in range(12):
        keys.append(driver.add(f"r{number}", prompt_of(20, 7 * number)))
        driver.run_until_idle()
    driver.check_complete(*keys)
    held = sum(len(ids) for ids in driver.transfers.holding.values())
    assert 10 <= held < 20
    driver.settle()


def keys_in_order(driver: OffloadDriver, prompt: Sequence[int]) -> list[bytes]:
    """The keys of a prompt's blocks, as an idle connector stores them."""
    other = OffloadDriver(num_blocks=200)
    other.ask("request", prompt, max_tokens=1)
    assert len(other.stored_keys) == (len(prompt) - 1) // driver.specs[0].block_size
    return other.stored_keys


@pytest.mark.req("LDS-04")
@pytest.mark.parametrize("why", ["the device", "host memory"])
def test_blocks_left_out_are_stored_before_those_after_them(why: str) -> None:
    """While stores do not end, there is no room for more: the request goes on, and the rest of its
    blocks is stored in order as soon as there is room."""
    num_slots = 7 if why == "host memory" else 64
    num_blocks = 80 if why == "host memory" else 24
    driver = OffloadDriver(num_blocks=num_blocks, max_num_batched_tokens=12, num_slots=num_slots)
    prompt = prompt_of(49)
    expected = keys_in_order(driver, prompt)
    driver.add("request", prompt, max_tokens=14)
    driver.steps(8)
    assert driver.stored_keys == expected[:6]
    driver.end_all()
    driver.steps(2)
    assert driver.stored_keys == expected, "in several jobs, none of which has ended before"
    assert driver.requests["request"].row >= 0
    driver.settle()
    assert len(driver.stored_keys) == len(set(driver.stored_keys))


@pytest.mark.req("LDS-04")
def test_after_a_preemption_nothing_is_stored_behind_blocks_that_were_left_out() -> None:
    """The request does not own them any more, and does not compute them again, because the prefix
    cache of the device still has them."""
    driver = OffloadDriver(num_blocks=24, max_num_batched_tokens=12)
    prompt = prompt_of(49)
    expected = keys_in_order(driver, prompt)
    key = driver.add("request", prompt, max_tokens=14)
    driver.steps(5)
    assert driver.stored_keys == expected[:6]
    while driver.unanswered:
        driver.answer()
    driver.scheduler._lifecycle.preempt(driver.requests["request"], driver.now)
    for _ in range(40):
        driver.step()
        driver.end_all()
    driver.settle()
    driver.check_complete(key)
    assert driver.stored_keys == expected[:6]
    gaps = driver.offloading._stores.gaps
    assert gaps._gaps == gaps._first_steps == {}


def test_reset_evicts_everything_unless_a_transfer_is_in_progress() -> None:
    driver = small()
    driver.ask("first", prompt_of(33))
    driver.ask("other", OTHER)
    driver.add("again", prompt_of(33))
    driver.plan()
    assert not driver.scheduler.reset_connector_cache()
    driver.settle()
    assert driver.scheduler.reset_connector_cache()
    driver.ask("other again", OTHER)
    driver.loaded.clear()
    driver.ask("third", prompt_of(33))
    assert driver.loaded == []


@pytest.mark.parametrize("specs", [(full(),), (full(), full(8))])
def test_a_load_that_host_memory_has_no_room_for_begins_with_fewer_blocks(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    """The rest is computed. The load has not failed, so that the request goes on even if failed
    loads end their requests."""
    driver = small(
        *specs,
        num_blocks=17 + 12 * (len(specs) - 1),
        num_slots=7,
        num_disk_slots=200,
        load_failure_policy="fail",
        max_num_batched_tokens=16,
    )
    driver.ask("first", prompt_of(33))
    for number in range(4):
        driver.ask(f"other {number}", prompt_of(58, 45 + number))
    key = driver.add("again", prompt_of(33))
    driver.step()
    (job,) = driver.jobs_of(LoadJob)
    assert isinstance(job.command, LoadJob)
    assert job.command.missing == []
    assert 0 < driver.requests["again"].num_external_tokens < 32
    driver.settle()
    driver.check_complete(key)


def test_a_reset_says_why_it_is_not_possible(caplog: pytest.LogCaptureFixture) -> None:
    driver = small(num_disk_slots=40, num_ranks=2)
    driver.ask("first", prompt_of(33))
    driver.ask("other", OTHER)
    driver.add("again", prompt_of(33))
    driver.plan()
    assert not driver.scheduler.reset_connector_cache()
    assert "were not emptied, because 1 loads and 0 stores" in caplog.text
    driver.settle()
    assert driver.scheduler.reset_connector_cache()
    driver.settle()
    assert [tiers.disk for tiers in driver.tiers] == [{}, {}]


def test_after_a_new_epoch_host_memory_is_found_again() -> None:
    driver = small(num_ranks=2)
    driver.ask("first", prompt_of(33))
    driver.restart_workers()
    driver.ask("again", prompt_of(33))
    assert len(driver.loaded) == 8
    driver.keeps_host = False
    driver.restart_workers()
    driver.ask("third", prompt_of(33))
    assert len(driver.loaded) == 8


def test_after_a_new_epoch_the_disk_is_found_again() -> None:
    driver = small(num_disk_slots=40, num_ranks=2)
    driver.keeps_host = False
    driver.ask("first", prompt_of(33))
    driver.restart_workers()
    assert len(driver.tiers[0].disk) == 9
    driver.ask("again", prompt_of(33))
    assert len(driver.loaded) == 8


def test_blocks_of_one_tenant_are_not_loaded_for_another() -> None:
    driver = small()
    driver.ask("first", prompt_of(33), cache_salt="one")
    driver.ask("other", OTHER)
    driver.ask("again", prompt_of(33), cache_salt="two")
    assert driver.loaded == []
    driver.ask("mine", prompt_of(33), cache_salt="one")


def test_an_idle_step_costs_the_same_for_any_number_of_requests() -> None:
    """Counted in calls and lines, because a clock would not be exact."""

    def num_events(num_requests: int) -> int:
        connector = OffloadDriver(num_blocks=2000, num_slots=4000).offloading
        for number in range(num_requests):
            request = view(f"r{number}", 40, salt=number % 200)
            connector.on_new_request(request)
            assert connector.get_num_new_matched_tokens(request, 0) == Matched(0)
        events = 0

        def count(*_: object) -> Any:
            nonlocal events
            events += 1
            return count

        sys.settrace(count)
        try:
            assert connector.build_connector_meta(StepView(1, 0)) == b""
        finally:
            sys.settrace(None)
        return events

    assert num_events(1) == num_events(500) <= 60


def test_an_offloaded_block_is_stored_with_the_last_of_its_blocks() -> None:
    connector = OffloadDriver(num_blocks=40, options={"block_size": 8}).offloading
    connector.bind_blocks(Holds())
    assert connector.chunk_blocks == 2
    begun = StorableBlocks(1, "r", 0, (5,), (b"v" * 8,), (0,))
    assert connector.build_connector_meta(StepView(2, 1, storable=[begun])) == b""
    completed = StorableBlocks(2, "r", 0, (6, 7), (b"w" * 8, b"x" * 8), (1, 2), earlier_ids=(5,))
    data = connector.build_connector_meta(StepView(3, 2, storable=[completed]))
    (store,) = msgspec.msgpack.decode(data, type=Commands).stores
    assert store.blocks.ids(2).tolist() == [[5, 6]]


def test_blocks_that_a_request_computed_before_its_last_admission_are_not_tried_again() -> None:
    """They belong to it no longer."""
    gaps = OffloadDriver(num_blocks=40).offloading._stores.gaps
    gaps.request_admitted("r", 5)
    gaps.leave(NewBlocks("r", 4, 0, [b"v"], [7], 0))
    assert list(gaps.take()) == []
    new = NewBlocks("r", 5, 0, [b"v"], [8], 0)
    gaps.leave(new)
    assert list(gaps.take()) == [[new]]
    gaps.request_stopped("r")
    gaps.leave(new)
    assert list(gaps.take()) == []


def test_a_state_that_no_step_has_written_is_not_found() -> None:
    """A loaded request has a block for its next token. A chunk that ends in a later block writes
    its state there, and nothing into that one."""
    driver = small(
        state(block_size=8), num_blocks=20, max_num_batched_tokens=24, max_steps_in_flight=1
    )
    driver.ask("first", prompt_of(25))
    for number in range(20):
        driver.ask(f"other{number}", prompt_of(33, 5 + 3 * number), max_tokens=1)
    driver.ask("longer", prompt_of(49))
    assert driver.requests["longer"].num_external_tokens == 24
    driver.ask("within", prompt_of(33))


def test_blocks_of_a_queued_request_are_read_ahead_while_others_run() -> None:
    """It is not at the head of the queue, so nobody has looked it up yet."""
    driver = small(
        num_slots=32, num_disk_slots=200, max_num_seqs=1, max_num_batched_tokens=16, num_blocks=40
    )
    driver.ask("first", prompt_of(33))
    for number in range(8):
        driver.ask(f"other {number}", prompt_of(58, 45 + number))
    driver.add("running", prompt_of(30, 7), max_tokens=20)
    driver.steps(2)
    key = driver.add("queued", prompt_of(33))
    driver.steps(2)
    assert driver.requests["queued"].row < 0
    driver.end_all()
    assert len(driver.read_ahead) == 8
    driver.settle()
    driver.check_complete(key)
    assert len(driver.loaded) == 8


def test_a_request_waits_for_lower_tiers_as_long_as_the_option_says() -> None:
    options = {"prefetch": "timeout", "prefetch_timeout_ms": 1500}
    driver = small(num_slots=16, num_disk_slots=200, options=options)
    driver.ask("first", prompt_of(33))
    for number in range(4):
        driver.ask(f"other {number}", prompt_of(58, 45 + number))
    driver.now = 100.0
    key = driver.add("again", prompt_of(33))
    for waited_s, is_begun in ((0.0, False), (1.0, False), (2.0, True)):
        driver.now = 100.0 + waited_s
        driver.step()
        assert (driver.requests["again"].row >= 0) == is_begun
    driver.settle()
    driver.check_complete(key)


@pytest.mark.req("CRG-09", "LDS-06", "LDS-07", "MET-05", "MET-07", "MET-08")
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))]
)
def test_random_requests_get_their_tokens_and_leave_nothing_behind(part: int) -> None:
    whats = (
        "loaded",
        "stored",
        "preemptions",
        "failed loads",
        "epochs",
        "reset",
        "read ahead",
    )
    run_until_seen(lambda seed: RandomRun(seed).play(), range(part, 64, 4), dict.fromkeys(whats, 1))


def test_blocks_that_a_paused_session_no_longer_has_are_not_stored() -> None:
    """There was no room for them while it ran; now others may have written to them."""
    driver = small(num_slots=8, num_blocks=33)
    driver.add("first", prompt_of(33), max_tokens=1)
    driver.steps(4)
    assert len(driver.jobs_of(StoreJob)) == 1, "it fills host memory"
    session = driver.add("session", prompt_of(33, 45), max_tokens=1, resumable=True)
    while not driver.continued[session]:
        driver.step()
    driver.steps(3)
    keys = {block_hash + b"\0" for block_hash in driver.requests["session"].block_hashes}
    assert keys.isdisjoint(driver.stored_keys)
    driver.end_all()
    driver.steps(3)
    assert keys.isdisjoint(driver.stored_keys), "they may be anything"
    driver.abort(session)
    driver.settle()


def test_a_request_with_no_store_leaves_nothing_in_the_tiers_and_takes_nothing() -> None:
    """One before it and one after it with the same prompt store and load all of their blocks."""
    driver = small(num_disk_slots=40)
    for name, num_loaded, num_stored in (("a", 0, 8), ("b", 8, 0)):
        driver.ask(f"{name} private", prompt_of(33), max_tokens=1, no_store=True)
        assert not driver.stored_keys
        assert not driver.loaded
        driver.ask(name, prompt_of(33), max_tokens=1)
        assert (len(driver.loaded), len(driver.stored_keys)) == (num_loaded, num_stored)
        assert len(driver.tiers[0].disk) == 8
        assert driver.scheduler.reset_prefix_cache()
        driver.loaded.clear()
        driver.stored_keys.clear()


def test_a_block_of_a_request_with_no_store_is_not_found_by_one_that_stores() -> None:
    """Else the second one would begin with blocks that no tier has."""
    driver = small(num_blocks=41)
    driver.add("private", prompt_of(33), max_tokens=20, no_store=True)
    driver.steps(3)
    for name in ("sibling", "public"):
        driver.add(name, prompt_of(33), max_tokens=1, no_store=name == "sibling")
    driver.settle()
    found = {name: driver.requests[name].num_cached_tokens for name in ("sibling", "public")}
    assert found == {"sibling": 32, "public": 0}
    assert len(driver.stored_keys) == 8
