"""Structs that ignore unknown fields, made from structs that reject them."""

import functools
import operator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec


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
