"""Random requests on a scheduler with the offloading connector, and a worker half that does all
that its contract allows."""

import random
from collections import Counter
from typing import Any, ClassVar, Final

from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.outputs import FinishedRequest, FinishReason
from tests.connectors.offloading.offload_driver import OffloadDriver
from tests.harness.clients import RequestKey
from tests.harness.kv_groups import chunked, full, latent, state, window
from tests.harness.tokens import prompt_of

GROUPS: Final[dict[str, tuple[KVCacheSpec, ...]]] = {
    "full": (full(),),
    "latent": (latent(),),
    "two": (full(), full(8)),
    "window": (window(6),),
    "hybrid window": (full(), window(6)),
    "large window": (window(9), full(8)),
    "chunks": (chunked(8), full()),
    "state": (full(), state(3)),
    "large state": (full(), state(9)),
    "state alone": (state(1),),
}


class RandomRun:
    """Requests and aborts; jobs that end late, partly, or never; reports that are repeated; workers
    that are replaced. All it draws comes from `chance`, so a seed is a whole run.

    seen: how often things have happened.
    EVENTS: methods, of which one is called after each new request, by their weight.
    """

    NUM_REQUESTS: ClassVar[int] = 40
    MOST_STEPS: ClassVar[int] = 5
    LOAD_TIMEOUT_S: ClassVar[float] = 30.0
    POLICIES: ClassVar[tuple[str, ...]] = ("lru", "arc")
    EVENTS: ClassVar[dict[str, int]] = {
        "go_on": 20,
        "abort": 3,
        "repeat": 2,
        "be_late": 1,
        "wait": 2,
        "reset": 1,
        "die": 1,
    }

    def __init__(self, seed: int) -> None:
        chance = self.chance = random.Random(seed)
        self.may_fail = chance.random() < 0.6
        self.seen: Counter[str] = Counter()
        self.keys: list[RequestKey] = []
        name = chance.choice(["full", "full", *GROUPS])
        options: dict[str, Any] = {
            "eviction_policy": chance.choice(self.POLICIES),
            "store_threshold": chance.choice([0, 0, 2]),
        }
        if name in ("full", "latent"):
            options["block_size"] = chance.choice([None, 8, 16])
        num_disk_slots = chance.choice([0, 0, 8, 60])
        if num_disk_slots:
            options |= self.disk_options()
        self.driver = OffloadDriver(
            *GROUPS[name],
            num_disk_slots=num_disk_slots,
            num_ranks=chance.choice([1, 1, 2, 3]),
            hash_block_size=chance.choice([4, 2]),
            options=options,
            max_num_batched_tokens=chance.choice([16, 40, 100]),
            max_steps_in_flight=chance.choice([1, 2]),
            load_timeout_s=self.LOAD_TIMEOUT_S,
            **self.settings(len(GROUPS[name])),
        )

    def disk_options(self) -> dict[str, Any]:
        chance = self.chance
        options: dict[str, Any] = {
            "write_policy": chance.choice(["through", "back"]),
            "prefetch": chance.choice(["wait", "best_effort", "timeout"]),
        }
        if options["prefetch"] == "timeout":
            options["prefetch_timeout_ms"] = 3000
        return options

    def settings(self, num_groups: int) -> dict[str, Any]:
        """Of the driver."""
        chance = self.chance
        return {
            "num_blocks": num_groups * chance.randrange(18, 24),
            "num_slots": chance.choice([3, 10, 40]),
            "max_num_seqs": chance.randrange(1, 6),
            "enable_prefix_caching": chance.random() < 0.9,
        }

    def draw(self, number: int) -> tuple[str, list[int], dict[str, Any]]:
        """Id, prompt and fields of a new request."""
        chance = self.chance
        prompt = prompt_of(chance.randrange(1, 45), chance.choice([10, 40]))
        salt = chance.choice([None, None, None, "salt"])
        name = f"r{number}"
        if number and chance.random() < 0.05:
            name = f"r{chance.randrange(number)}"
        fields = {"max_tokens": chance.randrange(1, 8), "cache_salt": salt}
        return name, prompt, fields | {"no_store": number % 7 == 6}

    def play(self) -> Counter[str]:
        """The whole run; returns `seen`."""
        chance, driver = self.chance, self.driver
        for number in range(self.NUM_REQUESTS):
            name, prompt, fields = self.draw(number)
            self.keys.append(driver.add(name, prompt, **fields))
            for _ in range(chance.randint(0, self.MOST_STEPS)):
                driver.step()
                if chance.random() < 0.65:
                    driver.random_end(chance, self.may_fail)
            (event,) = chance.choices(list(self.EVENTS), list(self.EVENTS.values()))
            getattr(self, event)()
            driver.offloading._manager.check()
        self.finish()
        for key in self.keys:
            self.check_end(key, driver.finished[key])
        stats = driver.scheduler.make_stats()
        self.seen["read ahead"] += len(driver.read_ahead)
        self.seen["loaded"] += len(driver.loaded)
        self.seen["stored"] += len(driver.stored_keys)
        self.seen["preemptions"] += stats.num_preemptions
        self.seen["failed loads"] += len(driver.invalid_ids)
        self.seen["swapped out"] += stats.num_swapped_out
        self.seen["swapped in"] += stats.num_swapped_in
        self.seen["refused"] += stats.num_swaps_refused
        return self.seen

    def finish(self) -> None:
        """Until all requests and jobs have ended."""
        self.driver.settle()

    def check_end(self, key: RequestKey, end: FinishedRequest) -> None:
        """The request got its tokens, or there is a reason why not."""
        if end.reason is FinishReason.LENGTH_CAPPED:
            self.driver.check_complete(key)
        else:
            is_namesake = "give each request a unique id" in (end.message or "")
            assert end.reason is FinishReason.ABORTED or is_namesake, end

    # Events

    def go_on(self) -> None:
        """Nothing happens."""

    def abort(self) -> None:
        self.driver.abort(self.chance.choice(self.keys))

    def repeat(self) -> None:
        if self.driver.said:
            self.driver.repeat(self.chance.randrange(len(self.driver.said)))

    def be_late(self) -> None:
        """All loads are too late."""
        self.driver.now += self.LOAD_TIMEOUT_S

    def wait(self) -> None:
        self.driver.now += 2.0

    def reset(self) -> None:
        self.seen["reset"] += self.driver.scheduler.reset_connector_cache()

    def die(self) -> None:
        self.driver.keeps_host = self.chance.random() < 0.5
        self.driver.restart_workers(late_outputs=True, keeps_kv=self.chance.random() < 0.5)
        self.seen["epochs"] += 1
