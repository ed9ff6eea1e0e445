"""What the layers with states have in common, whatever their recurrence: how the tokens of a step
are cut into pieces, and the causal convolution before the recurrence.

Both can stop at given offsets of a chunk: the state and the convolution's inputs after the token
before a stop are results, too, and the chunk goes on.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

PIECE_TOKENS: Final = 64
"""Maximum number of tokens of a piece; the products within a piece are this wide."""

Ints = npt.NDArray[np.int64]
Stops = Sequence[Sequence[int]]
"""By chunk: increasing offsets in tokens, above 0 and below the chunk's number of tokens."""


def num_pieces(num_tokens: int, stops: Sequence[int] = ()) -> int:
    """Number of pieces of a chunk."""
    return len(_starts(num_tokens, stops))


def _starts(num_tokens: int, stops: Sequence[int]) -> list[int]:
    """The offset of each piece: every stop begins one."""
    parts = pairwise([0, *stops, num_tokens])
    return [start for first, end in parts for start in range(first, end, PIECE_TOKENS)]


class Pieces:
    """Chunks of several tokens, cut into pieces.

    Pieces are ordered by round: the first pieces of all chunks, then the second pieces, and so on.
    All are padded to the width of the longest; padding repeats the last token of its piece, so that
    no other sequence's tokens are used.

    tokens:      (pieces, width) int64, the token of each place.
    is_padding:  (pieces, width) bool.
    places:      (num_tokens,) int64, the place of each token, counted through all pieces.
    rounds:      of each round, its first piece and the number of its pieces: those of the first
                 chunks.
    firsts:      (rounds,) int64, the first of them alone.
    num_pieces:  (num_chunks,) int64, of each chunk.
    after_stops: the piece that begins at each stop, chunk by chunk.
    stops:       (num_stops,) int64, the same on the device.
    """

    def __init__(
        self, firsts: Ints, counts: Ints, device: torch.device, stops: Stops | None = None
    ) -> None:
        """firsts, counts: (num_chunks,), first token and number of tokens of each chunk, those with
        the most pieces first."""
        stops = stops or [()] * len(counts)
        starts = [_starts(int(count), of) for count, of in zip(counts, stops, strict=True)]
        numbers = np.array([len(of_chunk) for of_chunk in starts], np.int64)
        assert (np.diff(numbers) <= 0).all(), "chunks with more pieces come first"
        num_active = [int((numbers > nth).sum()) for nth in range(numbers[0])]
        of_rounds = np.cumsum(num_active) - num_active
        self.rounds = list(zip(of_rounds.tolist(), num_active, strict=True))
        pieces = [(chunk, nth) for nth, n in enumerate(num_active) for chunk in range(n)]
        chunks = np.array([chunk for chunk, _ in pieces], np.int64)
        begins = np.array([starts[chunk][nth] for chunk, nth in pieces], np.int64)
        ends = np.array([[*starts[c], int(counts[c])][nth + 1] for c, nth in pieces], np.int64)
        width = int((ends - begins).max())
        offsets = begins[:, None] + np.arange(width)
        is_token = offsets < ends[:, None]
        tokens = firsts[chunks, None] + np.minimum(offsets, ends[:, None] - 1)
        places = np.empty(int(counts.sum()), np.int64)
        places[tokens[is_token]] = np.flatnonzero(is_token)
        self.after_stops = [
            int(of_rounds[starts[chunk].index(stop)]) + chunk
            for chunk, of_chunk in enumerate(stops)
            for stop in of_chunk
        ]
        self.stops = upload(np.array(self.after_stops, np.int64), device)
        self.firsts = upload(of_rounds, device)
        self.num_pieces = upload(numbers, device)
        self.tokens = upload(tokens, device)
        self.places = upload(places, device)
        self.is_padding = upload(~is_token, device)
        self.is_later = torch.ones(width, width, dtype=torch.bool, device=device).triu_(1)


class Convolution:
    """A causal convolution over sequences of any lengths.

    Its taps read lines of one table: the stored inputs of each sequence, oldest first, then the
    inputs of the step.
    """

    def __init__(
        self,
        firsts: Ints,
        counts: Ints,
        width: int,
        device: torch.device,
        stops: Stops | None = None,
    ) -> None:
        """firsts, counts: (num_seqs,), first token and number of tokens of each sequence. stops: by
        sequence."""
        num_seqs, num_kept = len(firsts), width - 1
        first_step_line = num_seqs * num_kept

        def lines(seqs: Ints, offsets: Ints) -> Ints:
            """Table lines of the tokens at `offsets` from their sequence's first token in the step;
            negative offsets are stored inputs."""
            kept = seqs * num_kept + num_kept + offsets
            return np.where(offsets < 0, kept, first_step_line + firsts[seqs] + offsets)

        seqs, offsets = _tokens(counts)
        taps = np.empty((width, len(seqs)), np.int64)
        for tap in range(width):
            taps[tap, firsts[seqs] + offsets] = lines(seqs, offsets - num_kept + tap)
        ends = [
            *enumerate(counts.tolist()),
            *((seq, stop) for seq, of_seq in enumerate(stops or ()) for stop in of_seq),
        ]
        of_ends = np.array(ends, np.int64).reshape(-1, 2)
        last = of_ends[:, 1:] + np.arange(-num_kept, 0)
        # The lines of one sequence are adjacent, which needs no copies.
        is_alone = num_seqs == 1
        self._taps = (
            [slice(tap, tap + len(seqs)) for tap in range(width)]
            if is_alone
            else upload(taps, device)
        )
        self._kept = upload(lines(of_ends[:, :1], last).reshape(-1), device)

    def run(
        self,
        inputs: Tensor,
        kept: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        has_silu: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """inputs: (n, channels); kept: (num_seqs, width - 1, channels), the stored inputs; weight:
        (width, channels), oldest token first; bias: (channels,); has_silu: whether silu follows.

        Returns the result, (n, channels) float32, and the inputs to store: after the last token of
        each sequence, then at each stop; (num_seqs + num_stops, width - 1, channels).
        """
        table = torch.cat((kept.flatten(0, 1), inputs))
        out = torch.zeros(inputs.shape, dtype=torch.float32, device=inputs.device)
        if bias is not None:
            out += bias
        for tap, of_tap in zip(self._taps, weight, strict=True):
            lines = table[tap] if isinstance(tap, slice) else table.index_select(0, tap)
            out.addcmul_(lines.float(), of_tap.float())
        stored = table.index_select(0, self._kept).unflatten(0, (-1, *kept.shape[1:2]))
        return F.silu(out.to(inputs.dtype)).float() if has_silu else out, stored


def _tokens(counts: Ints) -> tuple[Ints, Ints]:
    """The sequence of each token and its offset in it, sequence after sequence."""
    seqs = np.repeat(np.arange(len(counts)), counts)
    return seqs, np.arange(len(seqs)) - np.repeat(counts.cumsum() - counts, counts)


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
