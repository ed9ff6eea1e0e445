"""State space layers (Mamba 2) over paged states: a block holds the state after a token.

A layer stores two tensors per block: the state of its heads, and the last inputs of its
convolution. For each sequence of a step, the state before the step's first token is read and the
state after its last token is written; for each head, all sequences are read before any is written.
The null block is zeros, which is the state before the first token of a sequence.

Single tokens take one step of the recurrence, all sequences at once. On a GPU a kernel computes
them, which reads rows and lengths on the device, so that graphs can replay a step of decodes.
Longer chunks are computed as in "Transformers are SSMs" (Dao and Gu, 2024, section 6): they are cut
into pieces. Within a piece the layer is a masked product like attention, and a state carries the
context from piece to piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.kernels.carry_state import carry_state
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.state_step import StateWeights, state_step
from longshore.worker.kv_cache.buffer import PagedStates

PIECE_TOKENS: Final = 64
"""Tokens of one piece of the chunked scan; the masked products are this wide."""

SLAB_BYTES: Final = 1 << 20
"""Bytes of states that a CPU updates at once in decode, so that its five passes hit the cache."""

_Ints = npt.NDArray[np.int64]


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

    def make_backend(self, view: PagedStates) -> "StateBackend":
        """view: per block and layer, (num_heads, head_dim, state_size) float32 and (conv_width - 1,
        channels) in the model's dtype."""
        return StateBackend(self, view)


class StateInputs(NamedTuple):
    """What a layer gives to its backend.

    channels: (n, conv_channels): x, B and C before the convolution, concatenated.
    dt:       (n, num_heads), before bias and softplus.
    """

    channels: Tensor
    dt: Tensor
    weights: StateWeights

    def after(self, num_tokens: int) -> "StateInputs":
        """Without the first tokens."""
        return self._replace(channels=self.channels[num_tokens:], dt=self.dt[num_tokens:])


class StateBackend:
    """Computes the layers of one group: on a GPU single tokens with a kernel, and everything else
    in plain torch operations."""

    def __init__(self, kind: MambaKind, view: PagedStates) -> None:
        self.kind = kind
        self.view = view
        self.is_replayable = uses_triton(view.states[0])

    def __str__(self) -> str:
        decodes = "Triton for decodes, " if self.is_replayable else ""
        return f"{decodes}torch, over states, {self.kind}"

    def begin_step(self, metadata: AttentionMetadata) -> "StateStep":
        num_decodes = len(metadata.decode_rows) if self.is_replayable else 0
        return StateStep(self.kind, self.view, metadata, num_decodes)


