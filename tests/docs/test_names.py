"""What the pages name in backticks exists: files, classes, their members, functions, metrics and
policies."""

import ast
import re
from collections import defaultdict
from functools import cache

import pytest

from longshore.scheduler.queue.policies import POLICIES
from tests.conftest import ROOT
from tests.docs.blocks import pages, spans

# Examples of pages, and files of models and of other programs.
OTHER_FILES = {
    *("1_Pooling/config.json", "application/json", "path/to/model", "shortest.py", ".toml"),
    *("shortest/latency.png", "shortest/load.png", "owner/name", ".venv/bin/pytest"),
    *("longshore-kv/IDENTITY/RANK/KE/KEY", "longshore-kv/IDENTITY/identity.json"),
    *("cohere/NAME", "hosted_vllm/NAME", "jina_ai/NAME", "openai/NAME"),
    *("text-completion-openai/NAME", "keys.toml"),
}
OTHER_CLASSES = {  # of vLLM, systemd and models, and a name that stands for any class
    *("AsyncLLMEngine", "EngineArgs", "RepetitionDetectionParams", "TimeoutStopSec", "MemoryMax"),
    *("BertForMaskedLM", "SpecType"),
}
PAGES = [path.relative_to(ROOT).as_posix() for path in pages()]
PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")
SOURCES = (*PACKAGES, "tests", "benchmarks")


@cache
def files() -> set[str]:
    """The files and folders that a page may name: each by its path, and by every end of it."""
    top = [path for path in ROOT.iterdir() if not path.name.startswith(".") or path.name == ".ci"]
    paths = top + [path for folder in top if folder.is_dir() for path in folder.rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in paths]
    return {"/".join(each[begin:]) for each in parts for begin in range(len(each))}


@cache
def words() -> set[str]:
    """Every word of the code."""
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    paths += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    return {word for path in paths for word in re.findall(r"\w+", path.read_text("utf-8"))}


@pytest.mark.parametrize("page", PAGES)
def test_files_on_a_page_exist(page: str) -> None:
    named = {
        span
        for span in spans(ROOT / page)
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span)
        and ("/" in span or re.search(r"\.(py|md|sh|toml|cpp|json|txt)$", span))
    }
    known = files() | OTHER_FILES
    missing = {name for name in named if name.rstrip("/") not in known}
    assert {name for name in missing if not is_of_a_model(name)} == set()


def is_of_a_model(name: str) -> bool:
    """A file that models, disk tiers or recordings have: a page names it without a folder."""
    return "/" not in name and name.endswith((".json", ".txt"))


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/requirements.md"])
def test_classes_and_functions_on_a_page_exist(page: str) -> None:
    named: set[str] = set()
    for span in spans(ROOT / page):
        named.update(re.findall(r"(?<![\w./-])[A-Z][a-z]+(?:[A-Z][a-z0-9]*)+(?![\w-])", span))
        if call := re.fullmatch(r"([a-z_]\w*(?:\.\w+)*)\(.*\)", span):
            named.update(call[1].split("."))
    assert named - words() - OTHER_CLASSES == set()


@cache
def members() -> dict[str, set[str]]:
    """The members of the packages' classes, with those of base classes, by the class's name."""
    own: defaultdict[str, set[str]] = defaultdict(set)
    bases: defaultdict[str, set[str]] = defaultdict(set)
    for path in (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")):
        for found in ast.parse(path.read_text("utf-8")).body:
            if isinstance(found, ast.ClassDef):
                bases[found.name] |= {ast.unparse(base).split(".")[-1] for base in found.bases}
                own[found.name] |= {name for node in ast.walk(found) if (name := _defined(node))}

    def with_bases(name: str) -> set[str]:
        return own[name].union(*map(with_bases, bases[name] & own.keys() - {name}))

    return {name: with_bases(name) for name in [*own]}


def _defined(node: ast.AST) -> str | None:
    """The name that a definition or an assignment gives to a member."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return None


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/requirements.md"])
def test_members_of_classes_on_a_page_exist(page: str) -> None:
    named = {
        (class_name, member)
        for span in spans(ROOT / page)
        for class_name, member in re.findall(r"(?<![\w./])([A-Z]\w+)\.([a-z_]\w*)", span)
        if class_name in members()
    }
    assert {each for each in named if each[1] not in members()[each[0]]} == set()


def test_metrics_on_the_pages_are_listed_in_theirs() -> None:
    listed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = {
        metric
        for page in PAGES
        for span in spans(ROOT / page)
        for metric in re.findall(r"\blongshore_\w+", span)
        if not metric.endswith(("_sum", "_count", "_bucket"))
    }
    assert len(named) > 30
    assert {name for name in named if f"`{name}`" not in listed} == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_list_of_the_built_in_policies_has_all_of_them(page: str) -> None:
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        named = {name for name in POLICIES if f"`{name}`" in line}
        assert len(named) < 3 or "fcfs" not in named or named == POLICIES.keys(), line
