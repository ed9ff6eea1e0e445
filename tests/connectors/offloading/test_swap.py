"""Swapped requests: a scheduler with the offloading connector under memory pressure, and a scripted
worker half."""

from typing import Any, ClassVar

import msgspec
import pytest

from longshore.connectors.base.groups import is_private, private_key
from longshore.connectors.offloading.messages import LoadJob, StoreJob, TierJob
from longshore.connectors.offloading.tiers import Spill, TierTask
from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.outputs import FinishedRequest, FinishReason
from tests.connectors.offloading.offload_driver import Job, OffloadDriver
from tests.connectors.offloading.random_run import GROUPS, RandomRun
from tests.harness.clients import RequestKey
from tests.harness.kv_groups import full
from tests.harness.random_runs import run_until_seen
from tests.harness.tokens import prompt_of

CACHE = {"watermark": 0.0, "preempt_threshold": 0.8, "admit_threshold": 0.6}


def swapping(*specs: KVCacheSpec, mode: str = "swap", **settings: Any) -> OffloadDriver:
    """20 usable blocks of four tokens, of which 16 may be held before a request is swapped out."""
    defaults: dict[str, Any] = {"num_blocks": 21, "max_tokens": 24, "max_model_len": 64}
    cache = CACHE | settings.pop("cache", {})
    return OffloadDriver(*specs, preemption_mode=mode, cache=cache, **(defaults | settings))


def swapped_out(driver: OffloadDriver, limit: int = 60) -> str:
    """Run until a request is swapped out, with ordinary stores ending at once; its id."""
    for _ in range(limit):
        driver.step()
        for request_id, request in driver.requests.items():
            if request.is_swapped:
                return request_id
        end_others(driver)
    raise AssertionError("no request was swapped out")


def swap_jobs(driver: OffloadDriver) -> list[Job]:
    """Stores with a private block."""
    return [job for job in driver.jobs_of(StoreJob) if any(map(is_private, keys_of(job)))]


def keys_of(job: Job) -> list[bytes]:
    assert isinstance(job.command, StoreJob | LoadJob)
    return job.command.blocks.keys


def end_others(driver: OffloadDriver) -> None:
    """All jobs end but loads, and stores of swapped requests."""
    for job in list(driver.jobs):
        if job not in swap_jobs(driver) and not isinstance(job.command, LoadJob):
            for rank in list(job.ranks_left):
                driver.end(job, rank)


def end(driver: OffloadDriver, jobs: list[Job], failing: tuple[int, ...] = ()) -> None:
    for job in list(jobs):
        for rank in list(job.ranks_left):
            driver.end(job, rank, failing)


def two_requests(driver: OffloadDriver) -> list[Any]:
    return [driver.add("one", prompt_of(17)), driver.add("two", prompt_of(18, 50))]


def until_loading(driver: OffloadDriver) -> Job:
    """Everything goes on until a load has begun."""
    for _ in range(200):
        if driver.jobs_of(LoadJob):
            return driver.jobs_of(LoadJob)[0]
        end_others(driver)
        end(driver, swap_jobs(driver))
        driver.step()
    raise AssertionError("no load began")


