"""The lines of a batch: requests, and the answers to them, in OpenAI's format.

Answers are written in the order of the requests, so the number of complete lines in the output is
the number of requests that are done.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Literal

import msgspec

from longshore.protocol.errors import ConfigError, shortened

PATHS: Final = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *("/v1/score", "/v1/rerank"),
)
"""The paths that a line may ask."""
MAX_LINE_BYTES: Final = 16 << 20
LEAST_URGENT: Final = 2**31 - 1
"""The priority of lines that have none, where priorities have an effect."""


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. custom_id: the client's name of it."""

    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: Literal["POST"] = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """What the path has answered. body: JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct, frozen=True):
    """One line of an output."""

    custom_id: str
    response: BatchResponse
    id: str
    error: None = None

    @classmethod
    def of(cls, line: BatchLine, status: int, request_id: str | None, body: bytes) -> "BatchAnswer":
        """The answer to a line."""
        number = uuid.uuid4().hex
        content = msgspec.Raw(b"".join(body.splitlines()))
        return cls(
            line.custom_id,
            BatchResponse(status, request_id or number, content),
            f"batch_req_{number}",
        )

    @property
    def is_good(self) -> bool:
        return self.response.status_code == 200


class _OutputLine(msgspec.Struct, frozen=True):
    custom_id: str


_line_decoder: Final = msgspec.json.Decoder(BatchLine)
_output_decoder: Final = msgspec.json.Decoder(_OutputLine)


class BadLine(Exception):
    """A line that is no request. code: for programs."""

    def __init__(self, number: int, message: str, code: str = "invalid_json_line") -> None:
        super().__init__(f"line {number}: {message}")
        self.number = number
        self.code = code


def raw_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, from 1; without empty ones. Raises BadLine for one that is too
    long."""
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        if len(data) > max_bytes:
            raise BadLine(number, f"it has more than {max_bytes} bytes")
        if data.strip():
            yield number, data


def read_line(number: int, data: bytes, paths: Sequence[str] = PATHS) -> BatchLine:
    """The request of a line. Raises BadLine."""
    try:
        line = _line_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(number, shortened(str(error))) from error
    if line.url not in paths:
        raise BadLine(
            number, f"url is {shortened(line.url)!r}; use {' or '.join(paths)}", "mismatched_url"
        )
    if bytes(line.body.get("stream", b"false")) not in (b"false", b"null"):
        raise BadLine(number, "stream is not supported in a batch; remove it", "invalid_request")
    return line


def check_lines(
    file: BinaryIO,
    paths: Sequence[str] = PATHS,
    *,
    max_bytes: int = MAX_LINE_BYTES,
    max_lines: int | None = None,
) -> int:
    """The number of requests in a file. Raises BadLine for the first line that is none, or that is
    beyond `max_lines`; with this limit, also for one whose `custom_id` another line has."""
    total = 0
    seen: set[str] = set()
    for number, data in raw_lines(file, max_bytes):
        line = read_line(number, data, paths)
        total += 1
        if max_lines is None:
            continue
        if total > max_lines:
            raise BadLine(number, f"a batch has at most {max_lines} requests", "too_many_lines")
        if line.custom_id in seen:
            raise BadLine(
                number,
                f"custom_id {shortened(line.custom_id)!r} is that of another line",
                "duplicate_custom_id",
            )
        seen.add(line.custom_id)
    return total


class OutputFile:
    """The answers so far. What a former process wrote is kept, without an incomplete last line.

    num_lines: complete lines. last_id: `custom_id` of the last one. size_bytes: of them.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError, or ConfigError if the last line is no answer."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = open(descriptor, "r+b")  # noqa: SIM115  # closed by `close`
        self.num_lines = self.size_bytes = 0
        last = b""
        for data in self._file:
            if not data.endswith(b"\n"):
                break
            last = data
            self.num_lines += 1
            self.size_bytes += len(data)
        self._file.truncate(self.size_bytes)
        self._file.seek(self.size_bytes)
        self.last_id: str | None = None
        if last:
            try:
                self.last_id = _output_decoder.decode(last).custom_id
            except msgspec.DecodeError as error:
                self._file.close()
                raise ConfigError(
                    f"{path}: line {self.num_lines} is no answer of a batch; choose another output"
                ) from error

    def write(self, answers: Sequence[BatchAnswer]) -> None:
        """Append lines, and hand them to the operating system."""
        if not answers:
            return
        data = b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers)
        self._file.write(data)
        self._file.flush()
        self.num_lines += len(answers)
        self.size_bytes += len(data)
        self.last_id = answers[-1].custom_id

    def close(self) -> None:
        self._file.close()
