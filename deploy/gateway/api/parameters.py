"""Reads the parameters of a request from its JSON body, within bounds.

A parameter is a field of the request, or has a rule (see `FIELD_RULES`), or is unknown. Hints and
unknown ones are ignored, and the response names them. What would change the answer is rejected by
name.

Types are those of lenient servers: 4.0 and "4" are the integer 4, and "true" is true. No value is
rounded, and none is dropped.

Decoding JSON holds the interpreter lock, and many small objects take a hundred times longer than a
text of the same size. So a body is first split into parameters, which stay bytes, and a parameter
is decoded only if the number of objects in it is known to be small.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec

from longshore.deploy.gateway.api.field_rules import FIELD_RULES, FieldRules, Hint
from longshore.deploy.gateway.api.lenient import lenient, unread_fields
from longshore.deploy.gateway.api.unknown_fields import are_rejected, ignore_fields, unknown_field
from longshore.deploy.requests.errors import RequestError, invalid
from longshore.deploy.requests.refused import Refusal, is_neutral, why_refused
from longshore.protocol.errors import shortened

MAX_PARAMETER_BYTES: Final = 64 << 10
"""Limit of each parameter's JSON, except prompts, tools, and parameters that are ignored."""
MAX_UNKNOWN_BYTES: Final = 64 << 10
"""Limit of all unknown parameters of a request together, with their JSON."""
MAX_TOKEN_IDS: Final = 2 << 20
"""Limit of the token ids of all prompts of a request."""
MAX_ITEMS: Final = 2048
"""Limit of the texts, or lists of token ids, of a request."""
MAX_TOOLS_BYTES: Final = 1 << 20
"""Limit of the JSON of `tools`."""
MAX_OBJECTS: Final = 256 << 10
"""Limit of the objects in the messages of a chat, and of the lists, counted by `{` and `[`."""
MAX_MEMBERS: Final = 512 << 10
"""Limit of the members of all these objects together, counted by `:`."""

MAX_DOCUMENT_TEXTS: Final = 32 << 10
"""Limit of the texts in `documents` and their names, counted by the number of quotes."""

_PROMPTS: Final = frozenset(
    {"prompt", "input", "messages", "tokens", "system", "instructions"}
    | {"documents", "queries", "query", "items", "text_1", "text_2", "data_1", "data_2"}
)
MAX_NEUTRAL_BYTES: Final = 1024
MAX_SEARCHED_BYTES: Final = 128 << 10
"""Unknown fields are looked for in parameters up to this size, which takes some milliseconds."""

ParametersT = TypeVar("ParametersT", bound=msgspec.Struct)
JsonT = TypeVar("JsonT")

_FIELD_OF_ERROR: Final = re.compile(r"at `\$\.(\w+)|(?:required|unknown) field `(\w+)`")
_UNKNOWN_FIELD: Final = "Object contains unknown field `"
_UNKNOWN_INSIDE: Final = re.compile(f"{_UNKNOWN_FIELD}(.*)` - at `\\$\\.(.*)`", re.DOTALL)
_FIRST_ITEM: Final = re.compile(rb"\[\s*(.)", re.DOTALL)


