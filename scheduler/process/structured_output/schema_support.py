"""Which backends are installed, and which JSON schemas they support.

A backend that ignored a keyword would return output that the schema forbids. So a schema with a
keyword that a backend does not enforce is not given to that backend. This module imports no
backend.
"""

import json
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from longshore.protocol.model_files import parse_json
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.settings import StructuredOutputBackend

BackendName: TypeAlias = Literal["llguidance", "xgrammar"]

BACKENDS: Final[tuple[BackendName, ...]] = ("llguidance", "xgrammar")
"""In the order in which `auto` tries them: llguidance supports more keywords, bounds its own work,
and needs no torch."""

MAX_SCHEMA_DEPTH: Final = 64
"""Limit of the nesting of a schema's JSON."""

NOT_INSTALLED: Final = (
    "structured output needs a package that is not installed on the server: pip install llguidance"
)

MAX_POINTERS: Final = 20
"""Unsupported keywords that a message names."""

# Keywords that restrict what is valid, of all drafts. Other keywords are annotations.
_OF_OBJECTS: Final = {
    "properties", "patternProperties", "additionalProperties", "propertyNames", "required",
    "minProperties", "maxProperties", "dependencies", "dependentRequired", "dependentSchemas",
    "unevaluatedProperties",
}  # fmt: skip
_OF_ARRAYS: Final = {
    "items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems",
    "maxItems", "uniqueItems", "unevaluatedItems",
}  # fmt: skip
_OF_NUMBERS: Final = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "divisibleBy",
}  # fmt: skip
_OF_STRINGS: Final = {"minLength", "maxLength", "pattern", "format"}
_OF_ANY: Final = {
    "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "disallow",
    "extends", "$ref", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_KEYWORDS: Final = _OF_OBJECTS | _OF_ARRAYS | _OF_NUMBERS | _OF_STRINGS | _OF_ANY

_LLGUIDANCE_LACKS: Final = {
    "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "not", "if",
    "then", "else", "disallow", "extends", "$dynamicRef", "$recursiveRef", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "divisibleBy",
}  # fmt: skip
_LLGUIDANCE_FORMATS: Final = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
}  # fmt: skip

