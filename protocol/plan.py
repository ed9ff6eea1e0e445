"""Messages from scheduler to worker: one plan per step, with the changes since the previous plan.

Scheduler and worker keep the same table of rows (`rows.RowTable`). A plan drops, rewinds and adds
rows, appends blocks, and lists the rows whose number of tokens differs from what that table
predicts. A row is an index below `max_num_seqs`; its generation identifies the occupant.
"""

import zlib
from typing import Final

import msgspec
import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array
from longshore.protocol.requests import LoRARequest, MultimodalFeature, PoolingParams, PromptEmbeds
from longshore.protocol.sampling import SamplingParams


class RowStart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Puts a request on a row, for the first time or after preemption. The worker keeps no state of
    dropped rows, so this message is complete in both cases.

    generation:         unique per admission, increasing.
    num_computed_tokens: tokens whose KV is already in the given blocks (prefix hits).
    prompt_token_ids, output_token_ids: separate, as limits and penalties count from the prompt.
    block_ids:          block table per KV cache group, in order of position.
    last_computed:      maximum number of computed tokens (the last token is only sampled). The
                        predictor of both sides uses it.
    resumed:            the request was preempted; this block table replaces its former one.
    has_structured_output: a `SampleMask` precedes each sampled token.
    """

    row: int
    generation: int
    request_id: str
    num_computed_tokens: int
    last_computed: int
    prompt_token_ids: Int32Array
    block_ids: tuple[Int32Array, ...]
    sampling: SamplingParams
    output_token_ids: Int32Array = EMPTY_INT32
    resumed: bool = False
    lora: LoRARequest | None = None
    multimodal: tuple[MultimodalFeature, ...] = ()
    prompt_embeds: PromptEmbeds | None = None
    pooling: PoolingParams | None = None
    has_structured_output: bool = False

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids are known at admission. The step that computes the last one samples."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class AppendedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to block tables of one group: `block_ids[i]` to the table of row `rows[i]`.

    A row that gets several blocks is listed several times, in order of position.
    """

    group: int
    rows: Int32Array
    block_ids: Int32Array


class Rewind(msgspec.Struct, frozen=True, array_like=True):
    """Resets row `row` to `num_computed_tokens`. Its first `num_known_tokens` token ids stay known,
    the ids sampled after them are void, and its block table is cut to what the computed tokens
    need. Tokens and draft rejections of earlier plans no longer apply to the row."""

    row: int
    num_computed_tokens: int
    num_known_tokens: int


class KeptState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a row after its first `num_tokens` tokens, which the step computes, is also
    written to these blocks. Any number of tokens is allowed, whatever the block size."""

    row: int
    num_tokens: int
    block_ids: Int32Array


class RowState(msgspec.Struct, frozen=True, array_like=True):
    """The full state of one row after this plan's changes and before its step (`--verify-plan`)."""

    row: int
    generation: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[Int32Array, ...]


