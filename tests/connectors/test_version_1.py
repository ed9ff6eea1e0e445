"""Connectors that were written for version 1 of the contract."""

from pathlib import Path

import msgspec
import pytest

from longshore.connectors.base import (
    AdmittedRequest,
    ConnectorConfig,
    SchedulerConnector,
    StepView,
    StorableBlocks,
    WorkerConnectorConfig,
)
from longshore.connectors.example.scheduler import Commands
from longshore.connectors.registry import load_scheduler_connector, load_worker_connector
from longshore.connectors.version_1 import FormerStepView, _FormerViews
from longshore.protocol.arrays import int32_array
from tests.connectors.engine import check_tokens_of_demo_model
from tests.connectors.holds import Holds

NAME = "tests.testing.version_1_connector:Version1"
HASHES = [bytes([number]) * 32 for number in range(3)]


class Former(SchedulerConnector):
    """Records what it sees."""

    contract_version = 1
    worker_half = "tests.testing.version_1_connector:Version1Worker"

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.views: list[FormerStepView] = []

    def build_connector_meta(self, step: FormerStepView) -> bytes:  # type: ignore[override]
        self.views.append(step)
        return b"metadata"


def storable(step: int, *block_ids: int) -> StorableBlocks:
    return StorableBlocks(step, "r", 0, block_ids, HASHES[: len(block_ids)])


def test_it_holds_storable_blocks_until_the_plan_that_lists_them_is_answered(
    tmp_path: Path,
) -> None:
    connector = load_scheduler_connector(NAME, ConnectorConfig({"path": str(tmp_path)}))
    holds = Holds()
    connector.bind_blocks(holds)
    assert connector.build_connector_meta(StepView(3, 2, storable=[storable(1, 7, 8)])) == b""
    assert holds.held == {1: [7, 8]}
    data = connector.build_connector_meta(StepView(4, 3))
    (store,) = msgspec.msgpack.decode(data, type=Commands).stores
    assert store.block_ids == [7, 8]
    assert connector.build_connector_meta(StepView(5, 4, storable=[storable(3, 9)])) == b""
    connector.build_connector_meta(StepView(6, 4, uncached=[9]))
    assert holds.held == {1: [7, 8]}


def test_nothing_is_kept_of_requests_that_a_new_epoch_has_not_admitted() -> None:
    views = _FormerViews()
    views.of(StepView(4, 3, admitted=[AdmittedRequest("r", (int32_array([1]),))]))
    assert views._first_steps == {"r": 4}
    views.of(StepView(1, 0))
    assert views._first_steps == {}


def test_it_sees_the_other_fields_and_no_blocks_from_before_the_last_admission() -> None:
    connector = load_scheduler_connector(f"{__name__}:Former", ConnectorConfig())
    assert isinstance(connector, Former)
    admitted = [AdmittedRequest("r", (int32_array([1, 2]),))]
    blocks = {step: storable(step, step) for step in (1, 2, 4, 5, 6)}
    for step in (
        StepView(1, 0, admitted=admitted),
        StepView(3, 1, storable=[blocks[1]], uncached=[4], preempted=["r"]),
        StepView(4, 2, storable=[blocks[2]]),  # it has no block table
        StepView(5, 3, admitted=admitted),
        StepView(6, 4, storable=[blocks[4]]),
        StepView(7, 6, storable=[blocks[5], blocks[6]], finished=["r"]),
        StepView(1, 0, admitted=admitted),  # a new epoch
        StepView(2, 1, storable=[blocks[1]]),
    ):
        assert connector.build_connector_meta(step) == b"metadata"
    views = connector.views
    assert [list(view.cached) for view in views] == [
        *([], [blocks[1]], [blocks[2]], [], [], [blocks[5], blocks[6]]),
        *([], [blocks[1]]),
    ]
    assert views[1] == FormerStepView(3, 1, (), [4], [blocks[1]], ["r"])
    assert views[5].finished == ["r"]
    assert views[6].admitted == admitted


def test_a_worker_half_of_version_1_is_loaded(tmp_path: Path) -> None:
    config = WorkerConnectorConfig({"path": str(tmp_path)})
    assert load_worker_connector(NAME, config).contract_version == 1


@pytest.mark.timeout(300)
def test_an_engine_with_one_gives_the_tokens_of_one_without(tmp_path: Path) -> None:
    check_tokens_of_demo_model(
        kv_connector=NAME,
        kv_connector_config=msgspec.json.encode({"path": str(tmp_path)}).decode(),
        in_process=True,
    )
