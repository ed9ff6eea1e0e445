"""The faults, as data: what is done to which deployment."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from tests.chaos.proxy import Spoiling, Toward
from tests.chaos.streams import NUM_STREAMS
from tests.chaos.target import Target
from tests.connectors.offloading.remote.servers import RedisServer
from tests.integration.deployment import wait_until

PAUSE_S: Final = 1.5
DELAY_S: Final = 0.02
REQUEST_BYTES: Final = 300
"""All new requests have more: their prompts have at least 104 tokens. Other messages have less."""
Injection = Callable[[Target], None]


@dataclass(frozen=True)
class Fault:
    """One fault under load.

    kind:     for the report's groups.
    inject:   returns when it is in force.
    is_short: it is in the short form of the suite.
    """

    kind: str
    what: str
    inject: Injection
    is_short: bool = True


def kill(*names: str) -> Injection:
    return lambda target: target.kill(*names)


def stop(name: str) -> Injection:
    return lambda target: target.stop(name)


def pause(name: str) -> Injection:
    return lambda target: target.pause(name, PAUSE_S)


def hook(what: str) -> Injection:
    """what: `raise FaultyWorker.HOOK` and so on."""
    return lambda target: target.disturb_hook(what)


def kill_again(name: str) -> Injection:
    """Kill a process, and the one that replaces it while that starts."""

    def inject(target: Target) -> None:
        former = target.members()[name]
        target.kill(name)
        wait_until(lambda: target.is_replaced(name, former))
        target.kill(name)

    return inject


def stop_again(name: str) -> Injection:
    """Kill a process, and stop the one that replaces it while that starts."""

    def inject(target: Target) -> None:
        former = target.members()[name]
        target.kill(name)
        wait_until(lambda: target.is_replaced(name, former))
        target.stop(name)

    return inject


def hang_up(target: Target) -> None:
    target.load.hang_up(NUM_STREAMS // 2)


def fill_queue(target: Target) -> None:
    for _ in range(3):
        target.fill_queue_and_hang_up(num_connections=4, num_prompts=500)


REPLICAS: Final[Sequence[Fault]] = (
    Fault("killed", "a worker", kill("worker-0.0")),
    Fault("hung", "a worker", stop("worker-1.0"), is_short=False),
    Fault("killed", "a scheduler", kill("scheduler-0")),
    Fault("hung", "a scheduler", stop("scheduler-1")),
    Fault("killed", "a gateway", kill("gateway-0")),
    Fault("killed", "the other gateway", kill("gateway-1"), is_short=False),
    Fault("hung", "a gateway", stop("gateway-1")),
    Fault("paused", "a gateway", pause("gateway-1")),
    Fault("paused", "the supervisor", pause("supervisor"), is_short=False),
    Fault("paused", "a worker", pause("worker-0.0"), is_short=False),
    Fault("client gone", "half of the streams", hang_up),
    Fault("client gone", "a full queue, three times", fill_queue),
    Fault("killed together", "the workers of both engines", kill("worker-0.0", "worker-1.0")),
    Fault(
        "killed together",
        "a scheduler and its worker",
        kill("scheduler-0", "worker-0.0"),
        is_short=False,
    ),
    Fault(
        "killed together",
        "an engine's worker and a gateway",
        kill("worker-1.0", "gateway-0"),
        is_short=False,
    ),
    Fault(
        "killed at start", "a worker that replaces one", kill_again("worker-0.0"), is_short=False
    ),
    Fault(
        "killed at start",
        "a scheduler that replaces one",
        kill_again("scheduler-1"),
        is_short=False,
    ),
    Fault("stopped at start", "a worker that replaces one", stop_again("worker-1.0")),
    Fault(
        "stopped at start",
        "a scheduler that replaces one",
        stop_again("scheduler-0"),
        is_short=False,
    ),
    Fault(
        "stopped at start", "a gateway that replaces one", stop_again("gateway-0"), is_short=False
    ),
)
"""On two engines behind two gateways, with host memory as a tier."""


def redis_of(target: Target) -> RedisServer:
    """It answers, also if an earlier fault has ended it."""
    assert target.redis is not None
    if not target.redis.answers():
        target.redis.restart()
    return target.redis


def redis_pauses(target: Target) -> None:
    redis = redis_of(target)
    redis.stop()
    time.sleep(PAUSE_S)
    redis.go_on()


def redis_dies(target: Target) -> None:
    redis_of(target).kill()


def redis_restarts(target: Target) -> None:
    redis_of(target).restart()


def redis_forgets(target: Target) -> None:
    redis_of(target).client.flushall()


def redis_has_garbage(target: Target) -> None:
    client = redis_of(target).client
    for name in client.scan_iter(count=1000):
        if client.type(name) == b"string":
            client.setrange(name, 60, b"garbage")


def store_is_slow(target: Target) -> None:
    """No answer takes as long as the timeout of an operation."""
    assert target.link is not None
    redis_of(target)
    target.link.delay_s = 0.2
    time.sleep(PAUSE_S)
    target.link.delay_s = 0.0


def store_is_hostile(target: Target) -> None:
    """It announces an array that is too large for any memory."""
    assert target.link is not None
    redis_of(target)
    target.link.reply = b"*2147483647\r\n"
    time.sleep(PAUSE_S)
    target.link.reply = b""


def flip_disk(target: Target) -> None:
    """Flip bits of all blocks on disk."""
    for segment in target.disk.glob("*/rank-*/segment-*"):
        with segment.open("r+b") as file:
            for offset in range(7, os.fstat(file.fileno()).st_size, 4096):
                file.seek(offset)
                (byte,) = file.read(1) or b"\0"
                file.seek(offset)
                file.write(bytes([byte ^ 16]))


def full_disk(target: Target) -> None:
    """For a while, the worker cannot write to any file."""
    worker = target.members()["worker-0"]
    limits = worker.rlimit(psutil.RLIMIT_FSIZE)
    worker.rlimit(psutil.RLIMIT_FSIZE, (0, limits[1]))
    time.sleep(PAUSE_S)
    worker.rlimit(psutil.RLIMIT_FSIZE, limits)


def flip_host_memory(target: Target) -> None:
    """Flip a bit in every KiB of the host tier, through the supervisor's descriptor."""
    for descriptor in Path(f"/proc/{target.deployment.process.pid}/fd").iterdir():
        if "memfd:longshore-engine" in os.readlink(descriptor):
            with descriptor.open("r+b") as memory:
                content = np.frombuffer(memory.read(), np.uint8).copy()
                content[::1024] ^= 4
                memory.seek(0)
                memory.write(content.tobytes())


