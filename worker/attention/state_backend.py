"""State space layers (Mamba 2) over states in pages, which a step overwrites in place.

A state is two tensors per layer: the state of its heads, and the last inputs of its convolution.
Before the first token of a sequence both are zeros, whatever its pages hold.

Single tokens take one step of the recurrence, all sequences at once. On a GPU a kernel computes
them, which reads pages and lengths on the device, so that graphs can replay a step of decodes.
Longer chunks are computed as in "Transformers are SSMs" (Dao and Gu, 2024, section 6): they are cut
into pieces. Within a piece the layer is a masked product like attention, and a state carries the
context from piece to piece.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.state_pieces import Convolution, Pieces, num_pieces, upload
from longshore.worker.attention.state_storage import StepPages
from longshore.worker.kernels.carry_state import carry_state
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.state_sequences import StateSequences, native_kernels
from longshore.worker.kernels.state_step import StateWeights, state_sequences, state_step
from longshore.worker.kv_cache.state_pages import StatePages

SLAB_BYTES: Final = 1 << 20
"""Bytes of states that a CPU updates at once in decode, so that its five passes hit the cache."""


@dataclass(frozen=True)
class MambaKind:
    """A Mamba 2 layer (Dao and Gu, 2024). Sizes are of this rank's shard.

    num_groups: number of groups; heads of a group share the input and output maps B and C.
    conv_width: tokens that the causal convolution covers, the newest included.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int

    @property
    def width(self) -> int:
        """Elements of all heads of a token."""
        return self.num_heads * self.head_dim

    def make_backend(self, view: StatePages) -> "MambaBackend":
        """view: per layer, (num_heads, head_dim, state_size) float32 and (conv_width - 1, channels)
        in the model's dtype."""
        return MambaBackend(self, view)


class StateInputs(NamedTuple):
    """What a layer gives to its backend.

    channels: (n, conv_channels): x, B and C before the convolution, concatenated.
    dt:       (n, num_heads), before bias and softplus.
    """

    channels: Tensor
    dt: Tensor
    weights: StateWeights

    def before(self, num_tokens: int) -> "StateInputs":
        """The first tokens alone."""
        return self._replace(channels=self.channels[:num_tokens], dt=self.dt[:num_tokens])

    def after(self, num_tokens: int) -> "StateInputs":
        """Without the first tokens."""
        return self._replace(channels=self.channels[num_tokens:], dt=self.dt[num_tokens:])


class StateLayerInputs(Protocol):
    """Of all tokens of a step."""

    def before(self, num_tokens: int) -> Self:
        """The first tokens alone."""
        ...

    def after(self, num_tokens: int) -> Self:
        """Without the first tokens."""
        ...


Inputs = TypeVar("Inputs", bound=StateLayerInputs)


