"""Tool calls written as JSON, as they arrive.

A call is given once it is complete and valid, so that a malformed one stays text. Only a call with
long arguments is given before its end: its arguments are passed on as they arrive.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from longshore.deploy.parsers.parser import MoreArguments, Source, Steps, ToolCall

MAX_HELD_CHARACTERS: Final = 1024
"""A call that is longer is passed on as it arrives."""
MAX_OBJECT_CHARACTERS: Final = 64 << 10
"""Limit of a call whose arguments cannot be passed on as they arrive."""
MAX_MALFORMED: Final = 16
"""After so many malformed objects over MAX_HELD_CHARACTERS, an answer has no more calls.
A model that repeats itself writes a new beginning of a call into each, and each is searched."""
MAX_DEPTH: Final = 64
MAX_NAME_CHARACTERS: Final = 256

_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.DOTALL)
_PAIRS: Final = {"}": "{", "]": "["}
_NAMED: Final = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")'
)
_HEAD: Final = re.compile(rf'{_NAMED.pattern}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')


class JsonScanner:
    """Finds the end of an object or array by its brackets.

    start:     index of its first character.
    is_inside: the text at `start` is the rest of an object.
    stop:      index after the bracket that closes it, or of a bracket that does not match; None:
               not found yet.
    is_closed: the closing bracket was found.
    """

    def __init__(self, start: int, *, is_inside: bool = False) -> None:
        self.stop: int | None = None
        self.is_closed = False
        self._index = start
        self._open = ["{"] if is_inside else []
        self._in_string = False

    def scan(self, text: str) -> bool:
        """Read on in the same text, which may have grown; True: `stop` is known."""
        while self.stop is None:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            match = pattern.search(text, self._index)
            if match is None:
                self._index = max(self._index, len(text))
                return False
            if match[0] == "\\":
                if match.end() == len(text):  # the escaped character is missing
                    self._index = match.start()
                    return False
                self._index = match.end() + 1
            else:
                self._index = match.end()
                self._read(match[0])
        return True

    def _read(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        elif character in "{[":
            self._open.append(character)
            if len(self._open) > MAX_DEPTH:
                self.stop = self._index - 1
        elif not self._open or self._open.pop() != _PAIRS[character]:
            self.stop = self._index - 1
        elif not self._open:
            self.is_closed, self.stop = True, self._index

    def taken(self, num_characters: int) -> None:
        """The text has lost this number of characters at its beginning."""
        self._index -= num_characters
        if self.stop is not None:
            self.stop -= num_characters


def _scan(source: Source, scanner: JsonScanner, limit: int) -> Steps[int | None]:
    """The scanner's `stop`; None: it is beyond the index `limit`, or the text has ended."""
    while not scanner.scan(source.text):
        if source.is_complete or len(source.text) > limit:
            return None
        yield None
    return None if scanner.stop is None or scanner.stop > limit else scanner.stop


def json_call(source: Source, start: int, names: frozenset[str] | None = None) -> Steps[bool]:
    """A call as an object with `name` and `arguments` (or `parameters`) at `start`. Takes it with
    the text before it; False: it is not one, and nothing is taken.

    names: the names that a call may have; None: any.
    """
    if not source.text.startswith("{", start) or source.num_malformed >= MAX_MALFORMED:
        return False
    scanner = JsonScanner(start)
    limit = start + MAX_HELD_CHARACTERS
    stop = yield from _scan(source, scanner, limit)
    if stop is None and (len(source.text) > limit or source.is_cut):
        head = _HEAD.match(source.text, start, limit)
        if head is not None:
            name = read_json(head[1])
            if not is_name(name, names):
                return False
            if not (yield from json_arguments(source, head.end(), name)):
                return False
            yield from _rest_of_object(source)
            return True
        named = _NAMED.match(source.text, start, limit) if source.is_cut else None
        if named is not None and is_name(name := read_json(named[1]), names):
            source.take()
            yield ToolCall(name, "")
            return True
        stop = yield from _scan(source, scanner, start + MAX_OBJECT_CHARACTERS)
    call = read_call(source.text[start:stop], names) if scanner.is_closed and stop else None
    if call is None:
        source.num_malformed += (stop or len(source.text)) > limit
        return False
    source.take(stop)
    yield call
    return True


