"""Captured decode steps: the tokens and hooks of steps that run kernel by kernel.

On a CPU a captured step is computed again, from the same addresses, and its results lie in the same
memory until the next replay, as those of a CUDA graph do.
"""

import gc
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.worker.attention import selector, triton_backend
from longshore.worker.attention.backend import AttentionInputs, AttentionStep, LayerHooks
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.kernels import cascade_attention
from longshore.worker.kernels.native import native
from longshore.worker.step import decode_graphs, step_launcher
from longshore.worker.step.decode_graphs import (
    GRAPH_ROWS,
    CudaGraphMaker,
    Decode,
    Decoded,
    DecodeGraphs,
    GraphKey,
)
from tests.models import make_tiny_model
from tests.reference import assert_experts_are_those_of
from tests.worker.kernels.variants import in_triton
from tests.worker.models.cases import CASES
from tests.worker.models.served_model import ServedModel

PROMPTS = [[5, 9, 2] * 9, [7, 7, 1], [3] * 40, [8, 1, 4, 4, 2], [11, 12, 13] * 5]
needs_native = pytest.mark.skipif(native() is None, reason="the CPU kernels are not built")


class PaddedAttention(NativeAttention):
    """Computes the rows before those of length 0; the results of these are zeros."""

    is_replayable = True

    def begin_step(self, metadata: AttentionMetadata) -> Any:
        num_rows = int((metadata.decode_lens > 0).sum())
        if num_rows == len(metadata.decode_lens):
            return super().begin_step(metadata)
        assert not metadata.prefill_chunks, "only steps of decodes are padded"
        assert bool((metadata.decode_lens[num_rows:] == 0).all())
        assert bool((metadata.slot_mapping[num_rows:] == -1).all())
        step = super().begin_step(
            replace(
                metadata,
                slot_mapping=metadata.slot_mapping[:num_rows],
                decode_rows=metadata.decode_rows[:num_rows],
                decode_lens=metadata.decode_lens[:num_rows],
            )
        )
        return PaddedStep(step, num_rows)


class PaddedStep:
    native_steps = ()

    def __init__(self, step: AttentionStep, num_rows: int) -> None:
        self._step = step
        self._num_rows = num_rows

    def forward(self, layer: int, inputs: AttentionInputs) -> Tensor:
        n, (q, k, v, rotation, sinks) = self._num_rows, inputs
        if rotation is not None:
            rotation = rotation._replace(positions=rotation.positions[:n])
        out = torch.zeros(len(q), q.shape[1] * q.shape[2], dtype=q.dtype)
        out[:n] = self._step.forward(layer, AttentionInputs(q[:n], k[:n], v[:n], rotation, sinks))
        return out


class RerunGraph:
    def __init__(self, decode: Decode, has_layer_hooks: bool, replayed: list[int]) -> None:
        self._decode = decode
        self._has_layer_hooks = has_layer_hooks
        self._replayed = replayed
        self._results: Decoded | None = None

    def replay(self, hooks: LayerHooks | None) -> Decoded:
        decoded = self._decode(hooks if self._has_layer_hooks else None)
        if self._results is None:
            self._results = Decoded(*map(torch.clone, decoded))
        for result, new in zip(self._results, decoded, strict=True):
            result.copy_(new)
        self._replayed.append(len(decoded.logits))
        return self._results


class RerunMaker:
    """replayed: the rows of each replay."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def capture(self, decode: Decode, *, has_layer_hooks: bool) -> RerunGraph:
        return RerunGraph(decode, has_layer_hooks, self.replayed)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> RerunMaker:
    maker = RerunMaker()
    monkeypatch.setattr(selector, "NativeAttention", PaddedAttention)
    monkeypatch.setattr(step_launcher, "graph_maker", lambda device: maker)
    return maker


def answers(path: Path, num_tokens: int = 12, **settings: Any) -> list[list[int]]:
    with ServedModel(path, num_tokens=num_tokens, **settings) as served:
        return served.answers(PROMPTS)


@needs_native
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "GptOss", "Mixtral"])
@pytest.mark.parametrize(
    "max_num_batched_tokens",
    [pytest.param(256, marks=pytest.mark.long), 13, 6],
)
def test_replayed_steps_have_the_tokens_of_steps_kernel_by_kernel(
    family: str,
    max_num_batched_tokens: int,
    tmp_path: Path,
    maker: RerunMaker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 6 tokens per step, some steps compute one token each of rows that do not sample yet."""
    make_tiny_model(family, tmp_path, initializer_range=0.2)
    settings = {"max_num_batched_tokens": max_num_batched_tokens}
    replayed = answers(tmp_path, **settings)
    max_rows = min(16, max_num_batched_tokens)
    num_captured = len([size for size in GRAPH_ROWS if size < max_rows]) + 1
    in_service = maker.replayed[num_captured:]
    assert len(in_service) >= 8
    assert max(in_service) > max_rows // 4
    monkeypatch.setattr(step_launcher, "graph_maker", lambda device: None)
    assert replayed == answers(tmp_path, **settings)


