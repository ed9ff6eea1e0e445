"""Structured output as users ask for it, with vLLM's names, and as the engine gets it.

Here a constraint is checked for what needs no grammar: that there is one, its type and size, and
whether a JSON schema is one. What a grammar compiler cannot express, the engine rejects.
"""

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from longshore.protocol.errors import shortened
from longshore.protocol.requests import MAX_CONSTRAINT_BYTES, StructuredOutput
from longshore.scheduler.process.structured_output.schema_support import subschemas

MAX_CHOICES: Final = 1024
MAX_CHECKED_SCHEMAS: Final = 64

ANY_OBJECT: Final = StructuredOutput("json_schema", '{"type":"object"}')

_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
# Not supported. The values here have no effect, so they are accepted.
_UNSUPPORTED: Final[dict[str, object]] = {
    "disable_any_whitespace": False,
    "disable_fallback": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}


class StructuredOutputError(ValueError):
    """A constraint is invalid. name: the field of `StructuredOutputsParams` at fault."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True
):
    """Constrains an answer. Exactly one of the first five is set. Raises ValueError otherwise.

    json:    the answer is JSON that conforms to this JSON schema: a dict, or its text.
    regex:   the whole answer matches this regular expression.
    choice:  the answer is one of these texts.
    grammar: the answer is derived from this context-free grammar.
    json_object: the answer is a JSON object.
    disable_additional_properties: objects have no properties that the schema does not name, unless
             its `additionalProperties` says so.
    The others are vLLM's; values that would change the answer are rejected.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    disable_fallback: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, neutral in _UNSUPPORTED.items():
            if getattr(self, name) != neutral:
                raise ValueError(f"{name} is not supported; remove it")
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured outputs need exactly one of {', '.join(_KINDS)}, but "
                f"{' and '.join(given) or 'none'} is given"
            )
        if self.disable_additional_properties and self.json is None:
            raise ValueError("disable_additional_properties needs json")


def structured_output(params: StructuredOutputsParams) -> StructuredOutput:
    """The engine's form of `params`. Raises StructuredOutputError. This takes 0.2 s for a schema of
    128 KiB, and longer for the first one."""
    if params.json is not None:
        return _json_schema(params.json, is_closed=params.disable_additional_properties)
    if params.choice is not None:
        return _choice(params.choice)
    if params.regex is not None:
        return StructuredOutput("regex", _bounded("regex", params.regex))
    if params.grammar is not None:
        return StructuredOutput("grammar", _bounded("grammar", params.grammar))
    return ANY_OBJECT


def _bounded(name: str, text: str) -> str:
    if not text:
        raise StructuredOutputError(name, f"{name} is empty")
    limit = MAX_CONSTRAINT_BYTES
    if len(text) > limit or len(text.encode(errors="replace")) > limit:
        raise StructuredOutputError(name, f"{name} is too large; at most {limit} bytes are allowed")
    return text


def _choice(choices: list[str]) -> StructuredOutput:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise StructuredOutputError(
            "choice", f"choice has {len(choices)} texts; it must have 1 to {MAX_CHOICES}"
        )
    if not all(choices):
        raise StructuredOutputError("choice", "choice has an empty text")
    text = msgspec.json.encode(list(dict.fromkeys(choices))).decode()
    return StructuredOutput("choice", _bounded("choice", text))


def _json_schema(schema: str | dict[str, Any], *, is_closed: bool) -> StructuredOutput:
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StructuredOutputError("json", f"the JSON schema is not JSON: {error}") from error
    check_schema(_bounded("json", text))
    if is_closed:
        text = msgspec.json.encode(_closed(msgspec.json.decode(text))).decode()
    return StructuredOutput("json_schema", text)


def strict_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a strict function's arguments: an object, without properties that it does not
    name."""
    return _closed(copy.deepcopy({"type": "object", "properties": {}, **parameters}))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed to forbid properties that it does not name."""
    for _, node in list(subschemas(schema)):
        if isinstance(node, dict) and "properties" in node:
            node.setdefault("additionalProperties", False)
    return schema


@functools.lru_cache(MAX_CHECKED_SCHEMAS)
def check_schema(text: str) -> None:
    """Raise StructuredOutputError, with a JSON pointer, unless `text` is a JSON schema. The first
    call imports a library, which takes a while."""
    try:
        schema = msgspec.json.decode(text)
        if not isinstance(schema, dict):
            raise StructuredOutputError(
                "json", 'the JSON schema must be an object, such as {"type": "object"}'
            )
        error = _flaw(schema)
    except (msgspec.DecodeError, UnicodeError) as failure:
        raise StructuredOutputError("json", f"the JSON schema is not JSON: {failure}") from failure
    except RecursionError:
        raise StructuredOutputError("json", "the JSON schema is nested too deeply") from None
    if error is not None:
        raise StructuredOutputError(
            "json",
            f"the JSON schema is invalid at {_pointer(error.absolute_path)}: "
            f"{shortened(error.message)}",
        )


def _flaw(schema: dict[str, Any]) -> Any:
    """A `jsonschema.ValidationError`, as deep in the schema as possible; None: it is valid."""
    from jsonschema.exceptions import best_match  # slow to import, and most processes need none

    return best_match(itertools.islice(_schema_validator().iter_errors(schema), 1))


@functools.cache
def _schema_validator() -> Any:
    """Validates JSON schemas of draft 7, and the keywords that later drafts have added. The later
    drafts' own schemas take five times as long."""
    from jsonschema import Draft7Validator
    from jsonschema.validators import extend

    of_schemas = {"type": "object", "additionalProperties": {"$ref": "#"}}
    meta = {name: value for name, value in Draft7Validator.META_SCHEMA.items() if name != "$id"}
    meta["properties"] = {
        **meta["properties"],
        "$defs": of_schemas,
        "dependentSchemas": of_schemas,
        "prefixItems": {"$ref": "#/definitions/schemaArray"},
        "unevaluatedItems": {"$ref": "#"},
        "unevaluatedProperties": {"$ref": "#"},
        "minContains": {"$ref": "#/definitions/nonNegativeInteger"},
        "maxContains": {"$ref": "#/definitions/nonNegativeInteger"},
    }
    return extend(Draft7Validator, {"uniqueItems": _unique_names})(meta)


def _unique_names(_: Any, is_unique: bool, values: object, __: Any) -> Iterator[Any]:
    """jsonschema's own `uniqueItems` compares all pairs if an array has values of several types. In
    a schema these arrays have names only, and their type is checked as well."""
    from jsonschema import ValidationError

    names = [one for one in values if isinstance(one, str)] if isinstance(values, list) else []
    if is_unique and len(set(names)) < len(names):
        yield ValidationError("it has a name twice")


def _pointer(path: Any) -> str:
    """A JSON pointer (RFC 6901), quoted; `""` is the whole schema."""
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
    pointer = "".join(f"/{part}" for part in parts)
    return f'"{shortened(pointer)}"'
