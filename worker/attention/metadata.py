"""Attention metadata of one step: which tokens belong to which sequence, and where their KV is."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longshore.protocol.plan import KeptState


@dataclass(frozen=True)
class DecodeSegment:
    """Consecutive sequences with one new token each and similar length, computed together.

    first_seq, num_seqs: range of sequences of the step.
    num_blocks:          blocks of the longest of them; the others are padded to it.
    """

    first_seq: int
    num_seqs: int
    num_blocks: int


@dataclass(frozen=True)
class PrefillChunk:
    """Several new tokens of one sequence.

    first_token: index of the first of them in the step.
    seq_len:     tokens of the sequence, new ones included; the new ones are the last.
    kept_states: states after some of them, in order.
    """

    row: int
    first_token: int
    num_tokens: int
    seq_len: int
    kept_states: Sequence[KeptState] = ()

    @property
    def start(self) -> int:
        """Tokens of the sequence before the step."""
        return self.seq_len - self.num_tokens


@dataclass(frozen=True)
class AttentionMetadata:
    """One step. Sequences with one new token come first, so decode sequence i is token i. A row
    that verifies drafts is several of them: each attends to the new tokens of those before it.

    slot_mapping: (num_tokens,) int64, block_id * block_size + offset of each new token; -1 if it is
                  not stored: another rank stores it, or it has been computed before.
    block_table:  (max_num_seqs, max_blocks) int32, indexed by row; entries beyond a sequence's
                  length are the null block or stale ids.
    decode_rows, decode_lens: (num_decodes,) int64, row and length (new token included).
    kept_tokens:  (n,) int64, indices in the step of the new tokens that this rank stores; None:
                  all.
    shared_tokens: (1,) int64: the decodes have the blocks of so many leading tokens in common,
                  whole blocks, and a backend may read them once; at most the shortest length,
                  without padding. None: it should not.
    Of a group with states, the line of a row in `block_table` is the pages of its state.
    For cross attention every token of the step is a sequence of its own, with the length of its
    row's encoder tokens and no new KV: there are no slots and no chunks.
    Tensors are on the device; the rest is plain values, so nothing waits for the device.
    """

    slot_mapping: Tensor
    block_table: Tensor
    decode_rows: Tensor
    decode_lens: Tensor
    decode_segments: Sequence[DecodeSegment]
    prefill_chunks: Sequence[PrefillChunk]
    kept_tokens: Tensor | None = None
    shared_tokens: Tensor | None = None
