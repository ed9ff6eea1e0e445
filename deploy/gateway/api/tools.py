"""The tools of a request that the client runs."""

from collections.abc import Mapping
from typing import Any

from longshore.deploy.gateway.api.field_rules import CHOICE_FIELDS, TOOL_FIELDS, KnownFields
from longshore.deploy.gateway.api.unknown_fields import ignore_fields


def client_tools(
    tools: list[dict[str, Any]] | None, known: Mapping[str, KnownFields] = TOOL_FIELDS["openai"]
) -> list[dict[str, Any]] | None:
    """The tools without their unknown fields, and without those that a server runs, such as web
    search: agents list them beside their own, and work without them. The response names unknown
    fields and the types of the latter. Raises RequestError as `ignore_fields` does."""
    kept = []
    for position, tool in enumerate(tools or ()):
        kind = tool.get("type")
        if not isinstance(kind, str):
            kept.append(tool)
        elif kind in known:
            kept.append(_without_unknown(tool, known[kind], f"tools[{position}]"))
        else:
            leave_out(kind)
    return kept or None


def client_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """A chat's `tool_choice` without its unknown fields. Raises RequestError as `ignore_fields`
    does."""
    if not isinstance(choice, dict) or not isinstance(kind := choice.get("type"), str):
        return choice
    known = CHOICE_FIELDS.get(kind)
    return choice if known is None else _without_unknown(choice, known, "tool_choice")


def _without_unknown(given: dict[str, Any], known: KnownFields, where: str) -> dict[str, Any]:
    ignore_fields(f"{where}.{name}" for name in given if name not in known.fields)
    kept = {name: value for name, value in given.items() if name in known.fields}
    for name, value in kept.items():
        inner = known.fields[name]
        if inner is not None and isinstance(value, dict):
            kept[name] = _without_unknown(value, inner, f"{where}.{name}")
    return kept


def leave_out(kind: str) -> None:
    """The request has a tool of this type, which is left out. Raises RequestError as
    `ignore_fields` does."""
    ignore_fields((f"tools.{kind}",))
