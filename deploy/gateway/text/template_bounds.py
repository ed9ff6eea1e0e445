"""A sandbox in which a chat template can neither run forever nor exhaust the memory.

A template is a program that comes with a model, perhaps from a hub. Jinja's sandbox blocks access
to attributes and long ranges, but not nested loops or strings that keep doubling. Here every step
and every character has a cost that is paid in advance, and a rendering has a budget far above what
legitimate templates need. Everything that can be repeated (the bodies of loops, macros and blocks)
pays for its size each time, so the budget, and a limit of time that is looked at with each payment,
also bound statements that cost nothing by themselves.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from jinja2 import Template, TemplateRuntimeError, pass_context
from jinja2.nodes import (
    Block,
    CallBlock,
    Compare,
    Concat,
    Const,
    Expr,
    ExprStmt,
    Filter,
    For,
    Getitem,
    Macro,
    Node,
    Output,
    Slice,
    Test,
)
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEP_COST: Final = 64  # in characters
CALL_COST: Final = 4 * STEP_COST  # of a macro, which takes as long as several steps
FIXED_BUDGET: Final = 10_000_000  # one or two seconds
BUDGET_PER_CHARACTER: Final = 32  # of the input
INLINE_BUDGET: Final = 500_000  # of a rendering on the event loop: at most about 0.1 s
MAX_RENDERING_S: Final = 10.0  # of large chats, which have a large budget
MAX_INTEGER_BITS: Final = 4096

# Filters and string methods with an argument, a number or a text, that bounds what they add per
# line or item.
_WIDENING: Final = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "wordwrap"}
    | {"zfill"}
)
_FORMATTING: Final = frozenset({"format", "format_map", "%"})
_GROWING: Final = _WIDENING | _FORMATTING | {"join", "replace", "tojson", "translate"}
_SIZED: Final = (str, list, tuple, dict, range)
_REMOVED_FILTERS: Final = ("lipsum", "urlize")
_WIDE_FIELD: Final = re.compile(r"[0-9]{5}|\*|\{[^{}]*\{")
_NUMBER: Final = re.compile(r"[0-9]+")
_COUNTED: Final = "longshore_counted"
_LOOKED_AT: Final = "longshore_looked_at"
_COMPARED: Final = "longshore_compared"
_REPEATED: Final = "longshore_repeated"

T = TypeVar("T")


class TemplateTooCostly(TemplateRuntimeError):
    """The rendering has exceeded its budget."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose renderings have a budget, which `begin` sets; one rendering at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        self._left = 0
        self._end_s = 0.0
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
            self.globals.pop(name, None)

    def template(self, source: str) -> Template:
        """`source`, compiled with cost accounting. Raises TemplateError, SyntaxError."""
        for name, function in self.filters.items():
            self.filters[name] = self._bounded_filter(name, function)
        self.filters[_COUNTED] = pass_context(lambda _, value: self._counted(value))
        self.filters[_LOOKED_AT] = pass_context(lambda _, value: self._looked_at(value))
        self.filters[_COMPARED] = pass_context(lambda _, value: self._compared(value))
        self.filters[_REPEATED] = pass_context(lambda _, cost: self._pay(cost))
        self.filters[_COUNTED + "_items"] = pass_context(lambda _, value: self._items(value))
        return self.from_string(_WithCosts(self).visit(self.parse(source)))

    def begin(self, values: object, *, is_inline: bool = False) -> None:
        """Set a new budget, for a rendering of `values`; a small one for the event loop."""
        self._left = available = 1 << 62
        self._end_s = time.monotonic() + MAX_RENDERING_S
        self._counted(values)
        self._left = FIXED_BUDGET + BUDGET_PER_CHARACTER * (available - self._left)
        if is_inline:
            self._left = min(self._left, INLINE_BUDGET)

    def _pay(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise TemplateTooCostly("it loops too often or produces too much text")
        if time.monotonic() > self._end_s:
            raise TemplateTooCostly(f"it takes longer than {MAX_RENDERING_S:g} s")

    def _counted(self, value: T) -> T:
        """`value`, after paying for it and everything in it."""
        if isinstance(value, str):
            self._pay(STEP_COST + len(value))
            return value
        self._pay(STEP_COST)
        if isinstance(value, dict):
            for key, inner in value.items():
                self._counted(key)
                self._counted(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                self._counted(inner)
        return value

    def _looked_at(self, value: T) -> T:
        """`value`, after paying for reading or copying it, without its items' content."""
        self._pay(STEP_COST + (len(value) if isinstance(value, _SIZED) else 0))
        return value

    def _compared(self, value: T) -> T:
        """`value`, after paying for comparing it with something: also what is in its items, which
        may be the same object many times."""
        self._looked_at(value)
        if isinstance(value, list | tuple):
            for inner in value:
                if isinstance(inner, list | tuple | dict):
                    self._counted(inner)
        elif isinstance(value, dict):
            for inner in value.values():
                if isinstance(inner, list | tuple):
                    self._counted(inner)
        return value

    def _items(self, values: Iterable[T]) -> Iterator[T]:
        for value in values:
            self._pay(STEP_COST)
            yield value

    def _argument(self, value: Any) -> Any:
        return self._items(value) if hasattr(value, "__next__") else self._counted(value)

    def _pay_for_growth(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Pay for what a filter or method adds to `value` and its arguments."""
        if name not in _GROWING:
            return
        length = 1 + (len(value) if isinstance(value, _SIZED) else 0)
        if name in _WIDENING:
            widths = [abs(n) for n in arguments if isinstance(n, int)]
            texts = [len(text) for text in arguments if isinstance(text, str)]
            self._pay(length * max(widths + texts, default=0))
        elif name == "tojson":
            indents = [abs(n) for n in arguments if isinstance(n, int)]
            self._pay(_num_indents(value) * (sum(indents) + _size_of_texts(arguments)))
        elif name == "translate":
            tables = [each for each in arguments if isinstance(each, dict)]
            self._pay(length * max((_size(text) for t in tables for text in t.values()), default=0))
        elif name == "join":
            self._pay(length * sum(len(each) for each in arguments if isinstance(each, str)))
            (parts,) = arguments[:1] or ((),)
            self._pay(len(value) * len(parts) if isinstance(parts, _SIZED) else 0)
        elif name == "replace":
            old, new = ([each for each in arguments if isinstance(each, str)] + ["", ""])[:2]
            self._pay((str(value).count(old) if old else length) * len(new))
        else:
            self._pay_for_fields(str(value), arguments)

    def _pay_for_fields(self, text: str, arguments: Sequence[Any]) -> None:
        """Pay for formatting: each field may be as wide as it says, and have all arguments."""
        if _WIDE_FIELD.search(text):
            raise TemplateTooCostly("it formats a text with too large a width")
        self._pay(sum(map(int, _NUMBER.findall(text))))
        num_fields = text.count("{") + text.count("%")
        self._pay(num_fields * (STEP_COST + _size_of_texts(arguments)))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        position = int(hasattr(function, "jinja_pass_arg"))  # after context or environment

        @functools.wraps(function)
        def bounded(*arguments: Any, **named: Any) -> Any:
            before, (value, *rest) = arguments[:position], arguments[position:]
            if name == "join" and hasattr(value, "__next__"):
                value = list(self._items(value))
            value, rest = self._argument(value), [self._argument(each) for each in rest]
            named = {key: self._argument(each) for key, each in named.items()}
            self._pay_for_growth(name, value, [*rest, *named.values()])
            return function(*before, value, *rest, **named)

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        arguments = [__self._argument(each) for each in args]
        kwargs = {name: __self._argument(each) for name, each in kwargs.items()}
        if isinstance(owner, str):
            __self._counted(owner)
            name = getattr(__obj, "__name__", "")
            if name == "join" and arguments:
                arguments[0] = __self._counted(list(arguments[0]))
            __self._pay_for_growth(name, owner, [*arguments, *kwargs.values()])
        return super().call(__context, __obj, *arguments, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def bounded(*arguments: Any, **named: Any) -> str:
            self._pay_for_growth("format", value.__self__, [*arguments, *named.values()])
            return wrapped(*arguments, **named)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        left, right = self._looked_at(left), self._looked_at(right)
        match operator, left, right:
            case ("*", int(), int()):
                self._check_bits(left.bit_length() + right.bit_length())
            case ("**", int(), int()):
                self._check_bits(left.bit_length() * abs(right))
            case ("*", str() | list() | tuple(), int()):
                self._pay((1 + len(left)) * abs(right))
            case ("*", int(), str() | list() | tuple()):
                self._pay((1 + len(right)) * abs(left))
            case ("%", str(), _):
                self._counted(right)
                self._pay_for_growth("%", left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def _check_bits(self, num_bits: int) -> None:
        if num_bits > MAX_INTEGER_BITS:
            raise TemplateTooCostly("it computes too large a number")


class _WithCosts(NodeTransformer):
    """Wraps everything that a template loops over, compares, slices, joins or writes in the
    environment's cost filters."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def _filtered(self, node: Node, name: str) -> Expr:
        assert isinstance(node, Expr)
        filtered = Filter(node, name, [], [], None, None, lineno=node.lineno)
        filtered.set_environment(self._environment)
        return filtered

    def visit_For(self, node: For) -> Node:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, _COUNTED + "_items")
        return self._paying(node)

    def visit_Macro(self, node: Macro) -> Node:
        self.generic_visit(node)
        return self._paying(node)

    def visit_CallBlock(self, node: CallBlock) -> Node:
        self.generic_visit(node)
        return self._paying(node)

    def visit_Block(self, node: Block) -> Node:
        self.generic_visit(node)
        return self._paying(node)

    def _paying(self, node: For | Macro | CallBlock | Block) -> Node:
        """Begin the body of what can be repeated with a payment for its size."""
        cost = STEP_COST if isinstance(node, For) else CALL_COST
        cost += sum(1 for inner in node.body for _ in inner.find_all(Node))
        payment = ExprStmt(self._filtered(Const(cost), _REPEATED), lineno=node.lineno)
        node.body.insert(0, payment.set_environment(self._environment))
        return node

    def visit_Output(self, node: Output) -> Node:
        self.generic_visit(node)
        node.nodes = [self._filtered(each, _COUNTED) for each in node.nodes]
        return node

    def visit_Concat(self, node: Concat) -> Node:
        self.generic_visit(node)
        node.nodes = [self._filtered(each, _COUNTED) for each in node.nodes]
        return node

    def visit_Compare(self, node: Compare) -> Node:
        self.generic_visit(node)
        node.expr = self._filtered(node.expr, _COMPARED)
        for operand in node.ops:
            is_contained = operand.op in ("in", "notin")
            name = _COMPARED if not is_contained else _LOOKED_AT
            operand.expr = self._filtered(operand.expr, name)
        return node

    def visit_Test(self, node: Test) -> Node:
        self.generic_visit(node)
        node.args = [self._filtered(each, _LOOKED_AT) for each in node.args]
        return node

    def visit_Getitem(self, node: Getitem) -> Node:
        self.generic_visit(node)
        return self._filtered(node, _LOOKED_AT) if isinstance(node.arg, Slice) else node


def _size_of_texts(arguments: Sequence[Any]) -> int:
    """The size of the arguments that are texts or contain several values."""
    return sum(_size(each) for each in arguments if isinstance(each, str | dict | list | tuple))


def _size(value: object) -> int:
    """At least the length of `value` as text."""
    match value:
        case str():
            return len(value)
        case dict():
            return STEP_COST + sum(_size(each) for item in value.items() for each in item)
        case list() | tuple():
            return STEP_COST + sum(map(_size, value))
    return STEP_COST


def _num_indents(value: object, depth: int = 1) -> int:
    """The number of indents, and of separators, in `value` as JSON: at least one per item, and one
    per level around it."""
    match value:
        case dict():
            return depth + sum(2 * depth + _num_indents(each, depth + 1) for each in value.values())
        case list() | tuple():
            return depth + sum(depth + _num_indents(each, depth + 1) for each in value)
    return depth