class StateBackend(ABC, Generic[Inputs]):
    """Computes the layers of one group. On a GPU, a kernel computes single tokens. All other tokens
    are computed in plain torch operations, unless it has a kernel for them."""

    def __init__(self, kind: object, view: StatePages) -> None:
        self._kind = kind
        self.view = view
        self.is_replayable = uses_triton(view.buffer)

    def __str__(self) -> str:
        decodes = "Triton for decodes, " if self.is_replayable else ""
        others = "a CPU kernel" if self.has_kernel else "torch"
        return f"{decodes}{others}, over states, {self._kind}"

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel computes all tokens, without torch."""
        return native_kernels(self.view) is not None

    @abstractmethod
    def decode(self, layer: int, inputs: Inputs, metadata: AttentionMetadata) -> Tensor:
        """Compute single tokens with the kernel: the decodes of the step."""

    @abstractmethod
    def other_tokens(self, metadata: AttentionMetadata) -> Callable[[int, Inputs], Tensor]:
        """What computes the tokens that `decode` does not: see StateStep.forward."""

    def begin_step(self, metadata: AttentionMetadata) -> "StateStep[Inputs]":
        return StateStep(self, metadata)


class StateStep(Generic[Inputs]):
    """One step, all layers of the group."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(self, backend: StateBackend[Inputs], metadata: AttentionMetadata) -> None:
        self._backend = backend
        self._metadata = metadata
        self._num_decodes = len(metadata.decode_rows) if backend.is_replayable else 0
        self._others: Callable[[int, Inputs], Tensor] | None = None
        if self._num_decodes < len(metadata.slot_mapping):
            self._others = backend.other_tokens(_after(metadata, self._num_decodes))

    def forward(self, layer: int, inputs: Inputs) -> Tensor:
        """The outputs of every token, (n, width of all heads) float32. layer: index among the
        layers of the group."""
        n, parts = self._num_decodes, []
        if n:
            parts.append(self._backend.decode(layer, inputs.before(n), self._metadata))
        if self._others is not None:
            parts.append(self._others(layer, inputs.after(n)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class MambaBackend(StateBackend[StateInputs]):
    """h' = exp(dt decay) h + dt x B^T per head, y = h' C + skip x, of every token."""

    def __init__(self, kind: MambaKind, view: StatePages) -> None:
        super().__init__(kind, view)
        self.kind = kind

    def decode(self, layer: int, inputs: StateInputs, metadata: AttentionMetadata) -> Tensor:
        return state_step(
            inputs.channels,
            inputs.dt,
            self.view,
            layer,
            metadata.block_table,
            metadata.decode_rows,
            metadata.decode_lens,
            inputs.weights,
            num_groups=self.kind.num_groups,
        )

    def other_tokens(self, metadata: AttentionMetadata) -> Callable[[int, StateInputs], Tensor]:
        if not self.has_kernel:
            return _MambaStep(self.kind, self.view, metadata).forward
        view, sequences = self.view, sequences_of(metadata)

        def forward(layer: int, inputs: StateInputs) -> Tensor:
            channels, dt, weights = inputs
            num_groups = self.kind.num_groups
            return state_sequences(
                channels, dt, view, layer, sequences, weights, num_groups=num_groups
            )

        return forward


def sequences_of(metadata: AttentionMetadata) -> StateSequences:
    """The sequences of a step, single tokens first, on a CPU."""
    decodes = StateSequences.of_single_tokens(
        metadata.block_table, metadata.decode_rows, metadata.decode_lens
    )
    chunks = metadata.prefill_chunks
    lines = [[each.row, each.first_token, each.num_tokens, each.seq_len] for each in chunks]
    stops = [
        [(state.num_tokens - chunk.start, state.block_ids) for state in chunk.kept_states]
        for chunk in chunks
    ]
    return StateSequences(
        metadata.block_table,
        torch.cat((decodes.lines, torch.tensor(lines, dtype=torch.int64).view(-1, 4))),
        [*[()] * len(decodes.lines), *stops],
    )


def _after(metadata: AttentionMetadata, num_decodes: int) -> AttentionMetadata:
    """The step without its first `num_decodes` sequences."""
    if num_decodes == 0:
        return metadata
    return replace(
        metadata,
        slot_mapping=metadata.slot_mapping[num_decodes:],
        decode_rows=metadata.decode_rows[num_decodes:],
        decode_lens=metadata.decode_lens[num_decodes:],
        prefill_chunks=[
            replace(chunk, first_token=chunk.first_token - num_decodes)
            for chunk in metadata.prefill_chunks
        ],
    )


STATES, KEPT_INPUTS = range(2)
"""The tensors that a layer stores: the states of its heads, and inputs of its convolution."""


class StepParts:
    """The sequences of a step that is computed in torch: single tokens first, then chunks.

    decodes, rest: the tokens, and the sequences, of the single tokens; the tokens of the chunks,
                   and their sequences, those with the most pieces first.
    pieces:        of the chunks; None: there are none, or no recurrence.
    """

    def __init__(
        self,
        conv_width: int,
        view: StatePages,
        metadata: AttentionMetadata,
        *,
        has_pieces: bool = True,
    ) -> None:
        """has_pieces: whether there is a recurrence after the convolution."""
        num_decodes = len(metadata.decode_rows)
        chunks = sorted(
            metadata.prefill_chunks, key=lambda chunk: -num_pieces(chunk.num_tokens, _stops(chunk))
        )
        device = metadata.slot_mapping.device
        firsts = np.array([*range(num_decodes), *(c.first_token for c in chunks)], np.int64)
        counts = np.array([*[1] * num_decodes, *(c.num_tokens for c in chunks)], np.int64)
        stops = [_stops(chunk) for chunk in chunks]
        self.num_decodes = num_decodes
        self.decodes, self.rest = slice(num_decodes), slice(num_decodes, None)
        self.states = StepPages(view, metadata, chunks)
        self._kept = _kept(chunks, device)
        self.pieces: Pieces | None = None
        if chunks and has_pieces:
            firsts_of_chunks = firsts[num_decodes:] - num_decodes
            self.pieces = Pieces(firsts_of_chunks, counts[num_decodes:], device, stops)
        self._convolution = Convolution(
            firsts, counts, conv_width, device, [*[()] * num_decodes, *stops]
        )

    def convolve(
        self,
        layer: int,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        has_silu: bool = True,
    ) -> Tensor:
        """See Convolution.run; stored inputs are read and written."""
        kept = self.states.read(KEPT_INPUTS, layer)
        num_seqs = len(kept)
        convolved, kept = self._convolution.run(inputs, kept, weight, bias, has_silu=has_silu)
        self.states.write(KEPT_INPUTS, layer, kept[:num_seqs])
        self._keep(KEPT_INPUTS, layer, kept[self.num_decodes :])
        return convolved

    def write_chunks(self, layer: int, states: Tensor, at_stops: Tensor) -> None:
        """Store the states after all chunks, and what is kept of them and of those at the stops."""
        self.states.write(STATES, layer, states, self.rest)
        if self._kept is not None:
            self._keep(STATES, layer, torch.cat((states, at_stops)))

    def _keep(self, tensor: int, layer: int, states: Tensor) -> None:
        """states: after each chunk, then at each stop."""
        if self._kept is not None:
            self.states.keep(tensor, layer, states.index_select(0, self._kept))


def _stops(chunk: PrefillChunk) -> list[int]:
    """The offsets within a chunk after which states are kept."""
    offsets = [state.num_tokens - chunk.start for state in chunk.kept_states]
    return [offset for offset in offsets if offset < chunk.num_tokens]


def _kept(chunks: Sequence[PrefillChunk], device: torch.device) -> Tensor | None:
    """(n,) int64: which of the states after each chunk, then at each stop, are kept; None: none."""
    kept, num_stops = [], 0
    for index, chunk in enumerate(chunks):
        for state in chunk.kept_states:
            if state.num_tokens == chunk.seq_len:
                kept.append(index)
            else:
                kept.append(len(chunks) + num_stops)
                num_stops += 1
    return upload(np.array(kept, np.int64), device) if kept else None


class _MambaStep:
    """Tokens of a step in plain torch operations."""

    def __init__(self, kind: MambaKind, view: StatePages, metadata: AttentionMetadata) -> None:
        self._kind = kind
        self._parts = StepParts(kind.conv_width, view, metadata)
        self._slabs = _slabs(kind, self._parts.num_decodes, metadata.slot_mapping.device)

    def forward(self, layer: int, inputs: StateInputs) -> Tensor:
        """See StateStep.forward."""
        channels, dt, weights = inputs
        kind, parts, stored = self._kind, self._parts, self._parts.states
        convolved = parts.convolve(layer, channels, weights.conv_weight, weights.conv_bias)
        maps_width = kind.num_groups * kind.state_size
        x, b, c = convolved.split([kind.width, maps_width, maps_width], dim=1)
        x = x.unflatten(1, (kind.num_heads, kind.head_dim))
        b = b.unflatten(1, (kind.num_groups, kind.state_size))
        c = c.unflatten(1, (kind.num_groups, kind.state_size))
        dt = F.softplus(dt.float() + weights.dt_bias)
        out = weights.skip[:, None] * x
        rest, decodes = parts.rest, parts.decodes
        at_stops = state = stored.read(STATES, layer, rest)
        if parts.pieces is not None:
            y, at_stops = scan(
                parts.pieces, state, x[rest], b[rest], c[rest], dt[rest], weights.decay
            )
            out[rest] += y
        for heads, groups in self._slabs:
            slab = stored.read(STATES, layer, decodes, heads)
            out[decodes, heads] += _advance(
                slab,
                x[decodes, heads],
                b[decodes, groups],
                c[decodes, groups],
                dt[decodes, heads],
                weights.decay[heads],
            )
            stored.write(STATES, layer, slab, decodes, heads)
        parts.write_chunks(layer, state, at_stops)
        return out.flatten(1)


def _slabs(kind: MambaKind, num_seqs: int, device: torch.device) -> list[tuple[slice, slice]]:
    """Slices of heads and of their groups whose states are updated together. On a CPU they are
    small enough that the states of all sequences stay in the cache from read to write."""
    if num_seqs == 0:
        return []
    num_heads = kind.num_heads
    if device.type == "cpu":
        head_bytes = num_seqs * kind.head_dim * kind.state_size * torch.float32.itemsize
        num_heads = min(num_heads, max(1, SLAB_BYTES // head_bytes))
    per_group = kind.num_heads // kind.num_groups
    if num_heads >= per_group:
        step = num_heads // per_group
        groups = [slice(g, min(g + step, kind.num_groups)) for g in range(0, kind.num_groups, step)]
        return [(slice(g.start * per_group, g.stop * per_group), g) for g in groups]
    return [
        (slice(first, min(first + num_heads, (group + 1) * per_group)), slice(group, group + 1))
        for group in range(kind.num_groups)
        for first in range(group * per_group, (group + 1) * per_group, num_heads)
    ]


def _advance(state: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor) -> Tensor:
    """Advance each sequence by one token.

    state: (n, num_heads, head_dim, state_size), contiguous, updated in place; x: (n, num_heads,
    head_dim); b, c: (n, num_groups, state_size); dt: (n, num_heads). Returns h' C, like x.
    """
    state.mul_((dt * decay).exp_()[:, :, None, None])
    # Heads of a group are adjacent: they are the rows of one product with the group's B and C.
    num_products, state_size = b.shape[0] * b.shape[1], b.shape[2]
    rows = state.view(num_products, -1, state_size)
    rows.addcmul_(
        (dt.unsqueeze(2) * x).view(num_products, -1, 1), b.reshape(num_products, 1, state_size)
    )
    return torch.bmm(c.reshape(num_products, 1, state_size), rows.mT).view(x.shape)


def scan(
    pieces: Pieces, state: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks of several tokens.

    state: (num_chunks, num_heads, head_dim, state_size), updated in place; the rest as in
    `_advance`, for every token. Returns h' C, shaped like x, and the state at each stop.
    """
    num_groups = b.shape[1]
    dt = dt[pieces.tokens].masked_fill_(
        pieces.is_padding.unsqueeze(2), 0
    )  # leaves the state unchanged
    b, c = (maps[pieces.tokens].transpose(1, 2) for maps in (b, c))  # (pieces, group, token, N)
    x = (x[pieces.tokens] * dt.unsqueeze(3)).permute(0, 2, 3, 1)  # (pieces, head, head_dim, token)
    # Sums over a piece are float64, because small differences of large sums are needed.
    log = (dt.double() * decay).cumsum(1).transpose(1, 2)  # (pieces, head, token)
    between = (log.unsqueeze(3) - log.unsqueeze(2)).float()
    between = between.masked_fill_(pieces.is_later, float("-inf")).exp_()
    scores = between.unflatten(1, (num_groups, -1)).mul_((c @ b.mT).unsqueeze(2)).flatten(1, 2)
    y = x @ scores.mT  # (pieces, head, head_dim, token), from tokens of the same piece

    at_end = x * (log[:, :, -1:] - log).float().exp_().unsqueeze(2)
    added = at_end.unflatten(1, (num_groups, -1)).flatten(2, 3) @ b
    states = added.view(len(added), *state.shape[1:])
    carry_state(state, states, log[:, :, -1].float(), pieces.firsts, pieces.num_pieces)
    earlier = states.unflatten(1, (num_groups, -1)).flatten(2, 3) @ c.mT
    y += earlier.view_as(y).mul_(log.float().exp_().unsqueeze(2))
    y = y.permute(0, 3, 1, 2).flatten(0, 1).index_select(0, pieces.places)
    return y, states.index_select(0, pieces.stops)
