"""Griffe extension for the docs site: turns the explanations of fields in a docstring into a list.

Docstrings here explain fields and parameters as lines `name: text`, with continuation lines
indented. In Markdown these would become one paragraph. A message gets a code block with its fields,
because its class has no `__init__` to show. Used by mkdocs.yml.
"""

import re
from typing import Any

import griffe

_FIELD = re.compile(r"(?P<names>[a-z][\w*]*(?:, [a-z][\w*]*)*):\s+(?P<text>\S.*)")


def fields_as_list(text: str) -> str:
    """`text`, with all consecutive explanations of fields turned into a Markdown list."""
    lines: list[str] = []
    is_field = False
    for line in text.splitlines():
        match = _FIELD.fullmatch(line)
        if match is not None and (is_field or not lines or not lines[-1]):
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            lines += [*([] if is_field else [""]), f"- {names}: {match['text']}"]
            is_field = True
        elif is_field and line[:1] == " ":
            lines.append(f"    {line.strip()}")
        else:
            lines += [*([""] if is_field and line else []), line]
            is_field = False
    return "\n".join(lines)


class FieldsAsList(griffe.Extension):
    """Applies `fields_as_list` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fields_as_list(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is None or not any(str(base).endswith("Struct") for base in cls.bases):
            return
        fields = [
            f"{name}: {member.annotation}" + ("" if member.value is None else f" = {member.value}")
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute) and member.annotation is not None
        ]
        if fields:
            cls.docstring.value += "\n\n```python\n" + "\n".join(fields) + "\n```"
