"""The grammar of a whole answer of Llama's models: calls, or text that does not begin as one. No
token marks a call, so the text must be excluded from what `LlamaTools` reads as one."""

import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Final

from longshore.deploy.parsers.call_grammar import LarkRules, json_schema, properties_of
from longshore.deploy.parsers.json_text import write_json
from longshore.deploy.parsers.parser import CallForm, NotExpressible

_SPACE: Final = r"[\s\x1c-\x1f]*"  # as Python's `str.lstrip` has it
_KEY: Final = "[A-Za-z_][A-Za-z0-9_]*"


def answer_grammar(
    forms: Mapping[str, CallForm],
    special_ids: Mapping[str, int],
    *,
    begins: Sequence[str],
    end: str,
    call_keys: Sequence[str],
) -> str:
    """Raises NotExpressible.

    begins, end: markers around calls, which may be missing. A marker that is no special token is
    not part of the grammar, and of no other text.
    call_keys: an object with one of these as its first key is a call.
    """
    rules = LarkRules(special_ids)
    written = _json_calls(rules, forms) + _python_calls(rules, forms)
    space = rules.rule(f"/{_SPACE}/", is_terminal=True)
    calls = rules.rule(f"({' | '.join(written)}) ({space} {rules.literal(end)})? {space}")
    text = rules.rule(_other_text(begins, call_keys), is_terminal=True)
    marked = [f"({rules.literal(begin)} {calls})" for begin in begins if rules.is_special(begin)]
    more = f" ({' | '.join(marked)})*" if marked else ""
    return rules.grammar(f"({calls} | {text}){more}")


def _other_text(begins: Sequence[str], call_keys: Sequence[str]) -> str:
    keys = "|".join(map(re.escape, call_keys))
    in_json = rf'(\[{_SPACE})?\{{{_SPACE}"({keys})"'
    in_python = r"""\[[^\[\](){}'",]*\("""
    markers = "|".join(map(re.escape, begins))
    return f"/(?s:.*)/ & ~/{_SPACE}({in_json}|{in_python})(?s:.*)/ & ~/(?s:.*)({markers})(?s:.*)/"


def _json_calls(rules: LarkRules, forms: Mapping[str, CallForm]) -> list[str]:
    """Calls one after the other, and in an array. Raises NotExpressible."""
    arguments = {name: rules.json_arguments(form) for name, form in forms.items()}

    def call(before: str) -> str:
        # One terminal up to the arguments: where the other text is possible, too, a shorter one
        # would not end.
        calls = []
        for name, rule in arguments.items():
            head = (
                rf'\{{("type": "function", )?"name": {_escaped(write_json(name))}, "parameters": '
            )
            calls.append(f"{rules.rule(f'/{before}{head}/', is_terminal=True)} {rule}")
        return rules.rule(f"({' | '.join(calls)}) {rules.literal('}')}")

    first, more = call(_SPACE), call(f"{_SPACE}[;,]{_SPACE}")
    in_array, end = call(rf"{_SPACE}\[{_SPACE}"), rules.rule(rf"/{_SPACE}\]/", is_terminal=True)
    return [f"{first} {more}*", f"{in_array} {more}* {end}"]


def _python_calls(rules: LarkRules, forms: Mapping[str, CallForm]) -> list[str]:
    """A list of calls of the functions that Python can call with such arguments; empty: it can call
    none."""
    firsts, others = [], []
    for name, form in forms.items():
        if not all(map(_is_identifier, name.split("."))):
            continue
        try:
            arguments = rules.rule(f"{_python_arguments(rules, form)} {rules.literal(')')}")
        except NotExpressible:
            continue
        first = rules.rule(rf"/{_SPACE}\[{_escaped(name)}\(/", is_terminal=True)
        firsts.append(f"{first} {arguments}")
        others.append(f"{rules.literal(f', {name}(')} {arguments}")
    return [f'({" | ".join(firsts)}) ({" | ".join(others)})* "]"'] if firsts else []


def _python_arguments(rules: LarkRules, form: CallForm) -> str:
    """Keyword arguments, whose values are JSON: the parser takes its constants, and its texts are
    texts of Python. Raises NotExpressible."""
    comma = rules.literal(", ")
    if form.syntax is not None:
        form = CallForm(json_schema(form))
    if form.schema is None:
        key = rules.text_until("=", _KEY)
        one = rules.rule(f"{key} {rules.json({})}")
        return f"({one} ({comma} {one})*)?"
    members = []
    for name, schema, is_required in properties_of(form):
        if not _is_identifier(name):
            raise NotExpressible(f"Python has no argument {name!r}")
        value = rules.json_part(schema, form)
        members.append((rules.rule(f"{rules.literal(f'{name}=')} {value}"), is_required))
    return rules.members(members, comma)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _is_identifier(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)
