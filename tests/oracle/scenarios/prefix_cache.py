"""Which blocks a request finds in the prefix cache."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Add, Answer, Free, Plan, Usage, scenario

LENGTH: Final = FinishReason.LENGTH_CAPPED

PREFIX_CACHE: Final = (
    scenario(
        "two of three blocks hit",
        "NUM-10",
        lines=(
            Add("one", range(12), max_tokens=1),
            Plan({"one": 12}, new=("one",), cached={"one": 0}, tables={"one": (1, 2, 3)}),
            Answer({"one": 90}, ended={"one": LENGTH}),
            Add("two", [*range(8), 50, 51, 52, 53], max_tokens=1),
            Plan(
                {"two": 4},
                new=("two",),
                finished=("one",),
                cached={"two": 8},
                tables={"two": (1, 2, 4)},
            ),
            Answer({"two": 91}, ended={"two": LENGTH}),
            Usage("two", 1, num_cached_tokens=8),
            Free(16),
        ),
    ),
    scenario(
        "lookup stops at the first block that is not cached",
        "NUM-11",
        "STM-05",
        block_size=16,
        max_model_len=128,
        budget=256,
        lines=(
            Add("first", range(48), max_tokens=1),
            Plan({"first": 48}, new=("first",), tables={"first": (1, 2, 3)}),
            Answer({"first": 90}, ended={"first": LENGTH}),
            Add("second", range(80), max_tokens=1),
            Plan(
                {"second": 32},
                new=("second",),
                finished=("first",),
                cached={"second": 48},
                tables={"second": (1, 2, 3, 4, 5)},
            ),
        ),
    ),
    scenario(
        "the last token of a cached prompt is computed again",
        "NUM-12",
        "KVM-03",
        "SCH-13",
        block_size=16,
        max_model_len=128,
        budget=256,
        lines=(
            Add("first", range(64), max_tokens=1),
            Plan({"first": 64}, new=("first",), tables={"first": (1, 2, 3, 4)}),
            Answer({"first": 90}, ended={"first": LENGTH}),
            Add("second", range(64), max_tokens=1),
            Plan(
                {"second": 16},
                new=("second",),
                finished=("first",),
                cached={"second": 48},
                tables={"second": (1, 2, 3, 5)},
            ),
        ),
    ),
    scenario(
        "a request hits blocks that were named earlier in the same step",
        "HSH-09",
        lines=(
            Add("one", range(9)),
            Add("two", range(9)),
            Plan(
                {"one": 9, "two": 1},
                new=("one", "two"),
                cached={"one": 0, "two": 8},
                tables={"one": (1, 2, 3), "two": (1, 2, 4)},
            ),
        ),
    ),
    scenario(
        "only computed chunks are hit, and of two equal blocks the one named first",
        "HSH-03",
        "HSH-09",
        threshold=4,
        lines=(
            Add("one", range(12), max_tokens=1),
            Add("two", range(12), max_tokens=1),
            Plan(
                {"one": 4, "two": 4},
                new=("one", "two"),
                cached={"one": 0, "two": 4},
                tables={"one": (1,), "two": (1, 2)},
            ),
            Answer({}),
            Plan({"one": 4, "two": 4}, tables={"one": (1, 3), "two": (1, 2, 4)}),
            Answer({"two": 90}, ended={"two": LENGTH}),
            Add("three", range(12), max_tokens=1),
            Plan(
                {"one": 4, "three": 4},
                new=("three",),
                finished=("two",),
                cached={"three": 8},
                tables={"one": (1, 3, 5), "three": (1, 2, 6)},
            ),
        ),
    ),
    scenario(
        "salt separates, and a request may skip reading",
        "HSH-06",
        "KVM-02",
        lines=(
            Add("plain", range(9)),
            Add("salted", range(9), salt="s"),
            Add("same salt", range(9), salt="s"),
            Add("skips", range(9), skips_cache=True),
            Plan(
                {"plain": 9, "salted": 9, "same salt": 1, "skips": 9},
                new=("plain", "salted", "same salt", "skips"),
                cached={"plain": 0, "salted": 0, "same salt": 8, "skips": 0},
                tables={"same salt": (4, 5, 7), "skips": (8, 9, 10)},
            ),
        ),
    ),
    scenario(
        "without prefix caching nothing is hit",
        "KVM-02",
        caching=False,
        lines=(
            Add("one", range(9)),
            Add("two", range(9)),
            Plan({"one": 9, "two": 9}, new=("one", "two"), cached={"two": 0}),
        ),
    ),
    scenario(
        "a block is named only when its last token is verified",
        "KVM-09",
        in_flight=2,
        lines=(
            Add("one", range(7)),
            Plan({"one": 7}, new=("one",)),
            Plan({"one": 1}, tables={"one": (1, 2)}),  # fills block 2 with a token not yet known
            Answer({"one": 90}),
            Add("early", [*range(7), 90, 50]),
            Plan({"one": 1, "early": 1}, new=("early",), cached={"early": 8}),
        ),
    ),
    scenario(
        "a request that gets no tokens in a step names what it has computed",
        "KVM-09",
        in_flight=2,
        lines=(
            Add("one", range(7), max_tokens=2),
            Plan({"one": 7}, new=("one",)),
            Plan({"one": 1}, tables={"one": (1, 2)}),
            Answer({"one": 90}),
            Add("guesses", [*range(7), 90, 50]),
            # "one" has all its tokens on the way and is skipped, but its second block was computed
            # in the plan before and its last token is verified now.
            Plan({"guesses": 1}, new=("guesses",), cached={"guesses": 8}),
        ),
    ),
)
