"""Bodies of OpenAI's files and batches."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

Status: TypeAlias = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A stored file. Times are Unix times in seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"


class UploadRequest(msgspec.Struct, frozen=True):
    """POST /v1/files: the fields of the form, beside the file."""

    purpose: Literal["batch"]


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    object: str = "file"
    deleted: bool = True


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/batches. endpoint: the path that all lines ask."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchFault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed. line: of the input, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchFaults(msgspec.Struct, frozen=True):
    data: Sequence[BatchFault]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    """failed: answered with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. The files of answers are named once it has ended, if they have lines."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    errors: BatchFaults | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    object: str = "batch"


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[Batch]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of a batch. model: which its requests are for. output_id, error_id: of the
    files that the answers are written to."""

    batch: Batch
    model: str
    output_id: str
    error_id: str
