"""Parses multipart/form-data bodies: one uploaded file and a few small fields."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.requests.audio import require_extra
from longshore.protocol.errors import shortened

MAX_FIELDS: Final = 64
MAX_FIELD_BYTES: Final = 64 << 10
# A filename in another charset (RFC 5987), which the parser does not report.
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_EXTENDED_FILENAME: Final = re.compile(rb";\s*filename\*", re.IGNORECASE)


@dataclass
class Form:
    """Files and fields by name, in order; a field may occur several times."""

    files: dict[str, bytes] = field(default_factory=dict)
    fields: list[tuple[str, str]] = field(default_factory=list)


def parse_form(content_type: bytes, body: bytes) -> Form:
    """Raises ApiError for an invalid body, ConfigError if the extra `audio` is missing. Slow for
    large files: call it on another thread."""
    (multipart,) = require_extra("python_multipart.multipart")
    kind, options = multipart.parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid(
            "the request body is not multipart/form-data; send the audio as the form field `file`"
        )
    parts = _Parts(lambda value: multipart.parse_options_header(value)[1])
    try:
        parser = multipart.MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except (multipart.FormParserError, UnicodeDecodeError) as error:
        raise invalid(f"the request body is not multipart/form-data: {error}") from error
    if not parts.is_complete:
        raise invalid("the request body ends within a part of the form")
    return parts.form


class _Parts:
    """Collects the parts that the parser reports."""

    def __init__(self, options_of: Callable[[bytes], dict[bytes, bytes]]) -> None:
        self.form = Form()
        self.is_complete = False
        self._options_of = options_of
        self._name: str = ""
        self._is_file = False
        self._data: list[bytes] = []
        self._header = [b"", b""]
        self._num_parts = 0

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_part_data": lambda data, start, end: self._data.append(data[start:end]),
            "on_part_end": self._end,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise invalid(f"the form has more than {MAX_FIELDS} fields")
        self._name, self._is_file, self._data = "", False, []

    def _add_header(self, part: int, data: bytes) -> None:
        self._header[part] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._header = [b"", b""]
        if name.lower() == b"content-disposition":
            options = self._options_of(value)
            self._name = options.get(b"name", b"").decode()
            extended = _EXTENDED_FILENAME.search(_QUOTED.sub(b"", value))
            self._is_file = b"filename" in options or extended is not None

    def _end(self) -> None:
        data = b"".join(self._data)
        if not self._name:
            raise invalid("a part of the form has no name")
        if self._is_file:
            if self._name in self.form.files:
                raise invalid(f"the form has several files {shortened(self._name)!r}; send one")
            self.form.files[self._name] = data
            return
        if len(data) > MAX_FIELD_BYTES:
            raise invalid(
                f"the form field {shortened(self._name)!r} is longer than {MAX_FIELD_BYTES} bytes "
                "(if it is a file, send it with a filename)",
                param=self._name,
            )
        self.form.fields.append((self._name, data.decode()))

    def _finish(self) -> None:
        self.is_complete = True
