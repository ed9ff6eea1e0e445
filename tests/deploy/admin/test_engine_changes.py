"""Engines that are added, drained and removed, with real child processes instead of engines."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.admin import operations
from longshore.deploy.admin.actions import (
    Action,
    AddEngine,
    DrainOneEngine,
    ReloadKeys,
    RemoveEngine,
    Restart,
    Result,
    ResumeEngine,
    SleepEngine,
    Status,
    WakeEngine,
)
from longshore.deploy.admin.operations import NewEngine, Operations
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.key_file import DeploymentKeys
from longshore.deploy.supervisor import group_restarts
from longshore.deploy.supervisor.engine_set import EngineSet
from longshore.deploy.supervisor.process import ManagedProcess, ProcessSpec
from longshore.deploy.supervisor.replica import Replica, replicas
from longshore.protocol.commands import Command, DrainEngine, EngineMember
from longshore.protocol.errors import ConfigError
from longshore.protocol.transport.channel import Endpoint
from tests.deploy.supervisor.test_orders import WAIT_S, Running, running
from tests.deploy.supervisor.test_supervisor import spec


class Maker:
    """behaviour: of the new scheduler; None: there is no memory."""

    def __init__(self) -> None:
        self.behaviour: str | None = "serve"
        self.cleaned_up: list[tuple[int, list[str]]] = []

    def make_engine(self, replica: Replica) -> NewEngine:
        if self.behaviour is None:
            raise ConfigError("no memory is free")
        group = {"restart_group": replica.engine_id}
        specs = [
            spec(replica.worker(0), "serve", **group),
            spec(replica.scheduler, self.behaviour, **group),
        ]
        return NewEngine(specs, EngineMember(replica.number, "unified", Endpoint("ipc://unused")))

    def clean_up(self, replica: Replica, specs: Sequence[ProcessSpec]) -> None:
        self.cleaned_up.append((replica.number, [each.name for each in specs]))


class Deployment:
    """Two engines, and a gateway once it is started. is_fixed: it has a topology."""

    def __init__(
        self,
        run: Running,
        state_dir: Path,
        *,
        is_fixed: bool = False,
        keys: DeploymentKeys | None = None,
    ) -> None:
        self.run, self.maker = run, Maker()
        self.engines = EngineSet(replicas(("unified",) * 2))
        self.operations = Operations(
            run.supervisor,
            self.engines,
            maker=None if is_fixed else self.maker,
            keys=keys,
            stop=run.stop_signal.request,
            state_dir=state_dir,
            drain_timeout_s=0.0,
            start_timeout_s=WAIT_S,
        )

    def start_gateway(self, behaviour: str = "serve") -> None:
        gateway = spec("gateway", behaviour, stop_group="gateways", restart_group="gateway")
        self.run.supervisor.orders.start("gateway", [gateway]).result(WAIT_S)

    def perform(self, action: Action) -> Result:
        answer, _ = self.operations.perform(action)
        return answer.results[0]

    @property
    def states(self) -> dict[str, str]:
        answer, _ = self.operations.perform(Status())
        return {
            each.process: each.values["state"]
            for each in answer.results
            if each.process.startswith("engine")
        }


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with running() as run:
        yield Deployment(run, tmp_path)


def test_an_engine_is_added_and_removed(deployment: Deployment) -> None:
    deployment.start_gateway()
    before = deployment.run.pids
    added = deployment.perform(AddEngine())
    assert (added.process, added.ok, added.values["role"]) == ("engine 2", True, "unified")
    assert set(deployment.run.pids) - set(before) == {"worker 2.0", "scheduler 2"}
    assert deployment.states == {f"engine {number}": "ready" for number in range(3)}
    removed = deployment.perform(RemoveEngine(engine=2))
    assert removed.ok
    assert removed.message.startswith("removed in")
    assert deployment.run.pids == before
    assert deployment.maker.cleaned_up == [(2, ["worker 2.0", "scheduler 2"])]
    assert deployment.states["engine 2"] == "removed"
    assert deployment.perform(AddEngine()).process == "engine 3"


def test_a_topology_says_which_engines_there_are(tmp_path: Path) -> None:
    with running() as run:
        fixed, before = Deployment(run, tmp_path, is_fixed=True), run.pids
        for action, begin in (
            (AddEngine(), "no engine was added"),
            (RemoveEngine(engine=1), "no engine was removed"),
        ):
            result = fixed.perform(action)
            assert not result.ok
            assert result.message == f"{begin}: the topology says which engines there are"
        assert run.pids == before


class SlowKeys(DeploymentKeys):
    """Counts how many threads read them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reading, self.most = 0, 0

    def read_again(self) -> tuple[ApiKey, ...]:
        self.num_reading += 1
        self.most = max(self.most, self.num_reading)
        time.sleep(0.1)
        self.num_reading -= 1
        return (ApiKey(name="alice", digest="a"),)