# xgrammar ignores keywords silently, above all in combinations. It gets only the sets of keywords
# that it is known to enforce together. With a minLength or maxLength, its strings may contain raw
# control characters, which JSON forbids.
_XGRAMMAR_TOGETHER: Final = {
    "string": (set[str](),),
    "integer": ({"minimum", "maximum"},),
    "number": (set[str](),),
    "boolean": (set[str](),),
    "null": (set[str](),),
    "array": ({"items", "minItems", "maxItems"}, {"items", "prefixItems"}),
    "object": ({"properties", "required", "additionalProperties"},),
}
_SCHEMA_LINE: Final = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,8}")  # of an array, in a JSON pointer
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "dependentSchemas")
_SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS: Final = (
    "items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def installed_backends(setting: StructuredOutputBackend = "auto") -> tuple[BackendName, ...]:
    """The backends that the setting allows and whose package is installed. Imports none."""
    names = (name for name in BACKENDS if setting in ("auto", name))
    return tuple(name for name in names if find_spec(name) is not None)


def supporting_backends(schema: object, names: tuple[BackendName, ...]) -> tuple[BackendName, ...]:
    """The backends that support all keywords of a schema. Raises GrammarError if none does."""
    lacking = {name: unsupported_keywords(schema, name) for name in names}
    supporting = tuple(name for name in names if not lacking[name])
    if supporting:
        return supporting
    fewest = min(lacking.values(), key=len)  # of the backend that supports most of it
    shown = ", ".join(fewest[:MAX_POINTERS]) + (", ..." if len(fewest) > MAX_POINTERS else "")
    raise GrammarError(
        f"the JSON schema has keywords that {' and '.join(names)} cannot enforce: {shown}"
    )


def read_schemas(spec: StructuredOutput) -> list[object]:
    """The schemas of the constraint, whose depth is limited. Raises GrammarError."""
    match spec.kind:
        case "json_schema":
            return [_read_schema(spec.text)]
        case "tool_calls":
            return [_read_schema(match[2]) for match in _SCHEMA_LINE.finditer(spec.text)]
    return []


def with_options(grammar: str, options: Mapping[str, object]) -> str:
    """The grammar of tool calls, whose schemas have llguidance's options."""

    def changed(match: re.Match[str]) -> str:
        schema = parse_json(match[2].encode())
        assert isinstance(schema, dict)
        return match[1] + json.dumps({**schema, "x-guidance": options})

    return _SCHEMA_LINE.sub(changed, grammar)


def _read_schema(text: str) -> object:
    try:
        schema = parse_json(text.encode())
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("the JSON schema must be an object or a boolean")
    depth = _depth(schema)
    if depth > MAX_SCHEMA_DEPTH:
        raise GrammarError(
            f"the JSON schema is nested {depth} levels deep; the limit is {MAX_SCHEMA_DEPTH}"
        )
    return schema


def unsupported_keywords(schema: object, backend: BackendName) -> list[str]:
    """JSON pointers to keywords that a backend does not enforce where they are; empty if it
    supports all. Definitions count only if something refers to them."""
    check = _lacks_of_llguidance if backend == "llguidance" else _lacks_of_xgrammar
    found = []
    if isinstance(schema, dict) and "x-guidance" in schema:  # options that relax the grammar
        found.append("/x-guidance")
    for pointer, node in subschemas(schema):
        found += [f"{pointer}/{_escaped(keyword)}" for keyword in check(node)]
    return found


def _depth(value: object) -> int:
    """Nesting of arrays and objects."""
    depth, level = 0, [value]
    while level:
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
        depth += 1
    return depth - 1


def subschemas(schema: object) -> Iterator[tuple[str, object]]:
    """All schemas within a schema that apply to something, once, with their JSON pointers."""
    waiting = [("", schema)]
    seen = {id(schema)}  # by object: pointers to one schema may be spelled in many ways
    while waiting:
        pointer, node = waiting.pop()
        yield pointer, node
        for inner, value in _applied(schema, node, pointer):
            if isinstance(value, bool) or id(value) not in seen:
                seen.add(id(value))
                waiting.append((inner, value))


def _applied(root: object, node: object, pointer: str) -> Iterator[tuple[str, object]]:
    if not isinstance(node, dict):
        return
    for keyword in _NAMED_SCHEMAS:
        if isinstance(named := node.get(keyword), dict):
            for name, value in named.items():
                yield f"{pointer}/{keyword}/{_escaped(name)}", value
    for keyword in (*_SCHEMA_LISTS, "items"):
        if isinstance(schemas := node.get(keyword), list):
            for index, value in enumerate(schemas):
                yield f"{pointer}/{keyword}/{index}", value
    for keyword in _SCHEMAS:
        value = node.get(keyword)
        # Whether a backend enforces `additionalProperties: false` depends on the whole object.
        is_part = keyword == "additionalProperties" and isinstance(value, bool)
        if isinstance(value, dict | bool) and not is_part:
            yield f"{pointer}/{keyword}", value
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        target = _target(root, reference[1:])
        if target is not None:
            yield reference[1:], target


def _target(root: object, pointer: str) -> object | None:
    """What a pointer refers to; None if there is nothing: then the backend rejects it."""
    value = root
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _lacks_of_llguidance(node: object) -> list[str]:
    """It rejects what it does not implement; this says where. Beside patterns of names, it takes a
    name that is written with an escape like \\u0061 for one that matches no pattern."""
    if not isinstance(node, dict):
        return []
    lacks = [keyword for keyword in node if keyword in _LLGUIDANCE_LACKS]
    if node.get("patternProperties") and node.get("additionalProperties", True) is not False:
        lacks.append('patternProperties (unless "additionalProperties" is false)')
    text_format = node.get("format")
    if isinstance(text_format, str) and text_format not in _LLGUIDANCE_FORMATS:
        lacks.append("format")
    return lacks


def _lacks_of_xgrammar(node: object) -> list[str]:
    if not isinstance(node, dict):
        return [] if node is True else [""]
    present = [keyword for keyword in node if keyword in _KEYWORDS]
    rest = set(present) - {"type"}
    kind: Any = node.get("type")
    if not rest:
        return [] if kind is None or isinstance(kind, str | list) else ["type"]
    if len(present) == 1 and rest <= {"$ref", "anyOf", "const", "enum"}:
        return [keyword for keyword in rest if not _is_exact(keyword, node)]
    if isinstance(kind, str) and kind in _XGRAMMAR_TOGETHER:
        allowed = _XGRAMMAR_TOGETHER[kind]
        if any(rest <= together for together in allowed):
            return [keyword for keyword in rest if not _is_exact(keyword, node)]
        most = max(allowed, key=lambda together: len(rest & together))
        return [keyword for keyword in present if keyword != "type" and keyword not in most]
    return [keyword for keyword in present if keyword != "type"]


def _is_exact(keyword: str, node: dict[str, Any]) -> bool:
    """Whether xgrammar enforces this keyword with this value."""
    value = node[keyword]
    match keyword:
        case "$ref":  # it ignores others
            return isinstance(value, str) and (value == "#" or value.startswith("#/"))
        case "minimum" | "maximum" | "minItems" | "maxItems":
            return isinstance(value, int) and not isinstance(value, bool)
        case "items":
            return isinstance(value, dict)
        case "required":
            properties = node.get("properties", {})
            return isinstance(value, list) and all(name in properties for name in value)
        case "additionalProperties":
            return isinstance(value, bool)
    return True
