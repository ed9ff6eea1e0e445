"""Connectors of one class with a role, as the scheduler sees them."""

from typing import Any

import msgspec
import pytest

from longshore.connectors.adapter import (
    AllocatedBlocks,
    ConnectorRole,
    OneClassAdapter,
    OneClassConnector,
    SupportsHMA,
)
from longshore.connectors.base import (
    AskLater,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.protocol.arrays import int32_array

REQUEST = RequestView("r", int32_array([1, 2, 3, 4]), 4, ())


class Meta(msgspec.Struct):
    step: int


class Recorder(OneClassConnector):
    """Records its calls; returns `match` and `metadata`."""

    match: tuple[int | None, bool] = (0, False)
    metadata: bytes | Meta = b""

    def __init__(self) -> None:
        super().__init__(ConnectorConfig(), ConnectorRole.SCHEDULER)
        self.calls: list[Any] = []

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.calls.append((request.request_id, num_computed_tokens))
        return self.match

    def update_state_after_alloc(
        self, request: RequestView, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        self.calls.append((request.request_id, blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, step: StepView) -> bytes | Meta:
        return self.metadata

    def request_finished(
        self, request: RequestView, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append((request.request_id, block_ids))
        return True, {"lease": 3}

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.calls.append(output)

    def on_new_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)

    @property
    def has_pending_work(self) -> bool:
        return bool(self.calls)


class Wide(Recorder, SupportsHMA):
    def request_finished_all_groups(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append((request.request_id, block_ids))
        return False, None


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ((0, False), Matched(0)),
        ((12, False), Matched(12)),
        ((12, True), Matched(12, is_async=True)),
        ((None, False), AskLater()),
        ((None, True), AskLater()),
    ],
)
def test_a_tuple_becomes_a_match(answer: tuple[int | None, bool], match: Any) -> None:
    connector = Recorder()
    connector.match = answer
    assert (
        OneClassAdapter(connector, connector.config).get_num_new_matched_tokens(REQUEST, 8) == match
    )
    assert connector.calls == [("r", 8)]


def test_allocated_blocks_come_as_lists_per_group() -> None:
    connector = Recorder()
    blocks = (int32_array([3, 4]), int32_array([9]))
    OneClassAdapter(connector, connector.config).update_state_after_alloc(REQUEST, blocks, 8)
    assert connector.calls == [("r", ([3, 4], [9]), 8)]


def test_metadata_is_sent_as_bytes() -> None:
    connector = Recorder()
    adapter = OneClassAdapter(connector, connector.config)
    assert adapter.build_connector_meta(StepView(1, 0)) == b""
    connector.metadata = Meta(7)
    encoded = adapter.build_connector_meta(StepView(2, 1))
    assert msgspec.msgpack.decode(encoded, type=Meta) == Meta(7)


def test_the_end_of_a_request_is_passed_on_with_one_group_or_with_all() -> None:
    one, wide = Recorder(), Wide()
    blocks = (int32_array([3, 4]), int32_array([9]))
    assert OneClassAdapter(one, one.config).request_finished(REQUEST, blocks[:1]) == FinishAction(
        True, {"lease": 3}
    )
    assert OneClassAdapter(one, one.config).request_finished(REQUEST, ()) == FinishAction(
        True, {"lease": 3}
    )
    assert OneClassAdapter(wide, wide.config).request_finished(REQUEST, blocks) == FinishAction()
    assert one.calls == [("r", [3, 4]), ("r", [])]
    assert wide.calls == [("r", ([3, 4], [9]))]


def test_every_hook_of_the_contract_reaches_the_connector() -> None:
    connector = Recorder()
    adapter = OneClassAdapter(connector, connector.config)
    output = ConnectorOutput(finished_sending=("r",))
    assert not adapter.has_pending_work
    adapter.update_connector_output(output)
    adapter.on_new_epoch(2)
    assert connector.calls == [output, 2]
    assert adapter.has_pending_work
    hooks = {name for name in vars(SchedulerConnector) if not name.startswith("_")}
    own = {name for name in vars(OneClassAdapter) if name in hooks}
    assert own | {"supports_hma"} == hooks
