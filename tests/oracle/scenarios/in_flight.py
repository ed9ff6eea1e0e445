"""What two plans in flight change. Both are unanswered where two Plan lines follow each other."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Abort, Add, Answer, Free, NoPlan, Plan, Usage, scenario

LENGTH: Final = FinishReason.LENGTH_CAPPED
STOPPED: Final = FinishReason.STOPPED

IN_FLIGHT: Final = (
    scenario(
        "nothing is planned beyond the last token",
        "SPD-06",
        in_flight=2,
        lines=(
            Add("one", range(3), max_tokens=2),
            Plan({"one": 3}, new=("one",)),
            Plan({"one": 1}),
            NoPlan(),
            Answer({"one": 90}),
            NoPlan(),
            Answer({"one": 91}, ended={"one": LENGTH}),
            Plan({}, finished=("one",)),
            NoPlan(),
            Answer({}),
            NoPlan(),
        ),
    ),
    scenario(
        "younger requests go on behind one that has all its tokens on the way",
        "SPD-06",
        in_flight=2,
        lines=(
            Add("one", range(3), max_tokens=1),
            Add("two", range(20, 23)),
            Plan({"one": 3, "two": 3}, new=("one", "two")),
            Plan({"two": 1}),
            Answer({"one": 90, "two": 90}, ended={"one": LENGTH}),
            Plan({"two": 1}, finished=("one",)),
        ),
    ),
    scenario(
        "nothing is planned beyond the model's length",
        "SCH-04",
        "SCH-05",
        in_flight=2,
        max_model_len=4,
        lines=(
            Add("one", range(2)),
            Plan({"one": 2}, new=("one",)),
            Plan({"one": 1}),
            Answer({"one": 90}),
            NoPlan(),
            Answer({"one": 91}, ended={"one": LENGTH}),
        ),
    ),
    scenario(
        "resubmitted outputs are no room for more",
        "SPD-06",
        in_flight=2,
        lines=(
            Add("one", range(3), outputs=(90, 91), max_tokens=4),
            Plan({"one": 5}, new=("one",)),
            Plan({"one": 1}),
            Answer({"one": 92}),
            NoPlan(),
            Answer({"one": 93}, ended={"one": LENGTH}),
        ),
    ),
    scenario(
        "a token sampled after the end is dropped",
        "SPD-07",
        "OUT-06",
        in_flight=2,
        eos=(2,),
        lines=(
            Add("one", range(3)),
            Plan({"one": 3}, new=("one",)),
            Plan({"one": 1}),
            Answer({"one": 2}, ended={"one": STOPPED}),
            Free(16),
            Plan({}, finished=("one",)),
            Answer({"one": 91}, dropped=("one",)),
            Answer({}),
            NoPlan(),
        ),
    ),
    scenario(
        "an id used again does not get the tokens of its first life",
        "SPD-07",
        in_flight=2,
        lines=(
            Add("one", range(3)),
            Plan({"one": 3}, new=("one",), tables={"one": (1,)}),
            Abort("one"),
            Add("one", range(20, 22)),
            Plan({"one": 2}, new=("one",), finished=("one",), tables={"one": (1,)}),
            Answer({"one": 90}, dropped=("one",)),
            Answer({"one": 91}),
            Abort("one"),
            Usage("one", 1),
        ),
    ),
    scenario(
        "a token sampled before preemption is delivered and computed on resume",
        "SPD-07",
        "PRE-04",
        usable_blocks=4,
        in_flight=2,
        lines=(
            Add("old", range(7)),
            Add("young", range(20, 28)),
            Plan(
                {"old": 7, "young": 8},
                new=("old", "young"),
                tables={"old": (1, 2), "young": (3, 4)},
            ),
            Plan({"old": 1}, preempted=("young",)),
            Answer({"old": 90, "young": 95}),
            Plan({"old": 1}, tables={"old": (1, 2, 4)}),
            Abort("old"),
            NoPlan(),
            Answer({"old": 91}, dropped=("old",)),
            Plan(
                {"young": 5},
                resumed=("young",),
                finished=("old",),
                cached={"young": 4},
                tables={"young": (3, 4, 2)},
            ),
            Answer({"old": 92}, dropped=("old",)),
            Answer({"young": 96}),
            Plan({"young": 1}),
        ),
    ),
    scenario(
        "a token sampled before preemption may be the last",
        "SPD-07",
        usable_blocks=4,
        in_flight=2,
        lines=(
            Add("old", range(7)),
            Add("young", range(20, 28), stop_ids=(95,)),
            Plan({"old": 7, "young": 8}, new=("old", "young")),
            Plan({"old": 1}, preempted=("young",)),
            Answer({"old": 90, "young": 95}, ended={"young": STOPPED}),
            Usage("young", 1, num_preemptions=1),
            Plan({"old": 1}),
        ),
    ),
)
