"""Who has to wait although blocks are free, and how much of the work is done."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from longshore.scheduler.step.planner import PauseState
from tests.oracle.script import Abort, Add, Answer, Free, NoPlan, Plan, SetPause, scenario

LENGTH: Final = FinishReason.LENGTH_CAPPED

GATES: Final = (
    scenario(
        "the watermark is kept from admission, not from who runs",
        "WMK-01",
        "WMK-02",
        feature="gates",
        usable_blocks=9,
        watermark=0.2,  # int(10 * 0.2) = 2 blocks
        lines=(
            Add("one", range(8)),
            Add("two", range(20, 32)),
            Add("three", range(40, 49)),
            # 2 blocks, then 3: 4 are free. The third would leave 1.
            Plan({"one": 8, "two": 12}, new=("one", "two")),
            Free(4),
            Answer({"one": 90, "two": 90}),
            Plan({"one": 1, "two": 1}),
            Free(2),
            Abort("two"),
            # 6 are free and 3 are needed.
            Answer({"one": 91, "two": 91}, dropped=("two",)),
            Plan({"one": 1, "three": 9}, new=("three",), finished=("two",)),
            Free(3),
        ),
    ),
    scenario(
        "with nobody running the watermark is no hindrance",
        "WMK-02",
        feature="gates",
        usable_blocks=4,
        watermark=0.5,
        lines=(Add("one", range(15)), Plan({"one": 15}, new=("one",)), Free(0)),
    ),
    scenario(
        "pressure closes the gate until it has fallen below the lower threshold",
        "WMK-03",
        feature="gates",
        usable_blocks=10,
        preempt_threshold=0.7,
        admit_threshold=0.4,
        lines=(
            Add("a", range(12), max_tokens=1),
            Add("b", range(20, 32), max_tokens=1),
            Add("c", range(40, 48), max_tokens=2),
            Add("d", [70]),
            # Held before each attempt: 0, 3, 6 and 8 of 10; 0.8 is over 0.7.
            Plan({"a": 12, "b": 12, "c": 8}, new=("a", "b", "c")),
            Answer({"a": 90, "b": 90, "c": 90}, ended={"a": LENGTH, "b": LENGTH}),
            # "c" holds 3: 0.3 is below 0.4.
            Plan({"c": 1, "d": 1}, new=("d",), finished=("a", "b")),
        ),
    ),
    scenario(
        "between the thresholds the gate stays as it is",
        "WMK-03",
        feature="gates",
        usable_blocks=10,
        preempt_threshold=0.7,
        admit_threshold=0.4,
        lines=(
            Add("a", range(12), max_tokens=1),
            Add("b", range(20, 32), max_tokens=4),
            Add("c", range(40, 48), max_tokens=2),
            Add("d", [70]),
            Plan({"a": 12, "b": 12, "c": 8}, new=("a", "b", "c")),
            Answer({"a": 90, "b": 90, "c": 90}, ended={"a": LENGTH}),
            # "b" holds 4 and "c" 3: 0.7 opens nothing.
            Plan({"b": 1, "c": 1}, finished=("a",)),
            Answer({"b": 91, "c": 91}, ended={"c": LENGTH}),
            # 0.4 is not below 0.4.
            Plan({"b": 1}, finished=("c",)),
            Answer({"b": 92}),
            Abort("b"),
            # Nobody runs.
            Plan({"d": 1}, new=("d",), finished=("b",)),
        ),
    ),
    scenario(
        "a chunk is admitted only where the whole input fits",
        "SCH-15",
        feature="gates",
        usable_blocks=5,
        threshold=4,
        scheduler_reserve_full_isl=True,
        lines=(
            Add("one", range(8), max_tokens=2),
            Add("two", range(20, 33)),
            Add("three", [70]),
            # "one" has 1 of its 2 blocks; 4 are free, which is what "two" needs.
            Plan({"one": 4, "two": 4, "three": 1}, new=("one", "two", "three")),
        ),
    ),
    scenario(
        "a chunk that fits is not enough",
        "SCH-15",
        feature="gates",
        usable_blocks=4,
        threshold=4,
        scheduler_reserve_full_isl=True,
        lines=(
            Add("one", range(8), max_tokens=2),
            Add("two", range(20, 35)),
            Add("three", [70]),
            # 3 are free and "two" needs 4 in the end; "three" waits behind it.
            Plan({"one": 4}, new=("one",)),
            Answer({}),
            Plan({"one": 4}),
            Answer({"one": 90}),
            Plan({"one": 1}),
            Answer({"one": 91}, ended={"one": LENGTH}),
            Plan({"two": 4, "three": 1}, new=("two", "three"), finished=("one",)),
        ),
    ),
    scenario(
        "a pause admits nobody, or does nothing at all",
        "SCH-07",
        "SCH-20",
        feature="pause",
        lines=(
            Add("one", range(3)),
            Plan({"one": 3}, new=("one",)),
            Answer({"one": 90}),
            Add("two", range(20, 23)),
            SetPause(PauseState.PAUSED_NEW),
            Plan({"one": 1}),
            Answer({"one": 91}),
            SetPause(PauseState.PAUSED_ALL),
            NoPlan(),
            Abort("one"),
            Plan({}, finished=("one",)),
            Answer({}),
            NoPlan(),
            SetPause(PauseState.UNPAUSED),
            Plan({"two": 3}, new=("two",)),
        ),
    ),
)
