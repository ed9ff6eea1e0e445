"""Counts operations instead of time: the same on a busy machine, and on every machine.

An operation is a line of Python or a call of a Python function. A scan within one line executes no
other line: `x in queue`, `queue.remove(x)`, `sorted(queue)`, `[*queue]`. It counts as many
operations as it looks at or copies elements, which is known from the line's source and the objects
that its names stand for.

What is not seen: scans within other C code (NumPy's operations on whole arrays, encoders), and of
what a call in the same line returns, which that call has paid for already if it is Python.
"""

import ast
import gc
import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parents[2]
TOLERANCE: Final = 1.1

_Size: TypeAlias = Callable[[FrameType], int]
"""The elements that a scan in a line looks at, when the line begins."""

_SEQUENCES: Final = (list, tuple, deque, array)
_CONTAINERS: Final = (
    *(*_SEQUENCES, dict, set, frozenset, KeysView, ItemsView, ValuesView),
    *map(type, ({}.keys(), {}.values(), {}.items())),
)
_SCANNING_FUNCTIONS: Final = frozenset(
    (
        *("Counter", "OrderedDict", "array", "deque", "dict", "frozenset", "heapify", "list"),
        *("max", "min", "set", "sorted", "sum", "tuple"),
    )
)
_SCANNING_METHODS: Final = frozenset(
    ("copy", "count", "index", "insert", "remove", "reverse", "rotate", "sort")
)
_TAKING_METHODS: Final = frozenset(("extend", "extendleft", "fromkeys", "union", "update"))


def count_operations(run: Callable[[], object]) -> int:
    """Operations of `run`, on this thread."""
    total = 0

    def count(_: FrameType, event: str, __: object) -> Any:
        nonlocal total
        if event == "line":
            total += 1
        return count

    def count_scans(frame: FrameType, event: str, _: object) -> Any:
        nonlocal total
        if event == "line":
            total += 1
            for size in scans_of(frame.f_code).get(frame.f_lineno, ()):
                total += size(frame)
        return count_scans

    def enter(frame: FrameType, _: str, __: object) -> Any:
        nonlocal total
        total += 1
        return count_scans if scans_of(frame.f_code) else count

    scans_of = _scans_of
    former, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # its callbacks and finalizers come when they like
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(former)
        if collects:
            gc.enable()
    return total


def grows_at_most_n_log_n(counts: Mapping[int, int]) -> bool:
    """Whether operations, by n, grow at most as n log n does, from each n to each larger one. A
    tenth more is accepted: what is tidied up now and then is not due at every n."""
    return all(
        counts[large] * small * math.log(small)
        <= counts[small] * large * math.log(large) * TOLERANCE
        for small, large in combinations(sorted(counts), 2)
    )


_known: Final[dict[int, tuple[CodeType, Mapping[int, list[_Size]]]]] = {}
"""By id, because the hash of a code object is that of all its parts."""


def _scans_of(code: CodeType) -> Mapping[int, list[_Size]]:
    """The scans of a function's own lines, by line."""
    if (known := _known.get(id(code))) is not None:
        return known[1]
    path = Path(code.co_filename)
    scans: Mapping[int, list[_Size]] = {}
    if path.is_absolute() and ROOT in path.resolve().parents:
        scans = _scans_in(path.resolve()).get((code.co_name, code.co_firstlineno), {})
    _known[id(code)] = code, scans
    return scans


_Scopes: TypeAlias = dict[tuple[str, int], dict[int, list[_Size]]]
"""By name and first line of the code object, and by line."""


@cache
def _scans_in(path: Path) -> _Scopes:
    if ROOT / ".venv" in path.parents or not path.exists():
        return {}
    reader = _Reader()
    reader.visit(ast.parse(path.read_text()))
    return reader.scopes