def test_keys_are_read_again_by_one_operator_at_a_time(tmp_path: Path) -> None:
    keys = SlowKeys()
    with running() as run, ThreadPoolExecutor() as threads:
        deployment = Deployment(run, tmp_path, keys=keys)
        results = list(threads.map(deployment.perform, [ReloadKeys()] * 3))
    assert [result.ok for result in results] == [True] * 3
    assert [result.values["added"] for result in results] == [1, 0, 0]
    assert keys.most == 1


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("fail", "scheduler 2: no such model; choose another"), (None, "no memory is free")],
)
def test_an_engine_that_does_not_start_changes_nothing(
    deployment: Deployment, behaviour: str | None, reason: str
) -> None:
    deployment.start_gateway()
    before, deployment.maker.behaviour = deployment.run.pids, behaviour
    refused = deployment.perform(AddEngine())
    assert (refused.process, refused.ok, refused.message) == (
        "engine 2",
        False,
        f"not added: {reason}",
    )
    assert deployment.run.pids == before
    assert deployment.states == {"engine 0": "ready", "engine 1": "ready"}
    assert [number for number, _ in deployment.maker.cleaned_up] == [2]


def test_an_engine_whose_processes_cannot_be_described_leaves_its_number_and_gpus_free(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_engine(replica: Replica) -> NewEngine:
        raise OSError("too many open files")

    monkeypatch.setattr(deployment.maker, "make_engine", make_engine)
    refused = deployment.perform(AddEngine())
    assert refused.message == "not added: too many open files"
    assert [each.number for each in deployment.engines.present] == [0, 1]


def test_an_engine_that_does_not_end_in_time_can_be_removed_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.start_gateway()
    before, deployment.maker.behaviour = deployment.run.pids, "deaf"
    assert deployment.perform(AddEngine()).ok
    monkeypatch.setattr(group_restarts, "STOP_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(operations, "END_TIMEOUT_S", 0.0)
        late = deployment.perform(RemoveEngine(engine=2))
    assert late.message == (
        "gets no requests, but its processes have not ended: they still run after 0 s. "
        "Remove it again"
    )
    assert "remove it again" in deployment.perform(DrainOneEngine(engine=2)).message
    assert deployment.perform(RemoveEngine(engine=2)).ok
    assert deployment.run.pids == before
    assert deployment.maker.cleaned_up == [(2, ["worker 2.0", "scheduler 2"])]


def test_an_action_for_all_engines_leaves_out_those_that_start_or_end(
    deployment: Deployment,
) -> None:
    starting = deployment.engines.reserve(None)
    answer, _ = deployment.operations.perform(ResumeEngine())
    assert [each.process for each in answer.results] == ["scheduler 0", "scheduler 1"]
    answer, _ = deployment.operations.perform(ResumeEngine(engine=starting.number))
    assert answer.error == "engine 2 is starting"


def test_new_requests_wait_for_a_restart_if_all_other_engines_are_drained(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Command] = []

    def ask(to: Sequence[tuple[ManagedProcess, Command]], timeout_s: float) -> list[Result]:
        asked.extend(command for _, command in to)
        return [Result(process.name, True, "") for process, _ in to]

    monkeypatch.setattr(operations, "_ask", ask)
    assert deployment.perform(Restart(engine=1)).ok
    assert deployment.perform(DrainOneEngine(engine=0)).ok
    assert deployment.perform(Restart(engine=1)).ok
    holds_new = [each.holds_new for each in asked if isinstance(each, DrainEngine)]
    assert holds_new == [False, False, True]


def test_an_engine_that_sleeps_computes_no_requests_for_others(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Command] = []
    ask = operations._ask

    def note(to: Sequence[tuple[ManagedProcess, Command]], timeout_s: float) -> list[Result]:
        asked.extend(command for _, command in to)
        return ask(to, timeout_s)

    monkeypatch.setattr(operations, "_ask", note)
    deployment.perform(SleepEngine(engine=0, timeout_s=0.0))
    assert deployment.states == {"engine 0": "asleep", "engine 1": "ready"}
    refused = deployment.perform(DrainOneEngine(engine=1))
    assert "it is the last unified engine that is ready" in refused.message
    deployment.perform(Restart(engine=1))
    (drain,) = (each for each in asked if isinstance(each, DrainEngine))
    assert drain.holds_new
    deployment.perform(WakeEngine(engine=0))
    assert deployment.states["engine 0"] == "ready"
    assert deployment.perform(DrainOneEngine(engine=1)).message.startswith("gets no new requests")


def test_an_engine_that_a_gateway_cannot_use_is_ended(deployment: Deployment) -> None:
    deployment.start_gateway("refuse")
    before = deployment.run.pids
    refused = deployment.perform(AddEngine())
    assert refused.message == "not added: gateway: it is another model"
    assert deployment.run.pids == before
    assert [each.number for each in deployment.engines.used] == [0, 1]


def test_the_last_engine_stays_and_a_drained_one_is_resumed(deployment: Deployment) -> None:
    # A fake engine does not know the command, so that it is not drained in time.
    late = deployment.perform(DrainOneEngine(engine=0))
    assert late.message.startswith("gets no new requests, but was not drained")
    assert deployment.states["engine 0"] == "draining"
    for action in (RemoveEngine(engine=1), DrainOneEngine(engine=1)):
        refused: Any = deployment.perform(action)
        assert not refused.ok
        assert "it is the last unified engine that is ready" in refused.message
    deployment.perform(ResumeEngine(engine=0))
    assert deployment.states["engine 0"] == "ready"
    assert "not drained" in deployment.perform(DrainOneEngine(engine=1)).message


def test_a_role_without_its_connector_is_refused(deployment: Deployment) -> None:
    refused = deployment.perform(AddEngine("decode"))
    assert (refused.process, refused.ok) == ("deployment", False)
    assert "without the connector that split requests need" in refused.message
