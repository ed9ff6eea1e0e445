"""The JSON schemas of forced calls."""

import json
from typing import Any

import pytest

from longshore.deploy.gateway.openai.chat_tools import ToolUse
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.openai.forced_calls import forced_schema
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


def test_any_call_is_an_array_whose_references_are_found() -> None:
    schema = forced_schema([LOOKUP, LOOKUP, function("now")], REQUIRED)
    assert schema is not None
    assert "maxItems" not in schema
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
    with pytest.raises(ApiError, match=problem) as caught:
        forced_schema(tools, REQUIRED)
    assert caught.value.body.param == "tool_choice"
    assert forced_schema(tools, named("f")) is not None
