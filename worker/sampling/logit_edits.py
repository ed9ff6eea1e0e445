"""Logit edits: logit_bias, min_tokens, bad words and thinking budgets.

Each edit adds a number to a logit; -inf forbids a token. Most edits depend only on the length of
the output, which the host knows. Whether a bad word of several tokens is about to be completed
depends on the tokens themselves, so the device decides it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from longshore.protocol.sampling import SamplingParams
from longshore.worker.sampling.thinking import ForcedToken, RowBudget
from longshore.worker.step.token_table import TokenTable
from longshore.worker.step.upload import Upload

Int64s: TypeAlias = npt.NDArray[np.int64]
Float64s: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AddedLogits:
    """values, (n,), are added to the logits of the tokens ids, (n,)."""

    ids: Int64s
    values: Float64s


class RowEdits:
    """The edits of one request.

    before, after: added while the output has fewer than min_tokens tokens, and from then on.
    Bad words of several tokens are sorted by length. word_ends: (w,) last token of each word;
    prefixes: the tokens before it, concatenated; prefix_lens: (w,) their number per word.
    budget: when the reasoning is ended; None: never.
    """

    def __init__(
        self,
        *,
        min_tokens: int,
        before: AddedLogits,
        after: AddedLogits,
        words: Sequence[tuple[int, ...]],
        budget: RowBudget | None = None,
    ) -> None:
        self.budget = budget
        self.min_tokens = min_tokens
        self.before = before
        self.after = after
        words = sorted(words, key=len)
        self.word_ends = np.array([word[-1] for word in words], np.int64)
        self.prefix_lens = np.array([len(word) - 1 for word in words], np.int64)
        self.prefixes = np.array([token for word in words for token in word[:-1]], np.int64)

    @staticmethod
    def of(
        sampling: SamplingParams,
        prompt_token_ids: npt.NDArray[np.int32],
        *,
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> "RowEdits | None":
        """Return the edits, or None if the request edits nothing."""
        words = [word for word in sampling.bad_words_token_ids if len(word) > 1]
        added = dict(sampling.logit_bias or {})
        added.update((word[0], -math.inf) for word in sampling.bad_words_token_ids if not word[1:])
        thinking = sampling.thinking
        if not (added or words or sampling.min_tokens or thinking):
            return None
        ends = {*eos_token_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()
        forbidden = {token_id: -math.inf for token_id in ends if 0 <= token_id < vocab_size}
        return RowEdits(
            min_tokens=sampling.min_tokens,
            before=_added(added | forbidden),
            after=_added(added),
            words=words,
            budget=None if thinking is None else RowBudget(thinking, prompt_token_ids),
        )

    def added(self, num_outputs: int) -> AddedLogits:
        """What is added to the logits of output position `num_outputs`."""
        return self.before if num_outputs < self.min_tokens else self.after

    def num_words(self, num_outputs: int) -> int:
        """The number of words, shortest first, that an output of this length can complete."""
        return int(np.searchsorted(self.prefix_lens, num_outputs, side="right"))


def _added(values: dict[int, float]) -> AddedLogits:
    return AddedLogits(
        np.array(list(values), np.int64), np.array(list(values.values()), np.float64)
    )


@dataclass(frozen=True)
class Words:
    """Bad words that rows may be about to complete; tensors on the device.

    ends:     (w,) int64, flat index into the logits of each word's last token.
    index:    (m,) int64, flat indices into the token table of the last tokens of the row.
    expected: (m,) int64, the word's tokens at these places; if all match, the last is forbidden.
    word_of:  (m,) int64, the word that each of them belongs to.
    """

    ends: Tensor
    index: Tensor
    expected: Tensor
    word_of: Tensor


@dataclass(frozen=True)
class LogitEdits:
    """Edits of one step, on the device.

    index, values: (n,), int64 flat indices into the logits, and the float32s to add there.
    """

    index: Tensor
    values: Tensor
    words: Words | None
    forced: Sequence[ForcedToken] = ()

    def apply(self, logits: Tensor, tokens: TokenTable) -> None:
        """logits: (num_sampled, vocab_size) float32, changed in place."""
        flat = logits.view(-1)
        if len(self.index):
            flat.index_add_(0, self.index, self.values)
        words = self.words
        if words is not None:
            differs = (tokens.gather(words.index) != words.expected).to(logits.dtype)
            num_different = logits.new_zeros(len(words.ends))
            num_different.index_add_(0, words.word_of, differs)
            forbidden = logits.new_zeros(len(words.ends))
            flat.index_add_(0, words.ends, forbidden.masked_fill_(num_different == 0, -math.inf))

    def force(self, logits: Tensor, tokens: TokenTable) -> None:
        """End reasoning at its budget, after all other edits and penalties."""
        for each in self.forced:
            each.apply(logits, tokens)


@dataclass(frozen=True)
class EditSlices:
    """Slices of a step's packed edits."""

    index: slice
    values: slice
    words: tuple[slice, slice, slice, slice] | None
    forced: Sequence[ForcedToken]

    def on_device(self, ints: Tensor, reals: Tensor) -> LogitEdits:
        words = None if self.words is None else Words(*(ints[span] for span in self.words))
        return LogitEdits(ints[self.index], reals[self.values], words, self.forced)


