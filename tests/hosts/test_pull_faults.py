"""Faults between a prefill and a decode engine on hosts of their own, at every stage of a pull:
every request ends with the tokens of one engine, every block is free again, and a worker is
replaced only if its transport cannot end a read."""

import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.protocol.outputs import FinishReason
from tests.connectors.engine import Engine, prompts_of
from tests.hosts.network import Network
from tests.hosts.served import LIMIT_S, HostEngine, Router
from tests.hosts.staged import STAGES, Stages

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]

PROMPT_TOKENS: Final = 100
MAX_TOKENS: Final = 12
LEASE_S: Final = 3.0
READ_TIMEOUT_S: Final = 5.0
SHORT_TIMES: Final = {"lease_s": LEASE_S, "read_timeout_s": READ_TIMEOUT_S}
QUARANTINE_S: Final = 60.0
SLOW_MEGABITS: Final = 0.1
"""The reads of a prompt take about 5 s."""

PATIENCE_S: Final = 20.0
"""In addition to what is allowed, because other tests use the processors."""

_seeds: Final = itertools.count(1)


class Pair:
    """A prefill and a decode engine with the same model, and the engine that knows the tokens."""

    def __init__(
        self,
        stack: ExitStack,
        network: Network,
        model: Path,
        tmp: Path,
        connector: str,
        options: Mapping[str, float] = SHORT_TIMES,
        **settings: Any,
    ) -> None:
        self.stack, self.network, self.model, self.tmp = stack, network, model, tmp
        self.connector, self.options, self.settings = connector, options, settings
        self.hosts = {name: network.host(name) for name in ("prefill", "decode")}
        self.stages = Stages(tmp / "stages")
        self.plain = stack.enter_context(Engine(model))
        self.engines = {name: self.start(name) for name in self.hosts}

    def start(self, name: str) -> HostEngine:
        """Under the same name, address and port as before."""
        return self.stack.enter_context(
            HostEngine(
                self.hosts[name],
                self.model,
                self.tmp / f"{name}-{next(_seeds)}",
                connector=self.connector,
                options=self.options,
                remote_hosts=[host.address for host in self.hosts.values()],
                stages=self.stages.folder,
                **self.settings,
            )
        )

    @property
    def router(self) -> Router:
        return Router([self.engines["prefill"]], [self.engines["decode"]])

    def request(self) -> tuple[list[int], list[int]]:
        """A new prompt, and the tokens of its answer."""
        (prompt,) = prompts_of(PROMPT_TOKENS, seed=next(_seeds))
        return prompt, self.plain.run(prompt, max_tokens=MAX_TOKENS)[0]

    def check_pulls(self) -> None:
        """Requests are pulled again, at the latest after the first ones; nothing is held."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            prompt, wanted = self.request()
            (leg,) = self.router.run([prompt], max_tokens=MAX_TOKENS)
            assert leg.token_ids == wanted
            if leg.num_cached_tokens == PROMPT_TOKENS:
                break
            assert time.monotonic() < deadline
        self.settle("prefill", QUARANTINE_S)
        self.settle("decode", QUARANTINE_S)

    def num_replaced(self, before: float, at_least: int) -> float:
        """The decode workers that were replaced since; it is counted when the new one starts, and
        the blocks of the old one are free when it dies."""
        deadline = time.monotonic() + PATIENCE_S
        while (num := self.engines["decode"].num_restarts - before) < at_least:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return num

    def settle(self, name: str, limit_s: float) -> None:
        """No block is leased, loaded or in quarantine within this time."""
        deadline = time.monotonic() + limit_s
        engine = self.engines[name]
        while (held := engine.snapshot)["TRANSFER"] or held["QUARANTINED"]:
            assert time.monotonic() < deadline, held
            engine.receive()


@pytest.fixture(scope="module")
def pairs(
    serving_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Pair]]:
    made: dict[str, Pair] = {}
    with ExitStack() as stack:

        def pair_of(connector: str) -> Pair:
            if connector not in made:
                network = stack.enter_context(Network())
                tmp = tmp_path_factory.mktemp("run")
                model = serving_model("full")
                made[connector] = Pair(stack, network, model, tmp, connector)
            return made[connector]

        yield pair_of


@dataclass
class Fault:
    """side: the host that it happens to. Each method begins it, and returns what ends it."""

    pair: Pair
    side: str

    def cut(self) -> Callable[[], None]:
        host = self.pair.hosts[self.side]
        host.cut()
        return host.heal

    def stop(self) -> Callable[[], None]:
        engine = self.pair.engines[self.side]
        engine.signal(signal.SIGSTOP)
        return lambda: engine.signal(signal.SIGCONT)

    def kill(self) -> Callable[[], None]:
        """And start it again under the same name."""
        self.pair.engines[self.side].signal(signal.SIGKILL)

        def restart() -> None:
            self.pair.engines[self.side].__exit__()
            self.pair.engines[self.side] = self.pair.start(self.side)

        return restart


def run_cell(pair: Pair, stage: str, side: str, fault: str, seconds: float | None) -> None:
    pair.check_pulls()
    # A handshake is that of a reader that does not know the owner, and a worker that was replaced a
    # short time ago is replaced together with its scheduler.
    if stage == "handshake" or (pair.connector, stage) == ("mooncake", "read"):
        Fault(pair, "decode").kill()()
    num_restarts = pair.engines["decode"].num_restarts
    router = pair.router
    prompt, wanted = pair.request()
    leg = router.send(prompt)
    router.until(lambda: leg.first.end is not None)
    if stage == "read":
        pair.hosts["prefill"].limit(SLOW_MEGABITS)
    with pair.stages.held(stage) as shown:
        router.go_on(leg, max_tokens=MAX_TOKENS)
        router.until(shown.exists, pair.engines["decode"])
        end = getattr(Fault(pair, side), fault)()
        failed_at = time.monotonic()
    if stage == "read":
        pair.hosts["prefill"].limit(None)
    if seconds is not None:
        time.sleep(seconds)
        end()
    answers = side == "prefill" or fault == "cut"
    if answers or (fault == "stop" and seconds is not None):
        assert router.wait(leg) == wanted
        pair.settle("decode", QUARANTINE_S)
        print(f"decode had settled after {time.monotonic() - failed_at:.1f} s")
    if side == "decode" or fault == "cut":
        pair.settle("prefill", failed_at + LEASE_S + 1.0 - time.monotonic() + PATIENCE_S)
        print(f"prefill had settled after {time.monotonic() - failed_at:.1f} s")
    if seconds is None:
        end()
    if not (side == "decode" and fault == "kill"):
        # Mooncake cannot end a read, so the worker is replaced; a read may end before that.
        must = (pair.connector, stage, fault) == ("mooncake", "read", "cut") and seconds is None
        may = (pair.connector, stage) == ("mooncake", "read")
        assert pair.num_replaced(num_restarts, at_least=must) <= may
    pair.check_pulls()


SHORT: Final = {
    ("nixl", "claim", "decode", "kill", None),
    ("nixl", "read", "decode", "cut", None),
    ("nixl", "check", "decode", "cut", 1.0),
    ("nixl", "done", "prefill", "kill", None),
    ("mooncake", "read", "decode", "cut", None),
    ("p2p_nccl", "read", "prefill", "stop", None),
}
FAULTS: Final = (
    ("cut", 1.0),
    ("cut", 10.0),
    ("cut", None),
    ("stop", 1.0),
    ("stop", None),
    ("kill", None),
)


def cells() -> Iterator[Any]:
    for connector in ("nixl", "mooncake", "p2p_nccl"):
        for stage in STAGES:
            for side in ("prefill", "decode"):
                for fault, seconds in FAULTS:
                    if (side, fault) == ("prefill", "cut"):
                        continue  # there are two hosts: it is the same as the other side's
                    cell = connector, stage, side, fault, seconds
                    marks = [] if cell in SHORT else [pytest.mark.hosts_full]
                    how_long = "for-ever" if seconds is None else f"{seconds:g}s"
                    words = (connector, stage, side, fault, how_long)
                    yield pytest.param(*cell, marks=marks, id="-".join(words))


@pytest.mark.req("CRG-06")
@pytest.mark.req("CRG-03")
@pytest.mark.req("MET-07")
@pytest.mark.parametrize(("connector", "stage", "side", "fault", "seconds"), list(cells()))
def test_every_request_ends_and_every_block_is_free(
    connector: str,
    stage: str,
    side: str,
    fault: str,
    seconds: float | None,
    pairs: Callable[[str], Pair],
) -> None:
    run_cell(pairs(connector), stage, side, fault, seconds)


@pytest.mark.hosts_full
@pytest.mark.req("CRG-06")
@pytest.mark.req("MET-07")
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "p2p_nccl"])
def test_no_block_is_in_quarantine_a_minute_after_a_partition_with_default_timeouts(
    connector: str,
    network: Network,
    serving_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The request has not waited for the end of its pull, whose blocks are in quarantine."""
    with ExitStack() as stack:
        tmp, model = tmp_path_factory.mktemp("default"), serving_model("full")
        pair = Pair(stack, network, model, tmp, connector, options={}, load_timeout_s=2.0)
        pair.check_pulls()
        router = pair.router
        prompt, wanted = pair.request()
        leg = router.send(prompt)
        router.until(lambda: leg.first.end is not None)
        pair.hosts["prefill"].limit(SLOW_MEGABITS)
        with pair.stages.held("read") as shown:
            router.go_on(leg, max_tokens=MAX_TOKENS)
            router.until(shown.exists, pair.engines["decode"])
            Fault(pair, "decode").cut()
            failed_at = time.monotonic()
        assert router.wait(leg) == wanted
        assert pair.engines["decode"].snapshot["QUARANTINED"] > 0
        pair.settle("decode", failed_at + QUARANTINE_S - time.monotonic())
        print(f"decode had settled after {time.monotonic() - failed_at:.1f} s")
        pair.settle("prefill", failed_at + QUARANTINE_S - time.monotonic())


@pytest.mark.hosts_full
@pytest.mark.req("CRG-06")
@pytest.mark.req("MET-07")
def test_a_failed_pull_ends_the_request_with_the_reason(
    network: Network,
    serving_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with ExitStack() as stack:
        tmp, model = tmp_path_factory.mktemp("fail"), serving_model("full")
        pair = Pair(stack, network, model, tmp, "nixl", load_failure_policy="fail")
        pair.check_pulls()
        router = pair.router
        legs = [router.send(pair.request()[0]) for _ in range(2)]
        router.until(lambda: all(leg.first.end is not None for leg in legs))
        restart = Fault(pair, "prefill").kill()
        for leg in legs:
            router.go_on(leg, max_tokens=MAX_TOKENS)
            router.until(lambda leg=leg: leg.current.end is not None, leg.engine)
            assert leg.second is not None
            assert leg.second.end is not None
            assert leg.second.end.reason is FinishReason.ERROR
            assert "its KV could not be loaded" in leg.second.end.message
            assert leg.second.token_ids == []
        pair.settle("decode", QUARANTINE_S)
        restart()
        pair.check_pulls()
