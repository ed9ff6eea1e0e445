"""Random layers with states, and sequences that a backend computes in steps, against the
recurrence, token by token, in float64."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.protocol.kv_cache_spec import StateSpec
from longshore.protocol.plan import KeptState
from longshore.worker.attention.conv_backend import ConvInputs, ConvKind
from longshore.worker.attention.delta_backend import DeltaInputs, DeltaKind
from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.state_backend import MambaKind, StateInputs
from longshore.worker.kernels.conv_step import ConvWeights
from longshore.worker.kernels.delta_step import NORM_EPS, DeltaWeights
from longshore.worker.kernels.state_step import StateWeights
from longshore.worker.kv_cache.state_pages import StatePages

SCALES = (1.0, 0.5)
"""Of what goes into each of the layers."""
NUM_BLOCKS = 256
MAMBA = MambaKind(num_heads=6, head_dim=4, num_groups=2, state_size=5, conv_width=4)
CONV = ConvKind(conv_width=3)
DELTA = DeltaKind(num_heads=6, num_key_heads=2, key_dim=5, value_dim=4, conv_width=4)


class StateLayer(ABC):
    """Random weights, and inputs of any number of tokens.

    shapes: of the state tensors.
    """

    kind: Any
    shapes: tuple[tuple[int, ...], ...]

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    @abstractmethod
    def inputs(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Of a sequence, what goes into its convolution first."""

    @abstractmethod
    def step_inputs(self, *of_tokens: Tensor) -> Any:
        """What the layer gives to its backend."""

    @abstractmethod
    def recurrence(self, *of_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One sequence from its first token: (outputs, state, kept inputs), float64."""


def num_channels(kind: MambaKind) -> int:
    """Channels of the convolution: the inputs of all heads, B and C."""
    return kind.width + 2 * kind.num_groups * kind.state_size


class MambaLayer(StateLayer):
    def __init__(self, kind: MambaKind = MAMBA, *, seed: int = 0, conv_bias: bool = True) -> None:
        super().__init__(seed)
        self.kind = kind
        self.shapes = (
            (kind.num_heads, kind.head_dim, kind.state_size),
            (kind.conv_width - 1, num_channels(kind)),
        )
        self.weights = StateWeights(
            conv_weight=self.normal(kind.conv_width, num_channels(kind)),
            conv_bias=self.normal(num_channels(kind)) if conv_bias else None,
            decay=-self.normal(kind.num_heads).exp(),
            skip=self.normal(kind.num_heads),
            dt_bias=self.normal(kind.num_heads),
        )

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        return (
            self.normal(num_tokens, num_channels(self.kind)),
            self.normal(num_tokens, self.kind.num_heads),
        )

    def step_inputs(self, inputs: Tensor, dt: Tensor) -> StateInputs:
        return StateInputs(inputs, dt, self.weights)

    def recurrence(self, inputs: Tensor, dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


class DeltaLayer(StateLayer):
    def __init__(self, kind: DeltaKind = DELTA, *, seed: int = 0) -> None:
        super().__init__(seed)
        self.kind = kind
        channels = 2 * kind.key_width + kind.value_width
        self.shapes = (
            (kind.num_heads, kind.key_dim, kind.value_dim),
            (kind.conv_width - 1, channels),
        )
        self.weights = DeltaWeights(
            conv_weight=self.normal(kind.conv_width, channels),
            decay=-self.normal(kind.num_heads).exp(),
            dt_bias=self.normal(kind.num_heads),
        )

    def inputs(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        kind = self.kind
        return (
            self.normal(num_tokens, 2 * kind.key_width + kind.value_width),
            self.normal(num_tokens, kind.num_heads),
            self.normal(num_tokens, kind.num_heads),
        )

    def step_inputs(self, inputs: Tensor, dt: Tensor, beta: Tensor) -> DeltaInputs:
        return DeltaInputs(inputs, dt, beta, self.weights)

    def recurrence(self, inputs: Tensor, dt: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kind = self.kind
        weights = DeltaWeights(*(w.double() for w in self.weights))
        inputs, beta = inputs.double(), beta.double().sigmoid()
        decay = (F.softplus(dt.double() + weights.dt_bias) * weights.decay).exp()
        padded = F.pad(inputs, (0, 0, kind.conv_width - 1, 0))
        state = torch.zeros(kind.num_heads, kind.key_dim, kind.value_dim, dtype=torch.float64)
        outputs = []
        for token in range(len(inputs)):
            seen = padded[token : token + kind.conv_width]
            convolved = F.silu((seen * weights.conv_weight).sum(0))
            q, k, v = convolved.split([kind.key_width, kind.key_width, kind.value_width])
            q, k = (self.of_each_head(x) for x in (q, k))
            state = state * decay[token, :, None, None]
            predicted = torch.einsum("hkv,hk->hv", state, k)
            correction = beta[token, :, None] * (v.view(kind.num_heads, -1) - predicted)
            state = state + torch.einsum("hk,hv->hkv", k, correction)
            outputs.append(torch.einsum("hkv,hk->hv", state, q).flatten() / kind.key_dim**0.5)
        return torch.stack(outputs), state, padded[len(inputs) :]

    def of_each_head(self, x: Tensor) -> Tensor:
        kind = self.kind
        x = x.view(kind.num_key_heads, kind.key_dim)
        x = x / (x.square().sum(1, keepdim=True) + NORM_EPS).sqrt()
        return x.repeat_interleave(kind.num_heads // kind.num_key_heads, 0)


class ConvLayer(StateLayer):
    def __init__(
        self, kind: ConvKind = CONV, *, seed: int = 0, num_channels: int = 7, bias: bool = True
    ) -> None:
        super().__init__(seed)
        self.kind = kind
        self.shapes = ((num_channels, 0), (kind.conv_width - 1, num_channels))
        self.weights = ConvWeights(
            weight=self.normal(kind.conv_width, num_channels),
            bias=self.normal(num_channels) if bias else None,
        )

    def inputs(self, num_tokens: int) -> tuple[Tensor]:
        return (self.normal(num_tokens, self.shapes[0][0]),)

    def step_inputs(self, inputs: Tensor) -> ConvInputs:
        return ConvInputs(inputs, self.weights)

    def recurrence(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = (None if w is None else w.double() for w in self.weights)
        padded = F.pad(inputs.double(), (0, 0, self.kind.conv_width - 1, 0))
        outputs = F.conv1d(padded.T.unsqueeze(0), weight.T.unsqueeze(1), bias, groups=len(weight.T))
        return outputs[0].T, padded.new_empty(self.shapes[0]), padded[len(inputs) :]


@dataclass(frozen=True)
class Paging:
    """unit_bytes: at most a head's part of a state."""

    unit_bytes: int = 16
    num_pages: int = 3


def make_states(shapes: tuple[tuple[int, ...], ...], paging: Paging) -> StatePages:
    """The view of a pool whose blocks are larger than a page. Unwritten blocks are NaN, so that
    reading them is noticed; the null block is zeros."""
    spec = StateSpec(
        block_size=16,
        shapes=shapes,
        dtype_bytes=(4, 4),
        num_pages=paging.num_pages,
        unit_bytes=paging.unit_bytes,
    )
    num_bytes = spec.page_bytes(len(SCALES)) + 2 * paging.unit_bytes
    buffer = torch.full((NUM_BLOCKS, num_bytes), 0xFF, dtype=torch.uint8)
    buffer[0] = 0
    return StatePages(buffer, spec, len(SCALES), (torch.float32, torch.float32))


def scaled(of_tokens: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The inputs of a layer from those of the first one."""
    first, *rest = of_tokens
    return [first * scale, *rest]


class Serving:
    """Sequences on the rows of a block table, computed in steps of any of their tokens.

    table: the pages of each row's state. kept: those of kept states, by row and number of tokens.
    """

    def __init__(
        self, layer: StateLayer, lengths: list[int], paging: Paging = Paging(), seed: int = 0
    ) -> None:
        self.layer = layer
        self.view = make_states(layer.shapes, paging)
        self.backend = layer.kind.make_backend(self.view)
        self.sequences: list[Sequence[Tensor]] = [layer.inputs(length) for length in lengths]
        self.computed = [0] * len(lengths)
        self.outputs: list[list[Tensor]] = [[] for _ in lengths]
        self.free = np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self.table = np.array([self.allocate() for _ in lengths], np.int32).reshape(
            -1, paging.num_pages
        )
        self.kept: dict[tuple[int, int], Any] = {}

    def allocate(self) -> Any:
        """Pages for a state, (num_pages,) int32, which others have left as they were."""
        pages = [self.free.pop() for _ in range(self.view.spec.num_pages)]
        return np.array(pages, np.int32)

    def release(self, pages: Any) -> None:
        """What they hold is NaN from now on."""
        self.view.buffer[pages] = 0xFF
        self.free[:0] = pages.tolist()

    def begin_with(self, row: int, num_tokens: int, pages: Any) -> None:
        """The row begins with a copy of the state after so many tokens."""
        self.view.buffer[self.table[row]] = self.view.buffer[pages]
        self.computed[row] = num_tokens

    def step(
        self, scheduled: dict[int, int], kept: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """scheduled: tokens by row; single ones first, as the runner orders them. kept: by row, the
        numbers of tokens after which the state is kept."""
        rows = sorted(scheduled, key=lambda row: scheduled[row] > 1)
        num_tokens, chunks, decodes = 0, [], []
        for row in rows:
            count = scheduled[row]
            self.computed[row] += count
            end = self.computed[row]
            if count > 1:
                states = [KeptState(row, n, self.allocate()) for n in (kept or {}).get(row, ())]
                chunks.append(PrefillChunk(row, num_tokens, count, end, states))
                self.kept |= {(row, state.num_tokens): state.block_ids for state in states}
            else:
                decodes.append((row, end))
            num_tokens += count
        spans = [slice(self.computed[row] - scheduled[row], self.computed[row]) for row in rows]
        places = list(zip(rows, spans, strict=True))
        of_tokens = [
            torch.cat([self.sequences[row][part][span] for row, span in places])
            for part in range(len(self.sequences[0]))
        ]
        step = self.backend.begin_step(
            AttentionMetadata(
                slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
                block_table=torch.from_numpy(self.table),
                decode_rows=torch.tensor([row for row, _ in decodes], dtype=torch.int64),
                decode_lens=torch.tensor([end for _, end in decodes], dtype=torch.int64),
                decode_segments=(),
                prefill_chunks=chunks,
            )
        )
        outputs = [
            step.forward(layer, self.layer.step_inputs(*scaled(of_tokens, scale)))
            for layer, scale in enumerate(SCALES)
        ]
        counts = [scheduled[row] for row in rows]
        for row, part in zip(rows, torch.stack(outputs).split(counts, dim=1), strict=True):
            self.outputs[row].append(part)

    def state(self, pages: Any, layer: int = 0) -> list[Tensor]:
        table = torch.from_numpy(pages).long().unsqueeze(0)
        return [self.view.read(tensor, layer, table)[0] for tensor in range(2)]


def check(serving: Serving, rows: list[int] | None = None) -> None:
    """Outputs and states of all layers, kept ones too, equal those of the recurrence, and nothing
    else has been written."""
    for row in range(len(serving.sequences)) if rows is None else rows:
        outputs = torch.cat(serving.outputs[row], dim=1)
        states = {
            num_tokens: pages for (of, num_tokens), pages in serving.kept.items() if of == row
        }
        states[serving.computed[row]] = serving.table[row]
        for layer, scale in enumerate(SCALES):
            for num_tokens, pages in states.items():
                sequence = [of_token[:num_tokens] for of_token in serving.sequences[row]]
                y, *wanted = serving.layer.recurrence(*scaled(sequence, scale))
                assert_close(outputs[layer, :num_tokens], y)
                for got, exact in zip(serving.state(pages, layer), wanted, strict=True):
                    assert_close(got, exact)
    check_free_blocks(serving)


def check_free_blocks(serving: Serving) -> None:
    assert not serving.view.buffer[0].any()
    assert (serving.view.buffer[serving.free] == 0xFF).all()


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
