"""Mamba 2 layers over paged states against the recurrence, token by token, in float64."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor

from longshore.worker.attention import state_backend
from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.state_backend import MambaKind, StateInputs
from longshore.worker.attention.state_pieces import PIECE_TOKENS
from longshore.worker.kernels.state_step import StateWeights
from longshore.worker.kv_cache.buffer import PagedStates
from tests.worker.kernels.variants import TRITON, using

BLOCK_SIZE = 16
SCALES = (1.0, 0.5)
"""Of what goes into each of the layers."""
NUM_BLOCKS = 64
NOT_OURS = NUM_BLOCKS - 1
"""A block that others have: it stands in the tables wherever no state of the row's own is."""
KIND = MambaKind(num_heads=6, head_dim=4, num_groups=2, state_size=5, conv_width=4)


def make_states(kind: MambaKind) -> PagedStates:
    """The group's view of blocks in a wider pool. Unwritten blocks are NaN, so that reading them is
    noticed; the null block is zeros."""
    tensors = []
    for shape in (
        (kind.num_heads, kind.head_dim, kind.state_size),
        (kind.conv_width - 1, num_channels(kind)),
    ):
        size = math.prod(shape)
        pool = torch.full((NUM_BLOCKS, len(SCALES) * size + 7), float("nan"))
        pool[0] = 0
        tensors.append(pool[:, : len(SCALES) * size].view(NUM_BLOCKS, len(SCALES), *shape))
    return PagedStates(tuple(tensors), BLOCK_SIZE)


def num_channels(kind: MambaKind) -> int:
    """Channels of the convolution: the inputs of all heads, B and C."""
    return kind.width + 2 * kind.num_groups * kind.state_size


