"""The API as a page for people, made from the OpenAPI document. It loads nothing from elsewhere."""

import base64
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Final

from longshore.deploy.gateway.openapi import EVENTS, document

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .3rem 0; } summary code { font-weight: 600; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td, th { border: 1px solid #8886; padding: .2rem .6rem; text-align: left; vertical-align: top; }
:root { color-scheme: light dark; }
"""
_DIGEST: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


@functools.cache
def docs_page() -> str:
    """The page as HTML. Takes some milliseconds the first time."""
    api = document()
    info = api["info"]
    title = escape(f"{info['title']} {info['version']}: HTTP API")
    operations = "".join(
        _operation(method, path, operation)
        for path, item in api["paths"].items()
        for method, operation in item.items()
    )
    objects = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"{_fields(schema)}</details>"
        for name, schema in sorted(api["components"]["schemas"].items())
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{escape(info['description'])} "
        '<a href="openapi.json">openapi.json</a> has the same for programs.</p>'
        f"<h2>Paths</h2>{operations}<h2>Objects</h2>{objects}</body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    body = ""
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]
        body = f"<tr><td>body</td><td>{_contents(content)}</td></tr>"
    answers = "".join(
        f"<tr><td>{escape(status)}</td><td>{_contents(answer['content'])}</td></tr>"
        for status, answer in operation["responses"].items()
    )
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> "
        f"{escape(operation['summary'])}</summary><table>{body}{answers}</table></details>"
    )


def _contents(content: Mapping[str, Any]) -> str:
    return "<br>".join(
        f"{escape(media)}: "
        f"{_type(_data_of_events(described) if media == EVENTS else described['schema'])}"
        for media, described in content.items()
    )


def _data_of_events(described: Mapping[str, Any]) -> Mapping[str, Any]:
    data: Mapping[str, Any] = described["schema"]["properties"]["data"]
    return data


def _fields(schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"<p>{_type(schema)}</p>"
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{_type(kind)}</td>"
        f"<td>{'required' if name in required else _default(kind)}</td></tr>"
        for name, kind in schema["properties"].items()
    )
    about = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    return f"{about}<table><tr><th>field</th><th>type</th><th>default</th></tr>{rows}</table>"


def _default(schema: Mapping[str, Any]) -> str:
    return escape(json.dumps(schema["default"])) if "default" in schema else ""


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return _either(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return _either(escape(json.dumps(value)) for value in schema["enum"])
    if "const" in schema:
        return escape(schema["const"])
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(kind)


def _either(kinds: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(kinds))