class StateStep:
    """One step, all layers of the group. The kernel computes the first `num_decodes` tokens."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(
        self, kind: MambaKind, view: PagedStates, metadata: AttentionMetadata, num_decodes: int
    ) -> None:
        self._kind = kind
        self._view = view
        self._metadata = metadata
        self._num_decodes = num_decodes
        self._others: _TorchStep | None = None
        if num_decodes < len(metadata.slot_mapping):
            self._others = _TorchStep(kind, view, _after(metadata, num_decodes))

    def forward(self, layer: int, inputs: StateInputs) -> Tensor:
        """h' = exp(dt decay) h + dt x B^T per head, y = h' C + skip x, of every token.

        layer: index among the layers of the group. Returns (n, num_heads * head_dim) float32.
        """
        n, metadata = self._num_decodes, self._metadata
        parts = []
        if n:
            states, kept_inputs = (each[:, layer] for each in self._view.states)
            parts.append(
                state_step(
                    inputs.channels[:n],
                    inputs.dt[:n],
                    states,
                    kept_inputs,
                    metadata.block_table,
                    metadata.decode_rows,
                    metadata.decode_lens,
                    inputs.weights,
                    num_groups=self._kind.num_groups,
                    block_size=self._view.block_size,
                )
            )
        if self._others is not None:
            parts.append(self._others.forward(layer, inputs.after(n)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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


class _TorchStep:
    """Tokens of a step in plain torch operations."""

    def __init__(self, kind: MambaKind, view: PagedStates, metadata: AttentionMetadata) -> None:
        self._kind = kind
        self._states, self._conv_inputs = view.states
        num_decodes = len(metadata.decode_rows)
        # Longest first, so that in each round of the scan the chunks that still have a piece lead.
        chunks = sorted(metadata.prefill_chunks, key=lambda chunk: -chunk.num_tokens)
        device = metadata.slot_mapping.device
        firsts = np.array([*range(num_decodes), *(c.first_token for c in chunks)], np.int64)
        counts = np.array([*[1] * num_decodes, *(c.num_tokens for c in chunks)], np.int64)
        self._convolution = _Convolution(firsts, counts, kind.conv_width, device)
        self._decodes, self._rest = slice(num_decodes), slice(num_decodes, None)
        self._slabs = _slabs(kind, num_decodes, device)
        self._scan: _ChunkedScan | None = None
        if chunks:
            firsts, counts = firsts[num_decodes:], counts[num_decodes:]
            self._scan = _ChunkedScan(firsts - num_decodes, counts, device)
        self._read, self._written = _blocks(metadata, chunks, view.block_size)

    def forward(self, layer: int, inputs: StateInputs) -> Tensor:
        """See StateStep.forward."""
        channels, dt, weights = inputs
        kind, states, kept_inputs = self._kind, self._states[:, layer], self._conv_inputs[:, layer]
        kept = kept_inputs.index_select(0, self._read)
        convolved, kept = self._convolution.run(channels, kept, weights)
        kept_inputs.index_copy_(0, self._written, kept)

        maps_width = kind.num_groups * kind.state_size
        x, b, c = convolved.split([kind.width, maps_width, maps_width], dim=1)
        x = x.unflatten(1, (kind.num_heads, kind.head_dim))
        b = b.unflatten(1, (kind.num_groups, kind.state_size))
        c = c.unflatten(1, (kind.num_groups, kind.state_size))
        dt = F.softplus(dt.float() + weights.dt_bias)
        out = weights.skip[:, None] * x
        rest, decodes = self._rest, self._decodes
        state = states.index_select(0, self._read[rest])
        if self._scan is not None:
            out[rest] += self._scan.run(state, x[rest], b[rest], c[rest], dt[rest], weights.decay)
        for heads, groups in self._slabs:
            out[decodes, heads] += _advance(
                states[:, heads],
                self._read[decodes],
                self._written[decodes],
                x[decodes, heads],
                b[decodes, groups],
                c[decodes, groups],
                dt[decodes, heads],
                weights.decay[heads],
            )
        states.index_copy_(0, self._written[rest], state)
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


def _blocks(
    metadata: AttentionMetadata, chunks: Sequence[PrefillChunk], block_size: int
) -> tuple[Tensor, Tensor]:
    """The block of each sequence's last token before the step, or the null block if there is none,
    and the block of its last token in the step: (num_seqs,) int64 each, decodes first."""
    table, lens = metadata.block_table, metadata.decode_lens
    lines = [(c.row, c.seq_len - c.num_tokens, c.seq_len) for c in chunks]
    of_chunks = _upload(np.array(lines, np.int64).reshape(-1, 3), table.device)
    of_decodes = torch.stack((metadata.decode_rows, lens - 1, lens), dim=1)
    rows, starts, ends = torch.cat((of_decodes, of_chunks)).unbind(1)

    def block_of(positions: Tensor) -> Tensor:
        columns = positions.div(block_size, rounding_mode="floor")
        return table[rows, columns].long()

    return block_of((starts - 1).clamp_(min=0)) * (starts > 0), block_of(ends - 1)


def _advance(
    states: Tensor,
    read: Tensor,
    written: Tensor,
    x: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    decay: Tensor,
) -> Tensor:
    """Advance each sequence by one token, from the state in block `read` to that in `written`.

    states: (num_blocks, num_heads, head_dim, state_size); x: (n, num_heads, head_dim); b, c:
    (n, num_groups, state_size); dt: (n, num_heads). Returns h' C, like x.
    """
    state = states.index_select(0, read)
    state.mul_((dt * decay).exp_()[:, :, None, None])
    # Heads of a group are adjacent: they are the rows of one product with the group's B and C.
    num_products, state_size = b.shape[0] * b.shape[1], b.shape[2]
    rows = state.view(num_products, -1, state_size)
    rows.addcmul_(
        (dt.unsqueeze(2) * x).view(num_products, -1, 1), b.reshape(num_products, 1, state_size)
    )
    states.index_copy_(0, written, state)
    return torch.bmm(c.reshape(num_products, 1, state_size), rows.mT).view(x.shape)


class _Convolution:
    """A causal convolution over sequences of any lengths, followed by silu.

    Its taps read lines of one table: the stored inputs of each sequence, oldest first, then the
    inputs of the step. firsts, counts: (num_seqs,) first token and number of tokens of each
    sequence.
    """

    def __init__(self, firsts: _Ints, counts: _Ints, width: int, device: torch.device) -> None:
        num_seqs, num_kept = len(firsts), width - 1
        first_step_line = num_seqs * num_kept

        def lines(seqs: _Ints, offsets: _Ints) -> _Ints:
            """Table lines of the tokens at `offsets` from their sequence's first token in the step;
            negative offsets are stored inputs."""
            kept = seqs * num_kept + num_kept + offsets
            return np.where(offsets < 0, kept, first_step_line + firsts[seqs] + offsets)

        seqs, offsets = _tokens(counts)
        taps = np.empty((width, len(seqs)), np.int64)
        for tap in range(width):
            taps[tap, firsts[seqs] + offsets] = lines(seqs, offsets - num_kept + tap)
        last = counts[:, None] + np.arange(-num_kept, 0)
        self._taps = _upload(taps, device)
        self._kept = _upload(lines(np.arange(num_seqs)[:, None], last).reshape(-1), device)

    def run(self, inputs: Tensor, kept: Tensor, weights: StateWeights) -> tuple[Tensor, Tensor]:
        """inputs: (n, channels); kept: (num_seqs, width - 1, channels).

        Returns the result, (n, channels) float32, and the inputs to store now, shaped like `kept`.
        """
        table = torch.cat((kept.flatten(0, 1), inputs))
        out = torch.zeros(inputs.shape, dtype=torch.float32, device=inputs.device)
        if weights.conv_bias is not None:
            out += weights.conv_bias
        for tap, of_tap in zip(self._taps, weights.conv_weight, strict=True):
            out.addcmul_(table.index_select(0, tap).float(), of_tap.float())
        return F.silu(out.to(inputs.dtype)).float(), table.index_select(0, self._kept).view_as(kept)


class _ChunkedScan:
    """The recurrence over chunks of several tokens, longest first.

    Chunks are cut into pieces, ordered by round: the first pieces of all chunks, then the second
    pieces, and so on. firsts, counts: (num_chunks,) first token and number of tokens of each chunk.
    """

    def __init__(self, firsts: _Ints, counts: _Ints, device: torch.device) -> None:
        width = min(PIECE_TOKENS, int(counts[0]))
        nths = np.arange(-(-int(counts[0]) // width))
        num_active = (counts[:, None] > nths * width).sum(0)
        chunks = np.concatenate([np.arange(number) for number in num_active])
        offsets = np.repeat(nths, num_active)[:, None] * width + np.arange(width)
        is_token = offsets < counts[chunks, None]
        # Padding repeats the chunk's last token, so that no other sequence's tokens are used.
        tokens = firsts[chunks, None] + np.minimum(offsets, counts[chunks, None] - 1)
        places = np.empty(int(counts.sum()), np.int64)
        places[tokens[is_token]] = np.flatnonzero(is_token)
        self._firsts = _upload(num_active.cumsum() - num_active, device)
        self._num_pieces = _upload(-(-counts // width), device)
        self._tokens = _upload(tokens, device)
        self._places = _upload(places, device)
        self._is_padding = _upload(~is_token, device)
        self._is_later = torch.ones(width, width, dtype=torch.bool, device=device).triu_(1)

    def run(
        self, state: Tensor, x: Tensor, b: Tensor, c: Tensor, dt: Tensor, decay: Tensor
    ) -> Tensor:
        """state: (num_chunks, num_heads, head_dim, state_size), updated in place; the rest as in
        `_advance`, for every token. Returns h' C, shaped like x."""
        num_groups = b.shape[1]
        dt = dt[self._tokens].masked_fill_(
            self._is_padding.unsqueeze(2), 0
        )  # leaves the state unchanged
        b, c = (maps[self._tokens].transpose(1, 2) for maps in (b, c))  # (pieces, group, token, N)
        x = (x[self._tokens] * dt.unsqueeze(3)).permute(
            0, 2, 3, 1
        )  # (pieces, head, head_dim, token)
        # Sums over a piece are float64, because small differences of large sums are needed.
        log = (dt.double() * decay).cumsum(1).transpose(1, 2)  # (pieces, head, token)
        between = (log.unsqueeze(3) - log.unsqueeze(2)).float()
        between = between.masked_fill_(self._is_later, float("-inf")).exp_()
        scores = between.unflatten(1, (num_groups, -1)).mul_((c @ b.mT).unsqueeze(2)).flatten(1, 2)
        y = x @ scores.mT  # (pieces, head, head_dim, token), from tokens of the same piece

        at_end = x * (log[:, :, -1:] - log).float().exp_().unsqueeze(2)
        added = at_end.unflatten(1, (num_groups, -1)).flatten(2, 3) @ b
        states = added.view(len(added), *state.shape[1:])
        at_end_log = log[:, :, -1].float()
        carry_state(state, states, at_end_log, self._firsts, self._num_pieces)
        earlier = states.unflatten(1, (num_groups, -1)).flatten(2, 3) @ c.mT
        y += earlier.view_as(y).mul_(log.float().exp_().unsqueeze(2))
        return y.permute(0, 3, 1, 2).flatten(0, 1).index_select(0, self._places)


def _tokens(counts: _Ints) -> tuple[_Ints, _Ints]:
    """The sequence of each token and its offset in it, sequence after sequence."""
    seqs = np.repeat(np.arange(len(counts)), counts)
    return seqs, np.arange(len(seqs)) - np.repeat(counts.cumsum() - counts, counts)


def _upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
