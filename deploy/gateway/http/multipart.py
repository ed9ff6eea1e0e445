"""Parses multipart/form-data bodies: one uploaded file and a few small fields."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from python_multipart import multipart
from python_multipart.exceptions import FormParserError

from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened

MAX_FIELDS: Final = 64
MAX_FIELD_BYTES: Final = 64 << 10
# A filename in another charset (RFC 5987), which the parser does not report.
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_EXTENDED_FILENAME: Final = re.compile(rb";\s*filename\*", re.IGNORECASE)


@dataclass
class Form:
    """Files and fields by name, in order; a field may occur several times. filenames: of the files,
    as the client says."""

    files: dict[str, bytes] = field(default_factory=dict)
    filenames: dict[str, str] = field(default_factory=dict)
    fields: list[tuple[str, str]] = field(default_factory=list)


def parse_form(content_type: bytes, body: bytes) -> Form:
    """Raises RequestError for an invalid body. Slow for large files: call it on another thread."""
    reader = FormReader(content_type)
    reader.feed(body)
    return reader.finish()


class FormReader:
    """Parses a form as it arrives.

    sink: gets the content of files, which then have none in the form; None: they are held in
        memory.
    """

    def __init__(self, content_type: bytes, sink: Callable[[bytes], None] | None = None) -> None:
        """Raises RequestError if it is no form."""
        kind, options = multipart.parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise invalid(
                "the request body is not multipart/form-data; send the file as the form field "
                "`file`"
            )
        self._parts = _Parts(sink)
        self._parser = multipart.MultipartParser(boundary, self._parts.callbacks())

    def feed(self, data: bytes) -> None:
        """The next part of the body. Raises RequestError."""
        try:
            self._parser.write(data)
        except (FormParserError, UnicodeDecodeError) as error:
            raise invalid(f"the request body is not multipart/form-data: {error}") from error

    def finish(self) -> Form:
        """The form, at the end of the body. Raises RequestError if it is incomplete."""
        try:
            self._parser.finalize()
        except FormParserError as error:
            raise invalid(f"the request body is not multipart/form-data: {error}") from error
        if not self._parts.is_complete:
            raise invalid("the request body ends within a part of the form")
        return self._parts.form


class _Parts:
    """Collects the parts that the parser reports."""

    def __init__(self, sink: Callable[[bytes], None] | None) -> None:
        self.form = Form()
        self.is_complete = False
        self._sink = sink
        self._name = self._filename = ""
        self._is_file = False
        self._data: list[bytes] = []
        self._header = [b"", b""]
        self._num_parts = 0

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
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
            _, options = multipart.parse_options_header(value)
            self._name = options.get(b"name", b"").decode()
            extended = _EXTENDED_FILENAME.search(_QUOTED.sub(b"", value))
            self._is_file = b"filename" in options or extended is not None
            self._filename = options.get(b"filename", b"").decode(errors="replace")

    def _add(self, data: bytes) -> None:
        if self._is_file and self._sink is not None:
            self._sink(data)
        else:
            self._data.append(data)

    def _end(self) -> None:
        data = b"".join(self._data)
        if not self._name:
            raise invalid("a part of the form has no name")
        if self._is_file:
            if self._name in self.form.files:
                raise invalid(f"the form has several files {shortened(self._name)!r}; send one")
            self.form.files[self._name] = data
            self.form.filenames[self._name] = self._filename
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
