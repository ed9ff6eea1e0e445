"""Every log call in scheduler and worker that is about a request or a step has its id as a
field."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
CALLERS = {"logger", "_logger", "_refusals", "_failures", "limit"}
OWNERS = {"request": "request_id", "plan": "step_id", "planned": "step_id", "completion": "step_id"}
"""Variables, and what a call that uses one of them has to carry."""


Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def calls(tree: ast.Module) -> Iterator[tuple[Function, ast.Call]]:
    """Calls of a logger, each in its function."""
    for function in ast.walk(tree):
        if isinstance(function, Function):
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if attr in LEVELS:
                        name = getattr(owner, "id", getattr(owner, "attr", None))
                        if name in CALLERS:
                            yield function, node


def keywords_of(function: Function, call: ast.Call) -> set[str]:
    """Names of the fields that the call has, given directly or as `extra`."""
    given = {keyword.arg for keyword in call.keywords}
    for keyword in call.keywords:
        if keyword.arg == "extra":
            made = keyword.value
            if isinstance(made, ast.Name):
                made = _assigned(function, made.id, call.lineno)
            given |= {each.arg for each in getattr(made, "keywords", ())}
    return {name for name in given if name is not None}


def _assigned(function: Function, name: str, line: int) -> ast.Call | None:
    """The `fields(...)` that was assigned to the variable last before the line."""
    found = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and node.lineno < line
        and [getattr(target, "id", None) for target in node.targets] == [name]
    ]
    made = max(found, key=lambda node: node.lineno).value if found else None
    is_fields = isinstance(made, ast.Call) and getattr(made.func, "id", None) == "fields"
    return made if is_fields else None  # type: ignore[return-value]


def lacking(source: str) -> list[str]:
    """Errors in the calls of a module: line, and the missing field."""
    found = []
    for function, call in calls(ast.parse(source)):
        names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
        for name in sorted(names & OWNERS.keys()):
            if OWNERS[name] not in keywords_of(function, call):
                found.append(f"{call.lineno}: {OWNERS[name]}")
    return found


@pytest.mark.parametrize("folder", ["scheduler", "worker"])
def test_lines_about_requests_and_steps_carry_their_ids(folder: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): problems
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (problems := lacking(path.read_text()))
    }
    assert wrong == {}


def test_a_call_without_its_id_is_found() -> None:
    source = """
def told(request, plan):
    logger.info("%s", request.row)
    about = fields(step_id=plan.step)
    logger.info("%s", plan.step, extra=about)
    self._failures.warning("%d", request.row, request_id=request.request_id)

async def awaited(request, plan):
    logger.info("%s", request.row)
    ours = fields(request_id=request.request_id)
    about = fields(step_id=plan.step)
    logger.info("%s", request.row, extra=about)
    logger.info("%s", request.row, extra=ours)
"""
    assert lacking(source) == ["3: request_id", "9: request_id", "12: request_id"]
