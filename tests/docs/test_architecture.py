"""docs/architecture.md, and the pages of the scheduler and its KV cache, list the files, sizes and
names of the code."""

import ast
import re
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from longshore.connectors.registry import BUILT_IN
from tests.conftest import ROOT

PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

# Names that classes of two packages share. Names can only be removed.
SHARED_NAMES = {
    *("Alive", "Call", "Channel", "Chunk", "Encoder", "Engine", "Job", "Outcome", "Phase", "Piece"),
    *("Player", "PolicyError", "PoolingParams", "RankLayout", "Record", "Recorder", "Release"),
    *("Result", "Router", "Routing", "SamplingParams", "Source", "StoredBlocks", "Swaps"),
    "TransferQueue",
}


def modules(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if not path.stem.startswith("__")]


def table_after(text: str, begin: str) -> list[list[str]]:
    """The cells of the first table's rows after `begin`."""
    table = text.partition(begin)[2].partition("|---|")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]


def test_the_reading_order_names_files_that_exist() -> None:
    rows = table_after(TEXT, "## Reading order")
    assert len(rows) > 25
    package = Path()
    for first, second in rows:
        folders = [ROOT / name for name in re.findall(r"`([\w/]+)/`", first)]
        if first.startswith("↳"):
            folders = [package / folder.relative_to(ROOT) for folder in folders]
        else:
            (package,) = folders
        found = {path for folder in folders for path in folder.rglob("*")}
        assert found, first
        names = {path.stem for path in found} | BUILT_IN.keys()
        named = re.findall(r"`([a-z]\w*)`", second)
        assert [name for name in named if name not in names] == [], first


def test_the_reading_order_has_every_feature() -> None:
    (row,) = (second for first, second in table_after(TEXT, "## Reading order") if "feat" in first)
    features = {path.stem for path in modules(ROOT / "scheduler" / "features")}
    assert set(re.findall(r"`(\w+)`", row)) == features


@pytest.mark.parametrize(
    ("page", "begin", "folders"),
    [
        ("scheduler", "The files of `scheduler/`", ("", "step", "queue", "features")),
        ("kv_cache", "The files of `scheduler/kv_cache/`", ("kv_cache",)),
    ],
)
def test_a_page_has_every_file_of_its_folders(
    page: str, begin: str, folders: tuple[str, ...]
) -> None:
    rows = table_after((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), begin)
    named = re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))
    found = [path.stem for folder in folders for path in modules(ROOT / "scheduler" / folder)]
    assert sorted(named) == sorted(found)


def test_the_sizes_are_those_of_the_folders_within_a_tenth() -> None:
    rows = table_after(TEXT, "The next table counts lines")
    assert len(rows) > 8
    for first, num_files, num_lines, *_ in rows:
        folders = [ROOT / name for name in re.findall(r"`([\w/]+)/`", first)]
        paths = [path for folder in folders for path in folder.glob("*.py")]
        paths = [path for path in paths if path.name != "__init__.py"]
        lines = sum(path.read_text("utf-8").count("\n") for path in paths)
        assert len(paths) == int(num_files), first
        assert lines == pytest.approx(int(num_lines.replace(",", "")), rel=0.1), first


def test_no_module_of_the_scheduler_is_in_a_cycle_of_imports() -> None:
    """Not even of imports for types, or within functions."""
    imports: dict[str, set[str]] = {}
    for path in (ROOT / "scheduler").rglob("*.py"):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        imports[name] = {
            f"{node.module}.{alias.name}".removeprefix("longshore.")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        imports[name] |= {imported.rpartition(".")[0] for imported in imports[name]}
    graph = {name: imported & imports.keys() for name, imported in imports.items()}
    assert sum(map(len, graph.values())) > 300
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_classes_of_different_packages_do_not_share_a_name() -> None:
    packages: defaultdict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    packages[node.name].add(package)
    assert {name for name, where in packages.items() if len(where) > 1} == SHARED_NAMES
    assert f" {len(SHARED_NAMES)} names are left" in TEXT
