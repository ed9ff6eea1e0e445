"""Layers with states, over states in pages, against the recurrence, token by token, in float64."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from longshore.worker.attention import delta_backend, state_backend
from longshore.worker.attention.conv_backend import ConvKind
from longshore.worker.attention.delta_backend import DeltaKind
from longshore.worker.attention.state_backend import MambaKind
from longshore.worker.attention.state_pieces import PIECE_TOKENS
from tests.worker.attention.state_layers import (
    SCALES,
    ConvLayer,
    DeltaLayer,
    MambaLayer,
    Paging,
    Serving,
    StateLayer,
    assert_close,
    check,
    check_free_blocks,
    scaled,
)
from tests.worker.kernels.variants import NEWEST, TRITON, using

New: TypeAlias = Callable[..., Any]
"""Makes a StateLayer."""

of_every_layer = pytest.mark.parametrize(
    "new", [MambaLayer, DeltaLayer, ConvLayer], ids=["mamba", "delta", "convolution"]
)
with_recurrences = pytest.mark.parametrize("new", [MambaLayer, DeltaLayer], ids=["mamba", "delta"])
with_and_without_the_kernel = pytest.mark.parametrize("variant", ["torch", TRITON])

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.fixture(params=["torch", *([NEWEST] if NEWEST else [])])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch operations, which compute chunks on a GPU, and the compiled CPU kernels."""
    with using(request.param):
        yield


LENGTHS = (1, 2, 3, 16, 17, PIECE_TOKENS - 1, PIECE_TOKENS, PIECE_TOKENS + 1, 3 * PIECE_TOKENS + 5)


@pytest.mark.parametrize("length", LENGTHS)
@of_every_layer
def test_a_prompt_of_any_length_is_computed_as_token_by_token(new: New, length: int) -> None:
    serving = Serving(new(seed=length), [length])
    serving.step({0: length})
    check(serving)


@with_and_without_the_kernel
@pytest.mark.parametrize(("kind", "paging"), [
    (MambaKind(num_heads=4, head_dim=8, num_groups=1, state_size=16, conv_width=2),
     Paging(unit_bytes=128, num_pages=4)),
    (MambaKind(num_heads=3, head_dim=2, num_groups=3, state_size=1, conv_width=5),
     Paging(unit_bytes=8, num_pages=7)),
    (DeltaKind(num_heads=4, num_key_heads=1, key_dim=16, value_dim=8, conv_width=2),
     Paging(unit_bytes=512, num_pages=1)),
    (DeltaKind(num_heads=3, num_key_heads=3, key_dim=1, value_dim=2, conv_width=5),
     Paging(unit_bytes=8, num_pages=5)),
], ids=["mamba, one group", "mamba, a group per head", "delta, one key", "delta, a key per head"],
)  # fmt: skip
def test_groups_widths_and_units_of_all_kinds(
    kind: MambaKind | DeltaKind, paging: Paging, variant: str
) -> None:
    """Units of one row of a state or several; tests of other names have smaller ones."""
    layer: StateLayer = (
        MambaLayer(kind, seed=1, conv_bias=False)
        if isinstance(kind, MambaKind)
        else DeltaLayer(kind, seed=1)
    )
    with using(variant):
        serving = Serving(layer, [70, 30], paging)
        serving.step({0: 64, 1: 16}, {0: [16, 40]})
        serving.step({0: 1, 1: 13}, {1: [29]})
        serving.step({0: 5, 1: 1})
    check(serving)


@of_every_layer
def test_sequences_of_all_lengths_share_a_step(new: New) -> None:
    serving = Serving(new(seed=2), list(LENGTHS))
    serving.step(dict(enumerate(LENGTHS)))
    check(serving)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 4, 5, 6])
