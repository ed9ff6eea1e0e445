"""Which blocks are handed out, in which order, and when they are free again."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Add, Answer, Free, Plan, scenario

LENGTH: Final = FinishReason.LENGTH_CAPPED

BLOCK_ORDER: Final = (
    scenario(
        "reused blocks lose their names",
        "NUM-01",
        "POO-03",
        usable_blocks=5,
        lines=(
            # All five are cached, so they are taken in the order in which they were freed.
            Add("x", range(60, 64), max_tokens=1),
            Add("cached", range(4), max_tokens=1),
            Add("y", range(64, 68), max_tokens=1),
            Add("z", range(68, 72), max_tokens=1),
            Add("w", range(72, 76), max_tokens=1),
            Plan(
                {"x": 4, "cached": 4, "y": 4, "z": 4, "w": 4},
                new=("x", "cached", "y", "z", "w"),
                tables={"x": (1,), "cached": (2,), "y": (3,), "z": (4,), "w": (5,)},
            ),
            Answer(
                {"x": 90, "cached": 90, "y": 90, "z": 90, "w": 90},
                ended={"x": LENGTH, "cached": LENGTH, "y": LENGTH, "z": LENGTH, "w": LENGTH},
            ),
            Free(5),
            Add("taker", range(20, 29)),
            Plan(
                {"taker": 9},
                new=("taker",),
                finished=("cached", "w", "x", "y", "z"),
                tables={"taker": (1, 2, 3)},
            ),
            Free(2),
            Answer({"taker": 90}),
            Add("late", range(5)),
            Plan(
                {"taker": 1, "late": 5}, new=("late",), cached={"late": 0}, tables={"late": (4, 5)}
            ),
        ),
    ),
    scenario(
        "a request's blocks are freed tail first: all but the partial last one are cached",
        "NUM-02",
        "FRQ-05",
        usable_blocks=5,
        max_model_len=20,
        lines=(
            Add("one", range(19), max_tokens=1),
            Plan({"one": 19}, new=("one",), tables={"one": (1, 2, 3, 4, 5)}),
            Answer({"one": 90}, ended={"one": LENGTH}),
            Add("two", range(30, 49), max_tokens=1),
            Plan({"two": 19}, new=("two",), finished=("one",), tables={"two": (5, 4, 3, 2, 1)}),
        ),
    ),
    scenario(
        "hits leave the free queue and keep their names",
        "NUM-03",
        "POO-05",
        usable_blocks=4,
        lines=(
            Add("x", [70], max_tokens=1),
            Add("cached", range(8), max_tokens=1),
            Add("y", [71], max_tokens=1),
            Plan(
                {"x": 1, "cached": 8, "y": 1},
                new=("x", "cached", "y"),
                tables={"x": (1,), "cached": (2, 3), "y": (4,)},
            ),
            Answer(
                {"x": 90, "cached": 90, "y": 90},
                ended={"x": LENGTH, "cached": LENGTH, "y": LENGTH},
            ),
            Add("hitter", range(9), max_tokens=1),  # the queue is 4, 1, 3, 2
            Plan(
                {"hitter": 1},
                new=("hitter",),
                finished=("cached", "x", "y"),
                cached={"hitter": 8},
                tables={"hitter": (2, 3, 4)},
            ),
            Free(1),
            Answer({"hitter": 90}, ended={"hitter": LENGTH}),
            Add("again", range(9), max_tokens=1),
            Plan(
                {"again": 1},
                new=("again",),
                finished=("hitter",),
                cached={"again": 8},
                tables={"again": (2, 3, 4)},
            ),
        ),
    ),
    scenario(
        "cached blocks without a holder are free, and reused after those that are not cached",
        "NUM-04",
        "POO-04",
        "POO-10",
        "POO-11",
        usable_blocks=7,
        lines=(
            Add("a", range(5)),
            Add("c", range(10, 14), max_tokens=1),
            Add("d", [70], max_tokens=1),
            Add("b", [71, 72]),
            Add("e", range(20, 24), max_tokens=1),
            Add("f", [73], max_tokens=1),
            Plan(
                {"a": 5, "c": 4, "d": 1, "b": 2, "e": 4, "f": 1},
                new=("a", "c", "d", "b", "e", "f"),
                tables={"a": (1, 2), "c": (3,), "d": (4,), "b": (5,), "e": (6,), "f": (7,)},
            ),
            Free(0),
            Answer(
                {"a": 90, "c": 90, "d": 90, "b": 90, "e": 90, "f": 90},
                ended={"c": LENGTH, "d": LENGTH, "e": LENGTH, "f": LENGTH},
            ),
            Free(4),
            Add("taker", range(30, 45), max_tokens=1),
            Plan(
                {"a": 1, "b": 1, "taker": 15},
                new=("taker",),
                finished=("c", "d", "e", "f"),
                tables={"a": (1, 2), "b": (5,), "taker": (7, 4, 3, 6)},
            ),
        ),
    ),
    scenario(
        "hits that sit in the free queue count as blocks to take",
        "KVM-08",
        usable_blocks=4,
        lines=(
            Add("cached", range(8), max_tokens=1),
            Add("holder", [70]),
            Plan(
                {"cached": 8, "holder": 1},
                new=("cached", "holder"),
                tables={"cached": (1, 2), "holder": (3,)},
            ),
            Answer({"cached": 90, "holder": 90}, ended={"cached": LENGTH}),
            Free(3),
            # Two hits and two new blocks are four, and three are free.
            Add("big", [*range(8), *range(50, 55)]),
            Plan({"holder": 1}, finished=("cached",)),
        ),
    ),
    scenario(
        "decode takes a block every sixteenth token",
        "NUM-25",
        block_size=16,
        max_model_len=80,
        lines=(
            Add("one", range(16)),
            Plan({"one": 16}, new=("one",), tables={"one": (1,)}),
            *(
                line
                for num_tokens in range(17, 65)
                for line in (
                    Answer({"one": 90}),
                    Plan({"one": 1}, tables={"one": tuple(range(1, (num_tokens + 31) // 16))}),
                    Free(16 - (num_tokens + 15) // 16),
                )
            ),
        ),
    ),
)