class _Reader(ast.NodeVisitor):
    """Finds the scans of each function, lambda and comprehension."""

    def __init__(self) -> None:
        self.scopes: _Scopes = {}
        self._scope: dict[int, list[_Size]] = {}

    def _add(self, node: ast.expr, size: Callable[[Any], int]) -> None:
        """A scan of what an expression stands for."""
        self._add_scan(node, lambda frame: size(_value(node, frame)))

    def _add_scan(self, node: ast.expr, size: _Size) -> None:
        def of(frame: FrameType) -> int:
            try:
                return size(frame)
            except Exception:  # not assigned yet, or unknown
                return 0

        self._scope.setdefault(node.lineno, []).append(of)

    def _enter(self, name: str, first_line: int, *nodes: ast.AST) -> None:
        outer, self._scope = self._scope, self.scopes.setdefault((name, first_line), {})
        for node in nodes:
            self.visit(node)
        self._scope = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        first_line = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        self._enter(node.name, first_line, *node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter("<lambda>", node.lineno, node.body)

    def _comprehension(self, node: Any, name: str, *results: ast.AST) -> None:
        first, *others = node.generators
        self.visit(first.iter)  # in the scope around it
        self._enter(name, node.lineno, *results, *first.ifs, *others)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._comprehension(node, "<listcomp>", node.elt)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._comprehension(node, "<setcomp>", node.elt)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._comprehension(node, "<genexpr>", node.elt)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._comprehension(node, "<dictcomp>", node.key, node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operator, operand in zip(node.ops, node.comparators, strict=True):
            if isinstance(operator, ast.In | ast.NotIn):
                self._add(operand, _scanned)
        self.generic_visit(node)

    def visit_Starred(self, node: ast.Starred) -> None:
        if isinstance(node.ctx, ast.Load):
            self._add(node.value, _copied)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self._add(value, _copied)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.BitOr | ast.BitAnd | ast.BitXor):
            self._add(node.left, _copied)
            self._add(node.right, _copied)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node.value, _copied)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            if isinstance(node.ctx, ast.Load):
                self._add(node, _copied)  # as many as the slice has
            else:  # all that come after it are moved
                self._add_scan(node, partial(_moved, node.value, node.slice))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(name) if name in _SCANNING_FUNCTIONS:
                for argument in node.args:
                    self._add(argument, _copied)
            case ast.Attribute(value, name):
                if name in _SCANNING_METHODS:
                    self._add(value, _scanned if name in ("insert", "remove") else _copied)
                elif name in _TAKING_METHODS or name in _SCANNING_FUNCTIONS:  # heapq.heapify
                    for argument in node.args:
                        self._add(argument, _copied)
                elif name == "pop" and node.args and _is_zero(node.args[0]):
                    self._add(value, _scanned)
        self.generic_visit(node)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _moved(node: ast.expr, part: ast.Slice, frame: FrameType) -> int:
    """Elements from the beginning of a slice on."""
    size = _scanned(_value(node, frame))
    return size - _value(part, frame).indices(size)[0]


def _scanned(value: Any) -> int:
    """Elements of what has no index by value."""
    return len(value) if isinstance(value, (*_SEQUENCES, ValuesView, type({}.values()))) else 0


def _copied(value: Any) -> int:
    return len(value) if isinstance(value, _CONTAINERS) else 0


def _value(node: ast.expr | None, frame: FrameType) -> Any:
    """What an expression stands for that runs no code of its own. Raises LookupError for others."""
    match node:
        case None:
            return None
        case ast.Constant(value):
            return value
        case ast.Name(name):
            for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
                if name in names:
                    return names[name]
        case ast.Attribute(value, name):
            return getattr(_value(value, frame), name)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, frame)
        case ast.Slice(lower, upper, step):
            return slice(*(_value(each, frame) for each in (lower, upper, step)))
        case ast.Subscript(value, index):
            container = _value(value, frame)
            if isinstance(container, (*_SEQUENCES, dict)) and not hasattr(container, "__missing__"):
                return container[_value(index, frame)]
        case ast.Call(ast.Attribute(value, "keys" | "values" | "items" as name), []):
            if isinstance(owner := _value(value, frame), dict):
                return getattr(owner, name)()
    raise LookupError