def pack_edits(
    edits: Sequence[RowEdits],
    *,
    samples: Int64s,
    num_outputs: Int64s,
    table_ends: Int64s,
    table_rows: Int64s,
    token_width: int,
    vocab_size: int,
    upload: Upload,
) -> EditSlices:
    """Pack the edits of n rows.

    samples:     (n,) indices among the sampling rows.
    num_outputs: (n,) lengths of their outputs.
    table_ends:  (n,) flat index into the token table after the last token of each row.
    table_rows:  (n,) rows of the token table.
    """
    outputs = num_outputs.tolist()
    added = [row.added(count) for row, count in zip(edits, outputs, strict=True)]
    rows = np.repeat(samples, [len(each.ids) for each in added])
    index = rows * vocab_size + np.concatenate([each.ids for each in added])
    return EditSlices(
        index=upload.ints(index),
        values=upload.reals(np.concatenate([each.values for each in added])),
        words=_pack_words(edits, samples, outputs, table_ends, vocab_size, upload),
        forced=[
            ForcedToken(sample, row, end - row * token_width - count, token_id, each.budget)
            for each, sample, row, end, count in zip(
                edits,
                samples.tolist(),
                table_rows.tolist(),
                table_ends.tolist(),
                outputs,
                strict=True,
            )
            if each.budget is not None and (token_id := each.budget.forced(count)) is not None
        ],
    )


def _pack_words(
    edits: Sequence[RowEdits],
    samples: Int64s,
    num_outputs: Sequence[int],
    table_ends: Int64s,
    vocab_size: int,
    upload: Upload,
) -> tuple[slice, slice, slice, slice] | None:
    counts = [row.num_words(count) for row, count in zip(edits, num_outputs, strict=True)]
    if not any(counts):
        return None
    some = list(zip(edits, counts, strict=True))
    ends = np.concatenate([row.word_ends[:count] for row, count in some])
    lens = np.concatenate([row.prefix_lens[:count] for row, count in some])
    expected = np.concatenate(
        [row.prefixes[: row.prefix_lens[:count].sum()] for row, count in some]
    )
    # A prefix of n tokens is compared with the last n tokens of the output.
    in_prefix = np.arange(len(expected)) - np.repeat(np.cumsum(lens) - lens, lens)
    begins = np.repeat(table_ends, counts) - lens
    return (
        upload.ints(np.repeat(samples, counts) * vocab_size + ends),
        upload.ints(np.repeat(begins, lens) + in_prefix),
        upload.ints(expected),
        upload.ints(np.repeat(np.arange(len(lens)), lens)),
    )