class SchedulerOutput(
    msgspec.Struct, tag="plan", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One step. Changes apply in the order of the fields: rejected, finished, preempted, rewound,
    added, appended, scheduled.

    epoch:          the worker's incarnation.
    step, previous_step: plans count up from 1. A repeat of the last plan is ignored; a gap is a
                    PlanMismatch.
    num_rows, num_scheduled_tokens: totals after the changes, to verify them.
    digest:         CRC-32 of this plan's changes, chained on the digest of the previous plan.
    rejected_rows, rejected_tokens: rows of which answers have rejected drafts since the previous
                    plan, each once, and how many. They leave the computed tokens, as all later ones
                    of the row do: its next tokens take their places.
    finished_rows, preempted_rows: rows to drop.
    scheduled_rows, scheduled_tokens: rows whose number of tokens differs from the prediction.
    sampled_rows, sampled_tokens: token ids for a first pipeline stage that does not sample: the
                    token to compute, for rows that compute one sampled since they were added; the
                    last known token, for rewound rows. Only with pipeline parallelism and without
                    asynchronous scheduling.
    answered_step:  the latest answer that the scheduler had applied.
    draft_rows, draft_tokens: drafts to verify; a row is listed once per draft. Token -1 stands for
                    the worker's own latest draft, which only the worker knows so far.
    num_invalid_draft_tokens: drafts that the grammar rejected, for statistics.
    freed_encoder_hashes: encoder outputs to evict. One of them can be encoded again in this step.
    encoder_inputs: (row, index of the multimodal item) to encode in this step. With cross
                    attention: one item of each row in `added`, and no other.
    common_prefix_blocks: per group, leading blocks that all running rows share, for cascade
                    attention; empty if unchanged since the previous plan.
    copy_source_ids, copy_target_ids, copy_num_tokens: blocks to copy in all layers (copy-on-write),
                    before the step writes or clears any block. The target gets the source's first
                    `copy_num_tokens` tokens and zeros after them. Targets are distinct. All sources
                    are read before any target is written, as a block can be both.
    kept_states:    states to write to blocks of their own while the step computes them; of each row
                    in order.
    zero_block_ids: blocks to clear before use.
    has_structured_output: a `SampleMask` for this step follows; sampling waits for it.
    connector_metadata: data for the connector's worker half, opaque here.
    ec_connector_metadata: data for the encoder connector's worker half, opaque here.
    has_loads:      the connector loads KV for this step before it is computed: every rank that does
                    not sample reports with `TransferReport.step` which blocks it could not fill.
    full_state:     all rows in use, with `--verify-plan`.
    """

    epoch: int
    step: int
    previous_step: int
    num_rows: int
    num_scheduled_tokens: int
    digest: int
    answered_step: int = 0
    rejected_rows: Int32Array = EMPTY_INT32
    rejected_tokens: Int32Array = EMPTY_INT32
    finished_rows: Int32Array = EMPTY_INT32
    preempted_rows: Int32Array = EMPTY_INT32
    rewound: tuple[Rewind, ...] = ()
    added: tuple[RowStart, ...] = ()
    appended: tuple[AppendedBlocks, ...] = ()
    scheduled_rows: Int32Array = EMPTY_INT32
    scheduled_tokens: Int32Array = EMPTY_INT32
    sampled_rows: Int32Array = EMPTY_INT32
    sampled_tokens: Int32Array = EMPTY_INT32
    draft_rows: Int32Array = EMPTY_INT32
    draft_tokens: Int32Array = EMPTY_INT32
    num_invalid_draft_tokens: int = 0
    freed_encoder_hashes: tuple[str, ...] = ()
    encoder_inputs: tuple[tuple[int, int], ...] = ()
    common_prefix_blocks: tuple[int, ...] = ()
    copy_source_ids: Int32Array = EMPTY_INT32
    copy_target_ids: Int32Array = EMPTY_INT32
    copy_num_tokens: Int32Array = EMPTY_INT32
    kept_states: tuple[KeptState, ...] = ()
    zero_block_ids: Int32Array = EMPTY_INT32
    has_structured_output: bool = False
    connector_metadata: bytes = b""
    ec_connector_metadata: bytes = b""
    has_loads: bool = False
    full_state: tuple[RowState, ...] | None = None


class SampleMask(msgspec.Struct, tag="mask", frozen=True, forbid_unknown_fields=True):
    """Tokens that rows may sample in step `step`. Separate from the plan, because a grammar needs
    the preceding token first. Every rank gets it, and the sampling rank waits for it.

    rows: the step's sampling rows that have structured output, ascending; a row with drafts is
          listed once more per draft.
    bits: per row of `rows`, in order, the vocabulary as packed bits, the lowest id in the lowest
          bit of the first byte. A row without any bit fails its request.
    """

    epoch: int
    step: int
    rows: Int32Array
    bits: UInt8Array


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, forbid_unknown_fields=True):
    """Finish the plans received so far, then exit with status 0."""

    reason: str


class BeginSleep(msgspec.Struct, tag="begin_sleep", frozen=True, forbid_unknown_fields=True):
    """End the epoch, free the memory of the device, and answer with WorkerAsleep. Sent when every
    plan is answered, or instead of WorkerAccepted. Until EndSleep, rows and blocks do not exist."""


class EndSleep(msgspec.Struct, tag="end_sleep", frozen=True, forbid_unknown_fields=True):
    """Begin again with WorkerHello."""


def digest_changes(
    previous_digest: int,
    *,
    rejected_rows: Int32Array = EMPTY_INT32,
    rejected_tokens: Int32Array = EMPTY_INT32,
    finished_rows: Int32Array = EMPTY_INT32,
    preempted_rows: Int32Array = EMPTY_INT32,
    rewound: tuple[Rewind, ...] = (),
    added: tuple[RowStart, ...] = (),
    appended: tuple[AppendedBlocks, ...] = (),
    scheduled_rows: Int32Array = EMPTY_INT32,
    scheduled_tokens: Int32Array = EMPTY_INT32,
    copy_source_ids: Int32Array = EMPTY_INT32,
    copy_target_ids: Int32Array = EMPTY_INT32,
    copy_num_tokens: Int32Array = EMPTY_INT32,
) -> int:
    """CRC-32 of all changes of rows and all block copies, chained on the digest of the previous
    plan. Of the data of multimodal items and prompt embeddings, only the size counts."""
    # Lengths first: else an element that moves from one part to the next keeps the digest.
    lengths = (len(finished_rows), len(preempted_rows), len(rewound), len(added), len(appended))
    crc = zlib.crc32(_encoder.encode((*lengths, len(scheduled_rows))), previous_digest)
    for rows in (finished_rows, preempted_rows, scheduled_rows, scheduled_tokens):
        crc = zlib.crc32(rows, crc)
    if rewound or added:
        # Tuples, because a struct omits fields that are the very object of their default.
        starts = [msgspec.structs.astuple(start) for start in added]
        crc = zlib.crc32(_encoder.encode((rewound, starts)), crc)
    for blocks in appended:
        crc = zlib.crc32(_encoder.encode((blocks.group, len(blocks.rows))), crc)
        crc = zlib.crc32(blocks.rows, zlib.crc32(blocks.block_ids, crc))
    if len(rejected_rows):
        crc = zlib.crc32(_encoder.encode((len(rejected_rows), len(rejected_tokens))), crc)
        crc = zlib.crc32(rejected_tokens, zlib.crc32(rejected_rows, crc))
    if len(copy_source_ids):
        crc = zlib.crc32(_encoder.encode((len(copy_source_ids), len(copy_target_ids))), crc)
        for numbers in (copy_source_ids, copy_target_ids, copy_num_tokens):
            crc = zlib.crc32(numbers, crc)
    return crc


def plan_digest(previous_digest: int, plan: SchedulerOutput) -> int:
    """`digest_changes` of a received plan."""
    return digest_changes(previous_digest, **{name: getattr(plan, name) for name in _CHANGES})


_CHANGES: Final = tuple(digest_changes.__kwdefaults__ or ())  # all are fields of a plan


def _digested(array: np.ndarray) -> bytes | int:
    """The bytes of token and block ids. Data such as images is large, so only its size counts."""
    return array.tobytes() if array.dtype == np.int32 else len(array)


_encoder = msgspec.msgpack.Encoder(enc_hook=_digested)
