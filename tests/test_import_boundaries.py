"""The boundaries between the packages, as a fresh interpreter and the checkers see them."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")
ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
TOOLS = Path(sys.executable).parent  # of the environment that runs the tests


def modules_loaded_by(program: str) -> set[str]:
    """Names in `sys.modules` after `program` ran in a fresh interpreter."""
    report = "\nimport sys; print(*sys.modules)"
    # -P: the working folder is not on the path, as for an installed command
    run = subprocess.run(
        [sys.executable, "-P", "-c", program + report], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_scheduler_process_loads_no_torch_and_nothing_slow_that_few_need() -> None:
    """Streams wait for its start when it replaces one that has died."""
    loaded = modules_loaded_by(
        "import longshore.scheduler.__main__, longshore.scheduler.process.startup"
    )
    assert "longshore.scheduler.process.engine_loop" in loaded
    assert not loaded & {"torch", "safetensors", "transformers", "longshore.worker"}
    assert not loaded & {"importlib.metadata", "tomllib", "email", "longshore.connectors.registry"}


@pytest.mark.parametrize("package", ["protocol", "scheduler"])
def test_no_module_that_plans_loads_torch(package: str) -> None:
    loaded = modules_loaded_by(
        f"import pkgutil, importlib, longshore.{package} as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )
    assert f"longshore.{package}" in loaded
    assert "torch" not in loaded


def test_capturing_a_graph_does_not_load_the_compiler_of_torch() -> None:
    loaded = modules_loaded_by(
        "import torch\n"
        "from longshore.worker.kernels.graph import NotCapturable, capture\n"
        "x = torch.ones(2)\n"
        "try:\n"
        "    capture(None, lambda: x.view(2) + 1, 1, ())\n"
        "except NotCapturable:\n"
        "    print('captured')"
    )
    assert "captured" in loaded
    assert not loaded & {"torch._dynamo", "sympy"}


def test_import_of_the_public_names_loads_no_torch() -> None:
    program = "from longshore import *; LLM, Logprob, SamplingParams, __version__"
    loaded = modules_loaded_by(program)
    assert "longshore.deploy.llm.llm" in loaded
    assert "torch" not in loaded


def test_import_of_longshore_alone_loads_none_of_its_packages() -> None:
    loaded = modules_loaded_by("import longshore; dir(longshore)")
    assert not [name for name in loaded if name.startswith("longshore.")]


def test_the_tests_for_extensions_have_one_name() -> None:
    with pytest.raises(
        ImportError, match=r"import longshore\.testing, not longshore\.deploy\.testing"
    ):
        import longshore.deploy.testing  # noqa: F401


def test_faults_are_injected_in_the_scheduler_without_torch_or_pytest() -> None:
    loaded = modules_loaded_by("import longshore.testing.faults")
    assert not loaded & {"torch", "pytest"}


def test_unknown_public_name_is_an_attribute_error() -> None:
    import longshore

    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        longshore.Engine  # noqa: B018 - the access is what is tested


def test_protocol_imports_only_the_standard_library_msgspec_zmq_and_numpy() -> None:
    graph = grimp.build_graph("longshore", include_external_packages=True, cache_dir=None)
    imported = {
        target.partition(".")[0]
        for module in {"longshore.protocol", *graph.find_descendants("longshore.protocol")}
        for target in graph.find_modules_directly_imported_by(module)
    }
    assert imported - sys.stdlib_module_names - {"longshore"} == {"msgspec", "numpy", "zmq"}


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "deploy"])
def test_environment_is_read_in_deploy_only(package: str) -> None:
    readers = []
    # The command line of a fork is shown with all variables; nothing depends on their values.
    for path in {*(ROOT / package).rglob("*.py")} - {ROOT / "worker/process/command_line.py"}:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        # A variable that a library reads may be set, or given a default that is not used here.
        set_here = {
            node.value
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        } | {
            node.value.func.value
            for node in nodes
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr == "setdefault"
        }
        readers += [
            f"{path}:{node.lineno}"
            for node in nodes
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ENVIRONMENT
                and node not in set_here
            )
            or (
                isinstance(node, ast.ImportFrom)
                and ENVIRONMENT & {name.name for name in node.names}
            )
        ]
    assert readers == []


FORBIDDEN = [
    ("scheduler", "longshore.worker"),
    ("worker", "longshore.scheduler"),
    ("connectors", "longshore.scheduler"),
    ("worker", "longshore.deploy"),
    ("deploy", "longshore.testing"),
    ("protocol", "longshore.connectors"),
    ("scheduler", "torch"),
    ("protocol", "torch"),
    ("deploy", "pickle"),
]


def forbidden_module(target: str) -> str:
    return f"imports_{target.rpartition('.')[2]}"


@pytest.fixture(scope="module")
def broken_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code, including its links, with one module for each forbidden import, and one
    for each bare package name."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in ("src", *PACKAGES):
        ignore = shutil.ignore_patterns("__pycache__", "demo_model", "*.egg-info")
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tree)
    for package, target in FORBIDDEN:
        (tree / package / f"{forbidden_module(target)}.py").write_text(f"import {target}\n")
    for package in PACKAGES:
        (tree / "deploy" / f"bare_{package}.py").write_text(
            f"import {package}.module\nfrom {package}.module import name\n"
        )
    return tree


def run_tool(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH comes before the editable installation of the real tree
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    arguments = [str(TOOLS / command[0]), *command[1:]]
    return subprocess.run(
        arguments, cwd=tree, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture(scope="module")
def contracts(broken_tree: Path) -> subprocess.CompletedProcess[str]:
    """The output of lint-imports for the broken tree."""
    return run_tool(broken_tree, "lint-imports", "--no-cache")


@pytest.mark.parametrize(("package", "target"), FORBIDDEN)
def test_import_against_the_arrows_breaks_a_contract(
    contracts: subprocess.CompletedProcess[str], package: str, target: str
) -> None:
    assert contracts.returncode == 1, contracts.stdout + contracts.stderr
    importer = f"longshore.{package}.{forbidden_module(target)}"
    assert f"{importer} -> {target} (l.1)" in contracts.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_bare_package_name_is_banned(broken_tree: Path, package: str) -> None:
    module = f"deploy/bare_{package}.py"
    run = run_tool(broken_tree, "ruff", "check", "--no-cache", "--select=TID", module)
    assert run.stdout.count(f"TID251 `{package}` is banned") == 2, run.stdout + run.stderr
