"""Llama 3 and 4: the whole answer is one or more calls, as JSON or as a list of Python calls.

JSON is `{"name": ..., "parameters": {...}}`, several separated by `;` or `,`. Llama 4 and the small
models of Llama 3.2 also write `[get_weather(city="Oslo"), now()]`.
"""

import ast
import re
from collections.abc import Mapping
from typing import Any, Final

from longshore.deploy.parsers.json_text import MAX_NAME_CHARACTERS, is_name, json_calls, write_json
from longshore.deploy.parsers.llama_grammar import answer_grammar
from longshore.deploy.parsers.parser import (
    AnswerContext,
    CallForm,
    CallGrammar,
    Content,
    Events,
    Source,
    Steps,
    ToolCall,
    ToolParser,
    show_until,
)

MAX_LIST_CHARACTERS: Final = 16 << 10
"""Limit of a list of Python calls, which is parsed as a whole."""
MAX_DEPTH: Final = 32

_BEGIN: Final = ("<|python_tag|>", "<|python_start|>")
_END: Final = "<|python_end|>"
_FIRST_KEY: Final = re.compile(r'\{\s*"([^"\\]*)"')
_CALL_KEYS: Final = ("arguments", "function", "id", "name", "parameters", "type")
_FIRST_CALL: Final = re.compile(r"\[\s*(?:[^\W\d][\w.]*\s*(\()?)?")
_NOT_BRACKETS: Final = re.compile(r"[^\[\](){}'\"]+")
_STRING_PART: Final = re.compile(r"[^'\"\\\n]+|\\[\s\S]")
_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_PAIRS: Final = {")": "(", "]": "[", "}": "{"}


class LlamaTools(ToolParser):
    """Reads the tool calls of Llama's models. Without a marker before them, calls count only at the
    beginning of an answer, and only with the names of declared functions: answers in JSON look much
    the same."""

    special_tokens = (*_BEGIN, _END)

    def parse(self, source: Source, context: AnswerContext) -> Events:
        index = yield from source.space()
        if source.text.startswith(("{", "["), index):
            yield from self._calls(source, index, context.tool_names)
        while (found := (yield from show_until(source, *_BEGIN))) is not None:
            index, marker = found
            begin = index + len(marker)
            start = yield from source.space(begin)
            if not (yield from self._calls(source, start, None)):
                yield Content(source.take(begin))

    def call_grammar(
        self, forms: Mapping[str, CallForm], special_ids: Mapping[str, int]
    ) -> CallGrammar:
        text = answer_grammar(forms, special_ids, begins=_BEGIN, end=_END, call_keys=_CALL_KEYS)
        return CallGrammar("", text, is_answer=True)

    def _calls(self, source: Source, start: int, names: frozenset[str] | None) -> Steps[bool]:
        """Calls at `start`. Takes them with the text before them; False: there are none."""
        is_call = False
        index = start
        if source.text.startswith("[", start):
            index = yield from source.space(start + 1)
        if source.text.startswith("{", index):
            if names is None or (yield from _begins_as_call(source, index)):
                is_call = yield from json_calls(source, start, separators=(";", ","), names=names)
        elif index > start and (yield from _begins_as_list(source, start)):
            is_call = yield from _python_calls(source, start, names)
        if is_call:
            yield from source.take_markers(_END)
        return is_call


def _begins_as_call(source: Source, start: int) -> Steps[bool]:
    """Whether the first key of the object at `start` is one of a call."""
    while True:
        first = _FIRST_KEY.match(source.text, start)
        if first is not None:
            return first[1] in _CALL_KEYS
        rest = source.text[start + 1 :].lstrip()
        begins = not rest or any(f'"{key}"'.startswith(rest) for key in _CALL_KEYS)
        if source.is_complete or not begins:
            return False
        yield None


def _begins_as_list(source: Source, start: int) -> Steps[bool]:
    """Whether the list at `start` begins with a call."""
    while True:
        first = _FIRST_CALL.match(source.text, start)
        assert first is not None
        if first[1] or first.end() < len(source.text) or source.is_complete:
            return bool(first[1])
        if first.end() - start > 2 * MAX_NAME_CHARACTERS:
            return False
        yield None


def _python_calls(source: Source, start: int, names: frozenset[str] | None) -> Steps[bool]:
    """A list of Python calls at `start`."""
    scanner = _ListScanner(start)
    while not scanner.scan(source.text):
        if source.is_complete or len(source.text) - start > MAX_LIST_CHARACTERS:
            return False
        yield None
    stop = scanner.stop
    if stop is None or stop - start > MAX_LIST_CHARACTERS:
        return False
    calls = read_python_calls(source.text[start:stop], names)
    if not calls:
        return False
    source.take(stop)
    yield from calls
    return True


class _ListScanner:
    """Finds the end of a Python list.

    stop: index after it; None after the scan: the text is not Python.
    """

    def __init__(self, start: int) -> None:
        self.stop: int | None = None
        self._index = start
        self._open: list[str] = []
        self._quote = ""

    def scan(self, text: str) -> bool:
        """Read on; True: the end was found, or the text is not Python."""
        while self._index < len(text):
            pattern = _STRING_PART if self._quote else _NOT_BRACKETS
            if part := pattern.match(text, self._index):
                self._index = part.end()
                continue
            character = text[self._index]
            if character == "\\":  # the escaped character is missing
                return False
            self._index += 1
            if self._quote:
                if character == "\n":
                    return True
                self._quote = "" if character == self._quote else self._quote
            elif character in "'\"":
                self._quote = character
            elif character in "[({":
                self._open.append(character)
                if len(self._open) > MAX_DEPTH:
                    return True
            elif not self._open or self._open.pop() != _PAIRS[character]:
                return True
            elif not self._open:
                self.stop = self._index
                return True
        return False


def read_python_calls(text: str, names: frozenset[str] | None) -> list[ToolCall]:
    """The calls of a Python list; empty: it is not a list of calls with literal arguments."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        calls = [_read(item) for item in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if not all(is_name(call.name, names) for call in calls):
        return []
    return calls


def _read(node: ast.expr) -> ToolCall:
    """Raises ValueError if it is not a call with keyword arguments only."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError
        arguments[keyword.arg] = _value(keyword.value)
    return ToolCall(_name(node.func), write_json(arguments))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError
    return node.id


def _value(node: ast.expr) -> Any:
    """A literal as JSON has it."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError
    return node.value