TIERS: Final[Sequence[Fault]] = (
    Fault("store", "the store hangs for a while", redis_pauses, is_short=False),
    Fault("store", "the store is slow for a while", store_is_slow),
    Fault("store", "the store sends hostile replies", store_is_hostile, is_short=False),
    Fault("store", "the store forgets everything", redis_forgets),
    Fault("store", "the store returns garbage", redis_has_garbage),
    Fault("store", "the store is gone", redis_dies),
    Fault("store", "the store restarts, empty", redis_restarts),
    Fault("disk", "bits flip on disk", flip_disk),
    Fault("disk", "the disk is full for a while", full_disk),
    Fault("memory", "bits flip in host memory", flip_host_memory),
    Fault(
        "hook",
        "a worker's hook is slow",
        hook("delay FaultyWorker.get_finished"),
        is_short=False,
    ),
    Fault("hook", "a scheduler's hook is slow", hook("delay FaultyConnector.build_connector_meta")),
    Fault("hook", "a lookup raises", hook("raise FaultyConnector.get_num_new_matched_tokens")),
    Fault("hook", "a worker's hook raises", hook("raise FaultyWorker.get_finished")),
    Fault(
        "hook", "a hook of a step raises", hook("raise FaultyWorker.wait_for_save"), is_short=False
    ),
    Fault("hook", "a scheduler's hook raises", hook("raise FaultyConnector.build_connector_meta")),
    Fault("hook", "a worker's hook never ends", hook("hang FaultyWorker.start_load_kv")),
    Fault("hook", "a scheduler's hook never ends", hook("hang FaultyConnector.on_new_request")),
)
"""On one engine with host memory, disk and a remote store, through a connector whose transfers are
reported late."""


def until_counted(name: str, inject: Injection = lambda target: None) -> Injection:
    """Go on until the metric has grown."""

    def inject_and_wait(target: Target) -> None:
        before = target.metric(name)
        inject(target)
        wait_until(lambda: target.metric(name) > before)

    return inject_and_wait


