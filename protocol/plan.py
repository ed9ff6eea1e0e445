"""Scheduler to worker: one plan per step that names only what changed since the plan before.

Scheduler and worker keep the same table of rows (`rows.RowTable`). A plan drops, rewinds and adds
rows, appends blocks, and lists the rows whose number of tokens differs from what that table
expects. A row is an index below `max_num_seqs`; its generation tells one occupant from the next.
"""

import zlib
from typing import Final

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array
from longshore.protocol.requests import (
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    PromptEmbeds,
)
from longshore.protocol.sampling import SamplingParams

_encoder = msgspec.msgpack.Encoder()


class RowStart(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A request takes a row: newly, or again after preemption. The worker keeps nothing of a row
    that was dropped, so both carry everything.

    generation:         unique per admission, increasing.
    num_computed_tokens: tokens whose KV the given blocks already hold (prefix hits).
    prompt_token_ids, output_token_ids: apart, because limits and penalties count from the prompt.
    block_ids:          per KV cache group, in order of position.
    last_computed:      the row never computes beyond this many tokens (the last token is only
                        sampled). Both sides' predictor uses it.
    resumed:            the block table replaces what any earlier life of the request had.
    has_structured_output: its tokens are masked: a `SampleMask` precedes each of them.
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
        """Tokens whose ids are known at admission; the first step past them samples."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class AppendedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to the tables of one group: `block_ids[i]` goes to the end of row `rows[i]`.

    A row that gets several blocks is listed several times, in order of position.
    """

    group: int
    rows: Int32Array
    block_ids: Int32Array


class Rewind(msgspec.Struct, frozen=True, array_like=True):
    """Row `row` falls back to `num_computed_tokens`; the last `num_discarded_tokens` sampled ids
    of it are void, `num_known_tokens` stay known. Tokens and rejections of plans made before count
    no more. Its block table is cut to what the computed tokens need."""

    row: int
    num_computed_tokens: int
    num_discarded_tokens: int
    num_known_tokens: int


class RowState(msgspec.Struct, frozen=True, array_like=True):
    """All of one row, for `--verify-plan`: after this plan's changes, before its step."""

    row: int
    generation: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[Int32Array, ...]


class SchedulerOutput(
    msgspec.Struct, tag="plan", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One step. Changes apply in the order of the fields: finished, preempted, rewound, added,
    appended, scheduled.

    epoch, step, previous_step: the worker's incarnation; plans count up from 1. A repeat of the
                    last plan is ignored, a gap is a PlanMismatch.
    num_rows, num_scheduled_tokens: totals after the changes, to check the delta against.
    digest:         CRC-32 of this plan's changes chained on the digest of the plan before.
    finished_rows, preempted_rows: rows to drop, and why.
    scheduled_rows, scheduled_tokens: rows that compute another number of tokens than expected.
    sampled_rows, sampled_tokens: ids for a first pipeline stage that does not sample itself, by
                    row: of those that compute a token sampled since they were added, that token; of
                    rewound ones, the last known. Only with pipeline parallelism and without
                    asynchronous scheduling.
    answered_step:  the newest answer that had been applied. Drafts rejected in it and before are
                    taken back from the rows' computed counts before this plan's changes.
    draft_rows, draft_tokens: drafts to verify, a row listed once per draft; token -1 is the draft
                    that the worker itself proposed last, which it alone knows yet.
    num_invalid_draft_tokens: drafts that the grammar refused, for the statistics.
    freed_encoder_hashes: encoder outputs whose place is needed; one may be encoded anew right away.
    encoder_inputs: (row, index of the multimodal item) to encode in this step; of a model with
                    cross attention, one item of every row in `added` and of no other.
    common_prefix_blocks: per group, leading blocks that all running rows share, for cascade
                    attention; empty if they are as in the plan before.
    copy_source_ids, copy_target_ids, copy_num_tokens: blocks to copy, pair by pair, all layers,
                    before anything of the step is written or cleared: a shared block whose next
                    token one request writes alone. The target holds the source's first
                    `copy_num_tokens` tokens, and zeros behind them. No block is copied to twice;
                    all sources are read before a target is written, which may be one of them.
    zero_block_ids: blocks to clear before use.
    has_structured_output: a SampleMask for this step follows; sampling waits for it.
    connector_metadata: the connector's own encoding, opaque here.
    full_state:     every live row, with --verify-plan.
    """

    epoch: int
    step: int
    previous_step: int
    num_rows: int
    num_scheduled_tokens: int
    digest: int
    answered_step: int = 0
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
    zero_block_ids: Int32Array = EMPTY_INT32
    has_structured_output: bool = False
    connector_metadata: bytes = b""
    full_state: tuple[RowState, ...] | None = None


class SampleMask(msgspec.Struct, tag="mask", frozen=True, forbid_unknown_fields=True):
    """Which tokens the rows of step `step` may sample: a grammar's mask exists only after the
    token before it. Reserved: workers refuse it by name until structured output arrives.

    bits: one packed row of the vocabulary after the other, in the order of `rows`.
    """

    epoch: int
    step: int
    rows: Int32Array
    bits: UInt8Array


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, forbid_unknown_fields=True):
    """Finish the plans already received, then exit with status 0."""

    reason: str


def digest_changes(
    previous_digest: int,
    *,
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
    """CRC-32 of everything that changes row state or copies blocks, chained on the digest of the
    plan before."""
    # Lengths first, so that nothing can move from one part to the next unseen.
    lengths = (len(finished_rows), len(preempted_rows), len(rewound), len(added), len(appended))
    crc = zlib.crc32(_encoder.encode((*lengths, len(scheduled_rows))), previous_digest)
    for rows in (finished_rows, preempted_rows, scheduled_rows, scheduled_tokens):
        crc = zlib.crc32(rows, crc)
    for rewind in rewound:
        crc = zlib.crc32(repr(rewind).encode(), crc)
    if added:
        crc = zlib.crc32(_encoder.encode([_everything(start) for start in added]), crc)
    for blocks in appended:
        crc = zlib.crc32(_encoder.encode((blocks.group, len(blocks.rows))), crc)
        crc = zlib.crc32(blocks.rows, zlib.crc32(blocks.block_ids, crc))
    if len(copy_source_ids):
        crc = zlib.crc32(_encoder.encode((len(copy_source_ids), len(copy_target_ids))), crc)
        for numbers in (copy_source_ids, copy_target_ids, copy_num_tokens):
            crc = zlib.crc32(numbers, crc)
    return crc


def _everything(start: RowStart) -> tuple[object, ...]:
    return (
        start.row,
        start.generation,
        start.request_id,
        start.num_computed_tokens,
        start.last_computed,
        start.resumed,
        start.lora,
        start.pooling,
        start.has_structured_output,
        [(item.hash, item.offset, item.num_tokens) for item in start.multimodal],
        start.sampling,
        start.prompt_token_ids.tobytes(),
        start.output_token_ids.tobytes(),
        [block_ids.tobytes() for block_ids in start.block_ids],
    )


def plan_digest(previous_digest: int, plan: SchedulerOutput) -> int:
    """`digest_changes` of a plan that has been received."""
    return digest_changes(previous_digest, **{name: getattr(plan, name) for name in _CHANGES})


# What `digest_changes` takes: fields of a plan by their names.
_CHANGES: Final = (
    "finished_rows",
    "preempted_rows",
    "rewound",
    "added",
    "appended",
    "scheduled_rows",
    "scheduled_tokens",
    "copy_source_ids",
    "copy_target_ids",
    "copy_num_tokens",
)
