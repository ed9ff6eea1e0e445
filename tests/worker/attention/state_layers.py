"""Random layers with states, and sequences that a backend computes in steps, against the
recurrence, token by token, in float64."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.delta_backend import DeltaInputs, DeltaKind
from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.state_backend import MambaKind, StateInputs
from longshore.worker.kernels.delta_step import NORM_EPS, DeltaWeights
from longshore.worker.kernels.state_step import StateWeights
from longshore.worker.kv_cache.buffer import PagedStates

BLOCK_SIZE = 16
SCALES = (1.0, 0.5)
"""Of what goes into each of the layers."""
NUM_BLOCKS = 64
NOT_OURS = NUM_BLOCKS - 1
"""A block that others have: it stands in the tables wherever no state of the row's own is."""
MAMBA = MambaKind(num_heads=6, head_dim=4, num_groups=2, state_size=5, conv_width=4)
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


def make_states(shapes: Sequence[tuple[int, ...]]) -> PagedStates:
    """The group's view of blocks in a wider pool. Unwritten blocks are NaN, so that reading them is
    noticed; the null block is zeros."""
    tensors = []
    for shape in shapes:
        size = math.prod(shape)
        pool = torch.full((NUM_BLOCKS, len(SCALES) * size + 7), float("nan"))
        pool[0] = 0
        tensors.append(pool[:, : len(SCALES) * size].view(NUM_BLOCKS, len(SCALES), *shape))
    return PagedStates(tuple(tensors), BLOCK_SIZE)


def scaled(of_tokens: Sequence[Tensor], scale: float) -> list[Tensor]:
    """The inputs of a layer from those of the first one."""
    first, *rest = of_tokens
    return [first * scale, *rest]


class Serving:
    """Sequences on the rows of a block table, computed in steps of any of their tokens."""

    def __init__(self, layer: StateLayer, lengths: list[int], seed: int = 0) -> None:
        self.layer = layer
        self.view = make_states(layer.shapes)
        self.backend = layer.kind.make_backend(self.view)
        self.sequences: list[Sequence[Tensor]] = [layer.inputs(length) for length in lengths]
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
        places = list(zip(rows, spans, strict=True))
        of_tokens = [
            torch.cat([self.sequences[row][part][span] for row, span in places])
            for part in range(len(self.sequences[0]))
        ]
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
            step.forward(layer, self.layer.step_inputs(*scaled(of_tokens, scale)))
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
        sequence = [of_token[: serving.computed[row]] for of_token in serving.sequences[row]]
        outputs = torch.cat(serving.outputs[row], dim=1)
        for layer, scale in enumerate(SCALES):
            y, *states = serving.layer.recurrence(*scaled(sequence, scale))
            assert_close(outputs[layer], y)
            for got, wanted in zip(serving.state(row, layer), states, strict=True):
                assert_close(got, wanted)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
