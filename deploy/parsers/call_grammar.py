"""The grammar of tool calls in a model's own format: each call follows its function's schema.

It is written for Lark, as llguidance reads it (https://github.com/guidance-ai/llguidance), and
begins after the marker of a call. What a format cannot enforce is rejected.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from longshore.deploy.parsers.json_text import write_json
from longshore.deploy.parsers.parser import CallForm, NotExpressible
from longshore.deploy.parsers.translated_call import types_of

_TEXT_KEYWORDS: Final = frozenset({"pattern", "format", "minLength", "maxLength"})
_DEFINITIONS: Final = ("$defs", "definitions")
_OF_ARGUMENTS: Final = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", *_DEFINITIONS),
        *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
    }
)


_SLASH: Final = re.compile(r"(?<!\\)/")


class LarkRules:
    """The rules of one grammar. special_ids: ids of special tokens, by their text: they are written
    as ids, because no text matches them."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        self._rules: list[str] = []
        names = sorted(map(re.escape, special_ids), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(names)})") if names else None

    def grammar(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules, ""))

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts = [text] if self._special is None else self._special.split(text)
        return " ".join(
            f"<[{self._special_ids[part]}]>" if part in self._special_ids else _quoted(part)
            for part in parts
            if part
        )

    def is_special(self, text: str) -> bool:
        return text in self._special_ids

    def rule(self, body: str, attributes: str = "", *, is_terminal: bool = False) -> str:
        """The name of a new rule."""
        name = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def recursive(self, body: Callable[[str], str]) -> str:
        """The name of a new rule, for which `body` gives what it is: it may refer to itself."""
        index = len(self._rules)
        name = f"r{index}"
        self._rules.append("")
        self._rules[index] = f"{name}: {body(name)}"
        return name

    def members(self, members: Sequence[tuple[str, bool]], comma: str) -> str:
        """Rules in this order with commas between them. Each has whether it is required; the others
        may be left out."""
        firsts: list[str] = []
        rest, may_be_empty = "", True
        for rule, is_required in reversed(members):
            if is_required:
                firsts, may_be_empty = [], False
            firsts.append(f"{rule} {rest}")
            rest = self.rule(f"({comma} {rule}){'' if is_required else '?'} {rest}")
        return f"({' | '.join(firsts)}){'?' if may_be_empty else ''}" if firsts else ""

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that conforms to the schema. The rule is a line of its own, which the engine reads
        to check the schema."""
        return self.rule(f"%json {write_json(schema)}")

    def json_part(self, schema: object, form: CallForm) -> str:
        """JSON of one argument. Its schema may refer to definitions of the function's."""
        given = schema if isinstance(schema, Mapping) else {}
        root = (form.schema or {}) if '"$ref"' in write_json(given) else {}
        return self.json({**{key: root[key] for key in _DEFINITIONS if key in root}, **given})

    def json_arguments(self, form: CallForm) -> str:
        """The arguments of a call as JSON. Raises NotExpressible."""
        return self.json(json_schema(form))

    def text_until(self, end: str, form: str = "(?s:.*)") -> str:
        """Any text, and the literal that ends it."""
        if self.is_special(end):
            return f"{self.rule(f'/{form}/', is_terminal=True)} {self.literal(end)}"
        return self.rule(f"/{form}/", f"[suffix={_quoted(end)}]")

    def value(self, schema: object, form: CallForm, end: str) -> str:
        """A value that is written as it is if it is a text, and else as JSON, and the literal that
        ends it. Raises NotExpressible."""
        match form.syntax:
            case "lark":
                own = self.rule(f"%lark {{\n{form.definition}\n}}")
                return f"{own} {self.literal(end)}"
            case "regex":
                regex = _SLASH.sub(r"\\/", form.definition)
                return f"{self.rule(f'/{regex}/', is_terminal=True)} {self.literal(end)}"
        root = form.schema or {}
        types = types_of(schema, root)
        given = schema if isinstance(schema, Mapping) else {}
        choices = given.get("enum", [given["const"]] if "const" in given else None)
        if isinstance(choices, list):
            written = (one if isinstance(one, str) else write_json(one) for one in choices)
            return f"({' | '.join(map(self.literal, written))}) {self.literal(end)}"
        if types and "string" not in types:
            return f"{self.json_part(schema, form)} {self.literal(end)}"
        if keywords := sorted(_TEXT_KEYWORDS & given.keys()):
            raise NotExpressible(f"calls of this model cannot enforce {keywords[0]} of a text")
        return self.text_until(end)


def json_call_rule(rules: LarkRules, forms: Mapping[str, CallForm]) -> str:
    """An object with `name` and `arguments`. Raises NotExpressible."""
    calls = []
    for name, form in forms.items():
        head = rules.literal(f'{{"name": {write_json(name)}, "arguments": ')
        calls.append(f"{head} {rules.json_arguments(form)}")
    return f"({' | '.join(calls)}) {rules.literal('}')}"


def json_schema(form: CallForm) -> Mapping[str, Any]:
    """What arguments in JSON follow. Raises NotExpressible."""
    match form.syntax:
        case None:
            return {"type": "object"} if form.schema is None else form.schema
        case "regex":
            text = {"type": "string", "pattern": f"^(?:{form.definition})$"}
            return _only({"input": text})
        case "lark":
            raise NotExpressible("calls of this model are JSON, which a Lark grammar is not")


def properties_of(form: CallForm) -> list[tuple[str, object, bool]]:
    """Name, schema and whether it is required, of each argument. Raises NotExpressible if the
    schema says more than that."""
    if form.syntax is not None:
        return [("input", {"type": "string"}, True)]
    schema = form.schema or {}
    if others := sorted(schema.keys() - _OF_ARGUMENTS):
        raise NotExpressible(f"calls of this model cannot enforce {others[0]} of all arguments")
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    return [(name, one, name in required) for name, one in properties.items()]


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an object, without properties that it does not name."""
    return {"type": "object", "additionalProperties": False, **schema}


def _only(properties: Mapping[str, Any]) -> dict[str, Any]:
    return closed({"properties": properties, "required": [*properties]})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