@needs_native
@pytest.mark.req("FEA-08")
def test_replayed_steps_leave_the_experts_of_their_tokens(
    tmp_path: Path, maker: RerunMaker
) -> None:
    reference = make_tiny_model("Mixtral", tmp_path, initializer_range=0.2)
    fd = os.memfd_create("experts")
    with ServedModel(tmp_path, num_tokens=12, routed_experts_fd=fd) as served:
        os.close(fd)
        num_captured = len(maker.replayed)
        answers = served.answers(PROMPTS)
        assert len(maker.replayed) > num_captured
        for prompt, answer, end in zip(PROMPTS, answers, served.ended.values(), strict=True):
            assert end.routed_experts is not None
            experts = end.routed_experts.array()
            assert_experts_are_those_of(reference, experts, prompt + answer)


def test_rows_are_padded_to_the_next_captured_size() -> None:
    graphs = DecodeGraphs(RerunMaker(), max_rows=20)
    assert [key.num_rows for key in graphs.keys] == [1, 2, 4, 8, 16, 20]
    for size in (2, 8):
        graphs.capture(GraphKey(size), lambda hooks: Decoded(torch.ones(1), torch.ones(1)))
    found = [graphs.num_padded(num_rows) for num_rows in (1, 2, 3, 8, 9)]
    assert found == [2, 2, 8, 8, None]


@pytest.mark.parametrize(("max_rows", "largest"), [(1, 1), (512, 512), (4096, 512)])
def test_the_sizes_end_at_the_rows_of_the_engine(max_rows: int, largest: int) -> None:
    keys = DecodeGraphs(RerunMaker(), max_rows=max_rows, shares_blocks=True).keys
    assert keys == sorted(set(keys))
    assert keys[-1] == GraphKey(largest, shares_blocks=largest > 1)


def test_a_step_that_shares_blocks_uses_the_other_graph_if_that_does_not_exist() -> None:
    graphs = DecodeGraphs(RerunMaker(), max_rows=40, shares_blocks=True)
    assert [key.num_rows for key in graphs.keys if key.shares_blocks] == [16, 32, 40]
    for key in (GraphKey(8), GraphKey(16, True), GraphKey(24)):
        graphs.capture(key, lambda hooks: Decoded(torch.ones(1), torch.ones(1)))
    found = [graphs.best(num_rows, True) for num_rows in (3, 16, 17, 25)]
    assert found == [(16, True), (16, True), (24, False), (None, True)]
    assert graphs.best(3, False) == (8, False)


def test_a_graph_with_other_results_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    graphs = DecodeGraphs(RerunMaker(), max_rows=4)
    results = iter((0.0, float("nan"), float("nan"), 0.0))

    def decode(hooks: LayerHooks | None) -> Decoded:
        return Decoded(torch.ones(2), torch.tensor([next(results)]))

    graphs.capture(GraphKey(4), decode)
    assert "for 4 rows gives other results" in caplog.text
    assert graphs.num_padded(4) is None
    results = iter((float("nan"), float("nan")))
    graphs.capture(GraphKey(2), decode)
    assert graphs.num_padded(2) == 2


