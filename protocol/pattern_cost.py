"""How long a regular expression can take. Python's engine tries every way to match, which a hostile
text can make exponentially many, and it holds the interpreter lock meanwhile."""

# Its own parser, which `re` has no public name for. Hypothesis relies on it, too.
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

UNLIMITED: Final = int(ops.MAXREPEAT)
_MAX_REPEATED_CHOICES: Final = 16
_CHARACTERS: Final = frozenset({ops.ANY, ops.AT, ops.IN, ops.LITERAL, ops.NOT_LITERAL})
_REPEATS: Final = frozenset({ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT})
_ATOMIC: Final = frozenset({ops.ASSERT, ops.ASSERT_NOT, ops.ATOMIC_GROUP, ops.POSSESSIVE_REPEAT})


class _Cost(NamedTuple):
    """ways: in which it can match at one position. steps: to try all of them."""

    ways: int
    steps: int


def max_steps(pattern: str, longest: int | None = None) -> int:
    """A bound of the steps to try a valid pattern at one position of a text of at most `longest`
    characters; None: of any text. A step takes some nanoseconds. Raises ValueError, whose text goes
    on after the pattern, if it has none."""
    parts = list(_parser.parse(pattern))
    op, argument = parts[-1] if parts else (None, (1,))
    if op in _REPEATS and argument[0] == 0:  # it succeeds where it is tried first
        return _sequence(parts[:-1], longest).steps + _part(op, argument, longest).steps
    return _sequence(parts, longest).steps


def _sequence(parts: Any, longest: int | None) -> _Cost:
    ways, steps = 1, 1
    for op, argument in parts:
        part = _part(op, argument, longest)
        steps += ways * part.steps
        ways *= part.ways
    return _Cost(ways, steps)


def _part(op: Any, argument: Any, longest: int | None) -> _Cost:
    if op in _CHARACTERS:
        return _Cost(1, 1)
    if op is ops.BRANCH:
        costs = [_sequence(branch, longest) for branch in argument[1]]
        # At most one branch matches if each begins with a character of its own.
        ways = (max if _are_distinct(argument[1]) else sum)(cost.ways for cost in costs)
        return _Cost(ways, sum(cost.steps for cost in costs))
    if op is ops.SUBPATTERN:
        return _sequence(argument[-1], longest)
    if op in _REPEATS:
        fewest, most, body = argument
        cost = _repeat(fewest, most, body, longest)
    elif op in _ATOMIC:
        cost = _sequence(argument if op is ops.ATOMIC_GROUP else argument[1], longest)
    else:
        raise ValueError("refers to a group of its own")
    return _Cost(1, cost.steps) if op in _ATOMIC else cost


def _are_distinct(branches: Any) -> bool:
    firsts: list[Any] = [branch[0] if len(branch) else (None, None) for branch in branches]
    characters = {chr(argument).casefold() for op, argument in firsts if op is ops.LITERAL}
    return len(characters) == len(firsts)


def _repeat(fewest: int, most: int, body: Any, longest: int | None) -> _Cost:
    if most == UNLIMITED:
        if longest is None:
            raise ValueError("repeats something without a limit")
        most = max(fewest, longest)
    one = _sequence(body, longest)
    if one.ways == 1:
        return _Cost(most - fewest + 1, (most + 1) * one.steps)
    if most > _MAX_REPEATED_CHOICES:
        raise ValueError(f"repeats a choice more than {_MAX_REPEATED_CHOICES} times")
    ways = [one.ways**number for number in range(most + 1)]
    return _Cost(sum(ways[fewest:]), sum(ways) * one.steps)
