"""Figures of a machine are measured, not written into the code."""

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")


def constants() -> Iterator[tuple[str, str, object]]:
    """Place, name and value of every name that the code gives a constant."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named: list[tuple[str, ast.expr | None]] = []
                match node:
                    case ast.Assign(targets=targets, value=value):
                        named = [(ast.unparse(target), value) for target in targets]
                    case ast.AnnAssign(target=target, value=value):
                        named = [(ast.unparse(target), value)]
                    case ast.keyword(arg=str(name), value=value):
                        named = [(name, value)]
                    case ast.arguments():
                        names = [each.arg for each in node.args][-len(node.defaults) :]
                        named = list(zip(names, node.defaults, strict=False))
                        kwonly = [each.arg for each in node.kwonlyargs]
                        named += list(zip(kwonly, node.kw_defaults, strict=True))
                for name, expression in named:
                    if isinstance(expression, ast.Constant):
                        yield f"{path}:{expression.lineno}", name.lower(), expression.value


@pytest.mark.req("ERR-01")
def test_the_bandwidth_of_a_link_is_no_constant_of_the_code() -> None:
    """The sources have 28, 50 and 64 GB/s for the same bus. The cost models of the simulator are
    those of machines that are not there."""
    found = [each for each in constants() if "/deploy/simulator/" not in each[0]]
    assert len(found) > 1000
    for place, name, value in found:
        is_bandwidth = "bandwidth" in name or name.endswith(("_per_s", "_gbps"))
        is_bandwidth &= name != "tokens_per_s"  # what `longshore models` shows of a machine
        assert not (is_bandwidth and isinstance(value, int | float) and value), (place, name, value)
