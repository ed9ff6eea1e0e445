"""multi: which child loads, and how the ends of the children's transfers are combined."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from longshore.connectors.base import (
    AskLater,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    ConnectorStats,
    FinishAction,
    FinishedTransfers,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepTokens,
    StepView,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.multi.scheduler import MultiConnector
from longshore.connectors.multi.worker import MultiWorker
from longshore.connectors.registry import load_scheduler_connector, load_worker_connector
from longshore.protocol.arrays import EMPTY_INT32, Int32Array, int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import AllBlocksCleared, KVEvent
from longshore.protocol.statistics import TierStats, TransferOperation
from tests.connectors.engine import Engine, prompts_of

ModelOf = Callable[[str], tuple[Path, Any]]
VIEW = RequestView("r", int32_array([1] * 40), 40, (), kv_transfer_params={"key": 1})
BLOCKS = (int32_array([3, 4]),)


class Scripted(SchedulerConnector):
    """Answers what the test sets, and records its calls."""

    supports_hma = True
    worker_half: ClassVar[str] = f"{__name__}:ScriptedWorker"

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.match: Match = Matched(0)
        self.action = FinishAction()
        self.metadata = b""
        self.skips = False
        self.can_reset = True
        self.calls: list[Any] = []
        self.outputs: list[ConnectorOutput] = []

    def bind_blocks(self, holds: BlockHolds) -> None:
        self.calls.append(("bind_blocks", holds))

    def on_new_request(self, request: RequestView) -> None:
        self.calls.append(("on_new_request", request))

    def skips_prefix_cache(self, request: RequestView) -> bool:
        return self.skips

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self.calls.append(("match", num_computed_tokens))
        return self.match

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        self.calls.append(("load", num_external_tokens))

    def build_connector_meta(self, step: StepView) -> bytes:
        return self.metadata

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.outputs.append(output)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self.calls.append(("finished", request))
        return self.action

    def load_abandoned(self, request_id: str) -> None:
        self.calls.append(("abandoned", request_id))

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        self.calls.append(("released", transfer_ids))

    @property
    def has_pending_work(self) -> bool:
        return bool(self.metadata)

    def take_events(self) -> list[KVEvent]:
        return [AllBlocksCleared()]

    def get_kv_connector_stats(self) -> ConnectorStats:
        return ConnectorStats([TierStats("CPU", 1, 2, 3, 4)], {("CPU", "GPU"): 5})

    def reset_cache(self) -> bool:
        self.calls.append("reset")
        return self.can_reset

    def on_new_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        raise RuntimeError(f"{self.config.options['name']} cannot stop")


class OneGroup(Scripted):
    supports_hma = False


class Sharing(Scripted):
    uses_shared_memory = True


class Constant(Scripted):
    needs_every_step = True


class StoresNothing(Scripted):
    chunk_blocks = 0


class Chunky(Scripted):
    chunk_blocks = 4


class StoresSixes(Scripted):
    chunk_blocks = 6


class ScriptedWorker(WorkerConnector[bytes]):
    """The same for the worker half; `ended` is reported by the next `get_finished`."""

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self.has_layer_hooks = config.options.get("layers", False)
        self.has_hidden_states_hook = config.options.get("hidden", False)
        self.poll_interval_s = config.options.get("poll_s")
        self.ended = FinishedTransfers()
        self.message = b""
        self.calls: list[Any] = []

    def bind_connector_metadata(self, data: bytes) -> bytes:
        self.calls.append("bind")
        return data

    def handle_preemptions(self, metadata: bytes) -> None:
        self.calls.append(("preempt", metadata))

    def start_load_kv(self, metadata: bytes) -> None:
        self.calls.append(("start", metadata))

    def wait_for_load(self, metadata: bytes) -> None:
        self.calls.append(("wait", metadata))

    def wait_for_layer_load(self, metadata: bytes, layer_name: str) -> None:
        self.calls.append(("before", metadata))

    def save_kv_layer(self, metadata: bytes, layer_name: str, kv_layer: Any) -> None:
        self.calls.append(("after", metadata))

    def save_hidden_states(self, metadata: bytes, tokens: StepTokens, hidden_states: Any) -> None:
        self.calls.append(("hidden", metadata))

    def wait_for_save(self, metadata: bytes) -> None:
        self.calls.append(("save", metadata))

    def get_block_ids_with_load_errors(self, metadata: bytes) -> Sequence[int]:
        return [len(self.calls)]

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        ended, self.ended = self.ended, FinishedTransfers()
        return ended

    def get_kv_connector_stats(self) -> Sequence[TransferOperation]:
        return [TransferOperation("GPU", "CPU", 1, len(self.calls), 0.5)]

    def build_connector_worker_meta(self) -> bytes:
        message, self.message = self.message, b""
        return message

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def options_of(*names: str, **options: Any) -> dict[str, Any]:
    """Scripted children with these names; `name=…` are further options of that child."""
    return {
        "connectors": [
            {
                "connector": f"{__name__}:Scripted",
                "options": {"name": name, **options.get(name, {})},
            }
            for name in names
        ]
    }


def scheduler_half(*names: str, **options: Any) -> tuple[MultiConnector, list[Scripted]]:
    half = load_scheduler_connector("multi", ConnectorConfig(options_of(*names, **options)))
    assert isinstance(half, MultiConnector)
    children = [child for child in half.children if isinstance(child, Scripted)]
    return half, children


def worker_half(*names: str, **options: Any) -> tuple[MultiWorker, list[ScriptedWorker]]:
    config = WorkerConnectorConfig(options_of(*names, **options))
    half = load_worker_connector("multi", config)
    assert isinstance(half, MultiWorker)
    children = [child for child in half.children if isinstance(child, ScriptedWorker)]
    return half, children


# Lookups


@pytest.mark.req("CRG-07")
@pytest.mark.parametrize(
    ("matches", "chosen"),
    [
        ([Matched(0), Matched(16), Matched(32)], 2),
        ([Matched(32), Matched(16), Matched(32)], 0),
        ([Matched(16), Matched(32, is_async=True), Matched(32)], 1),
    ],
)
def test_the_child_with_the_longest_hit_loads_the_first_one_on_a_tie(
    matches: list[Match], chosen: int
) -> None:
    half, children = scheduler_half("a", "b", "c")
    for child, match in zip(children, matches, strict=True):
        child.match = match
    assert half.get_num_new_matched_tokens(VIEW, 8) == matches[chosen]
    half.update_state_after_alloc(VIEW, BLOCKS, 32)
    for index, child in enumerate(children):
        assert child.calls == [("match", 8)] + [("load", 32)] * (index == chosen)


def test_a_request_waits_while_a_child_asks_later() -> None:
    half, children = scheduler_half("a", "b")
    children[0].match = Matched(32)
    children[1].match = AskLater()
    assert half.get_num_new_matched_tokens(VIEW, 0) == AskLater()
    children[1].match = Matched(16)
    assert half.get_num_new_matched_tokens(VIEW, 0) == Matched(32)
    children[0].match = children[1].match = Matched(0)
    assert half.get_num_new_matched_tokens(VIEW, 0) == Matched(0)


def test_a_request_that_skips_the_cache_for_some_children_is_loaded_by_those_alone() -> None:
    half, children = scheduler_half("a", "b")
    children[0].match = Matched(32)
    assert not half.skips_prefix_cache(VIEW)
    children[1].skips = True
    assert half.skips_prefix_cache(VIEW)
    assert half.get_num_new_matched_tokens(VIEW, 0) == Matched(0)
    children[1].match = Matched(16)
    assert half.get_num_new_matched_tokens(VIEW, 0) == Matched(16)
    half.request_finished(VIEW, ())
    assert half.get_num_new_matched_tokens(VIEW, 0) == Matched(32)


# The ends of transfers


def plan(half: MultiConnector, *workers: MultiWorker) -> None:
    """Send the metadata of a plan, if there is some, to all ranks."""
    data = half.build_connector_meta(StepView(1, 0))
    for worker in workers:
        if data:
            worker.start_load_kv(worker.bind_connector_metadata(data))


@pytest.mark.req("CRG-07")
@pytest.mark.parametrize("senders", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_blocks_are_sent_when_all_children_that_keep_them_have_sent_in_any_order(
    senders: tuple[int, ...],
) -> None:
    """Each child reports twice, and one that keeps nothing reports as well."""
    others = [index for index in range(3) if index not in senders]
    for order in itertools.permutations([*senders, *senders, *others[:1]]):
        half, children = scheduler_half("a", "b", "c")
        worker, of_worker = worker_half("a", "b", "c")
        for index in senders:
            children[index].action = FinishAction(delay_free=True)
        assert half.request_finished(VIEW, BLOCKS).delay_free
        assert half.has_pending_work
        plan(half, worker)
        assert not half.has_pending_work
        missing = set(senders)
        for index in order:
            was_missing = bool(missing)
            missing.discard(index)
            of_worker[index].ended = FinishedTransfers(sent=["r"])
            sent = worker.get_finished(()).sent
            assert list(sent) == (["r"] if was_missing and not missing else [])
        half.update_connector_output(ConnectorOutput(finished_sending=["r"]))
        for index, child in enumerate(children):
            (output,) = child.outputs
            assert list(output.finished_sending) == (["r"] if index in senders else [])


@pytest.mark.req("CRG-07")
def test_a_load_ends_when_the_child_that_loads_says_so() -> None:
    """The other child and a repeated report have no effect."""
    half, children = scheduler_half("a", "b")
    worker, of_worker = worker_half("a", "b")
    children[1].match = Matched(32, is_async=True)
    half.get_num_new_matched_tokens(VIEW, 0)
    half.update_state_after_alloc(VIEW, BLOCKS, 32)
    plan(half, worker)
    half.load_abandoned("r")
    assert ("abandoned", "r") in children[1].calls
    assert ("abandoned", "r") not in children[0].calls
    received = []
    for index in (0, 1, 1, 0):
        of_worker[index].ended = FinishedTransfers(received=["r"], failed_block_ids=[index])
        ended = worker.get_finished(())
        received.append(list(ended.received))
        assert list(ended.failed_block_ids) == [index]
    assert received == [[], ["r"], [], []]
    half.update_connector_output(ConnectorOutput(finished_receiving=["r"]))
    assert [list(child.outputs[0].finished_receiving) for child in children] == [[], ["r"]]


def test_a_load_within_a_step_leaves_nothing_behind() -> None:
    half, children = scheduler_half("a", "b")
    children[0].match = Matched(32)
    half.get_num_new_matched_tokens(VIEW, 0)
    half.update_state_after_alloc(VIEW, BLOCKS, 32)
    assert half.build_connector_meta(StepView(1, 0)) == b""
    half.request_finished(VIEW, BLOCKS)
    assert half._matched == half._loading == {}


def test_a_request_without_blocks_sends_none() -> None:
    half, children = scheduler_half("a", "b")
    children[0].action = FinishAction(delay_free=True, params={"x": 1})
    assert half.request_finished(VIEW, (EMPTY_INT32,)) == FinishAction(params={"x": 1})
    assert half.build_connector_meta(StepView(1, 0)) == b""


def test_parameters_for_the_client_are_merged_the_first_child_wins() -> None:
    half, children = scheduler_half("a", "b", "c")
    children[0].action = FinishAction(params={"x": 1})
    children[1].action = FinishAction(params={"x": 2, "y": 3})
    assert half.request_finished(VIEW, BLOCKS).params == {"x": 1, "y": 3}
    assert [child.calls[-1] for child in children] == [("finished", VIEW)] * 3


# Everything else


def test_metadata_reaches_the_child_that_it_belongs_to() -> None:
    half, children = scheduler_half("a", "b", "c")
    worker, of_worker = worker_half(
        "a", "b", "c", a={"layers": True, "poll_s": 3.0}, c={"hidden": True, "poll_s": 2.0}
    )
    assert (worker.has_layer_hooks, worker.has_hidden_states_hook) == (True, True)
    assert worker.poll_interval_s == 2.0
    children[0].metadata, children[2].metadata = b"for a", b"for c"
    assert half.has_pending_work
    bound = worker.bind_connector_metadata(half.build_connector_meta(StepView(1, 0)))
    worker.handle_preemptions(bound)
    worker.start_load_kv(bound)
    worker.wait_for_load(bound)
    worker.wait_for_layer_load(bound, "layer")
    worker.save_kv_layer(bound, "layer", torch.empty(0))
    worker.save_hidden_states(bound, StepTokens((), (), ()), torch.empty(0))
    worker.wait_for_save(bound)
    around = ["bind", *((name, b"for a") for name in ("preempt", "start", "wait"))]
    assert of_worker[0].calls == [
        *around,
        ("before", b"for a"),
        ("after", b"for a"),
        ("save", b"for a"),
    ]
    assert of_worker[1].calls == []
    names = ("preempt", "start", "wait", "hidden", "save")
    assert of_worker[2].calls == ["bind", *((name, b"for c") for name in names)]
    assert worker.get_block_ids_with_load_errors(bound) == [7, 6]
    worker.shutdown()
    assert all(child.calls[-1] == "shutdown" for child in of_worker)


def test_all_children_are_shut_down_although_one_raises() -> None:
    worker, of_worker = worker_half("a", "b", "c")

    def shutdown() -> None:
        raise RuntimeError("a read goes on")

    of_worker[0].shutdown = shutdown  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a read goes on"):
        worker.shutdown()
    assert [each.calls for each in of_worker[1:]] == [["shutdown"], ["shutdown"]]


def test_messages_of_children_reach_their_scheduler_halves() -> None:
    half, children = scheduler_half("a", "b")
    worker, of_worker = worker_half("a", "b")
    assert worker.build_connector_worker_meta() == b""
    of_worker[1].message = b"hello"
    metadata = (worker.build_connector_worker_meta(),)
    half.update_connector_output(
        ConnectorOutput(3, 1, failed_block_ids=BLOCKS[0], metadata=metadata)
    )
    for child, messages in zip(children, ([], [b"hello"]), strict=True):
        (output,) = child.outputs
        assert (output.step, output.rank, list(output.metadata)) == (3, 1, messages)
        assert output.failed_block_ids is BLOCKS[0]


def test_hooks_of_the_engine_reach_every_child() -> None:
    half, children = scheduler_half("a", "b")
    half.bind_blocks(half)  # type: ignore[arg-type]
    half.on_new_request(VIEW)
    half.on_new_epoch(2)
    assert half.take_events() == [AllBlocksCleared(), AllBlocksCleared()]
    stats = half.get_kv_connector_stats()
    assert stats == ConnectorStats([TierStats("CPU", 1, 2, 3, 4)] * 2, {("CPU", "GPU"): 10})
    children[0].can_reset = False
    assert not half.reset_cache()
    with pytest.raises(RuntimeError, match="cannot stop"):
        half.shutdown()
    for child in children:
        assert child.calls == [
            ("bind_blocks", half),
            ("on_new_request", VIEW),
            ("epoch", 2),
            "reset",
            "shutdown",
        ]


def test_every_hook_of_the_contract_is_passed_on() -> None:
    for contract, half in ((SchedulerConnector, MultiConnector), (WorkerConnector, MultiWorker)):
        hooks = {
            name
            for name, value in vars(contract).items()
            if (callable(value) or isinstance(value, property)) and not name.startswith("_")
        }
        assert hooks <= set(vars(half))


# Options


def children(*entries: Any) -> dict[str, Any]:
    return {"connectors": list(entries)}


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "multi needs 'connectors', a list of two or more"),
        (children({"connector": "example"}), "a list of two or more"),
        ({**options_of("a", "b"), "x": 1}, "multi has no option 'x'"),
        (children("example", "example"), "'connector' and 'options' only; it is 'example'"),
        (children({"connector": "a", "x": 1}, {}), r"connectors\[0\] to have 'connector' and"),
        (children({"options": {}}, {}), r"connectors\[0\] to name its 'connector'"),
        (children({"connector": "example", "options": 3}, {}), r"'options' of connectors\[0\] to"),
        (children({"connector": "unheard-of"}, {"connector": "b"}), "unheard-of is unknown"),
        (children({"connector": "example"}, {"connector": "b"}), "example connector needs"),
    ],
)
def test_a_wrong_option_is_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scheduler_connector("multi", ConnectorConfig(options))


def test_several_groups_need_children_that_all_support_them() -> None:
    scripted, one = f"{__name__}:Scripted", f"{__name__}:OneGroup"
    both = children({"connector": scripted}, {"connector": one})
    with pytest.raises(ConfigError, match="OneGroup supports only one KV cache group"):
        load_scheduler_connector("multi", ConnectorConfig(both, num_groups=2))
    assert not load_scheduler_connector("multi", ConnectorConfig(both)).supports_hma
    wide = ConnectorConfig(children(*[{"connector": scripted}] * 2), num_groups=2)
    assert load_scheduler_connector("multi", wide).supports_hma


def test_every_step_is_needed_if_one_child_needs_it() -> None:
    scripted, constant = f"{__name__}:Scripted", f"{__name__}:Constant"
    for name, is_needed in ((scripted, False), (constant, True)):
        both = children({"connector": scripted}, {"connector": name})
        connector = load_scheduler_connector("multi", ConnectorConfig(both))
        assert connector.needs_every_step is is_needed


@pytest.mark.parametrize(
    ("names", "chunk_blocks"),
    [
        (("Scripted", "Constant"), 1),
        (("StoresNothing", "StoresNothing"), 0),
        (("StoresNothing", "Chunky", "Scripted"), 4),
        (("Chunky", "StoresSixes"), 12),
    ],
)
def test_every_child_finds_whole_chunks_of_its_own(
    names: tuple[str, ...], chunk_blocks: int
) -> None:
    options = children(*({"connector": f"{__name__}:{name}"} for name in names))
    assert load_scheduler_connector("multi", ConnectorConfig(options)).chunk_blocks == chunk_blocks


def test_two_children_cannot_share_the_memory_of_the_workers() -> None:
    sharing = {"connector": f"{__name__}:Sharing"}
    with pytest.raises(ConfigError, match=r"Sharing and .*Sharing: the memory that workers share"):
        load_scheduler_connector("multi", ConnectorConfig(children(sharing, sharing)))


# In an engine


@pytest.mark.req("CRG-07")
@pytest.mark.parametrize("kind", ["full", "windows"])
def test_children_store_and_load_and_change_no_token(
    kind: str, model_of: ModelOf, tmp_path: Path
) -> None:
    """The first tier is too small for all prompts; the second one, within another multi, is not.
    Hidden states of some requests are saved on the way."""
    model, _ = model_of(kind)
    prompts = prompts_of(100, 130, 60, 150, 95, 140)
    settings = {"num_blocks": 34, "max_num_batched_tokens": 32, "max_loading_blocks": 33}
    small = {"connector": "simple_cpu", "options": {"cpu_bytes_to_use": "200KiB"}}
    big = {"connector": "simple_cpu", "options": {"cpu_bytes_to_use": "16MiB"}}
    states = {"connector": "hidden_states", "options": {"path": str(tmp_path)}}
    inner = {"connector": "multi", "options": children(big, states)}
    with Engine(model) as plain:
        wanted = plain.run(*prompts, max_tokens=40)
    with Engine(model, "multi", children(small, inner), **settings) as engine:
        for _ in range(2):
            assert engine.run(*prompts, max_tokens=40, is_together=True) == wanted
        assert engine.run(*prompts, max_tokens=40) == wanted
        stats = engine.stats
        assert stats.num_external_hit_tokens > 0
        saved = engine.add(prompts[0], kv_transfer_params={"save_hidden_states": "name"})
        engine.wait(saved)
        assert saved.token_ids == wanted[0][:8]
        assert saved.end is not None
        assert saved.end.num_cached_tokens == 0
        engine.until((tmp_path / "name.safetensors").exists)
        assert engine.stats.num_free_blocks == stats.num_blocks - 1
    assert stats.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.req("CRG-07")
def test_children_work_in_processes_of_two_ranks(model_of: ModelOf, tmp_path: Path) -> None:
    model, _ = model_of("full")
    prompts = prompts_of(100, 130, 60, 150)
    options = children(
        {"connector": "example", "options": {"path": str(tmp_path)}},
        {"connector": "offloading", "options": {"cpu_bytes_to_use": "16MiB"}},
    )
    with Engine(model) as plain:
        wanted = plain.run(*prompts)
    settings = {"tensor_parallel_size": 2, "num_blocks": 18}
    with Engine(model, "multi", options, in_process=False, **settings) as engine:
        assert engine.run(*prompts) == wanted
        again = engine.add(prompts[0])
        engine.wait(again)
        assert again.token_ids == wanted[0]
        assert again.end is not None
        assert again.end.num_cached_tokens == 96


def test_commands_are_plain_data() -> None:
    half, scripted = scheduler_half("a", "b")
    scripted[0].metadata = b"x"
    data = half.build_connector_meta(StepView(1, 0))
    assert msgspec.msgpack.decode(data) == {"children": [b"x", b""], "loads": {}, "sends": {}}


def test_transfers_are_released_by_all_children() -> None:
    half, scripted = scheduler_half("a", "b")
    half.release_transfers(["t"])
    assert all(("released", ["t"]) in each.calls for each in scripted)


def test_operations_of_all_children_are_reported() -> None:
    half, (first, _) = worker_half("a", "b")
    first.calls.append("something")
    assert [each.num_bytes for each in half.get_kv_connector_stats()] == [1, 0]
