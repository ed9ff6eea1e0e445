"""Programs that connect to the private sockets of a deployment without its secret, and secrets of
the deployment in places where other programs could find them."""

import contextlib
import re
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import openai
import zmq

from longshore.deploy.supervisor.event_keys import EventKeys
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.handshake import ClientHello, EngineReady
from longshore.protocol.plan import Shutdown
from longshore.protocol.transport.codec import Encoder
from tests.harness.event_sockets import RemoteSubscriber
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import PATIENCE_S, Deployment
from tests.integration.engine_process import ready_engine, running_engine

KINDS = (zmq.DEALER, zmq.ROUTER, zmq.PAIR, zmq.PUSH, zmq.PULL, zmq.SUB, zmq.REQ)
MESSAGES = (
    b"garbage",
    *Encoder().encode(Shutdown("stop")),
    *Encoder().encode(ClientHello("me", "f")),
)
NUM_CONNECTIONS, NUM_IDLE = 400, 300
API_KEY = "an-api-key-of-this-test"


class Intruder:
    """Connects to a socket with ZMQ sockets of all kinds, and without ZMQ."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._context.socket(kind) for kind in KINDS]
        for each in self._sockets:
            each.setsockopt(zmq.SNDTIMEO, 0)
            each.connect(f"ipc://{path}")
            if each.type == zmq.SUB:
                each.setsockopt(zmq.SUBSCRIBE, b"")
        self._connections = [socket.socket(socket.AF_UNIX) for _ in range(NUM_CONNECTIONS)]
        self._path = path

    def connect(self) -> None:
        """Open connections without ZMQ: idle ones, and others with garbage."""
        for number, connection in enumerate(self._connections):
            connection.connect(str(self._path))  # waits if the listener's queue is full
            connection.settimeout(PATIENCE_S)
            if number >= NUM_IDLE:
                with contextlib.suppress(OSError):
                    connection.sendall(b"\xff" + b"x" * (97 * number))

    def send(self) -> None:
        """Send garbage and valid messages on all sockets that can send."""
        for each in self._sockets:
            for message in MESSAGES:
                with contextlib.suppress(zmq.ZMQError):
                    each.send(message)

    def has_received(self) -> bool:
        """Whether a message has arrived."""
        receiving = [each for each in self._sockets if each.type != zmq.PUSH]
        return any(each.poll(0) for each in receiving)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def intruders(deployment: Deployment) -> Iterator[list[Intruder]]:
    """One for each socket of the deployment."""
    (runtime_dir,) = deployment.runtime_dirs
    paths = [path for path in runtime_dir.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    names = {path.name for path in paths}
    assert {"clients.sock", "worker-0.sock", "events.sock", "replay.sock"} <= names
    opened = [Intruder(path) for path in paths]
    try:
        for intruder in opened:
            intruder.connect()
        yield opened
    finally:
        for intruder in opened:
            intruder.close()


def stream_of(deployment: Deployment, max_tokens: int = 600) -> Iterator[list[int]]:
    """The token ids of each chunk of an answer."""
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=API_KEY, max_retries=0) as client:
        for chunk in client.completions.create(
            model=client.models.list().data[0].id,
            prompt="berth",
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            if chunk.choices:
                yield chunk.choices[0].token_ids or []  # type: ignore[attr-defined]


def tokens_of(stream: Iterator[list[int]]) -> list[int]:
    return [token for chunk in stream for token in chunk]


def test_intruders_at_every_socket_get_nothing_and_change_nothing(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    EventKeys(StateDir(state_dir)).authorize("router", is_new=True, today="2026-01-31")
    deployment = start_deployment(
        "--gateways", "2", "--enable-kv-cache-events", "--state-dir", str(state_dir)
    ).wait_until_ready()
    calm = tokens_of(stream_of(deployment))
    assert len(calm) == 600
    printed = deployment.output
    stream = stream_of(deployment)
    tokens = next(stream)
    with intruders(deployment) as opened:
        for intruder in opened:
            intruder.send()
        for chunk in stream:
            tokens = [*tokens, *chunk]
            for intruder in opened:
                intruder.send()
        assert tokens == calm
        assert tokens_of(stream_of(deployment)) == calm
        assert not any(intruder.has_received() for intruder in opened)
        new_lines = deployment.output.removeprefix(printed).splitlines()
        regular = re.compile(r"POST|GET|last \d+ s: ")
        assert [line for line in new_lines if not regular.search(line)] == []
        assert_a_new_subscriber_is_served(deployment, EventKeys(StateDir(state_dir)))
        assert deployment.stop() == 0, deployment.output
    deployment.assert_nothing_is_left()


def assert_a_new_subscriber_is_served(deployment: Deployment, event_keys: EventKeys) -> None:
    """One that is authorized while the deployment runs."""
    keys = event_keys.authorize("monitor", is_new=True, today="2026-01-31")
    (runtime_dir,) = deployment.runtime_dirs
    addresses = (f"ipc://{runtime_dir}/events.sock", f"ipc://{runtime_dir}/replay.sock")
    subscriber = RemoteSubscriber(*addresses, keys=keys)
    try:
        subscriber.restore()
        assert subscriber.index.blocks
    finally:
        subscriber.close()


def test_more_connections_than_the_soft_limit_of_descriptors_are_accepted() -> None:
    """ZMQ aborts a process that has no descriptor left for a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > 2 * NUM_CONNECTIONS, "raise `ulimit -Hn`"
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(running_engine(soft_files=NUM_CONNECTIONS // 2))
        ready_engine(engine)
        intruder = Intruder(engine.runtime_dir / "clients")
        stack.callback(intruder.close)
        intruder.connect()
        _, answer = engine.connect()
        assert isinstance(answer, EngineReady)
        assert engine.process.poll() is None


def test_secrets_are_in_no_file_variable_or_command_line(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    """API keys reach the gateway, which does not pass them on."""
    settings = {"LONGSHORE_API_KEY": API_KEY, "LONGSHORE_STATE_DIR": str(tmp_path / "state")}
    deployment = start_deployment(environment=settings).wait_until_ready()
    assert len(tokens_of(stream_of(deployment, 5))) == 5
    seed = (tmp_path / "state" / "block_hash_seed").read_text().strip()
    secrets = [API_KEY.encode(), seed.encode()]
    processes = {name: each for name, each in deployment.members.items() if name != "supervisor"}
    assert {"gateway", "scheduler", "worker-0"} <= processes.keys()
    for process in processes.values():
        for file in ("environ", "cmdline"):
            content = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert not any(secret in content for secret in secrets)
    (runtime_dir,) = deployment.runtime_dirs
    files = [path for path in runtime_dir.rglob("*") if path.is_file()]
    assert {path.name for path in files if path.suffix == ".json"} <= {"restarts.json"}
    assert not any(secret in path.read_bytes() for path in files for secret in secrets)
