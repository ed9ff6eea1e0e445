"""Connectors of one class with a role, as the scheduler and the workers see them."""

import re
from typing import Any

import msgspec
import pytest
import torch

from longshore.connectors.adapter import (
    AllocatedBlocks,
    ConnectorRole,
    OneClassAdapter,
    OneClassConnector,
    OneClassWorkerAdapter,
    SupportsHMA,
)
from longshore.connectors.base import (
    AskLater,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    FinishedTransfers,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.protocol.arrays import int32_array
from tests.conftest import ROOT

REQUEST = RequestView("r", int32_array([1, 2, 3, 4]), 4, ())


class Meta(msgspec.Struct):
    step: int


class Recorder(OneClassConnector):
    """Records its calls; returns `match` and `metadata`."""

    match: tuple[int | None, bool] = (0, False)
    metadata: bytes | Meta = b""
    min_wait_s = 3.0
    chunk_blocks = 4

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

    def load_abandoned(self, request_id: str) -> None:
        self.calls.append(request_id)

    def skips_prefix_cache(self, request: RequestView) -> bool:
        return True

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
    assert adapter.skips_prefix_cache(REQUEST)
    adapter.load_expired("late")
    assert connector.calls.pop() == "late"  # as an abandoned load, unless it says otherwise
    assert adapter.min_wait_s == connector.min_wait_s == 3.0
    assert adapter.chunk_blocks == connector.chunk_blocks == 4
    hooks = {name for name in vars(SchedulerConnector) if not name.startswith("_")}
    own = {name for name in vars(OneClassAdapter) if name in hooks}
    attributes = {"supports_hma", "is_combinable", "uses_shared_memory", "worker_half"}
    attributes |= {"contract_version", "needs_every_step", "has_verify_kv", "reads_ahead"}
    attributes |= {"opens_nothing"}  # of a class that another one wraps, it cannot say
    attributes |= {"min_wait_s", "chunk_blocks"}
    attributes |= {"num_leasable_blocks"}  # it cannot lease
    attributes |= {"names_answers", "take_answered"}  # nor name what it has an answer for
    attributes |= {"check_options"}  # the wrapped class checks them when it is built
    swaps = {"can_swap", "swap_size", "swap_out", "release_swap"}  # not for one class
    # The one-class style has statistics of another type, and no way to end a send early.
    others = {"get_kv_connector_stats", "release_transfers"}
    assert own | attributes | swaps | others == hooks


def test_a_connector_of_one_class_is_asked_in_every_step_unless_it_says_otherwise() -> None:
    class Seldom(Recorder):
        needs_every_step = False

    for connector, needs_every_step in ((Recorder(), True), (Seldom(), False)):
        adapter = OneClassAdapter(connector, connector.config)
        assert adapter.needs_every_step is needs_every_step


class WorkerRecorder(Recorder):
    """Records the hooks of a worker; a hook that runs while another one does is an error."""

    metadata_type = Meta

    def note(self, *call: Any) -> None:
        self.calls.append(call)

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.note("bind", metadata)

    def clear_connector_metadata(self) -> None:
        self.note("clear")

    def handle_preemptions(self, metadata: Any) -> None:
        self.note("preemptions", metadata)

    def start_load_kv(self) -> None:
        self.note("load")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.note("before", layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any) -> None:
        self.note("after", layer_name)

    def wait_for_save(self) -> None:
        self.note("save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return finished_req_ids, {"b", "a"}

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {7, 3}


@pytest.mark.req("CON-01", "CON-03")
def test_the_hooks_of_a_step_follow_each_other_in_the_worker() -> None:
    connector = WorkerRecorder()
    adapter = OneClassWorkerAdapter(connector, WorkerConnectorConfig())
    first = adapter.bind_connector_metadata(msgspec.msgpack.encode(Meta(1)))
    adapter.handle_preemptions(first)
    adapter.start_load_kv(first)
    second = adapter.bind_connector_metadata(msgspec.msgpack.encode(Meta(2)))
    assert connector.calls == [], "the first step has not begun"
    for metadata in (first, second):
        adapter.wait_for_load(metadata)
        adapter.wait_for_layer_load(metadata, "layer")
        adapter.save_kv_layer(metadata, "layer", torch.empty(0))
        adapter.wait_for_save(metadata)
        assert adapter.get_block_ids_with_load_errors(metadata) == [3, 7]
    around = [("before", "layer"), ("after", "layer"), ("save",), ("clear",)]
    assert connector.calls == [
        ("bind", Meta(1)),
        ("preemptions", Meta(1)),
        ("load",),
        *around,
        ("bind", Meta(2)),
        ("load",),
        *around,
    ]


def test_finished_transfers_of_one_class_come_with_their_failed_blocks() -> None:
    adapter = OneClassWorkerAdapter(WorkerRecorder(), WorkerConnectorConfig())
    assert adapter.get_finished(["r"]) == FinishedTransfers(["r"], ["a", "b"], [3, 7])


def test_every_worker_hook_of_the_contract_is_wrapped() -> None:
    hooks = {name for name, value in vars(WorkerConnector).items() if callable(value)}
    hooks = {name for name in hooks if not name.startswith("_")}
    # Loads begin with the step, when the connector's metadata is bound.
    # The statistics of the one-class style have another type.
    assert hooks - {"start_load_kv", "get_kv_connector_stats"} <= set(vars(OneClassWorkerAdapter))


@pytest.mark.req("CON-02", "CON-03", "CON-12", "ERR-24")
def test_the_class_has_the_six_scheduler_hooks_and_the_nine_worker_hooks_of_the_text() -> None:
    """Its count of eight and seven is wrong."""
    text = (ROOT / "docs" / "requirements.md").read_text()
    for requirement, number in (("CON-02", 6), ("CON-03", 9)):
        (line,) = re.findall(rf"^- \*\*{requirement}\*\* (.*)$", text, re.M)
        hooks = re.findall(r"`(\w+)`", line)
        assert len(hooks) == number
        assert all(callable(getattr(OneClassConnector, hook)) for hook in hooks)
    assert callable(SupportsHMA.request_finished_all_groups)
