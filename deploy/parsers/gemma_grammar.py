"""The grammar of arguments as Gemma 4 writes them, from a JSON schema: keys are not quoted, and
texts are between quotes of their own, so it is no JSON."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from longshore.deploy.parsers.call_grammar import LarkRules
from longshore.deploy.parsers.json_text import write_json
from longshore.deploy.parsers.parser import CallForm, NotExpressible
from longshore.deploy.parsers.translated_call import referred

_KEY: Final = re.compile(r'[^\s:{}\[\],<"]+')
_ANNOTATIONS: Final = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions"}
    | {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPE_BY_KEYWORD: Final[Mapping[str, str]] = {
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    **dict.fromkeys(("items", "minItems", "maxItems"), "array"),
    **dict.fromkeys(_NUMBERS, "number"),
}


class GemmaArguments:
    """The arguments of one function, whose form this is. quote: before and after a text. All
    methods raise NotExpressible."""

    def __init__(self, rules: LarkRules, form: CallForm, quote: str) -> None:
        self._rules = rules
        self._form = form
        self._quote = quote
        self._comma = rules.literal(",")
        self._named: dict[str, str] = {}  # rules by the references to what they follow

    def rule(self) -> str:
        """The object of all arguments."""
        if self._form.syntax is None:
            return self._value({"type": "object", **self._root})
        begin, end = self._rules.literal(f"{{input:{self._quote}"), self._rules.literal("}")
        text = self._rules.value({"type": "string"}, self._form, self._quote)
        return f"{begin} {text} {end}"

    def _value(self, schema: object) -> str:
        if not isinstance(schema, Mapping):
            if schema is True:
                return self._any()
            raise NotExpressible("calls of this model need a schema of each argument")
        keywords = schema.keys() - _ANNOTATIONS
        if keywords == {"$ref"}:
            return self._reference(schema["$ref"])
        if keywords == {"anyOf"}:
            return f"({' | '.join(map(self._value, schema['anyOf']))})"
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return f"({' | '.join(self._rules.literal(self._written(one)) for one in values)})"
        if others := sorted(keywords - _TYPE_BY_KEYWORD.keys() - {"type"}):
            raise NotExpressible(f"calls of this model cannot enforce {others[0]}")
        if not keywords:
            return self._any()
        given = schema.get("type") or sorted({_TYPE_BY_KEYWORD[one] for one in keywords})
        types = given if isinstance(given, list) else [given]
        return f"({' | '.join(self._of_type(one, schema) for one in types)})"

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case "string":
                return f"{self._rules.literal(self._quote)} {self._rules.text_until(self._quote)}"
        limits = {key: schema[key] for key in _NUMBERS if key in schema}
        return self._rules.json({"type": kind, **limits})

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties"), schema.get("required") or ()
        if not properties and schema.get("additionalProperties") is not False:
            return self._map(schema.get("additionalProperties", True))
        if unknown := sorted(set(required) - (properties or {}).keys()):
            raise NotExpressible(f"the argument {unknown[0]!r} is required, but has no schema")
        members = []
        for name, one in (properties or {}).items():
            if not _KEY.fullmatch(name):
                raise NotExpressible(f"calls of this model cannot write the argument {name!r}")
            rule = self._rules.rule(f"{self._rules.literal(f'{name}:')} {self._value(one)}")
            members.append((rule, name in required))
        return f'"{{" {self._rules.members(members, self._comma)} "}}"'

    def _map(self, schema: object) -> str:
        """An object with any names."""
        key = self._rules.text_until(":", _KEY.pattern)
        member = self._rules.rule(f"{key} {self._value(schema)}")
        return f'"{{" ({member} ({self._comma} {member})*)? "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._rules.rule(self._value(schema.get("items", True)))
        limits = f"{max(fewest - 1, 0)},{'' if most is None else most - 1}"
        items = f"({item} ({self._comma} {item}){{{limits}}})"
        return f'"[" {items}{"" if fewest else "?"} "]"'

    def _any(self) -> str:
        types = ("string", "number", "boolean", "null", "array", "object")
        return self._once("", lambda: " | ".join(self._of_type(one, {}) for one in types))

    def _reference(self, reference: str) -> str:
        return self._once(reference, lambda: self._value(referred(reference, self._root)))

    @property
    def _root(self) -> Mapping[str, Any]:
        return self._form.schema or {}

    def _once(self, key: str, body: Callable[[], str]) -> str:
        """The rule of this key, which may refer to itself."""

        def named(name: str) -> str:
            self._named[key] = name
            return body()

        return self._named[key] if key in self._named else self._rules.recursive(named)

    def _written(self, value: object) -> str:
        match value:
            case str():
                return f"{self._quote}{value}{self._quote}"
            case list():
                return f"[{','.join(map(self._written, value))}]"
            case dict():
                members = (f"{key}:{self._written(one)}" for key, one in value.items())
                return f"{{{','.join(members)}}}"
        return write_json(value)