class Layer:
    """Random weights, and inputs of any number of tokens."""

    def __init__(self, kind: MambaKind, seed: int, *, conv_bias: bool = True) -> None:
        self.kind = kind
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = StateWeights(
            conv_weight=self.normal(kind.conv_width, num_channels(kind)),
            conv_bias=self.normal(num_channels(kind)) if conv_bias else None,
            decay=-self.normal(kind.num_heads).exp(),
            skip=self.normal(kind.num_heads),
            dt_bias=self.normal(kind.num_heads),
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        return (
            self.normal(num_tokens, num_channels(self.kind)),
            self.normal(num_tokens, self.kind.num_heads),
        )

    def recurrence(self, inputs: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One sequence from its first token: (outputs, state, kept inputs), float64."""
        kind = self.kind
        weights = StateWeights(*(None if w is None else w.double() for w in self.weights))
        inputs, dt = inputs.double(), F.softplus(dt.double() + weights.dt_bias)
        padded = F.pad(inputs, (0, 0, kind.conv_width - 1, 0))
        state = torch.zeros(kind.num_heads, kind.head_dim, kind.state_size, dtype=torch.float64)
        outputs = []
        for token in range(len(inputs)):
            seen = padded[token : token + kind.conv_width]
            convolved = (seen * weights.conv_weight).sum(0)
            if weights.conv_bias is not None:
                convolved += weights.conv_bias
            x, b, c = F.silu(convolved).split(
                [kind.width, *[kind.num_groups * kind.state_size] * 2]
            )
            x = x.view(kind.num_heads, kind.head_dim)
            repeats = kind.num_heads // kind.num_groups
            b, c = (maps.view(kind.num_groups, -1).repeat_interleave(repeats, 0) for maps in (b, c))
            state = state * (dt[token] * weights.decay).exp()[:, None, None]
            state = state + torch.einsum("h,hp,hn->hpn", dt[token], x, b)
            y = torch.einsum("hpn,hn->hp", state, c) + weights.skip[:, None] * x
            outputs.append(y.flatten())
        return torch.stack(outputs), state, padded[len(inputs) :]


class Serving:
    """Sequences on the rows of a block table, computed in steps of any of their tokens."""

    def __init__(self, layer: Layer, lengths: list[int], seed: int = 0) -> None:
        self.layer = layer
        self.view = make_states(layer.kind)
        self.backend = layer.kind.make_backend(self.view)
        self.sequences = [layer.inputs(length) for length in lengths]
        self.computed = [0] * len(lengths)
        self.outputs: list[list[Tensor]] = [[] for _ in lengths]
        self.table = np.full((max(len(lengths), 1), 16), NOT_OURS, np.int32)
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, NOT_OURS)))

    def step(self, scheduled: dict[int, int]) -> None:
        """scheduled: tokens by row; single ones first, as the runner orders them."""
        rows = sorted(scheduled, key=lambda row: scheduled[row] > 1)
        slots, chunks, decodes = [], [], []
        for row in rows:
            start, count = self.computed[row], scheduled[row]
            end = start + count
            self._append(row, start, end)
            if count > 1:
                chunks.append(PrefillChunk(row, len(slots), count, end))
            else:
                decodes.append((row, end))
            slots += [0] * count  # a token's own slot is never used
            self.computed[row] = end
        spans = [slice(self.computed[row] - scheduled[row], self.computed[row]) for row in rows]
        inputs = torch.cat([self.sequences[r][0][s] for r, s in zip(rows, spans, strict=True)])
        dt = torch.cat([self.sequences[r][1][s] for r, s in zip(rows, spans, strict=True)])
        step = self.backend.begin_step(
            AttentionMetadata(
                slot_mapping=torch.tensor(slots, dtype=torch.int64),
                block_table=torch.from_numpy(self.table),
                decode_rows=torch.tensor([row for row, _ in decodes], dtype=torch.int64),
                decode_lens=torch.tensor([end for _, end in decodes], dtype=torch.int64),
                decode_segments=(),
                prefill_chunks=chunks,
            )
        )
        outputs = [
            step.forward(layer, StateInputs(inputs * scale, dt, self.layer.weights))
            for layer, scale in enumerate(SCALES)
        ]
        counts = [scheduled[row] for row in rows]
        for row, part in zip(rows, torch.stack(outputs).split(counts, dim=1), strict=True):
            self.outputs[row].append(part)

    def _append(self, row: int, start: int, end: int) -> None:
        """Like the scheduler: allocates only the block of the last token, and keeps the one last
        read."""
        column = (end - 1) // BLOCK_SIZE
        if self.table[row, column] == NOT_OURS:
            self.table[row, column] = self.free.pop()
        self.table[row, : max(start - 1, 0) // BLOCK_SIZE] = NOT_OURS

    def block(self, row: int) -> int:
        """The block of the state after the row's last token."""
        return int(self.table[row, (self.computed[row] - 1) // BLOCK_SIZE])

    def state(self, row: int, layer: int = 0) -> list[Tensor]:
        return [states[self.block(row), layer] for states in self.view.states]


def check(serving: Serving, rows: list[int] | None = None) -> None:
    """Outputs and states of all layers equal those of the recurrence."""
    for row in range(len(serving.sequences)) if rows is None else rows:
        inputs, dt = (of_row[: serving.computed[row]] for of_row in serving.sequences[row])
        outputs = torch.cat(serving.outputs[row], dim=1)
        for layer, scale in enumerate(SCALES):
            y, *states = serving.layer.recurrence(inputs * scale, dt)
            assert_close(outputs[layer], y)
            for got, wanted in zip(serving.state(row, layer), states, strict=True):
                assert_close(got, wanted)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)


with_and_without_the_kernel = pytest.mark.parametrize("variant", ["torch", TRITON])

LENGTHS = (1, 2, 3, 16, 17, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS + 5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_of_any_length_is_computed_as_token_by_token(length: int) -> None:
    serving = Serving(Layer(KIND, seed=length), [length])
    serving.step({0: length})
    check(serving)


@pytest.mark.parametrize("kind", [
    MambaKind(num_heads=4, head_dim=8, num_groups=1, state_size=16, conv_width=2),
    MambaKind(num_heads=3, head_dim=2, num_groups=3, state_size=1, conv_width=5),
], ids=["one group", "a group per head"])  # fmt: skip
def test_groups_and_widths_of_all_kinds(kind: MambaKind) -> None:
    serving = Serving(Layer(kind, seed=1, conv_bias=False), [70, 30])
    serving.step({0: 64, 1: 16})
    serving.step({0: 6, 1: 14})
    check(serving)


def test_sequences_of_all_lengths_share_a_step() -> None:
    serving = Serving(Layer(KIND, seed=2), list(LENGTHS))
    serving.step(dict(enumerate(LENGTHS)))
    check(serving)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 4, 5, 6])
def test_any_number_of_heads_is_updated_together(
    heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a group of three heads, or several groups at once."""
    head_bytes = 2 * KIND.head_dim * KIND.state_size * 4  # of two sequences
    monkeypatch.setattr(state_backend, "SLAB_BYTES", heads_at_once * head_bytes + 1)
    serving = Serving(Layer(KIND, seed=9), [20, 3])
    serving.step({0: 16})
    for _ in range(3):
        serving.step({0: 1, 1: 1})
    check(serving)


@with_and_without_the_kernel
def test_decodes_and_chunks_share_steps_and_continue_each_other(variant: str) -> None:
    with using(variant):
        serving = Serving(Layer(KIND, seed=3), [40, 100, 5, 90])
        assert serving.backend.is_replayable == (variant == TRITON)
        serving.step({0: 16, 1: 80})
        serving.step({0: 16, 1: 1, 2: 1})
        serving.step({0: 1, 1: 15, 2: 1, 3: 64})
        serving.step({0: 7, 1: 1, 2: 3, 3: 16})
        serving.step({1: 3, 3: 10})
    check(serving)


def test_chunked_and_unchunked_prefill_agree() -> None:
    layer = Layer(KIND, seed=4)
    whole, chunked = Serving(layer, [208]), Serving(layer, [208])
    chunked.sequences = whole.sequences
    whole.step({0: 208})
    for count in (16, 64, 16, 80, 32):
        chunked.step({0: count})
    for got, wanted in zip(chunked.state(0), whole.state(0), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    got, wanted = torch.cat(chunked.outputs[0], dim=1), torch.cat(whole.outputs[0], dim=1)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@with_and_without_the_kernel
def test_a_full_block_is_a_snapshot_that_others_continue_from(variant: str) -> None:
    with using(variant):
        continue_from_a_snapshot()


def continue_from_a_snapshot() -> None:
    serving = Serving(Layer(KIND, seed=5), [60, 60])
    for inputs, shared in zip(serving.sequences[1], serving.sequences[0], strict=True):
        inputs[:32] = shared[:32]
    serving.step({0: 32})
    snapshot = [state.clone() for state in serving.state(0)]
    block = serving.table[0, 1]
    serving.table[1, 1] = block
    serving.computed[1] = 32
    serving.outputs[1].append(serving.outputs[0][0])
    serving.step({0: 1, 1: 16})
    serving.step({0: 15, 1: 1})
    check(serving)
    for states, kept in zip(serving.view.states, snapshot, strict=True):
        torch.testing.assert_close(states[block, 0], kept, atol=0, rtol=0)


def test_in_torch_every_state_of_a_step_is_read_before_any_is_written() -> None:
    """A block that one sequence frees may receive another one's state in the same step, for single
    tokens and for chunks. MambaManager keeps such a block until the step has been answered, which
    the kernel needs."""
    leaving = {0: 1, 2: 16, 4: 16, 6: 1}
    coming = {1: 1, 3: 16, 5: 1, 7: 16}
    counts = leaving | coming
    lengths = [counts[row] + (16 if row in leaving else 0) for row in range(8)]
    serving = Serving(Layer(KIND, seed=6), lengths)
    serving.step(dict.fromkeys(leaving, 16))
    for old, new in zip(leaving, coming, strict=True):
        serving.table[new, 0] = serving.table[old, 0]
    serving.step(counts)
    check(serving)


@with_and_without_the_kernel
def test_a_nan_in_one_sequence_does_not_reach_others(variant: str) -> None:
    with using(variant):
        serving = Serving(Layer(KIND, seed=7), [100, 70, 20, 1])
        serving.sequences[1][0][50:] = float("nan")
        serving.step({0: 96, 1: 64, 2: 16, 3: 1})
        serving.step({0: 1, 1: 1, 2: 3})
    check(serving, [0, 2, 3])


def test_strong_decay_after_weak_loses_no_precision() -> None:
    """Sums of logarithms over a piece are large, but those of a single token are tiny."""
    layer = Layer(KIND, seed=8)
    layer.weights = layer.weights._replace(decay=torch.full((KIND.num_heads,), -16.0))
    serving = Serving(layer, [128])
    serving.sequences[0][1][:] = 5.0
    serving.sequences[0][1][40:64] = -9.0
    serving.step({0: 128})
    y, *_ = layer.recurrence(*serving.sequences[0])
    torch.testing.assert_close(serving.outputs[0][0][0].double(), y, atol=1e-5, rtol=1e-5)


@dataclass
class Snapshot:
    """A block that holds the state after `inputs` and `dt`."""

    inputs: Tensor
    dt: Tensor
    block: int


class Rows(RuleBasedStateMachine):
    """Requests that start, hit snapshots, are computed in steps like the scheduler's, and
    finish."""

    NUM_ROWS = 5

    def __init__(self) -> None:
        super().__init__()
        self.serving = Serving(Layer(KIND, seed=10), [0] * self.NUM_ROWS)
        self.wanted: list[Tensor | None] = [None] * self.NUM_ROWS
        self.snapshots: list[Snapshot] = []

    @rule(data=st.data(), length=st.integers(1, 90), hits=st.booleans())
    def add(self, data: st.DataObject, length: int, hits: bool) -> None:
        serving = self.serving
        if None not in self.wanted:
            return
        row = self.wanted.index(None)
        inputs, dt = serving.layer.inputs(length)
        serving.computed[row] = 0
        serving.table[row] = NOT_OURS
        if hits and self.snapshots:
            hit = data.draw(st.sampled_from(self.snapshots))
            inputs, dt = torch.cat((hit.inputs, inputs)), torch.cat((hit.dt, dt))
            serving.computed[row] = len(hit.inputs)
            serving.table[row, len(hit.inputs) // BLOCK_SIZE - 1] = hit.block
        serving.sequences[row] = (inputs, dt)
        self.wanted[row] = torch.stack(
            [serving.layer.recurrence(inputs * scale, dt)[0] for scale in SCALES]
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        serving, scheduled = self.serving, {}
        for row, wanted in enumerate(self.wanted):
            left = 0 if wanted is None else wanted.shape[1] - serving.computed[row]
            count = data.draw(st.integers(0, left))
            if count := aligned(serving.computed[row], count):
                scheduled[row] = count
        if not scheduled:
            return
        before = {row: serving.block(row) for row in scheduled if serving.computed[row]}
        serving.step(scheduled)
        for row, count in scheduled.items():
            end, block = serving.computed[row], serving.block(row)
            assert_close(serving.outputs[row][-1], self.wanted[row][:, end - count : end])
            if row in before and before[row] != block and not self.is_kept(before[row]):
                self.release(before[row])
            if end % BLOCK_SIZE == 0:
                inputs, dt = serving.sequences[row]
                self.snapshots.append(Snapshot(inputs[:end], dt[:end], block))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        running = [row for row, wanted in enumerate(self.wanted) if wanted is not None]
        if not running:
            return
        row = data.draw(st.sampled_from(running))
        block = self.serving.block(row) if self.serving.computed[row] else NOT_OURS
        self.wanted[row] = None
        if block != NOT_OURS and not self.is_kept(block):
            self.release(block)

    @precondition(lambda self: len(self.snapshots) > 12)
    @rule()
    def evict(self) -> None:
        while len(self.snapshots) > 6:
            block = self.snapshots.pop(0).block
            if not self.is_kept(block):
                self.release(block)

    def is_kept(self, block: int) -> bool:
        """Whether a snapshot holds the block, or a row whose next step reads it."""
        serving = self.serving
        return any(snapshot.block == block for snapshot in self.snapshots) or any(
            wanted is not None and serving.computed[row] and serving.block(row) == block
            for row, wanted in enumerate(self.wanted)
        )

    def release(self, block: int) -> None:
        for states in self.serving.view.states:
            states[block] = float("nan")
        self.serving.free.append(block)


def aligned(num_computed: int, num_new: int) -> int:
    """Whether a step ends in the block in which it begins, or at a block boundary: see
    MambaManager."""
    offset = num_computed % BLOCK_SIZE
    if offset + num_new <= BLOCK_SIZE:
        return num_new
    return BLOCK_SIZE - offset if offset else num_new - num_new % BLOCK_SIZE


Rows.TestCase.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
TestRows = Rows.TestCase
