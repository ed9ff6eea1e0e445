"""Gated DeltaNet layers (Yang, Kautz and Hatamizadeh, 2024) over stored states.

The state of a head maps keys to values. A token makes it decay, then corrects what it maps the
token's key to: S' = exp(g) S, S = S' + beta k (v - S'^T k)^T. Its output is S^T q. Queries and keys
have length 1, and queries are divided by sqrt(key_dim). As in Mamba 2, a layer also stores the last
inputs of its convolution; `state_backend.py` says how the tokens of a step are divided.

The chunked form is that of "Parallelizing Linear Transformers with the Delta Rule" (Yang et al.,
2024) with decays: within a piece, the corrections are the solution of a triangular system (the UT
transform), which does not depend on the state before the piece.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.state_backend import (
    SLAB_BYTES,
    STATES,
    StateBackend,
    StepParts,
    sequences_of,
)
from longshore.worker.attention.state_pieces import PIECE_TOKENS, Pieces
from longshore.worker.kernels.delta_step import (
    DeltaWeights,
    delta_sequences,
    delta_step,
    normalise,
)
from longshore.worker.kv_cache.state_pages import StatePages

SCAN_BYTES: Final = 256 << 20
"""Bytes of intermediate results of the chunked form; more heads are computed one part after the
other."""


@dataclass(frozen=True)
class DeltaKind:
    """A gated DeltaNet layer. Sizes are of this rank's shard.

    num_heads:     number of value heads, each with a state. Value heads with one key head are
                   adjacent.
    num_key_heads: number of heads of queries, and of keys.
    conv_width:    tokens that the causal convolution covers, the newest included.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def key_width(self) -> int:
        """Elements of all key heads of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all value heads of a token."""
        return self.num_heads * self.value_dim

    def make_backend(self, view: StatePages) -> "DeltaBackend":
        """view: per layer, (num_heads, key_dim, value_dim) float32 and (conv_width - 1, channels)
        in the model's dtype."""
        return DeltaBackend(self, view)


class DeltaInputs(NamedTuple):
    """What a layer gives to its backend.

    channels: (n, conv_channels): queries, keys and values before the convolution, concatenated.
    dt:       (n, num_heads), before bias and softplus.
    beta:     (n, num_heads), before the sigmoid.
    """

    channels: Tensor
    dt: Tensor
    beta: Tensor
    weights: DeltaWeights

    def before(self, num_tokens: int) -> "DeltaInputs":
        """The first tokens alone."""
        return self._of(slice(num_tokens))

    def after(self, num_tokens: int) -> "DeltaInputs":
        """Without the first tokens."""
        return self._of(slice(num_tokens, None))

    def _of(self, tokens: slice) -> "DeltaInputs":
        channels, dt, beta, weights = self
        return DeltaInputs(channels[tokens], dt[tokens], beta[tokens], weights)