LOADS: Final[Sequence[Fault]] = (
    Fault("load", "blocks are not filled", until_counted("scheduler_failed_loads_total")),
    Fault(
        "load",
        "ends are reported twice, and of unknown requests",
        until_counted("scheduler_bad_messages_total"),
    ),
    Fault(
        "load",
        "clients hang up meanwhile",
        until_counted("scheduler_stale_tokens_total", hang_up),
    ),
    Fault("load", "the worker is killed meanwhile", kill("worker-0"), is_short=False),
)

DRAFTS: Final[Sequence[Fault]] = (
    *LOADS,
    Fault("load", "drafts are accepted", until_counted("scheduler_accepted_draft_tokens_total")),
)
"""On one engine with host memory, through a connector whose loads fail, and whose reports are late
and repeated, all the time."""


def grammars(number: signal.Signals) -> Injection:
    return lambda target: target.disturb_grammars(number)


def twice(inject: Injection) -> Injection:
    def inject_twice(target: Target) -> None:
        inject(target)
        inject(target)

    return inject_twice


GRAMMARS: Final[Sequence[Fault]] = (
    Fault("killed", "the grammar process", grammars(signal.SIGKILL), is_short=False),
    Fault("hung", "the grammar process", grammars(signal.SIGSTOP), is_short=False),
    Fault("killed at start", "the next grammar process", twice(grammars(signal.SIGKILL))),
    Fault("killed", "the worker, beside structured output", kill("worker-0"), is_short=False),
    Fault("killed", "the scheduler of a grammar process", kill("scheduler"), is_short=False),
)
"""On one engine half of whose streams have structured output."""


def slow(name: str) -> Injection:
    def inject(target: Target) -> None:
        assert target.proxies is not None
        target.proxies[name].delay_s = DELAY_S
        target.load.wait_for_tokens()
        target.proxies[name].delay_s = 0.0

    return inject


def held(name: str) -> Injection:
    def inject(target: Target) -> None:
        assert target.proxies is not None
        target.proxies[name].hold()
        time.sleep(PAUSE_S)
        target.proxies[name].release()

    return inject


def cut(name: str) -> Injection:
    def inject(target: Target) -> None:
        assert target.proxies is not None
        target.proxies[name].cut()

    return inject


def spoil(name: str, toward: Toward, what: Spoiling, min_bytes: int = 0) -> Injection:
    def inject(target: Target) -> None:
        assert target.proxies is not None
        proxy = target.proxies[name]
        proxy.spoil_next(toward, what, min_bytes)
        wait_until(lambda: proxy.has_spoiled(toward))

    return inject


def spoil_request(name: str, what: Spoiling) -> Injection:
    return spoil(name, "bound", what, REQUEST_BYTES)


LINKS: Final[Sequence[Fault]] = (
    Fault("slow socket", "gateway and scheduler", slow("clients-0")),
    Fault("slow socket", "scheduler and worker", slow("worker-1.0"), is_short=False),
    Fault("held socket", "gateway and scheduler", held("clients-1"), is_short=False),
    Fault("held socket", "scheduler and worker", held("worker-0.0")),
    Fault("cut socket", "gateway and scheduler", cut("clients-0")),
    Fault("cut socket", "scheduler and worker", cut("worker-1.0")),
    Fault("message", "a plan is dropped", spoil("worker-0.0", "connected", "drop")),
    Fault(
        "message", "a plan is repeated", spoil("worker-1.0", "connected", "repeat"), is_short=False
    ),
    Fault("message", "two plans are swapped", spoil("worker-1.0", "connected", "swap")),
    Fault("message", "a worker's report is dropped", spoil("worker-0.0", "bound", "drop")),
    Fault("message", "a step's tokens are dropped", spoil("clients-0", "connected", "drop")),
    Fault("message", "a step's tokens are repeated", spoil("clients-1", "connected", "repeat")),
    Fault(
        "message",
        "two steps' tokens are swapped",
        spoil("clients-1", "connected", "swap"),
        is_short=False,
    ),
    Fault("message", "a request is dropped", spoil_request("clients-0", "drop")),
    Fault("message", "a request is repeated", spoil_request("clients-1", "repeat"), is_short=False),
    Fault(
        "message", "two requests are swapped", spoil_request("clients-1", "swap"), is_short=False
    ),
    Fault(
        "message",
        "a worker's report is repeated",
        spoil("worker-1.0", "bound", "repeat"),
        is_short=False,
    ),
    Fault(
        "message",
        "two reports of a worker are swapped",
        spoil("worker-0.0", "bound", "swap"),
        is_short=False,
    ),
)
"""On two engines whose private sockets go through proxies."""
