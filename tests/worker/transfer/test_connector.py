"""The hooks of a connector's worker half: when each is called, on which thread, with what."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.connectors.base import FinishedTransfers, KVCaches, StepTokens, TransferQueues
from longshore.protocol.errors import ConfigError
from longshore.protocol.outputs import ModelRunnerOutput, WorkerFailed, WorkerReport
from longshore.protocol.plan import SchedulerOutput
from longshore.worker.config import WorkerConfig
from longshore.worker.kernels.native import native
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.transfer.connector import ConnectorRunner, HookFailed
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner
from tests.worker.recording_connector import Call, RecordingConnector

NUM_BLOCKS = 40
EPOCH, RANK = 5, 0


class Rank:
    """A worker with a connector, and the plans for it."""

    def __init__(self, model: Path, connector: RecordingConnector) -> None:
        config = WorkerConfig(
            model=str(model), num_blocks=NUM_BLOCKS, max_num_seqs=8, show_progress=False
        )
        self.worker = Worker(config)
        self.num_wakes = 0
        self.runner: ModelRunner = self.worker.start(
            epoch=EPOCH, connector=connector, wake=self._wake
        )
        self.connector = connector
        self.plans = Planner(num_blocks=NUM_BLOCKS, block_size=16, epoch=EPOCH)
        self.reports: list[WorkerReport] = []

    def _wake(self) -> None:
        self.num_wakes += 1

    @property
    def hooks(self) -> ConnectorRunner:
        assert self.worker.connector is not None
        return self.worker.connector

    def run(self, plan: SchedulerOutput) -> WorkerReport:
        """Execute a plan; returns the report."""
        completion = self.runner.submit(plan, self.reports.append)
        assert completion is not None
        completion.wait()
        return self.reports[-1]

    def output(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        report = self.run(plan)
        assert isinstance(report, ModelRunnerOutput), report
        return report


OpenRank = Callable[[RecordingConnector], Rank]


@pytest.fixture
def open_rank(checkpoint: tuple[Path, Any]) -> Iterator[OpenRank]:
    ranks: list[Rank] = []

    def open_(connector: RecordingConnector) -> Rank:
        ranks.append(Rank(checkpoint[0], connector))
        return ranks[-1]

    yield open_
    for rank in ranks:
        rank.worker.close()


def first_plan(rank: Rank, **fields: Any) -> SchedulerOutput:
    return rank.plans.plan({0: 20}, added=[Entry(0, range(3, 23), request_id="a")], **fields)


@pytest.mark.req("CON-03")
def test_the_blocks_are_registered_once_before_the_first_plan(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    open_rank(connector)
    assert connector.calls == [Call("register_kv_caches", None, False)]
    assert connector.kv_caches is not None
    (group,) = connector.kv_caches.groups
    assert group.blocks.dtype == torch.uint8
    assert group.blocks.shape == (NUM_BLOCKS, group.size_bytes)
    assert tuple(group.layers) == group.layer_names
    element_bytes = [layer.nbytes for layer in group.layers.values()]  # type: ignore[union-attr]
    assert sum(element_bytes) == NUM_BLOCKS * group.size_bytes


@pytest.mark.req("CON-14")
def test_a_registered_block_is_one_run_of_bytes_with_all_layers(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    open_rank(connector)
    assert connector.kv_caches is not None
    (group,) = connector.kv_caches.groups
    assert len(group.layers) > 1
    assert group.blocks[2].is_contiguous()
    starts = [layer[2].data_ptr() for layer in group.layers.values()]  # type: ignore[union-attr]
    assert starts == sorted(starts), "in the order of the layers"
    group.blocks[2] = 255
    for layer in group.layers.values():
        assert (layer[2].contiguous().view(torch.uint8) == 255).all()  # type: ignore[union-attr]
        assert not layer[1].any()  # type: ignore[union-attr]


def test_the_registered_blocks_are_those_that_steps_write(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    assert connector.kv_caches is not None
    (group,) = connector.kv_caches.groups
    before = group.blocks.clone()
    rank.output(first_plan(rank))
    changed = (group.blocks != before).any(dim=1).nonzero().flatten().tolist()
    assert set(rank.plans.blocks[0]) <= set(changed)
    layers = torch.stack([layer[rank.plans.blocks[0][0]] for layer in group.layers.values()])  # type: ignore[misc, index]
    assert layers.any()


@pytest.mark.req("CON-13")
def test_a_plan_without_metadata_calls_no_hook(open_rank: OpenRank) -> None:
    connector = RecordingConnector(layers=True, hidden_states=True)
    rank = open_rank(connector)
    del connector.calls[:]
    rank.output(first_plan(rank))
    rank.output(rank.plans.plan())
    assert connector.calls == []


@pytest.mark.req("CON-03", "CON-13")
def test_block_hooks_run_before_the_step_on_the_loop_and_within_it_on_the_queue(
    open_rank: OpenRank,
) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    del connector.calls[:]
    rank.output(first_plan(rank, connector_metadata=b"one"))
    assert connector.calls == [
        Call("bind_connector_metadata", "one", False),
        Call("start_load_kv", "one", False),
        Call("wait_for_load", "one", True),
        Call("wait_for_save", "one", True),
        Call("get_block_ids_with_load_errors", "one", True),
    ]


@pytest.mark.req("CON-03", "CON-13")
def test_layer_hooks_surround_the_attention_of_every_layer_of_every_step(
    open_rank: OpenRank,
) -> None:
    connector = RecordingConnector(layers=True)
    rank = open_rank(connector)
    assert connector.kv_caches is not None
    (group,) = connector.kv_caches.groups
    around = [
        f"{hook} {name}"
        for name in group.layer_names
        for hook in ("wait_for_layer_load", "save_kv_layer")
    ]
    rank.output(first_plan(rank, connector_metadata=b"prefill"))
    for step in range(3):  # small steps would replay a graph
        del connector.calls[:]
        rank.output(rank.plans.plan(connector_metadata=str(step).encode()))
        assert connector.hooks()[2:-2] == ["wait_for_load", *around]
        assert {call.metadata for call in connector.calls} == {str(step)}
        assert all(call.is_on_compute_queue for call in connector.calls[2:])
    for name, layer in group.layers.items():
        assert connector.saved_layers[name] is layer


@pytest.mark.parametrize("layers", [True, False])
def test_layer_hooks_switch_graphs_off(layers: bool, open_rank: OpenRank) -> None:
    rank = open_rank(RecordingConnector(layers=layers))
    can_capture = rank.runner._launcher.state.forward.is_capturable
    assert can_capture == (not layers and native() is not None)


def test_tokens_do_not_depend_on_the_hooks(open_rank: OpenRank) -> None:
    answers = []
    for connector in (RecordingConnector(), RecordingConnector(layers=True, hidden_states=True)):
        rank = open_rank(connector)
        outputs = [rank.output(first_plan(rank, connector_metadata=b"m"))]
        outputs += [rank.output(rank.plans.plan(connector_metadata=b"m")) for _ in range(8)]
        answers.append([output.sampled_tokens.tolist() for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.req("CON-10")
@pytest.mark.parametrize("metadata", [b"", b"m"])
def test_preemptions_are_handled_before_loads_begin(metadata: bytes, open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    rank.output(first_plan(rank))
    del connector.calls[:]
    rank.output(rank.plans.plan(preempted=[0], connector_metadata=metadata))
    begin = ["bind_connector_metadata", "handle_preemptions", "start_load_kv"]
    assert connector.hooks()[:3] == (begin if metadata else [])


@pytest.mark.req("CON-10")
def test_a_step_on_the_blocks_of_a_preempted_request_begins_after_the_barrier(
    open_rank: OpenRank,
) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    rank.output(first_plan(rank))
    del connector.calls[:]
    plan = rank.plans.plan(
        {1: 5},
        added=[Entry(1, range(30, 35), request_id="b")],
        preempted=[0],
        connector_metadata=b"loads",
    )
    assert connector.kv_caches is not None
    before = connector.kv_caches.groups[0].blocks.clone()
    seen: list[bool] = []
    handle = connector.handle_preemptions

    def wait_a_little(metadata: Any) -> None:
        handle(metadata)
        assert connector.queues is not None
        assert connector.queues.computed().wait(10)  # a step that did not wait has written now
        assert connector.kv_caches is not None
        seen.append(torch.equal(connector.kv_caches.groups[0].blocks, before))

    connector.handle_preemptions = wait_a_little  # type: ignore[method-assign]
    rank.output(plan)
    assert seen == [True]
    assert not torch.equal(connector.kv_caches.groups[0].blocks, before)


def test_a_plan_without_tokens_begins_its_transfers(open_rank: OpenRank) -> None:
    connector = RecordingConnector(layers=True)
    rank = open_rank(connector)
    del connector.calls[:]
    rank.output(rank.plans.plan(connector_metadata=b"store"))
    assert connector.hooks() == [
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_load",
        "wait_for_save",
        "get_block_ids_with_load_errors",
    ]


def test_hidden_states_come_with_the_requests_of_their_tokens(open_rank: OpenRank) -> None:
    connector = RecordingConnector(hidden_states=True)
    rank = open_rank(connector)
    rank.output(first_plan(rank, connector_metadata=b"one"))
    entry = Entry(3, range(5, 12), request_id="b")
    rank.output(rank.plans.plan({3: 4}, added=[entry], connector_metadata=b"two"))
    rank.output(rank.plans.plan({3: 3}, connector_metadata=b"three"))
    rank.output(
        rank.plans.plan(
            {0: 6},
            finished=[0],
            added=[Entry(0, range(6), request_id="c")],
            connector_metadata=b"four",
        )
    )
    by_request = [
        {
            request_id: (num, position)
            for request_id, num, position in zip(
                tokens.request_ids, tokens.num_tokens, tokens.positions, strict=True
            )
        }
        for tokens in connector.tokens
    ]
    assert by_request == [
        {"a": (20, 0)},
        {"a": (1, 20), "b": (4, 0)},
        {"a": (1, 21), "b": (3, 4)},
        {"b": (1, 7), "c": (6, 0)},
    ]
    hidden_size = rank.worker.model_config.hidden_size
    assert connector.hidden_shapes == [(num, hidden_size) for num in (20, 5, 4, 7)]
    assert all(isinstance(tokens, StepTokens) for tokens in connector.tokens)


# Reports


@pytest.mark.req("MET-05")
def test_blocks_that_a_load_within_the_step_did_not_fill_are_in_its_output(
    open_rank: OpenRank,
) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    connector.failed = [9, 4, 9]
    output = rank.output(first_plan(rank, connector_metadata=b"m", has_loads=True))
    assert output.failed_block_ids.tolist() == [4, 9]
    assert rank.output(rank.plans.plan()).failed_block_ids.tolist() == []


@pytest.mark.req("CON-09")
def test_ended_transfers_are_reported_once(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    assert rank.hooks.take_report() is None
    connector.ended = [FinishedTransfers(["sent"], ["received"], [7, 3])]
    connector.messages = [b"hello"]
    report = rank.hooks.take_report()
    assert report is not None
    assert (report.epoch, report.rank, report.step) == (EPOCH, RANK, 0)
    assert report.finished_sending == ("sent",)
    assert report.finished_receiving == ("received",)
    assert report.failed_block_ids.tolist() == [7, 3]
    assert report.connector_metadata == b"hello"
    assert rank.hooks.take_report() is None


@pytest.mark.req("CON-09")
@pytest.mark.parametrize(
    "ended",
    [FinishedTransfers(["r"], [], []), FinishedTransfers([], ["r"], [])],
    ids=["sent", "received"],
)
def test_a_transfer_that_ends_alone_is_reported(
    ended: FinishedTransfers, open_rank: OpenRank
) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    connector.ended = [ended]
    report = rank.hooks.take_report()
    assert report is not None
    assert [*report.finished_sending] == ended.sent
    assert [*report.finished_receiving] == ended.received


@pytest.mark.req("CON-09")
def test_a_message_without_an_ended_transfer_is_reported(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    connector.messages = [b"found"]
    report = rank.hooks.take_report()
    assert report is not None
    assert report.connector_metadata == b"found"


@pytest.mark.req("CON-03", "CON-09")
def test_ended_requests_are_named_once_also_by_plans_without_metadata(
    open_rank: OpenRank,
) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    rank.output(first_plan(rank))
    rank.output(rank.plans.plan({2: 5}, added=[Entry(2, range(5), request_id="b")]))
    rank.output(rank.plans.plan(preempted=[2]))
    rank.hooks.take_report()
    assert connector.finished == []
    # The row goes to another request in the same plan.
    again = Entry(0, range(5), request_id="c")
    rank.output(rank.plans.plan({0: 5}, finished=[0], added=[again], connector_metadata=b"m"))
    rank.output(rank.plans.plan(finished=[0]))
    rank.hooks.take_report()
    rank.hooks.take_report()
    assert connector.finished == ["a", "c"]


def test_the_connector_can_wake_the_worker(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    assert connector.queues is not None
    connector.queues.wake()
    assert rank.num_wakes == 1


# Failures


@pytest.mark.parametrize("hook", ["bind_connector_metadata", "handle_preemptions", "start_load_kv"])
def test_a_hook_on_the_loop_that_raises_is_named(hook: str, open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    rank.output(first_plan(rank))
    connector.failing = {hook}
    message = f"^{hook} of the connector RecordingConnector raised RuntimeError: it does not work"
    with pytest.raises(HookFailed, match=message):
        rank.run(rank.plans.plan(preempted=[0], connector_metadata=b"m"))


@pytest.mark.parametrize(
    "hook",
    [
        "wait_for_load",
        "wait_for_layer_load",
        "save_kv_layer",
        "save_hidden_states",
        "wait_for_save",
        "get_block_ids_with_load_errors",
    ],
)
def test_a_hook_within_the_step_that_raises_fails_the_step_and_is_named(
    hook: str, open_rank: OpenRank
) -> None:
    connector = RecordingConnector(layers=True, hidden_states=True)
    rank = open_rank(connector)
    connector.failing = {hook}
    report = rank.run(first_plan(rank, connector_metadata=b"m"))
    assert isinstance(report, WorkerFailed)
    assert (report.epoch, report.rank, report.is_consequence) == (EPOCH, RANK, False)
    start = f"step 1: {hook} of the connector RecordingConnector raised RuntimeError: it does not"
    assert report.reason.startswith(start)


@pytest.mark.parametrize("hook", ["get_finished", "build_connector_worker_meta"])
def test_a_hook_for_reports_that_raises_is_named(hook: str, open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    connector.failing = {hook}
    with pytest.raises(HookFailed, match=f"^{hook} of the connector RecordingConnector raised"):
        rank.hooks.take_report()


def test_blocks_that_cannot_be_registered_end_the_start(open_rank: OpenRank) -> None:
    connector = RecordingConnector()
    connector.failing = {"register_kv_caches"}
    with pytest.raises(HookFailed, match=r"^register_kv_caches of the connector Recording") as why:
        open_rank(connector)
    assert "raised RuntimeError: it does not work. The worker cannot start with it" in str(
        why.value
    )


def test_an_error_of_the_connector_that_is_complete_is_not_changed(open_rank: OpenRank) -> None:
    """Such as: the disk tier cannot use a path, and why, and what to do."""

    class Refusing(RecordingConnector):
        def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
            raise ConfigError("the folder cannot be written; give it another one")

    with pytest.raises(ConfigError) as why:
        open_rank(Refusing())
    assert str(why.value) == "the folder cannot be written; give it another one"


def test_a_reason_not_to_start_is_reported_in_its_own_words(open_rank: OpenRank) -> None:
    class WithoutMemory(RecordingConnector):
        def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
            raise ConfigError("the host tier cannot have 9 bytes. Lower cpu_bytes_to_use.")

    with pytest.raises(ConfigError, match=r"^the host tier cannot have 9 bytes. Lower .*_use\.$"):
        open_rank(WithoutMemory())


def test_a_shutdown_that_raises_is_logged_and_everything_else_ends(
    open_rank: OpenRank, caplog: pytest.LogCaptureFixture
) -> None:
    connector = RecordingConnector()
    rank = open_rank(connector)
    assert connector.queues is not None
    queue = connector.queues.open("stores")
    done = queue.submit(lambda: None)
    connector.failing = {"shutdown"}
    with caplog.at_level(logging.ERROR):
        rank.worker.close()
    assert "shutdown of the connector RecordingConnector raised" in caplog.text
    assert done.is_done()
    assert connector.calls[-1] == Call("shutdown", None, False)


def test_no_epoch_follows_transfers_that_cannot_be_ended(open_rank: OpenRank) -> None:
    """The blocks are the same, and a late load would write to them."""
    connector = RecordingConnector()
    rank = open_rank(connector)
    connector.failing = {"shutdown"}
    with pytest.raises(HookFailed, match="may still write to memory"):
        rank.worker.end_epoch()