def json_arguments(source: Source, start: int, name: str, call_id: str = "") -> Steps[bool]:
    """The arguments of a call of `name`, an object at `start`. Takes it with the text before it;
    False: it is not one, and nothing is taken."""
    if not source.text.startswith("{", start):
        return False
    scanner = JsonScanner(start)
    limit = start + MAX_HELD_CHARACTERS
    stop = yield from _scan(source, scanner, limit)
    if stop is None and (len(source.text) > limit or source.is_cut):
        source.take(start)
        scanner.taken(start)
        yield from _long_arguments(source, scanner, ToolCall(name, "", call_id))
        return True
    text = source.text[start:stop]
    if stop is None or not scanner.is_closed or not is_json_object(text):
        return False
    source.take(stop)
    yield ToolCall(name, text, call_id)
    return True


def _long_arguments(source: Source, scanner: JsonScanner, call: ToolCall) -> Steps[None]:
    """Pass on the arguments that the text begins with, as they arrive. call: without arguments."""
    has_begun = False
    while True:
        is_over = scanner.scan(source.text) or source.is_complete
        end = len(source.text) if scanner.stop is None else scanner.stop
        if not is_over and source.text.endswith("\\"):  # the scanner may still need it
            end -= 1
        if part := source.take(end):
            scanner.taken(len(part))
            yield (
                MoreArguments(part) if has_begun else msgspec.structs.replace(call, arguments=part)
            )
            has_begun = True
        if is_over:
            return
        yield None


def _rest_of_object(source: Source) -> Steps[None]:
    """Take the rest of the object that had the arguments."""
    scanner = JsonScanner(0, is_inside=True)
    stop = yield from _scan(source, scanner, MAX_HELD_CHARACTERS)
    if stop is not None and scanner.is_closed:
        source.take(stop)


def json_calls(
    source: Source, start: int, *, separators: Sequence[str], names: frozenset[str] | None = None
) -> Steps[bool]:
    """Calls in an array at `start`, or one after the other. Takes what it gives; False: the text
    has no call at `start`."""
    is_array = source.text.startswith("[", start)
    index = start
    if is_array:
        index = yield from source.space(start + 1)
    if not (yield from json_call(source, index, names)):
        return False
    while True:
        index = yield from source.space()
        separator = yield from source.begins_with(index, *separators)
        if separator is None:
            break
        after = yield from source.space(index + len(separator))
        if not (yield from json_call(source, after, names)):
            return True
    if is_array and (yield from source.begins_with(index, "]")) is not None:
        source.take(index + 1)
    return True


def read_call(text: str, names: frozenset[str] | None = None) -> ToolCall | None:
    """The call that an object describes; None: it is not one."""
    value = read_json(text)
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not is_name(name, names):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(name, arguments) if is_json_object(arguments) else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    return ToolCall(name, write_json(arguments or {}))


def is_name(name: object, names: frozenset[str] | None) -> bool:
    """Whether it can be the name of a function."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        return False
    return names is None or name in names


def read_json(text: str) -> Any:
    """The value; None if the text is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def write_json(value: object) -> str:
    """Raises ValueError for what JSON does not have: infinite numbers, and half of a surrogate
    pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def is_json_object(text: str) -> bool:
    return isinstance(read_json(text), dict)


def whole_members(text: str) -> str:
    """An object that is cut off, with its members that are complete for certain."""
    depth, end = 0, 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "{" | "[":
                depth += 1
            case "}" | "]":
                depth -= 1
            case "," if depth == 1:
                end = token.start()
    members = f"{text[:end]}}}"
    return members if is_json_object(members) else "{}"