def read_parameters(
    kind: type[ParametersT], body: bytes, *, rules: FieldRules = FIELD_RULES["openai"]
) -> ParametersT:
    """`body` as `kind`, without ignored and unknown parameters. All items of a prompt are of one
    kind. Raises InvalidRequest naming the invalid parameter. Takes up to a quarter of a second
    for a body of 16 MiB.

    rules: of the parameters that are no fields of `kind`.
    """
    fields = kind.__struct_fields__
    try:
        given = _split(body, _undecoded(fields, tuple(rules)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_read(error) from error
    served = {}
    for name, value in msgspec.structs.asdict(given).items():
        if value is msgspec.UNSET:
            continue
        if name in fields:
            served[name] = value
            _check_bounds(name, bytes(value))
        else:
            apply_rule(rules, name, _small_value(value))
    return _decoded(kind, served)


def apply_rule(rules: FieldRules, name: str, value: object) -> None:
    """Ignore a parameter that has a rule. Raises RequestError if its value is not accepted."""
    rule = rules[name]
    asks_for_nothing = is_neutral(rule.neutral, value) or is_neutral(rule.neutral, _as_json(value))
    if asks_for_nothing:
        return
    match rule:
        case Refusal(code=code):
            reason = why_refused({name: rule}, name, value)
            raise invalid(reason or name, param=name, code=code)
        case Hint(is_named=True):
            if are_rejected():
                raise invalid(
                    f"{name} is not supported; remove it", param=name, code="unsupported_parameter"
                )
            ignore_fields((name,))


def _as_json(value: object) -> object:
    """A value that a client sends as text, as in "false"."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value


def _split(body: bytes, known: type[msgspec.Struct]) -> msgspec.Struct:
    """The known parameters, not decoded. Raises msgspec's errors."""
    try:
        return msgspec.json.decode(body, type=known)
    except msgspec.ValidationError as error:
        message = str(error)
        if not message.startswith(_UNKNOWN_FIELD):
            raise
        if are_rejected():
            raise unknown_field(message[len(_UNKNOWN_FIELD) : -1]) from error
    given = msgspec.json.decode(body, type=lenient(known))
    values = msgspec.structs.astuple(given)
    num_known = sum(memoryview(value).nbytes for value in values if value is not msgspec.UNSET)
    # Bounds the number of names that are decoded.
    if len(body) - num_known > MAX_UNKNOWN_BYTES:
        raise invalid(
            f"the request has {len(body) - num_known} bytes of JSON besides the parameters that "
            f"this server knows; at most {MAX_UNKNOWN_BYTES} are allowed"
        )
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    ignore_fields(name for name in names if name not in known.__struct_fields__)
    return given


def _decoded(kind: type[ParametersT], served: Mapping[str, msgspec.Raw]) -> ParametersT:
    """The parameters as `kind`. Unknown fields of objects in them are ignored; those of a large
    parameter are not looked for beyond the first. Raises RequestError naming the invalid
    parameter."""
    body = msgspec.json.encode(served)  # not the request's, which may have one several times
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN_INSIDE.fullmatch(str(error))  # or a value of another type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_read(error) from error
    request = cast(ParametersT, read_json(lenient(kind), body, is_strict=False))
    small = {name: value for name, value in served.items() if len(value) <= MAX_SEARCHED_BYTES}
    given = read_json(dict[str, Any], msgspec.json.encode(small))
    first = [] if unknown is None else [f"{unknown[2]}.{unknown[1]}"]
    ignore_fields([*first, *unread_fields(given, request)])
    return request


@functools.cache
def _undecoded(fields: Sequence[str], others: Sequence[str]) -> type[msgspec.Struct]:
    """A struct that accepts these fields without decoding them. Decoding ends at the first unknown
    name."""
    optional = msgspec.Raw | msgspec.UnsetType
    names = dict.fromkeys((*fields, *others))
    return msgspec.defstruct(
        "Undecoded", [(name, optional, msgspec.UNSET) for name in names], forbid_unknown_fields=True
    )


def _check_bounds(name: str, value: bytes) -> None:
    """Raise RequestError if decoding the parameter could take long, or if a prompt has several
    kinds of items."""
    if name not in _PROMPTS:
        maximum = MAX_TOOLS_BYTES if name == "tools" else MAX_PARAMETER_BYTES
        if len(value) > maximum:
            raise invalid(
                f"{name} has {len(value)} bytes of JSON; at most {maximum} are allowed",
                param=name,
            )
        return
    first = _FIRST_ITEM.match(value)
    if name == "documents":
        if value.count(b'"') - value.count(b'\\"') > 2 * MAX_DOCUMENT_TEXTS:
            raise invalid(f"documents has more than {MAX_DOCUMENT_TEXTS} texts", param=name)
    elif name == "messages" or (first is not None and first[1] == b"{"):
        for mark, maximum, what in (
            (b"{", MAX_OBJECTS, "objects or braces"),
            (b"[", MAX_OBJECTS, "lists or brackets"),
            (b":", MAX_MEMBERS, "members of objects or colons"),
        ):
            if value.count(mark) > maximum:
                raise invalid(f"{name} has more than {maximum} {what}", param=name)
    elif first is not None and first[1] != b"]":
        _check_items(name, first[1], value)


def _check_items(name: str, first: bytes, value: bytes) -> None:
    """value: a list that is not empty. first: the first character of its first item."""
    kind: Any
    if first == b'"':
        # Texts have two quotes that are not escaped, or one if they end with a backslash.
        kind, num_items = list[str], (value.count(b'"') - value.count(b'\\"')) // 2
    else:  # no item can be a text with these characters in it
        number = int | float  # 4.0 is one, too
        kind = list[list[number]] if first == b"[" else list[number]
        num_items = value.count(b"[") - 1
        if value.count(b",") >= MAX_TOKEN_IDS:
            raise invalid(f"{name} has more than {MAX_TOKEN_IDS} token ids", param=name)
    if num_items > MAX_ITEMS:
        raise invalid(f"{name} has {num_items} items; at most {MAX_ITEMS} are allowed", param=name)
    try:
        msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        if "at `$[0]" not in str(error):
            raise invalid(
                f"{name} mixes texts, token ids and lists of token ids; use one kind ({error})",
                param=name,
            ) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # reported when the whole request is decoded


def read_json(kind: type[JsonT], body: bytes, *, is_strict: bool = True) -> JsonT:
    """`body` as `kind`. Raises InvalidRequest naming the invalid field. is_strict: no conversion of
    types."""
    try:
        return msgspec.json.decode(body, type=kind, strict=is_strict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_read(error) from error


def _not_read(error: Exception) -> RequestError:
    """For an error of msgspec."""
    if isinstance(error, msgspec.ValidationError):
        field = field_at_fault(error)
        where = "" if field else "the JSON of the request body: "
        return invalid(f"{where}{shortened(str(error))}", param=field)
    return invalid(f"the request body is not JSON: {error}")


def field_at_fault(error: msgspec.ValidationError) -> str | None:
    """The name of the field with the wrong type."""
    match = _FIELD_OF_ERROR.search(str(error))
    return match and (match[1] or match[2])


def _small_value(value: msgspec.Raw) -> object:
    """A large value is not decoded: it is not neutral."""
    return read_json(Any, value) if len(value) <= MAX_NEUTRAL_BYTES else value
