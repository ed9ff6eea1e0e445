"""What one step asks of attention: which tokens belong to which sequence, and where its KV lies."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DecodeSegment:
    """Neighbouring sequences of one new token each and of similar length, computed together.

    first_seq, num_seqs: which sequences of the step.
    num_blocks:          blocks of the longest of them; the others are padded to it.
    """

    first_seq: int
    num_seqs: int
    num_blocks: int


@dataclass(frozen=True)
class PrefillChunk:
    """Several new tokens of one sequence.

    first_token: where they start in the step.
    seq_len:     tokens of the sequence when they are computed; they are its last ones.
    """

    row: int
    first_token: int
    num_tokens: int
    seq_len: int


@dataclass(frozen=True)
class AttentionMetadata:
    """One step. Sequences with one new token come first, so decode sequence i is token i.

    slot_mapping: (num_tokens,) int64, block_id * block_size + offset of each new token; -1 where
                  another rank keeps it.
    block_table:  (max_num_seqs, max_blocks) int32, indexed by row; entries beyond a sequence's
                  length are the null block or ids of blocks that are no longer its own.
    decode_rows, decode_lens: (num_decodes,) int64, row and length (new token included).
    kept_tokens:  (n,) int64, indices in the step of the new tokens that this rank keeps; None: all.
    For cross attention every token of the step is a sequence of its own, as long as the encoder's
    tokens of its row, and nothing is new: no slots and no chunks.
    The tensors are on the device; the rest is plain values, so nothing waits for the device.
    """

    slot_mapping: Tensor
    block_table: Tensor
    decode_rows: Tensor
    decode_lens: Tensor
    decode_segments: Sequence[DecodeSegment]
    prefill_chunks: Sequence[PrefillChunk]
    kept_tokens: Tensor | None = None
