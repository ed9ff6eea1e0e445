"""The JSON schemas of forced calls."""

import json
from typing import Any

import pytest

from longshore.deploy.requests.chat_tools import ToolUse
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.forced_calls import (
    MAX_FORCED_CALLS,
    forced_constraint,
    forced_schema,
)
from longshore.protocol.requests import MAX_CONSTRAINT_BYTES

REQUIRED = ToolUse(is_forced=True)


def function(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def with_place(definition: Any, reference: str = "#/$defs/Place") -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"place": {"$ref": reference}},
        "$defs": {"Place": definition},
    }


LOOKUP = function("lookup", with_place({"type": "string"}))


def named(name: str) -> ToolUse:
    return ToolUse(is_forced=True, forced_name=name)


def test_named_function_s_own_schema_is_that_of_the_answer() -> None:
    tools = [LOOKUP, function("now"), function("f", {"required": ["a"]})]
    assert forced_schema(tools, named("lookup")) == LOOKUP["function"]["parameters"]
    assert forced_schema(tools, named("now")) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert forced_schema(tools, named("f")) == {"type": "object", "required": ["a"]}
    assert forced_schema(tools, ToolUse()) is None


def test_arguments_of_a_strict_function_have_no_other_properties() -> None:
    inner = {"type": "object", "properties": {"b": {}}}
    strict = function("f", {"type": "object", "properties": {"a": inner}})
    strict["function"]["strict"] = True
    schema = forced_schema([strict], named("f"))
    assert schema is not None
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"] == {**inner, "additionalProperties": False}
    assert "additionalProperties" not in strict["function"]["parameters"]
    any_call = forced_schema([strict], REQUIRED, 3)
    assert any_call is not None
    assert any_call["maxItems"] == 3
    assert any_call["items"]["anyOf"][0]["properties"]["parameters"] == schema


def test_a_choice_of_allowed_tools_forces_one_of_these() -> None:
    use = ToolUse(frozenset({"now"}), is_forced=True, is_limited=True)
    params = forced_constraint([LOOKUP, function("now")], use)
    assert params is not None
    assert isinstance(params.json, dict)
    (call,) = params.json["items"]["anyOf"]
    assert call["properties"]["name"] == {"const": "now"}


def test_any_call_is_an_array_whose_references_are_found() -> None:
    schema = forced_schema([LOOKUP, LOOKUP, function("now")], REQUIRED)
    assert schema is not None
    assert schema["maxItems"] == MAX_FORCED_CALLS
    assert schema["$defs"] == {"Place": {"type": "string"}}
    first, _, last = schema["items"]["anyOf"]
    assert first["properties"]["parameters"]["properties"]["place"] == {"$ref": "#/$defs/Place"}
    assert "$defs" not in first["properties"]["parameters"]
    assert last["properties"]["name"] == {"const": "now"}
    single = forced_schema([LOOKUP], ToolUse(is_forced=True, is_parallel=False))
    assert single is not None
    assert (single["minItems"], single["maxItems"]) == (1, 1)


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (with_place({"type": "integer"}), r"define 'Place' differently in \$defs"),
        (with_place({"type": "string"}, "#/properties/id"), "reference '#/properties/id'"),
        ({"items": [{"$ref": "#"}]}, "reference '#'"),
        ({"$defs": [5]}, "not an object"),
        ({"description": "x" * MAX_CONSTRAINT_BYTES}, "bytes of tools"),
    ],
)
def test_schemas_that_cannot_be_put_together_are_rejected(parameters: Any, problem: str) -> None:
    tools = json.loads(json.dumps([LOOKUP, function("f", parameters)]))
    with pytest.raises(RequestError, match=problem) as caught:
        forced_schema(tools, REQUIRED)
    assert caught.value.param == "tool_choice"
    assert forced_schema(tools, named("f")) is not None
