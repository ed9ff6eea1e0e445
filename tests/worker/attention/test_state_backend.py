"""Layers with states, over stored states, against the recurrence, token by token, in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor

from longshore.worker.attention import delta_backend, state_backend
from longshore.worker.attention.delta_backend import DeltaKind
from longshore.worker.attention.state_backend import MambaKind
from longshore.worker.attention.state_pieces import PIECE_TOKENS
from tests.worker.attention.state_layers import (
    BLOCK_SIZE,
    NOT_OURS,
    SCALES,
    DeltaLayer,
    MambaLayer,
    Serving,
    assert_close,
    check,
    scaled,
)
from tests.worker.kernels.variants import TRITON, using

New: TypeAlias = Callable[..., Any]
"""Makes a StateLayer."""

of_every_layer = pytest.mark.parametrize("new", [MambaLayer, DeltaLayer], ids=["mamba", "delta"])
with_and_without_the_kernel = pytest.mark.parametrize("variant", ["torch", TRITON])

LENGTHS = (1, 2, 3, 16, 17, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS + 5)


@pytest.mark.parametrize("length", LENGTHS)
@of_every_layer
def test_a_prompt_of_any_length_is_computed_as_token_by_token(new: New, length: int) -> None:
    serving = Serving(new(seed=length), [length])
    serving.step({0: length})
    check(serving)


@pytest.mark.parametrize("kind", [
    MambaKind(num_heads=4, head_dim=8, num_groups=1, state_size=16, conv_width=2),
    MambaKind(num_heads=3, head_dim=2, num_groups=3, state_size=1, conv_width=5),
    DeltaKind(num_heads=4, num_key_heads=1, key_dim=16, value_dim=8, conv_width=2),
    DeltaKind(num_heads=3, num_key_heads=3, key_dim=1, value_dim=2, conv_width=5),
], ids=["mamba, one group", "mamba, a group per head", "delta, one key", "delta, a key per head"],
)  # fmt: skip
def test_groups_and_widths_of_all_kinds(kind: MambaKind | DeltaKind) -> None:
    if isinstance(kind, MambaKind):
        serving = Serving(MambaLayer(kind, seed=1, conv_bias=False), [70, 30])
    else:
        serving = Serving(DeltaLayer(kind, seed=1), [70, 30])
    serving.step({0: 64, 1: 16})
    serving.step({0: 6, 1: 14})
    check(serving)


@of_every_layer
def test_sequences_of_all_lengths_share_a_step(new: New) -> None:
    serving = Serving(new(seed=2), list(LENGTHS))
    serving.step(dict(enumerate(LENGTHS)))
    check(serving)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 4, 5, 6])
@of_every_layer
def test_any_number_of_heads_is_updated_together(
    new: New, heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a group of three heads, or several groups at once."""
    layer = new(seed=9)
    head_bytes = 2 * math.prod(layer.shapes[0][1:]) * 4  # of two sequences
    for module in (state_backend, delta_backend):
        monkeypatch.setattr(module, "SLAB_BYTES", heads_at_once * head_bytes + 1)
    serving = Serving(layer, [20, 3])
    serving.step({0: 16})
    for _ in range(3):
        serving.step({0: 1, 1: 1})
    check(serving)


@with_and_without_the_kernel
@of_every_layer
def test_decodes_and_chunks_share_steps_and_continue_each_other(new: New, variant: str) -> None:
    with using(variant):
        serving = Serving(new(seed=3), [40, 100, 5, 90])
        assert serving.backend.is_replayable == (variant == TRITON)
        serving.step({0: 16, 1: 80})
        serving.step({0: 16, 1: 1, 2: 1})
        serving.step({0: 1, 1: 15, 2: 1, 3: 64})
        serving.step({0: 7, 1: 1, 2: 3, 3: 16})
        serving.step({1: 3, 3: 10})
    check(serving)


@of_every_layer
def test_chunked_and_unchunked_prefill_agree(new: New) -> None:
    layer = new(seed=4)
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
@of_every_layer
def test_a_full_block_is_a_snapshot_that_others_continue_from(new: New, variant: str) -> None:
    with using(variant):
        continue_from_a_snapshot(new)


