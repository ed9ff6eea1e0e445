"""For the docs site: the fields that a docstring explains become a list.

Docstrings here explain fields and parameters as `name: text`, one below the other, with further
lines indented. In Markdown that would run together into one paragraph. Used by mkdocs.yml.
"""

import re
from typing import Any

import griffe

_FIELD = re.compile(r"(?P<names>[a-z][\w*]*(?:, [a-z][\w*]*)*):\s+(?P<text>\S.*)")


def fields_as_list(text: str) -> str:
    """`text`, with every run of explained fields turned into Markdown's list."""
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
