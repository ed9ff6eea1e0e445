"""Installs the package that a page has as an example, as a reader would install it."""

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed_example(page: Path, folder: Path) -> Iterator[Path]:
    """Write the page's files to the folder, with the metadata that an installer writes. Within the
    block it is on the path, also in processes that are started there."""
    blocks = re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```$", page.read_text(), re.M | re.S)
    files = {name: content for name, content in blocks if not name.startswith("test_")}
    for name, content in files.items():
        (folder / name).write_text(content)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield folder
    for name in files:
        sys.modules.pop(name.removesuffix(".py"), None)