@with_recurrences
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
@pytest.mark.parametrize("paging", [Paging(8, 5), Paging(64, 1)], ids=["five pages", "one page"])
@pytest.mark.parametrize(("width", "num_channels"), [(2, 1), (3, 9), (5, 260)])
def test_convolutions_of_all_widths_and_units(
    width: int, num_channels: int, paging: Paging, variant: str
) -> None:
    layer = ConvLayer(ConvKind(width), seed=1, num_channels=num_channels, bias=False)
    with using(variant):
        serving = Serving(layer, [70, 30], paging)
        serving.step({0: 64, 1: 16}, {0: [16, 40]})
        serving.step({0: 1, 1: 13}, {1: [29]})
        serving.step({0: 5, 1: 1})
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
        serving.step({0: 7, 1: 1, 2: 3, 3: 16}, {0: [40], 3: [65, 80]})
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
    states = (serving.state(serving.table[0]) for serving in (chunked, whole))
    for got, wanted in zip(*states, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    got, wanted = torch.cat(chunked.outputs[0], dim=1), torch.cat(whole.outputs[0], dim=1)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@of_every_layer
def test_states_are_kept_within_a_chunk_and_at_its_end(new: New) -> None:
    """Also after the first and before the last token, next to the borders of pieces, and of some
    sequences only."""
    serving = Serving(new(seed=12), [150, 150, 9, 100, 2])
    serving.step(
        {0: 150, 1: 130, 2: 1, 3: 64, 4: 2},
        {0: [1, 2, 63, 64, 65, 149], 3: [64], 4: [1, 2]},
    )
    serving.step({1: 20, 2: 8, 3: 36}, {1: [131, 150]})
    check(serving)
    assert len(serving.kept) == 11


@with_and_without_the_kernel
@of_every_layer
def test_others_continue_from_a_kept_state_which_stays_as_it_is(new: New, variant: str) -> None:
    serving = Serving(new(seed=5), [60, 60, 60])
    for row in (1, 2):
        for inputs, shared in zip(serving.sequences[row], serving.sequences[0], strict=True):
            inputs[:32] = shared[:32]
    with using(variant):
        serving.step({0: 40}, {0: [20, 32]})
        for row, num_tokens in ((1, 32), (2, 20)):
            serving.begin_with(row, num_tokens, serving.kept[0, num_tokens])
            serving.outputs[row].append(serving.outputs[0][0][:, :num_tokens])
        serving.step({0: 1, 1: 16, 2: 1})
        serving.step({0: 15, 1: 1, 2: 7})
    check(serving)


@with_and_without_the_kernel
@of_every_layer
def test_a_sequence_begins_with_zeros_whatever_its_pages_hold(new: New, variant: str) -> None:
    with using(variant):
        serving = Serving(new(seed=6), [3, 40, 1, 2])
        serving.view.buffer[serving.table[2:]] = 0x47
        serving.step({0: 1, 1: 33, 2: 1, 3: 2})
        serving.step({0: 1, 1: 1})
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


@with_recurrences
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
    """The pages of the state after the tokens of `sequence`."""

    sequence: list[Tensor]
    pages: Any


class Rows(RuleBasedStateMachine):
    """Requests that start, begin with kept states, are computed in steps, and finish."""

    NUM_ROWS = 5
    new: ClassVar[New]
    paging: ClassVar[Paging]

    def __init__(self) -> None:
        super().__init__()
        self.serving = Serving(self.new(seed=10), [0] * self.NUM_ROWS, self.paging)
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
        if hits and self.snapshots:
            hit = data.draw(st.sampled_from(self.snapshots))
            sequence = [torch.cat(pair) for pair in zip(hit.sequence, sequence, strict=True)]
            serving.begin_with(row, len(hit.sequence[0]), hit.pages)
        serving.sequences[row] = sequence
        self.wanted[row] = torch.stack(
            [serving.layer.recurrence(*scaled(sequence, scale))[0] for scale in SCALES]
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        serving, scheduled, kept = self.serving, {}, {}
        for row, wanted in enumerate(self.wanted):
            start = serving.computed[row]
            left = 0 if wanted is None else wanted.shape[1] - start
            if count := data.draw(st.integers(0, left)):
                scheduled[row] = count
            if count > 1:
                ends = st.integers(start + 1, start + count)
                kept[row] = sorted(data.draw(st.sets(ends, max_size=3)))
        if not scheduled:
            return
        serving.step(scheduled, kept)
        for row, count in scheduled.items():
            end = serving.computed[row]
            assert_close(serving.outputs[row][-1], self.wanted[row][:, end - count : end])
        for (row, num_tokens), pages in serving.kept.items():
            sequence = [of_token[:num_tokens] for of_token in serving.sequences[row]]
            self.snapshots.append(Snapshot(sequence, pages))
        serving.kept.clear()

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        serving = self.serving
        running = [row for row, wanted in enumerate(self.wanted) if wanted is not None]
        if not running:
            return
        row = data.draw(st.sampled_from(running))
        self.wanted[row] = None
        serving.release(serving.table[row])
        serving.table[row] = serving.allocate()

    @precondition(lambda self: len(self.snapshots) > 12)
    @rule()
    def evict(self) -> None:
        while len(self.snapshots) > 6:
            self.serving.release(self.snapshots.pop(0).pages)

    def teardown(self) -> None:
        check_free_blocks(self.serving)


class MambaRows(Rows):
    new = MambaLayer
    paging = Paging(unit_bytes=16, num_pages=3)


class DeltaRows(Rows):
    new = DeltaLayer
    paging = Paging(unit_bytes=8, num_pages=5)


class ConvRows(Rows):
    new = ConvLayer
    paging = Paging(unit_bytes=8, num_pages=2)


@pytest.mark.parametrize("rows", [MambaRows, DeltaRows, ConvRows])
def test_rows_in_any_steps_are_computed_as_token_by_token(rows: type[Rows]) -> None:
    run_state_machine_as_test(
        rows, settings=settings(max_examples=12, stateful_step_count=15, deadline=None)
    )