class Tokens(NamedTuple):
    """What the recurrence needs of each token, after convolution and activations, in float32.

    q, k:      (n, num_key_heads, key_dim), or of each value head. v: (n, num_heads, value_dim).
    log_decay: (n, num_heads), of the state. beta: (n, num_heads).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    def at(self, tokens: slice) -> "Tokens":
        return Tokens(*(each[tokens] for each in self))

    def of(self, key_heads: slice, heads: slice) -> "Tokens":
        q, k, *rest = self
        return Tokens(q[:, key_heads], k[:, key_heads], *(each[:, heads] for each in rest))

    def with_key_for_each_head(self) -> "Tokens":
        q, k = (x.repeat_interleave(self.v.shape[1] // x.shape[1], 1) for x in (self.q, self.k))
        return self._replace(q=q, k=k)


class DeltaBackend(StateBackend[DeltaInputs]):
    """Computes the gated delta rule."""

    def __init__(self, kind: DeltaKind, view: StatePages) -> None:
        super().__init__(kind, view)
        self.kind = kind

    def decode(self, layer: int, inputs: DeltaInputs, metadata: AttentionMetadata) -> Tensor:
        return delta_step(
            inputs.channels,
            inputs.dt,
            inputs.beta,
            self.view,
            layer,
            metadata.block_table,
            metadata.decode_rows,
            metadata.decode_lens,
            inputs.weights,
            num_key_heads=self.kind.num_key_heads,
        )

    def other_tokens(self, metadata: AttentionMetadata) -> Callable[[int, DeltaInputs], Tensor]:
        if not self.has_kernel:
            return _DeltaStep(self.kind, self.view, metadata).forward
        view, sequences = self.view, sequences_of(metadata)

        def forward(layer: int, inputs: DeltaInputs) -> Tensor:
            channels, dt, beta, weights = inputs
            of_tokens, num_key_heads = (channels, dt, beta), self.kind.num_key_heads
            return delta_sequences(
                *of_tokens, view, layer, sequences, weights, num_key_heads=num_key_heads
            )

        return forward


class _DeltaStep:
    """Tokens of a step in plain torch operations."""

    def __init__(self, kind: DeltaKind, view: StatePages, metadata: AttentionMetadata) -> None:
        self._kind = kind
        self._parts = StepParts(kind.conv_width, view, metadata)
        self._slabs = list(_slabs(kind, self._parts.num_decodes, metadata.slot_mapping.device))

    def forward(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See StateStep.forward."""
        kind, parts, stored = self._kind, self._parts, self._parts.states
        convolved = parts.convolve(layer, inputs.channels, inputs.weights.conv_weight, None)
        tokens = _tokens(kind, convolved, inputs)
        out = torch.empty_like(tokens.v)
        rest, decodes = parts.rest, parts.decodes
        at_stops = state = stored.read(STATES, layer, rest)
        if parts.pieces is not None:
            out[rest], at_stops = scan(parts.pieces, state, tokens.at(rest))
        of_decodes = tokens.at(decodes).with_key_for_each_head()
        for heads in self._slabs:
            slab = stored.read(STATES, layer, decodes, heads)
            out[decodes, heads] = _advance(slab, of_decodes.of(heads, heads))
            stored.write(STATES, layer, slab, decodes, heads)
        parts.write_chunks(layer, state, at_stops)
        return out.flatten(1)


def _tokens(kind: DeltaKind, convolved: Tensor, inputs: DeltaInputs) -> Tokens:
    """convolved: (n, conv_channels) float32."""
    q, k, v = convolved.split([kind.key_width, kind.key_width, kind.value_width], dim=1)
    q, k = (normalise(x.unflatten(1, (kind.num_key_heads, kind.key_dim))) for x in (q, k))
    weights = inputs.weights
    return Tokens(
        q=q.mul_(kind.key_dim**-0.5),
        k=k,
        v=v.unflatten(1, (kind.num_heads, kind.value_dim)),
        log_decay=F.softplus(inputs.dt.float() + weights.dt_bias).mul_(weights.decay),
        beta=inputs.beta.float().sigmoid(),
    )


