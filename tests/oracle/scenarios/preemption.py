"""Who gives way when blocks run out, and what becomes of it."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Add, Answer, Plan, Usage, scenario

LENGTH: Final = FinishReason.LENGTH_CAPPED

PREEMPTION: Final = (
    scenario(
        "the youngest is preempted and finds what is left of its prefix",
        "PRE-01",
        "PRE-02",
        "PRE-04",
        "PRE-05",
        "QUE-06",
        usable_blocks=4,
        lines=(
            Add("old", range(7), max_tokens=3),
            Add("young", range(20, 28), max_tokens=3),
            Plan(
                {"old": 7, "young": 8},
                new=("old", "young"),
                tables={"old": (1, 2), "young": (3, 4)},
            ),
            Answer({"old": 90, "young": 95}),
            Add("late", [70]),
            Plan({"old": 1}, preempted=("young",), tables={"old": (1, 2)}),
            Answer({"old": 91}),
            # "old" takes block 4. A hit on 3 and two new blocks do not fit, and "late" waits.
            Plan({"old": 1}, tables={"old": (1, 2, 4)}),
            Answer({"old": 92}, ended={"old": LENGTH}),
            Plan(
                {"young": 5, "late": 1},
                new=("late",),
                resumed=("young",),
                finished=("old",),
                cached={"young": 4},
                tables={"young": (3, 4, 2), "late": (1,)},
            ),
            Answer({"young": 96, "late": 90}),
            Plan({"young": 1, "late": 1}),
            Answer({"young": 97, "late": 91}, ended={"young": LENGTH}),
            Usage("young", 3, num_cached_tokens=0, num_preemptions=1),
        ),
    ),
    scenario(
        "several victims come back in the order they ran",
        "QUE-06",
        usable_blocks=4,
        block_size=2,
        max_model_len=8,
        caching=False,
        threshold=4,
        lines=(
            Add("one", range(7), max_tokens=1),
            Add("two", [70], max_tokens=4),
            Add("three", [80], max_tokens=4),
            Plan(
                {"one": 4, "two": 1, "three": 1},
                new=("one", "two", "three"),
                tables={"one": (1, 2), "two": (3,), "three": (4,)},
            ),
            Answer({"two": 90, "three": 90}),
            Plan({"one": 3}, preempted=("three", "two"), tables={"one": (1, 2, 3, 4)}),
            Answer({"one": 90}, ended={"one": LENGTH}),
            Plan({"two": 2, "three": 2}, resumed=("two", "three"), finished=("one",)),
        ),
    ),
    scenario(
        "whoever preempts itself leaves its blocks to the others",
        "PRE-01",
        "PRE-02",
        "SCH-07",
        usable_blocks=4,
        priority=True,
        lines=(
            Add("casual", range(7), priority=5),
            Plan({"casual": 7}, new=("casual",), tables={"casual": (1, 2)}),
            Answer({"casual": 90}),
            Add("urgent", range(20, 28)),
            Plan({"casual": 1, "urgent": 8}, new=("urgent",), tables={"urgent": (3, 4)}),
            Answer({"casual": 91, "urgent": 90}),
            Add("late", [70], priority=-1),
            # Block 1 is free, but nobody is admitted in a step that preempts.
            Plan({"urgent": 1}, preempted=("casual",), tables={"urgent": (3, 4, 2)}),
            Answer({"urgent": 91}),
            Plan({"urgent": 1, "late": 1}, new=("late",), tables={"late": (1,)}),
        ),
    ),
    scenario(
        "a victim's tokens of this step go to the others",
        "PRE-02",
        "PRE-03",
        usable_blocks=5,
        block_size=2,
        max_model_len=10,
        budget=3,
        priority=True,
        lines=(
            Add("casual", range(3), priority=5),
            Plan({"casual": 3}, new=("casual",), tables={"casual": (1, 2)}),
            Answer({"casual": 90}),
            Add("urgent", [70]),
            Add("wide", range(20, 25)),
            Plan(
                {"casual": 1, "urgent": 1, "wide": 1},
                new=("urgent", "wide"),
                tables={"casual": (1, 2), "urgent": (3,), "wide": (4,)},
            ),
            Answer({"casual": 91, "urgent": 90}),
            Plan({"casual": 1, "urgent": 1, "wide": 1}, tables={"casual": (1, 2, 5)}),
            Answer({"casual": 92, "urgent": 91}),
            # "casual" and "urgent" would leave one token to "wide"; without "casual" it is two.
            Plan(
                {"urgent": 1, "wide": 2},
                preempted=("casual",),
                tables={"urgent": (3, 5), "wide": (4, 2)},
            ),
        ),
    ),
    scenario(
        "blocks that a victim was to fill in this step are not found later",
        "PRE-03",
        "HSH-09",
        usable_blocks=13,
        block_size=2,
        max_model_len=24,
        threshold=4,
        priority=True,
        lines=(
            Add("casual", range(20), priority=5),
            Plan({"casual": 4}, new=("casual",), tables={"casual": (1, 2)}),
            Answer({}),
            Add("urgent", range(30, 34), max_tokens=4),
            Plan(
                {"casual": 4, "urgent": 4},
                new=("urgent",),
                tables={"casual": (1, 2, 3, 4), "urgent": (5, 6)},
            ),
            Answer({"urgent": 90}),
            Plan({"casual": 4, "urgent": 1}, tables={"urgent": (5, 6, 9)}),
            Answer({"urgent": 91}),
            Plan({"casual": 4, "urgent": 1}, tables={"casual": (1, 2, 3, 4, 7, 8, 10, 11)}),
            Answer({"urgent": 92}),
            # "casual" gets 12 and 13 for its last four tokens, until "urgent" needs a block.
            Plan({"urgent": 1}, preempted=("casual",), tables={"urgent": (5, 6, 9, 12)}),
            Answer({"urgent": 93}, ended={"urgent": LENGTH}),
            Plan(
                {"casual": 4},
                resumed=("casual",),
                finished=("urgent",),
                cached={"casual": 16},
                tables={"casual": (1, 2, 3, 4, 7, 8, 10, 11, 12, 13)},
            ),
        ),
    ),
)
