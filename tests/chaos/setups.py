"""The deployments of the chaos suite, and the model that they serve."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.testing.faults import FAULTY_CONNECTOR
from tests.chaos.faults import DRAFTS, GRAMMARS, LINKS, LOADS, REPLICAS, TIERS, Fault
from tests.chaos.proxy import Proxies
from tests.chaos.streams import Prompt
from tests.chaos.target import Target
from tests.connectors.offloading.remote.servers import RedisServer, slow_redis
from tests.integration.deployment import Deployment, wait_until
from tests.models import make_tiny_llama

VOCAB_SIZE: Final = 512
DEBUG_FLAGS: Final = ("--dtype", "float32", "--verify-plan", "--poison-kv")
TIMEOUTS: Final = ("--hang-timeout-s", "5", "--step-timeout-s", "10", "--max-restarts", "1000")
NUM_BLOCKS: Final = 170
"""Too few for all streams at their ends."""

LINKED: Final = ("clients-0", "clients-1", "worker-0.0", "worker-1.0")
"""Sockets that have proxies."""

REGEXES: Final = (
    "([a-z]{3} [0-9]{2},){1000}",
    "([a-f]{5} ){1000}",
    "((bird|ship)[ab]{2}){1000}",
)
"""Of endless outputs, greedy and random ones."""

HOST_TIER: Final = {"cpu_bytes_to_use": "8MiB", "verify_kv": "always"}


def make_model(path: Path) -> None:
    """Without a tokenizer, so that tokens are told apart by their ids."""
    make_tiny_llama(
        path, vocab_size=VOCAB_SIZE, max_position_embeddings=2048, tie_word_embeddings=True
    )


def connector_flags(name: str, options: Mapping[str, object]) -> list[str]:
    return ["--kv-connector", name, "--kv-connector-config", json.dumps(options)]


class Setup(Protocol):
    """Starts a deployment in a new folder, whose path must be short."""

    def __call__(
        self, model: Path, folder: Path, prompts: Sequence[Prompt]
    ) -> AbstractContextManager[Target]: ...


def deploy(model: Path, folder: Path, *flags: str, **settings: str) -> Deployment:
    """A deployment that begins to start."""
    tmp_dir = folder / "t"
    tmp_dir.mkdir(parents=True)
    state = ("--state-dir", str(folder / "state"))
    return Deployment(
        model,
        tmp_dir,
        *(*DEBUG_FLAGS, *TIMEOUTS, *state, *flags),
        num_blocks=NUM_BLOCKS,
        **settings,
    )


@contextmanager
def replicas(model: Path, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Target]:
    flags = ["--replicas", "2", "--gateways", "2", *connector_flags("offloading", HOST_TIER)]
    with deploy(model, folder, *flags) as deployment:
        yield Target(deployment.wait_until_ready(), prompts, folder=folder)


@contextmanager
def tiers(model: Path, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Target]:
    (folder / "r").mkdir(parents=True)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "r"))
        link = stack.enter_context(slow_redis(redis))
        tier = {
            **HOST_TIER,
            "disk_path": str(folder / "tier"),
            "disk_bytes": "16MiB",
            "remote_url": f"redis://{link.address}/0",
            "remote_timeout_ms": 300,
            "remote_retry_s": 1.0,
        }
        faults = {"late": 0.3, "ask_later": 0.1, "switch": str(folder / "switch")}
        options = {"connector": "offloading", "options": tier, "faults": faults}
        flags = connector_flags(FAULTY_CONNECTOR, options)
        deployment = stack.enter_context(deploy(model, folder, *flags))
        yield Target(deployment.wait_until_ready(), prompts, folder=folder, redis=redis, link=link)


@contextmanager
def loads(
    model: Path, folder: Path, prompts: Sequence[Prompt], flags: Sequence[str] = ()
) -> Iterator[Target]:
    faults = {"failed_load": 0.2, "late": 0.3, "duplicate": 0.3}
    options = {"connector": "offloading", "options": HOST_TIER, "faults": faults}
    with deploy(model, folder, *connector_flags(FAULTY_CONNECTOR, options), *flags) as deployment:
        yield Target(deployment.wait_until_ready(), prompts, folder=folder)


@contextmanager
def drafts(model: Path, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Target]:
    """The model drafts for itself: its drafts are right where a request is greedy, and often wrong
    where it draws. Their KV is loaded with the other, or fails to be."""
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    with loads(model, folder, prompts, ("--speculative-config", json.dumps(config))) as target:
        yield target


@contextmanager
def grammars(model: Path, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Target]:
    """With a model whose tokens are texts."""
    constrained = [
        replace(prompt, regex=REGEXES[index // 2 % len(REGEXES)]) if index % 4 < 2 else prompt
        for index, prompt in enumerate(prompts)
    ]
    with deploy(DEMO_MODEL_DIR, folder) as deployment:
        yield Target(deployment.wait_until_ready(), constrained, folder=folder)


@contextmanager
def links(model: Path, folder: Path, prompts: Sequence[Prompt]) -> Iterator[Target]:
    with ExitStack() as stack:
        deployment = stack.enter_context(
            deploy(model, folder, "--replicas", "2", program="tests.chaos.proxy")
        )
        wait_until(lambda: bool(deployment.runtime_dirs) or deployment.process.poll() is not None)
        (runtime_dir,) = deployment.runtime_dirs
        proxies = stack.enter_context(Proxies(runtime_dir, LINKED))
        deployment.wait_until_ready()
        assert not proxies.unused
        yield Target(deployment, prompts, folder=folder, proxies=proxies)


SETUPS: Final[Mapping[str, tuple[Setup, Sequence[Fault]]]] = {
    "replicas": (replicas, REPLICAS),
    "tiers": (tiers, TIERS),
    "loads": (loads, LOADS),
    "drafts": (drafts, DRAFTS),
    "links": (links, LINKS),
    "grammars": (grammars, GRAMMARS),
}