def continue_from_a_snapshot(new: New) -> None:
    serving = Serving(new(seed=5), [60, 60])
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


@of_every_layer
def test_in_torch_every_state_of_a_step_is_read_before_any_is_written(new: New) -> None:
    """A block that one sequence frees may receive another one's state in the same step, for single
    tokens and for chunks. MambaManager keeps such a block until the step has been answered, which
    the kernel needs."""
    leaving = {0: 1, 2: 16, 4: 16, 6: 1}
    coming = {1: 1, 3: 16, 5: 1, 7: 16}
    counts = leaving | coming
    lengths = [counts[row] + (16 if row in leaving else 0) for row in range(8)]
    serving = Serving(new(seed=6), lengths)
    serving.step(dict.fromkeys(leaving, 16))
    for old, new in zip(leaving, coming, strict=True):
        serving.table[new, 0] = serving.table[old, 0]
    serving.step(counts)
    check(serving)


@with_and_without_the_kernel
@of_every_layer
def test_a_nan_in_one_sequence_does_not_reach_others(new: New, variant: str) -> None:
    with using(variant):
        serving = Serving(new(seed=7), [100, 70, 20, 1])
        serving.sequences[1][0][50:] = float("nan")
        serving.step({0: 96, 1: 64, 2: 16, 3: 1})
        serving.step({0: 1, 1: 1, 2: 3})
    check(serving, [0, 2, 3])


@of_every_layer
def test_strong_decay_after_weak_loses_no_precision(new: New) -> None:
    """Sums of logarithms over a piece are large, but those of a single token are tiny."""
    layer = new(seed=8)
    layer.weights = layer.weights._replace(decay=torch.full((layer.kind.num_heads,), -16.0))
    serving = Serving(layer, [128])
    serving.sequences[0][1][:] = 5.0
    serving.sequences[0][1][40:64] = -9.0
    serving.step({0: 128})
    y, *_ = layer.recurrence(*serving.sequences[0])
    torch.testing.assert_close(serving.outputs[0][0][0].double(), y, atol=1e-5, rtol=1e-5)


@dataclass
class Snapshot:
    """A block that holds the state after the tokens of `sequence`."""

    sequence: list[Tensor]
    block: int


class Rows(RuleBasedStateMachine):
    """Requests that start, hit snapshots, are computed in steps like the scheduler's, and
    finish."""

    NUM_ROWS = 5
    new: ClassVar[New]

    def __init__(self) -> None:
        super().__init__()
        self.serving = Serving(self.new(seed=10), [0] * self.NUM_ROWS)
        self.wanted: list[Tensor | None] = [None] * self.NUM_ROWS
        self.snapshots: list[Snapshot] = []

    @rule(data=st.data(), length=st.integers(1, 90), hits=st.booleans())
    def add(self, data: st.DataObject, length: int, hits: bool) -> None:
        serving = self.serving
        if None not in self.wanted:
            return
        row = self.wanted.index(None)
        sequence = list(serving.layer.inputs(length))
        serving.computed[row] = 0
        serving.table[row] = NOT_OURS
        if hits and self.snapshots:
            hit = data.draw(st.sampled_from(self.snapshots))
            sequence = [torch.cat(pair) for pair in zip(hit.sequence, sequence, strict=True)]
            serving.computed[row] = num_hit = len(hit.sequence[0])
            serving.table[row, num_hit // BLOCK_SIZE - 1] = hit.block
        serving.sequences[row] = sequence
        self.wanted[row] = torch.stack(
            [serving.layer.recurrence(*scaled(sequence, scale))[0] for scale in SCALES]
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
                sequence = [of_token[:end] for of_token in serving.sequences[row]]
                self.snapshots.append(Snapshot(sequence, block))

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


class MambaRows(Rows):
    new = MambaLayer


class DeltaRows(Rows):
    new = DeltaLayer


SETTINGS = settings(max_examples=12, stateful_step_count=15, deadline=None)
TestMambaRows, TestDeltaRows = MambaRows.TestCase, DeltaRows.TestCase
TestMambaRows.settings = TestDeltaRows.settings = SETTINGS
