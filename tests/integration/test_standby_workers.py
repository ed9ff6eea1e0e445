"""Standby workers of real deployments, whose clients only see a short pause."""

import signal

import psutil
import pytest

from longshore.deploy.admin.actions import SOCKET_NAME, Status
from longshore.deploy.admin.client import perform
from tests.conftest import ROOT
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment, wait_until
from tests.integration.test_worker_deaths import Answers

FLAGS = ("--dtype", "float32", "--verify-plan", "--standby-workers", "1")
STANDBY = "worker 0 standby"
FAULTS = (signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long))


def ready_pids(deployment: Deployment) -> dict[str, int]:
    """The process ids that `longshore admin status` shows, of the processes that are ready."""
    (runtime_dir,) = deployment.runtime_dirs
    with perform(runtime_dir / f"{SOCKET_NAME}.sock", Status()) as (answer, _):
        return {
            each.process: each.values["pid"]
            for each in answer.results
            if "pid" in each.values and each.ok
        }


def wait_for_standby(deployment: Deployment, name: str = STANDBY, *, other_than: int = 0) -> int:
    """The process id of a standby that can take over."""
    wait_until(lambda: ready_pids(deployment).get(name, other_than) != other_than)
    return ready_pids(deployment)[name]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_streams_go_on_when_a_standby_takes_the_place_of_their_worker(
    start_deployment: StartDeployment, fault: signal.Signals
) -> None:
    deployment = start_deployment(*FLAGS, "--hang-timeout-s", "8").wait_until_ready()
    calm = Answers(deployment).all()
    standby = wait_for_standby(deployment)
    former = ready_pids(deployment)
    answers = Answers(deployment).wait_until_running()
    deployment.members["worker-0"].send_signal(fault)
    assert answers.all() == calm
    next_standby = wait_for_standby(deployment, other_than=standby)
    assert next_standby != former["worker 0"]
    assert ready_pids(deployment) == former | {"worker 0": standby, STANDBY: next_standby}
    assert f"{STANDBY} takes the place of worker 0" in deployment.output
    assert "Traceback" not in deployment.output
    deployment.find_members()
    assert next_standby in {member.pid for member in deployment.members.values()}
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


def who_imported(deployment: Deployment) -> list[str]:
    """The processes that have imported `late_library`, in this order."""
    lines = deployment.output.splitlines()
    return [line[line.index("[") + 1 : line.index("]")] for line in lines if "late library" in line]


@pytest.mark.slow
def test_a_standby_has_imported_its_connector_s_library_before_it_takes_over(
    start_deployment: StartDeployment,
) -> None:
    """Streams would wait for that, for seconds on a busy machine."""
    connector = ("--kv-connector", "tests.integration.closing_tier:LateLibrary")
    deployment = start_deployment(*FLAGS, *connector, environment={"PYTHONPATH": str(ROOT)})
    standby = wait_for_standby(deployment.wait_until_ready())
    for num_deaths in (1, 2):  # the second worker was a standby, and has imported it in advance
        psutil.Process(ready_pids(deployment)["worker 0"]).kill()
        next_standby = wait_for_standby(deployment, other_than=standby)
        assert ready_pids(deployment)["worker 0"] == standby
        standby = next_standby
        expected = ["worker 0", *[STANDBY] * (num_deaths + 1)]
        wait_until(lambda expected=expected: who_imported(deployment) == expected)
    deployment.find_members()
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_a_worker_whose_standby_has_died_is_restarted(start_deployment: StartDeployment) -> None:
    deployment = start_deployment(*FLAGS).wait_until_ready()
    calm = Answers(deployment).all()
    standby = wait_for_standby(deployment)
    deployment.find_members()
    answers = Answers(deployment).wait_until_running()
    for name in ("worker-0-standby", "worker-0"):
        deployment.members[name].send_signal(signal.SIGKILL)
    assert answers.all() == calm
    next_standby = wait_for_standby(deployment, other_than=standby)
    assert ready_pids(deployment)["worker 0"] not in (standby, next_standby)
    deployment.find_members()
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()


@pytest.mark.slow
def test_the_standbys_of_two_ranks_take_over_together(start_deployment: StartDeployment) -> None:
    deployment = start_deployment(*FLAGS, "--tensor-parallel-size", "2").wait_until_ready()
    calm = Answers(deployment).all()
    standbys = [wait_for_standby(deployment, f"worker {rank} standby") for rank in range(2)]
    answers = Answers(deployment).wait_until_running()
    deployment.members["worker-1"].send_signal(signal.SIGKILL)
    assert answers.all() == calm
    pids = ready_pids(deployment)
    assert [pids["worker 0"], pids["worker 1"]] == standbys
    for rank in range(2):
        wait_for_standby(deployment, f"worker {rank} standby", other_than=standbys[rank])
    deployment.find_members()
    assert deployment.stop() == 0
    deployment.assert_nothing_is_left()