class FakeCuda:
    """Stands in for torch.cuda: notes what is captured into which graph, and what is replayed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._num_graphs = 0

    def graph_pool_handle(self) -> str:
        self.events.append("pool")
        return "pool"

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def CUDAGraph(self) -> Any:  # torch's name
        number, self._num_graphs = self._num_graphs, self._num_graphs + 1

        def begin(pool: str, capture_error_mode: str) -> None:
            assert (pool, capture_error_mode) == ("pool", "thread_local")
            self.events.append(f"begin {number}")

        return SimpleNamespace(
            capture_begin=begin,
            capture_end=lambda: self.events.append(f"end {number}"),
            replay=lambda: self.events.append(f"replay {number}"),
        )


class NotingHooks:
    has_layer_hooks = True

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def before_layer(self, name: str) -> None:
        self._events.append(f"before {name}")

    def after_layer(self, name: str) -> None:
        self._events.append(f"after {name}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(decode_graphs.torch, "cuda", cuda)
    monkeypatch.setattr(decode_graphs, "_unowned", lambda tensor: tensor)
    return cuda


def two_layers(events: list[str]) -> Decode:
    def decode(hooks: LayerHooks | None) -> Decoded:
        for name in ("0", "1"):
            if hooks is not None:
                hooks.before_layer(name)
            events.append(f"attention {name}")
            if hooks is not None:
                hooks.after_layer(name)
        return Decoded(torch.zeros(1), torch.ones(1))

    return decode


def test_a_graph_is_cut_at_the_hooks_which_run_between_its_pieces(cuda: FakeCuda) -> None:
    maker = CudaGraphMaker()
    graph = maker.capture(two_layers(cuda.events), has_layer_hooks=True)
    assert cuda.events == [
        *("pool", "synchronize", "begin 0", "end 0", "begin 1", "attention 0", "end 1"),
        *("begin 2", "end 2", "begin 3", "attention 1", "end 3", "begin 4", "end 4"),
    ]
    del cuda.events[:]
    graph.replay(NotingHooks(cuda.events))
    assert cuda.events == [
        *("replay 0", "before 0", "replay 1", "after 0", "replay 2"),
        *("before 1", "replay 3", "after 1", "replay 4"),
    ]
    del cuda.events[:]
    graph.replay(None)
    assert cuda.events == [f"replay {number}" for number in range(5)]


def test_without_hooks_a_step_is_one_graph_and_all_graphs_share_a_pool(cuda: FakeCuda) -> None:
    maker = CudaGraphMaker()
    for _ in range(2):
        decoded = maker.capture(two_layers(cuda.events), has_layer_hooks=False).replay(None)
        assert decoded.logits.item() == 1
    assert cuda.events.count("pool") == 1
    assert cuda.events.count("replay 1") == 1
    assert not any(event.endswith(" 2") for event in cuda.events)


def test_a_pool_outlives_a_graph_that_is_not_used(cuda: FakeCuda) -> None:
    maker = CudaGraphMaker()
    graph = weakref.ref(maker.capture(two_layers(cuda.events), has_layer_hooks=False))
    gc.collect()
    assert graph() is not None


def test_a_capture_that_fails_is_ended(cuda: FakeCuda) -> None:
    def decode(hooks: LayerHooks | None) -> Decoded:
        raise RuntimeError("not capturable")

    with pytest.raises(RuntimeError, match="not capturable"):
        CudaGraphMaker().capture(decode, has_layer_hooks=False)
    assert cuda.events[-1] == "end 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "GPT-OSS",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("DeepSeek-V2", "Bamba", "Qwen3-Next", "LFM2")
        ),
    ],
)
def test_replays_of_the_triton_kernels_have_the_tokens_of_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run in the interpreter, as in a graph of a GPU: from the same addresses, with
    padded rows."""
    case = next(case for case in CASES if case.name.startswith(name))
    make_tiny_model(case.family, tmp_path, **{"initializer_range": 0.2, **case.settings})
    expected = answers(tmp_path, num_tokens=5)
    maker = RerunMaker()
    monkeypatch.setattr(step_launcher, "graph_maker", lambda device: maker)
    with in_triton():
        assert answers(tmp_path, num_tokens=5) == expected
    assert 8 in maker.replayed[-3:]


@pytest.mark.parametrize(
    ("name", "has_graphs"),
    [
        pytest.param("Llama", False, marks=pytest.mark.long),
        ("Llama", True),
        pytest.param("DeepSeek-V2", False, marks=pytest.mark.long),
    ],
)
def test_decodes_that_read_shared_blocks_once_have_the_tokens_of_transformers(
    name: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.name.startswith(name))
    model = make_tiny_model(case.family, tmp_path, **{"initializer_range": 0.2, **case.settings})
    prompts = [[5, 9, 2] * 12 + rest for rest in ([7], [1, 8, 4], [3] * 15)]
    shared: list[int] = []

    def counted(*inputs: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        shared.append(int(inputs[6]))
        return cascade_attention.cascade_attention(*inputs, **settings)

    monkeypatch.setattr(cascade_attention, "MIN_SAVED_BYTES", 1)
    monkeypatch.setattr(triton_backend, "cascade_attention", counted)
    monkeypatch.setattr(decode_graphs, "GRAPH_ROWS", (4,))
    monkeypatch.setattr(decode_graphs, "SHARING_ROWS", (4,))
    maker = RerunMaker() if has_graphs else None
    monkeypatch.setattr(step_launcher, "graph_maker", lambda device: maker)
    with in_triton(), ServedModel(tmp_path, num_tokens=3) as served:
        served.answers(prompts[:1])  # fills the prefix cache
        got = served.answers(prompts)
    assert shared.count(32) >= 2 * model.config.num_hidden_layers
    for prompt, tokens in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
        assert tokens == wanted[0, len(prompt) :].tolist()