def _slabs(kind: DeltaKind, num_seqs: int, device: torch.device) -> list[slice]:
    """Heads whose states are updated together. On a CPU they are few enough that the states of all
    sequences stay in the cache from read to write."""
    if num_seqs == 0:
        return []
    step = kind.num_heads
    if device.type == "cpu":
        head_bytes = num_seqs * kind.key_dim * kind.value_dim * torch.float32.itemsize
        step = min(step, max(1, SLAB_BYTES // head_bytes))
    return [
        slice(first, min(first + step, kind.num_heads)) for first in range(0, kind.num_heads, step)
    ]


def _advance(state: Tensor, tokens: Tokens) -> Tensor:
    """Advance each sequence by one token. Queries and keys are of each value head.

    state: (n, num_heads, key_dim, value_dim), contiguous, updated in place. Returns the outputs,
    like tokens.v.
    """
    q, k, v, log_decay, beta = tokens
    decay, beta = log_decay.exp().unsqueeze(2), beta.unsqueeze(2)
    # The state is read once for keys and queries; what the token adds to the output is q k delta.
    read = torch.stack((k, q), dim=2).flatten(0, 1) @ state.flatten(0, 1)
    of_key, of_query = read.view(*v.shape[:2], 2, -1).unbind(2)
    delta = (v - decay * of_key).mul_(beta)
    state.mul_(decay.unsqueeze(3)).addcmul_(k.unsqueeze(3), delta.unsqueeze(2))
    return (decay * of_query).addcmul_((q * k).sum(2, keepdim=True), delta)


def scan(pieces: Pieces, state: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks of several tokens.

    state: (num_chunks, num_heads, key_dim, value_dim), updated in place. Returns the outputs of all
    tokens, like tokens.v, and the state at each stop: (num_stops, num_heads, key_dim, value_dim).
    """
    out = torch.empty_like(tokens.v)
    at_stops = state.new_empty(len(pieces.after_stops), *state.shape[1:])
    for key_heads, heads in _scanned_together(len(pieces.tokens), tokens):
        part = _Scan(pieces, tokens.of(key_heads, heads))
        out[:, heads] = part.run(state[:, heads], at_stops[:, heads])
    return out, at_stops


def _scanned_together(num_pieces: int, tokens: Tokens) -> list[tuple[slice, slice]]:
    """Key heads and their value heads whose intermediate results take at most SCAN_BYTES."""
    (_, num_key_heads, key_dim), (_, num_heads, value_dim) = tokens.k.shape, tokens.v.shape
    group = num_heads // num_key_heads
    line_bytes = (4 * PIECE_TOKENS + 4 * key_dim + 4 * value_dim) * torch.float32.itemsize
    step = max(1, SCAN_BYTES // (num_pieces * PIECE_TOKENS * group * line_bytes))
    firsts = range(0, num_key_heads, step)
    parts = [slice(first, min(first + step, num_key_heads)) for first in firsts]
    return [(part, slice(part.start * group, part.stop * group)) for part in parts]


class _Scan:
    """The chunked form for some heads: what does not depend on the state before each piece.

    Shapes begin with (pieces, num_heads); the tokens of a piece are T, its keys K, its values V.

    corrections: (T, V), what each token adds to what its key maps to, if the state were zero.
    reads:       (2 T, K), what is read from the state: first for the corrections, then for outputs.
    scores:      (T, T), outputs by corrections of the same piece.
    keys:        (K, T), decayed to the end of the piece.
    decay:       (1, 1), of a state over the whole piece.
    """

    def __init__(self, pieces: Pieces, tokens: Tokens) -> None:
        self._pieces = pieces
        q, k, v = (x[pieces.tokens].transpose(1, 2) for x in tokens[:3])
        # Padding leaves the state unchanged.
        log_decay, beta = (
            x[pieces.tokens].masked_fill_(pieces.is_padding.unsqueeze(2), 0).transpose(1, 2)
            for x in tokens[3:]
        )
        self._width, num_key_heads = k.shape[2], k.shape[1]

        def by_key(x: Tensor) -> Tensor:
            return x.unflatten(1, (num_key_heads, -1))

        # Sums over a piece are float64, because small differences of large sums are needed.
        log = log_decay.double().cumsum(2)
        between = (log.unsqueeze(3) - log.unsqueeze(2)).float()
        between = by_key(between.masked_fill_(pieces.is_later, float("-inf")).exp_())
        since_start = by_key(log.float().exp_())
        until_end = by_key((log[:, :, -1:] - log).float().exp_())
        self.decay = log[:, :, -1:, None].float().exp_()
        self.scores = ((q @ k.mT).unsqueeze(2) * between).flatten(1, 2)

        system = between.mul_((k @ k.mT).unsqueeze(2)).flatten(1, 2).mul_(beta.unsqueeze(3))
        identity = torch.eye(self._width, device=v.device).expand_as(system)
        # One solution serves values and keys; it is bounded, because keys have length 1 at most.
        solution = torch.linalg.solve_triangular(
            system, identity, upper=False, unitriangular=True
        ).mul_(beta.unsqueeze(2))
        self.corrections = solution @ v
        decayed = (by_key(solution) * since_start.unsqueeze(3)).flatten(2, 3) @ k
        queries = q.unsqueeze(2) * since_start.unsqueeze(4)
        self.reads = torch.cat((decayed.view(*queries.shape), queries), dim=3).flatten(1, 2)
        self.keys = (k.unsqueeze(2) * until_end.unsqueeze(4)).flatten(1, 2).mT

    def run(self, state: Tensor, at_stops: Tensor) -> Tensor:
        """Carry the state from piece to piece. state: (num_chunks, num_heads, K, V), updated in
        place; at_stops: likewise, of each stop, filled. Returns the outputs of all tokens, (n,
        num_heads, V)."""
        pieces, width = self._pieces, self._width
        out = torch.empty_like(self.corrections)
        for first, number in pieces.rounds:
            this, active = slice(first, first + number), state[:number]
            for stop, piece in enumerate(pieces.after_stops):
                if first <= piece < first + number:
                    at_stops[stop] = active[piece - first]
            read = self.reads[this] @ active
            corrections = self.corrections[this].sub_(read[:, :, :width])
            out[this] = read[:, :, width:]
            active.mul_(self.decay[this]).add_(self.keys[this] @ corrections)
        out += self.scores @ self.corrections
        return out.transpose(1, 2).flatten(0, 1).index_select(0, pieces.places)
