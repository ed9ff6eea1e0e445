"""Prefill and decode engines on hosts of their own give the tokens of one engine: eight requests at
once, prompts in several chunks, hits on both sides, preemptions on decode engines, and aborts; and
500 requests at once."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

from tests.connectors.conftest import KINDS
from tests.connectors.engine import Answer, Engine, prompts_of
from tests.hosts.network import Network
from tests.hosts.served import HostEngine, Router

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]

MAX_TOKENS: Final = 40
LENGTHS: Final = (100, 33, 64, 150, 81, 128, 47, 112)
NUM_ABORTED: Final = 6
NUM_MANY: Final = 500
MANY_BLOCKS: Final = 20_000
"""All requests may be leased or pulled at once."""

LEASE_S: Final = 5.0

Settings: TypeAlias = Mapping[str, Any]

CHUNKED: Final = {"max_num_batched_tokens": 64, "num_blocks": 120}
SMALL: Final = {"num_blocks": 48}
TP2: Final = {"tensor_parallel_size": 2}


@dataclass(frozen=True)
class Topology:
    """Settings of each engine; each has a host of its own.

    delay_s, megabits: of every packet between two hosts, and of every link; None: not limited.
    """

    prefill: tuple[Settings, ...] = (CHUNKED,)
    decode: tuple[Settings, ...] = (SMALL,)
    connector: str = "nixl"
    delay_s: float | None = None
    megabits: float | None = None


TOPOLOGIES: Final = {
    "1p1d": Topology(),
    "2p2d": Topology((CHUNKED, CHUNKED), ({"num_blocks": 30}, {"num_blocks": 30})),
    "tp1to2": Topology(decode=({**SMALL, **TP2},)),
    "tp2to1": Topology(prefill=({**CHUNKED, **TP2},)),
    "block16to32": Topology(decode=({"num_blocks": 28, "block_size": 32},)),
    "mooncake": Topology(connector="mooncake"),
    "p2p_nccl": Topology(connector="p2p_nccl"),
    "delayed": Topology(delay_s=0.02),
    "slow": Topology(megabits=5.0),
}
PREEMPTED: Final = ("full", "latents")
"""Kinds whose decode engines have few blocks. The others need more of them for one long request."""

SHORT: Final = {("latents", "tp1to2"), ("windows", "block16to32")}
SHORT_STATES: Final = ("states", "1p1d")


def start(stack: ExitStack, network: Network, model: Path, tmp: Path, topology: Topology) -> Router:
    """The engines, with what routes requests between them."""
    roles = {"prefill": topology.prefill, "decode": topology.decode}
    names = {
        f"{role}-{number}": settings
        for role, each in roles.items()
        for number, settings in enumerate(each)
    }
    hosts = {name: network.host(name) for name in names}
    engines = {
        name: stack.enter_context(
            HostEngine(
                hosts[name],
                model,
                tmp / name,
                connector=topology.connector,
                options={"lease_s": LEASE_S},
                remote_hosts=[host.address for host in hosts.values()],
                **settings,
            )
        )
        for name, settings in names.items()
    }
    prefill, decode = (
        [engine for name, engine in engines.items() if name.startswith(role)] for role in roles
    )
    return Router(prefill, decode)


def cells() -> Iterator[Any]:
    for kind in KINDS:
        for name in TOPOLOGIES:
            is_short = (kind, name) in {*SHORT, SHORT_STATES}
            marks = [] if is_short else [pytest.mark.hosts_full]
            yield pytest.param(kind, name, marks=marks, id=f"{kind}-{name}")


@pytest.mark.req("CRG-06")
@pytest.mark.req("MET-08")
@pytest.mark.parametrize(("kind", "name"), list(cells()))
def test_tokens_are_those_of_one_engine(
    kind: str,
    name: str,
    network: Network,
    serving_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = serving_model(kind)
    prompts = prompts_of(*LENGTHS)
    longer = [prompt + prompts_of(30, seed=9)[0] for prompt in prompts]
    with Engine(model) as plain:
        wanted = plain.run(*prompts, *longer, max_tokens=MAX_TOKENS)
    with ExitStack() as stack:
        topology = TOPOLOGIES[name]
        if kind not in PREEMPTED:
            decode = tuple({**each, "num_blocks": 120} for each in topology.decode)
            # Half of them may be leased, and a request has blocks in several groups.
            prefill = tuple({**each, "num_blocks": 240} for each in topology.prefill)
            topology = replace(topology, prefill=prefill, decode=decode)
        router = start(stack, network, model, tmp_path_factory.mktemp("split"), topology)
        if topology.delay_s is not None:
            stack.enter_context(network.delay(topology.delay_s))
        if topology.megabits is not None:
            for engine in (*router.prefill, *router.decode):
                engine.host.limit(topology.megabits)
        legs = router.run(prompts, max_tokens=MAX_TOKENS)
        assert [leg.token_ids for leg in legs] == wanted[: len(prompts)]
        # In larger blocks, a window may begin with tokens that the owner has freed.
        least = 0 if name == "block16to32" else sum(LENGTHS) // 2
        assert sum(leg.num_cached_tokens for leg in legs) > least
        # Hits on both sides, while other requests end.
        others = prompts_of(*[90] * NUM_ABORTED, seed=5)
        legs = router.run([*longer, *others], max_tokens=MAX_TOKENS, abort=aborts(len(longer)))
        assert [leg.token_ids for leg in legs[: len(longer)]] == wanted[len(prompts) :]
        router.settle()
        is_limited = topology.delay_s is not None or topology.megabits is not None
        if kind in PREEMPTED and not is_limited:  # then, few requests decode at once
            assert router.num_preemptions > 0


MANY: Final = {"num_blocks": MANY_BLOCKS}
MANY_TOPOLOGIES: Final = {
    "1p1d": Topology((MANY,), (MANY,)),
    "2p2d": Topology((MANY, MANY), (MANY, MANY)),
    "block16to32": Topology((MANY,), ({**MANY, "block_size": 32},)),
}


def cells_of_many() -> Iterator[Any]:
    for kind in KINDS:
        for name in MANY_TOPOLOGIES:
            marks = [] if (kind, name) == ("full", "1p1d") else [pytest.mark.hosts_full]
            yield pytest.param(kind, name, marks=marks, id=f"{kind}-{name}")


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize(("kind", "name"), list(cells_of_many()))
def test_many_requests_at_once(
    kind: str,
    name: str,
    network: Network,
    serving_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = serving_model(kind)
    chance = random.Random(7)
    prompts = prompts_of(*[chance.randint(20, 150) for _ in range(NUM_MANY)], seed=3)
    with Engine(model, max_num_seqs=32, num_blocks=1000) as plain:
        wanted = plain.run(*prompts, max_tokens=8)
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp("split")
        router = start(stack, network, model, tmp, MANY_TOPOLOGIES[name])
        legs = router.run(prompts, max_tokens=8)
        assert [leg.token_ids for leg in legs] == wanted
        assert sum(leg.num_cached_tokens for leg in legs) == sum(len(prompt) for prompt in prompts)
        router.settle()


def aborts(first: int) -> Callable[[int, Answer | None], bool]:
    """Requests from this number on are aborted: in the first leg, at the begin of the second, or
    after some of its tokens."""
    chance = random.Random(first)

    def is_due(number: int, second: Answer | None) -> bool:
        if number < first:
            return False
        stage = (number - first) % 3
        if stage == 0:
            return second is None and chance.random() < 0.5
        if stage == 1:
            return second is not None
        return second is not None and len(second.token_ids) > 3

    return is_due
