"""Structs that ignore unknown fields, made from structs that reject them; and what they ignored."""

import functools
import operator
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

from longshore.deploy.requests.errors import invalid


@functools.cache
def lenient(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A subclass of `kind` that ignores unknown fields, as do the structs within it."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        changed = _lenient_type(field.type)
        if changed is field.type:
            continue  # inherited
        if field.default_factory is not msgspec.NODEFAULT:
            value = msgspec.field(default_factory=field.default_factory, name=field.encode_name)
        else:
            value = msgspec.field(default=field.default, name=field.encode_name)
        fields.append((field.name, changed, value))
    return msgspec.defstruct(
        kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=False
    )


def _lenient_type(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return lenient(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        inner = _lenient_type(arguments[0])
        return kind if inner is arguments[0] else Annotated[inner, *arguments[1:]]
    changed = tuple(map(_lenient_type, arguments))
    if all(map(operator.is_, changed, arguments)):
        return kind
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, changed)
    return origin[changed]


def unread_fields(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """The paths of the fields in JSON that a lenient struct has ignored, such as `input[0].spare`.
    Raises RequestError for a text that was read as null: msgspec takes "null" for it.

    given: the JSON. read: what was made of it.
    """
    if isinstance(read, msgspec.Struct) and isinstance(given, dict):
        names = _names(type(read))
        for key, value in given.items():
            if key not in names:
                yield f"{path}.{key}" if path else key
            elif not isinstance(value, str) or getattr(read, names[key]) is None:
                inner = f"{path}.{key}" if path else key
                yield from unread_fields(value, getattr(read, names[key]), inner)
    elif isinstance(read, list | tuple) and isinstance(given, list):
        for index, (value, item) in enumerate(zip(given, read, strict=True)):
            if isinstance(value, dict | list) or item is None:
                yield from unread_fields(value, item, f"{path}[{index}]")
    elif read is None and given is not None:
        param = path.partition(".")[0].partition("[")[0]
        raise invalid(f"{path} is a text; null is written without quotes", param=param)


@functools.cache
def _names(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The attributes of a struct, by the names of its fields."""
    return {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
