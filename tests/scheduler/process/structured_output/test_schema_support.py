"""Limits, and which keywords go to which backend."""

import json
from typing import Any

import pytest

from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.schema_support import (
    MAX_POINTERS,
    BackendName,
    read_schemas,
    subschemas,
    supporting_backends,
    unsupported_keywords,
)

BOTH: tuple[BackendName, ...] = ("llguidance", "xgrammar")
OPEN_PATTERNS = 'patternProperties (unless "additionalProperties" is false)'


def of_schema(schema: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


def nested(depth: int) -> object:
    schema: object = {"type": "integer"}
    for _ in range(depth // 2):
        schema = {"items": schema, "type": "array"}
    return schema


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "object or a boolean"),
    ],
)
def test_what_is_not_a_schema_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        read_schemas(StructuredOutput("json_schema", text))


def test_the_depth_of_a_schema_is_limited() -> None:
    assert read_schemas(of_schema(nested(60))) == [nested(60)]
    with pytest.raises(GrammarError, match="levels deep; the limit is 64"):
        read_schemas(of_schema(nested(200)))


@pytest.mark.parametrize(
    ("schema", "pointers"),
    [
        ({"type": "array", "uniqueItems": True}, ["/uniqueItems"]),
        ({"properties": {"a/b": {"not": {}}}}, ["/properties/a~1b/not"]),
        ({"anyOf": [{}, {"contains": {}}]}, ["/anyOf/1/contains"]),
        ({"items": [{"if": {}}]}, ["/items/0/if"]),
        ({"$defs": {"a": {"not": {}}}}, []),  # nothing refers to it
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, ["/$defs/a/not"]),
        ({"$ref": "#", "propertyNames": {}}, ["/propertyNames"]),
        ({"enum": [{"not": 1}], "default": {"not": 1}}, []),  # values, not schemas
        ({"properties": {"not": {"type": "string"}}}, []),  # a name, not a keyword
        ({"type": "string", "format": "idn-email"}, ["/format"]),
        ({"type": "string", "format": "date"}, []),
        ({"title": "t", "x-foo": 1, "examples": [{"not": 1}]}, []),
        ({"x-guidance": {"lenient": True}}, ["/x-guidance"]),
        ({"patternProperties": {"x": {}}}, [f"/{OPEN_PATTERNS}"]),
        (
            {"items": {"patternProperties": {"x": {}}, "additionalProperties": {"const": 1}}},
            [f"/items/{OPEN_PATTERNS}"],
        ),
        ({"patternProperties": {"x": {}}, "additionalProperties": False}, []),
        ({"patternProperties": {}}, []),
        (True, []),
    ],
)
def test_pointers_of_what_llguidance_does_not_support(schema: Any, pointers: list[str]) -> None:
    assert unsupported_keywords(schema, "llguidance") == pointers


@pytest.mark.parametrize(
    ("schema", "pointers"),
    [
        ({"type": "integer", "multipleOf": 2}, ["/multipleOf"]),
        ({"type": "integer", "minimum": 1, "maximum": 5}, []),
        ({"type": "integer", "minimum": 1.5}, ["/minimum"]),
        ({"type": "string"}, []),
        ({"type": "string", "maxLength": 5}, ["/maxLength"]),
        ({"anyOf": [{"type": "null"}], "minLength": 1}, ["/anyOf", "/minLength"]),
        ({"minLength": 1}, ["/minLength"]),
        ({"type": "object", "required": ["a"]}, ["/required"]),
        ({"type": "object", "required": ["a"], "properties": {"a": {}}}, []),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, []),
        (
            {"type": "object", "additionalProperties": {"minLength": 1}},
            ["/additionalProperties", "/additionalProperties/minLength"],
        ),
        ({"properties": {"a": False}}, ["/properties", "/properties/a/"]),
        ({"oneOf": [{"type": "string"}]}, ["/oneOf"]),
        (False, ["/"]),
    ],
)
def test_xgrammar_gets_only_keywords_that_it_enforces(schema: Any, pointers: list[str]) -> None:
    assert unsupported_keywords(schema, "xgrammar") == pointers


@pytest.mark.parametrize("target", ["https://example.com/schema", "other.json", "#name", 5])
def test_xgrammar_gets_no_reference_that_it_ignores(target: object) -> None:
    schema = {"properties": {"a": {"$ref": target}}, "type": "object"}
    assert unsupported_keywords(schema, "xgrammar") == ["/properties/a/$ref"]


@pytest.mark.parametrize("name", ["²", "0" * 5000, "00", "9" * 5000, "-1"])
def test_what_is_no_index_refers_to_nothing(name: str) -> None:
    assert unsupported_keywords({"$ref": f"#/anyOf/{name}", "anyOf": [{}]}, "llguidance") == []


def test_each_schema_is_visited_once_however_it_is_spelled() -> None:
    spellings = ["#/$defs/a~1b", "#/%24defs/a~1b", "#/$defs/%61~1b", "#/$def%73/a~1b"]
    schema = {"$defs": {"a/b": {"not": {}}}, "anyOf": [{"$ref": one} for one in spellings]}
    assert len([node for _, node in subschemas(schema) if node == {"not": {}}]) == 1


def test_one_backend_that_supports_a_schema_is_enough() -> None:
    schema = {"type": "integer", "multipleOf": 2}
    assert supporting_backends(schema, BOTH) == ("llguidance",)
    with pytest.raises(GrammarError, match="xgrammar cannot enforce: /multipleOf"):
        supporting_backends(schema, ("xgrammar",))


def test_the_number_of_pointers_is_limited() -> None:
    schema = {"properties": {str(index): {"not": {}} for index in range(500)}}
    with pytest.raises(GrammarError) as error:
        supporting_backends(schema, BOTH)
    assert str(error.value).count("/not") == MAX_POINTERS
    assert str(error.value).endswith("...")


def test_a_reference_in_a_circle_ends() -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}, "not": {}}}}
    assert unsupported_keywords(schema, "llguidance") == ["/$defs/a/not"]
