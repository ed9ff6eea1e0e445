"""The structure of the state that a snapshot contains: its classes and their attributes.

A snapshot can only be decoded by code with the same structure. A version number that somebody must
raise does not guard that between releases, so the structure is read from the code itself.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import longshore
from longshore.scheduler.recorder.graph import PACKAGES, is_allowed


@functools.cache
def structure_digest() -> str:
    """Of all classes that a snapshot may contain, by the code of this installation."""
    root = Path(longshore.__file__).parent
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted((root / "/".join(package.split(".")[1:])).rglob("*.py")):
            module = ".".join(("longshore", *file.relative_to(root).with_suffix("").parts))
            if is_allowed(f"{module}:"):
                digest.update(f"{module}\n{structure_of(file.read_text('utf-8'))}".encode())
    return digest.hexdigest()[:16]


def structure_of(source: str) -> str:
    """The classes of a module, a line each, with the fields that they declare and the attributes
    that their methods assign. Code that changes none of them does not change it."""
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return "".join(f"{cls.name}: {', '.join(sorted(set(_attributes(cls))))}\n" for cls in classes)


def _attributes(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=kind) if node in cls.body:
                yield f"{name}: {ast.unparse(kind)}"
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
