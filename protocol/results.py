"""Worker to scheduler: what a step produced, and the end of a worker."""

from typing import TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array


class ModelRunnerOutput(
    msgspec.Struct, tag="output", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The answer to one plan.

    epoch, step:  of the plan; an answer of another epoch is dropped.
    sampled_tokens: one id per sampling row (`RowTable.samples`), in row order.
    nan_rows:     sampling rows whose logits were not finite; their token is meaningless.
    failed_block_ids: blocks that a load was to fill and did not.
    connector_metadata: of the connector's worker half, opaque here.
    compute_s:    time the step took on the device, in seconds.
    """

    epoch: int
    step: int
    sampled_tokens: Int32Array = EMPTY_INT32
    nan_rows: Int32Array = EMPTY_INT32
    failed_block_ids: Int32Array = EMPTY_INT32
    connector_metadata: bytes = b""
    compute_s: float = 0.0


class WorkerFailed(msgspec.Struct, tag="failed", frozen=True, forbid_unknown_fields=True):
    """The worker cannot go on and exits after this message."""

    epoch: int
    rank: int
    reason: str


WorkerReport: TypeAlias = ModelRunnerOutput | WorkerFailed