@pytest.mark.req("TIE-03", "TIE-04", "ERR-10", "ERR-14")
def test_a_swapped_request_frees_its_blocks_when_they_are_copied_and_recomputes_nothing() -> None:
    driver = swapping(max_steps_in_flight=1)
    keys = two_requests(driver)
    assert swapped_out(driver) == "two", "the youngest"
    request = driver.requests["two"]
    num_computed = request.num_tokens - 1
    (job,) = swap_jobs(driver)
    assert [is_private(key) for key in keys_of(job)].count(True) == 1, "the partial block"
    copied = {block_id for block_id in job.command.blocks.ids(1).ravel().tolist()}
    assert copied.isdisjoint(driver.scheduler.kv_cache.pool.free_block_ids())
    end(driver, [job])
    driver.plan()
    assert copied <= set(driver.scheduler.kv_cache.pool.free_block_ids())
    until_loading(driver)
    end(driver, driver.jobs_of(LoadJob))
    assert request.hold.num_computed_tokens == num_computed
    driver.settle()
    driver.check_complete(*keys)
    stats = driver.scheduler.make_stats()
    assert (stats.num_swapped_out, stats.num_swapped_in, stats.num_preemptions) == (1, 1, 1)
    assert stats.num_swapped_out_blocks == -(-num_computed // 4)
    assert stats.num_swapped_in_blocks > 0


WITH_STATE = {"state": 36, "large state": 80, "state alone": 24}
"""Blocks with which requests are swapped: each needs pages, and grows little."""


@pytest.mark.req("TIE-04", "TIE-06")
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("caches", [True, False])
def test_every_kind_of_group_is_swapped_and_changes_no_token(name: str, caches: bool) -> None:
    """The workers check the KV of each position that is read."""
    specs = GROUPS[name]
    driver = swapping(
        *specs,
        num_blocks=WITH_STATE.get(name, 11 * len(specs) + 10),
        enable_prefix_caching=caches,
        num_slots=400,
        max_num_batched_tokens=16,
        max_model_len=40,
        cache={"preempt_threshold": 0.3, "admit_threshold": 0.3},
    )
    keys = [driver.add(f"r{n}", prompt_of(5 + n, 30 * n), max_tokens=24) for n in range(8)]
    driver.settle()
    driver.check_complete(*keys)
    stats = driver.scheduler.make_stats()
    assert stats.num_swapped_in > 0, stats


@pytest.mark.req("TIE-04")
@pytest.mark.parametrize("block_size", [8, 16])
def test_offloaded_blocks_of_several_device_blocks_are_swapped(block_size: int) -> None:
    """The last offloaded block is partial even where the device's block is full."""
    driver = swapping(options={"block_size": block_size})
    keys = two_requests(driver)
    swapped_out(driver)
    (job,) = swap_jobs(driver)
    rows = job.command.blocks.ids(block_size // 4)
    assert rows[-1][-1] == 0, "no token is there yet"
    driver.settle()
    driver.check_complete(*keys)
    assert driver.scheduler.make_stats().num_swapped_in == 1


@pytest.mark.req("TIE-06")
def test_others_run_while_a_request_is_copied_and_while_it_is_loaded() -> None:
    driver = swapping()
    two_requests(driver)
    swapped_out(driver)
    num_tokens = len(driver.received[(0, 0)])
    driver.steps(4)
    assert len(driver.received[(0, 0)]) >= num_tokens + 3
    reasons = [each.waits_for for each in driver.scheduler.make_report(driver.now, "").waiting]
    assert reasons == ["the copy of its KV, which is being swapped out"]
    until_loading(driver)
    later = driver.add("later", prompt_of(5, 3), max_tokens=3)
    driver.steps(8)
    assert later in driver.finished, "it was not held up"
    assert driver.requests["two"].row < 0, "not before everything is there"
    driver.settle()


@pytest.mark.req("TIE-04")
def test_a_request_runs_on_if_host_memory_has_no_room() -> None:
    driver = swapping(num_slots=3)
    keys = two_requests(driver)
    driver.settle()
    driver.check_complete(*keys)
    stats = driver.scheduler.make_stats()
    assert stats.num_swapped_out == 0
    assert stats.num_swaps_refused > 0
    assert stats.num_swaps_refused < 4, "an attempt in every step would stop its victim"


@pytest.mark.req("TIE-07")
def test_a_shared_block_stays_where_it_is_for_its_other_users() -> None:
    driver = swapping(num_blocks=19)
    shared = prompt_of(20)
    keys = [driver.add("one", [*shared, 5])]
    driver.steps(3)
    keys.append(driver.add("two", [*shared, 6, 7]))
    driver.step()
    common = driver.table("one")[:5]
    assert driver.table("two")[:5] == common
    swapped_out(driver)
    assert driver.table("one")[:5] == common
    (job,) = swap_jobs(driver)
    in_use = set(job.command.blocks.ids(1).ravel().tolist()) & set(common)
    assert not in_use, "they were stored by their hashes, once"
    end(driver, [job])
    until_loading(driver)
    (_load,) = driver.jobs_of(LoadJob)
    driver.settle()
    driver.check_complete(*keys)


@pytest.mark.req("TIE-08")
def test_the_victim_is_the_policys_and_no_request_with_a_copy_in_flight() -> None:
    driver = swapping(policy="priority", num_blocks=31, load_timeout_s=20.0, max_tokens=20)
    for name, priority in (("low", 2), ("high", 0), ("middle", 1)):
        driver.add(name, prompt_of(17, 20 * priority), priority=priority)
    assert swapped_out(driver) == "low"
    until_loading(driver)
    (load,) = driver.jobs_of(LoadJob)
    driver.now += 20.0  # it recomputes in other blocks, and its load never ends
    for _ in range(60):
        driver.step()
        end_others(driver)
        end(driver, swap_jobs(driver))
        assert not driver.requests["low"].is_swapped or driver.requests["low"].row < 0
        assert [each.name for each in driver.jobs_of(LoadJob)].count("low") <= 1
    end(driver, [load])
    driver.settle()


@pytest.mark.req("TIE-08")
def test_a_swapped_request_is_resumed_before_waiting_ones() -> None:
    driver = swapping(max_num_seqs=2)
    two_requests(driver)
    swapped_out(driver)
    end(driver, swap_jobs(driver))
    waiting = [driver.add(f"w{n}", prompt_of(12, 40 + n)) for n in range(3)]
    while not driver.jobs_of(LoadJob):
        assert all(driver.requests[f"w{n}"].num_cached_tokens < 0 for n in range(3)), "none began"
        driver.step()
        end_others(driver)
    (load,) = driver.jobs_of(LoadJob)
    assert load.name == "two"
    driver.settle()
    driver.check_complete(*waiting)


@pytest.mark.parametrize("when", ["copying", "copied", "loading", "loaded"])
@pytest.mark.parametrize("how", ["abort", "stop", "epoch", "reset"])
def test_a_swap_ends_at_any_time_and_leaves_nothing_behind(when: str, how: str) -> None:
    """`settle` checks that no block, slot or pin is left."""
    driver = swapping()
    keys = two_requests(driver)
    swapped_out(driver)
    if when != "copying":
        end(driver, swap_jobs(driver))
    if when in ("loading", "loaded"):
        until_loading(driver)
    if when == "loaded":
        end(driver, driver.jobs_of(LoadJob))
    match how:
        case "abort":
            driver.abort(keys[1])
        case "stop":
            driver.stop_found(keys[1], 2)
        case "epoch":
            driver.restart_workers(late_outputs=True)
        case "reset":
            was_reset = driver.scheduler.reset_connector_cache()
            assert was_reset or driver.jobs
    driver.settle()
    driver.check_complete(keys[0])
    if how in ("epoch", "reset"):
        driver.check_complete(keys[1])


@pytest.mark.req("TIE-04")
@pytest.mark.parametrize("failed", ["first", "tail", "all"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_cannot_be_restored_is_recomputed(failed: str, policy: str) -> None:
    """Also where requests fail whose prompt cannot be loaded: this load was the engine's choice."""
    driver = swapping(load_failure_policy=policy)
    keys = two_requests(driver)
    swapped_out(driver)
    load = until_loading(driver)
    num_blocks = len(keys_of(load))
    failing = {"first": (0,), "tail": (num_blocks - 1,), "all": tuple(range(num_blocks))}[failed]
    end(driver, [load], failing)
    request = driver.requests["two"]
    num_good = {"first": 0, "tail": 4 * (num_blocks - 1), "all": 0}[failed]
    assert request.num_computed_tokens >= num_good
    assert request.num_computed_tokens % 4 == 0, "up to the last good block"
    driver.settle()
    driver.check_complete(*keys)
    assert driver.scheduler.make_stats().num_swapped_in == 0


def test_a_copy_that_failed_is_recomputed_from_its_last_good_block() -> None:
    driver = swapping()
    keys = two_requests(driver)
    swapped_out(driver)
    (job,) = swap_jobs(driver)
    end(driver, [job], tuple(range(len(keys_of(job)))))
    driver.settle()
    driver.check_complete(*keys)


def test_a_load_that_is_late_is_recomputed() -> None:
    driver = swapping(load_timeout_s=30.0, load_failure_policy="fail", num_blocks=31, max_tokens=40)
    keys = two_requests(driver)
    swapped_out(driver)
    until_loading(driver)
    driver.now += 30.0
    driver.steps(3)
    assert driver.requests["two"].row >= 0
    driver.settle()
    driver.check_complete(*keys)


def test_private_blocks_stay_in_host_memory() -> None:
    """They are not written to disk, no event is about them, and no other request finds them."""
    driver = swapping(num_disk_slots=60)
    keys = two_requests(driver)
    swapped_out(driver)
    (job,) = swap_jobs(driver)
    end(driver, [job])
    manager = driver.offloading._manager
    private = [key for key in keys_of(job) if is_private(key)]
    assert manager.lookup_swap(private) is True
    same = driver.add("same", driver.requests["two"].token_ids.tolist(), max_tokens=1)
    spilled: list[bytes] = []
    for _ in range(200):
        driver.step()
        for tier_job in driver.jobs_of(TierJob):
            task = msgspec.msgpack.decode(tier_job.command.tier_data, type=TierTask)
            spilled += task.keys if isinstance(task, Spill) else []
        end_others(driver)
        if same in driver.finished:
            break
        end(driver, swap_jobs(driver))
        end(driver, driver.jobs_of(LoadJob))
    assert spilled
    assert not any(map(is_private, spilled))
    driver.settle()
    driver.check_complete(*keys, same)
    assert manager.lookup_swap(private) is False, "removed with the request"


def test_no_event_is_about_a_private_block() -> None:
    driver = swapping()
    manager = driver.offloading._manager
    manager._publishes_events = True
    two_requests(driver)
    swapped_out(driver)
    driver.settle()
    hashes = [event.block_hash for event in driver.offloading.take_events()]
    assert hashes
    assert {len(each) for each in hashes} == {len(driver.requests["one"].block_hashes[0])}


def test_a_session_continues_with_the_tokens_that_it_kept_not_with_its_swapped_tail() -> None:
    """A stop string cuts its output while it is swapped out, and its next input follows."""
    driver = swapping()
    one = driver.add("one", prompt_of(17))
    session = driver.add("session", prompt_of(18, 50), resumable=True)
    assert swapped_out(driver) == "session"
    end(driver, swap_jobs(driver))
    driver.stop_found(session, 1)
    driver.continue_session(session, [61, 62, 63, 64, 65], max_tokens=4, resumable=False)
    driver.settle()
    driver.check_complete(one)
    assert driver.finished[session].reason is FinishReason.LENGTH_CAPPED


@pytest.mark.req("NUM-24", "ERR-14", "ERR-15")
def test_the_published_round_trip() -> None:
    """100 tokens are 7 blocks of 16. (GPU free, CPU free, sequences, blocks); what is read back is
    what was written, which the workers check."""
    driver = swapping(
        full(16),
        num_blocks=1025,
        num_slots=2048,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_batched_tokens=128,
        max_steps_in_flight=1,
    )
    ledger = driver.offloading._manager._host

    def counts() -> tuple[int, int, int, int]:
        live = [r for r in driver.requests.values() if not r.is_finished]
        blocks = sum(-(-max(r.num_tokens, 100) // 16) for r in live)
        return driver.num_free_blocks, ledger.num_free, len(live), blocks

    assert counts() == (1024, 2048, 0, 0)
    key = driver.add("sequence", prompt_of(100), max_tokens=8)
    driver.step()
    assert counts() == (1017, 2048, 1, 7)
    scheduler, request = driver.scheduler, driver.requests["sequence"]
    scheduler._attached.swaps._swap_out(request, scheduler.num_steps + 1, driver.now)
    driver.plan()
    assert counts() == (1017, 2041, 1, 7), "the source blocks are held until they are copied"
    end(driver, swap_jobs(driver))
    assert counts() == (1024, 2041, 1, 7)
    driver.answer()
    driver.plan()
    end(driver, driver.jobs_of(LoadJob))
    driver.answer()
    driver.plan()
    assert counts() == (1017, 2048, 1, 7)
    driver.abort(key)
    driver.settle()
    assert counts() == (1024, 2048, 0, 0)


def test_private_keys_are_no_block_hashes() -> None:
    keys = [private_key(1, 2, 3), private_key(1, 3, 3), private_key(2, 2, 3)]
    assert len(set(keys)) == 3
    assert all(key[-1] == 3 for key in keys), "the group, as of any key"
    assert all(map(is_private, keys))
    assert not any(is_private(bytes(size + 1)) for size in (16, 32))


# At random


class SwapRun(RandomRun):
    """Long answers in little memory, and sessions."""

    NUM_REQUESTS = 25
    MOST_STEPS = 11
    LOAD_TIMEOUT_S = 40.0
    POLICIES = ("lru", "arc", "s3fifo")
    EVENTS: ClassVar[dict[str, int]] = {
        "go_on": 22,
        "abort": 2,
        "repeat": 1,
        "be_late": 1,
        "reset": 1,
        "die": 1,
        "stop": 1,
        "continue_session": 1,
    }

    def disk_options(self) -> dict[str, Any]:
        return {}

    def settings(self, num_groups: int) -> dict[str, Any]:
        chance = self.chance
        return {
            "preemption_mode": chance.choice(["swap", "auto"]),
            "num_blocks": num_groups * chance.randrange(22, 30) + 4,
            "num_slots": chance.choice([6, 8, 40, 200]),
            "max_num_seqs": chance.randrange(2, 6),
            "max_model_len": 48,
            "enable_prefix_caching": chance.random() < 0.8,
            "policy": chance.choice(["fcfs", "priority"]),
            "cache": {
                "watermark": 0.0,
                "preempt_threshold": chance.choice([0.5, 0.7]),
                "admit_threshold": 0.5,
            },
        }

    def draw(self, number: int) -> tuple[str, list[int], dict[str, Any]]:
        chance = self.chance
        prompt = prompt_of(chance.randrange(1, 24), chance.choice([10, 40, 60]))
        fields = {"priority": chance.randrange(3), "max_tokens": chance.randrange(1, 24)}
        if chance.random() < 0.15:
            fields |= {"resumable": True, "keeps_blocks": chance.random() < 0.5}
        return f"r{number}", prompt, fields

    def stop(self) -> None:
        self.driver.stop_found(self.chance.choice(self.keys), self.chance.randrange(3))

    def continue_session(self) -> None:
        key = self.chance.choice(self.keys)
        self.driver.continue_session(key, [60, 61], max_tokens=3, resumable=True)

    def finish(self) -> None:
        driver, chance = self.driver, self.chance
        live = [key for key in self.keys if key not in driver.finished]
        driver.abort(*[key for key in live if chance.random() < 0.3])
        driver.run_until_quiet()
        driver.abort(*[key for key in live if key not in driver.finished])  # sessions
        driver.settle()

    def check_end(self, key: RequestKey, end: FinishedRequest) -> None:
        if end.reason is FinishReason.LENGTH_CAPPED and not self.driver.continued[key]:
            self.driver.check_complete(key)
        assert end.reason is not FinishReason.ERROR or "session" in (end.message or ""), end


@pytest.mark.req("TIE-03", "TIE-04", "TIE-06", "TIE-07", "ERR-14", "ERR-15")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))]
)
def test_random_swaps_change_no_token_and_leave_nothing_behind(part: int) -> None:
    whats = ("swapped out", "swapped in", "refused", "failed loads", "epochs", "reset")
    run_until_seen(lambda seed: SwapRun(seed).play(), range(part, 40, 4), dict.fromkeys(whats, 1))


def test_requests_with_no_store_are_swapped_under_private_keys() -> None:
    """They stay in host memory, and end with the swap."""
    driver = swapping(num_disk_slots=40)
    keys = [
        driver.add(name, prompt, no_store=True)
        for name, prompt in (("one", prompt_of(17)), ("two", prompt_of(18, 50)))
    ]
    swapped_out(driver)
    driver.settle()
    driver.check_complete(*keys)
    assert driver.loaded
    assert all(map(is_private, [*driver.loaded, *driver.stored_keys]))
    assert not driver.tiers[0].disk
