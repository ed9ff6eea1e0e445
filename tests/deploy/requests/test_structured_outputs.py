"""Constraints of answers: what is accepted, the engine's form of it, and errors that name it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.deploy.requests.structured_outputs import (
    MAX_CHOICES,
    StructuredOutputError,
    StructuredOutputsParams,
    structured_output,
)
from longshore.protocol.requests import MAX_CONSTRAINT_BYTES, StructuredOutput

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": [1, None]}}}


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (
            {"json": SCHEMA},
            StructuredOutput("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"json": '{"type": "null"}'}, StructuredOutput("json_schema", '{"type": "null"}')),
        ({"json": {}}, StructuredOutput("json_schema", "{}")),
        ({"json_object": True}, StructuredOutput("json_schema", '{"type":"object"}')),
        ({"regex": "[0-9]+"}, StructuredOutput("regex", "[0-9]+")),
        ({"choice": ["no", "yes", "no"]}, StructuredOutput("choice", '["no","yes"]')),
        ({"grammar": 'root ::= "a"'}, StructuredOutput("grammar", 'root ::= "a"')),
        (
            {"regex": "a", "disable_any_whitespace": False, "whitespace_pattern": None},
            StructuredOutput("regex", "a"),
        ),
    ],
)
def test_each_constraint_has_its_form_for_the_engine(
    params: dict[str, Any], wanted: StructuredOutput
) -> None:
    assert structured_output(StructuredOutputsParams(**params)) == wanted


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, but none is given"),
        ({"json_object": False}, "none is given"),
        ({"json": {}, "regex": "a"}, "json and regex is given"),
        ({"regex": "a", "choice": ["a"], "grammar": "a"}, "regex and choice and grammar"),
        ({"json": {}, "disable_any_whitespace": True}, "disable_any_whitespace is not supported"),
        ({"json": {}, "whitespace_pattern": " *"}, "whitespace_pattern is not supported"),
        ({"regex": "a", "disable_additional_properties": True}, "needs json"),
        ({"structural_tag": "{}"}, "structural_tag is not supported"),
    ],
)
def test_there_is_exactly_one_constraint(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        StructuredOutputsParams(**params)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"json": {"type": "strnig"}}, 'invalid at "/type"'),
        (
            {"json": {"properties": {"a/b": {"items": {"minLength": -1}}}}},
            'invalid at "/properties/a~1b/items/minLength"',
        ),
        ({"json": {"required": "a"}}, 'invalid at "/required"'),
        ({"json": {"required": ["a", "a"]}}, 'invalid at "/required"'),
        ({"json": {"type": [*range(20_000), "null"]}}, 'invalid at "/type/0"'),  # not in minutes
        ({"json": {"properties": {"x" * 999: 5}}}, r'invalid at "/properties/x{1,199}\.\.\."'),
        (
            {"json": {"$schema": "http://json-schema.org/draft-07/schema#", "if": 3}},
            'invalid at "/if"',
        ),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": ""}, "empty"),
        ({"json": '{"items":' * 300 + "{}" + "}" * 300}, "nested too deeply"),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "nested too deeply"),
        ({"json": {"enum": ["x" * MAX_CONSTRAINT_BYTES]}}, "too large"),
        ({"regex": "é" * (MAX_CONSTRAINT_BYTES // 2 + 1)}, "too large"),
        ({"regex": ""}, "empty"),
        ({"grammar": ""}, "empty"),
        ({"choice": []}, "has 0 texts"),
        ({"choice": ["a", ""]}, "an empty text"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "has 1025 texts"),
    ],
)
def test_what_is_wrong_with_a_constraint_is_said(params: dict[str, Any], reason: str) -> None:
    with pytest.raises(StructuredOutputError, match=reason) as error:
        structured_output(StructuredOutputsParams(**params))
    assert len(str(error.value)) < 700
    assert error.value.name in params


def test_objects_are_closed_where_the_schema_does_not_say_otherwise() -> None:
    named = {"properties": {"a": {}}}
    schema = {
        "properties": {
            "one": named,
            "properties": {"enum": [named]},
            "other": {"$ref": "#/$defs/d"},
        },
        "items": {**named, "additionalProperties": {"type": "null"}},
        "$defs": {"d": named},
    }
    spec = structured_output(
        StructuredOutputsParams(json=schema, disable_additional_properties=True)
    )
    closed = {**named, "additionalProperties": False}
    assert json.loads(spec.text) == {
        "properties": {
            "one": closed,
            "properties": {"enum": [named]},
            "other": {"$ref": "#/$defs/d"},
        },
        "items": {**named, "additionalProperties": {"type": "null"}},
        "$defs": {"d": closed},
        "additionalProperties": False,
    }


def test_an_invalid_schema_stays_invalid() -> None:
    """Valid ones are remembered."""
    for _ in range(2):
        with pytest.raises(StructuredOutputError):
            structured_output(StructuredOutputsParams(json={"type": 3}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "items", "properties", "$ref", "pattern", "enum", "required"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["type", "items", "allOf", "$defs", "$schema"]), json_values)
)
def test_any_json_is_a_constraint_or_an_error(schema: dict[str, Any]) -> None:
    try:
        spec = structured_output(StructuredOutputsParams(json=schema))
    except StructuredOutputError:
        return
    assert msgspec.json.decode(spec.text) is not None
