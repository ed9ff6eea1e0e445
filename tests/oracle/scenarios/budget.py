"""How the tokens of a step are divided."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Add, Answer, NoPlan, Plan, scenario

LENGTH: Final = FinishReason.LENGTH_CAPPED

BUDGET: Final = (
    scenario(
        "running requests draw on the budget first",
        "SCH-02",
        "SCH-03",
        "SCH-08",
        budget=8,
        lines=(
            Add("one", range(10)),
            Add("two", range(20, 30)),
            Plan({"one": 8}, new=("one",)),
            Answer({}),
            Plan({"one": 2, "two": 6}, new=("two",)),
            Answer({"one": 90}),
            Plan({"one": 1, "two": 4}),
        ),
    ),
    scenario(
        "a threshold slices long prompts",
        "SCH-04",
        threshold=3,
        lines=(
            Add("one", range(7)),
            Add("two", range(20, 22)),
            Plan({"one": 3, "two": 2}, new=("one", "two")),
            Answer({"two": 90}),
            Plan({"one": 3, "two": 1}),
            Answer({"two": 91}),
            Plan({"one": 1, "two": 1}),
            Answer({"one": 90, "two": 92}),
        ),
    ),
    scenario(
        "without chunks a prompt waits for a step that holds it",
        "SCH-14",
        budget=16,
        chunked=False,
        lines=(
            Add("one", range(10)),
            Add("two", range(20, 27)),
            Add("three", [70]),
            Plan({"one": 10}, new=("one",)),
            Answer({"one": 90}),
            Plan({"one": 1, "two": 7, "three": 1}, new=("two", "three")),
        ),
    ),
    scenario(
        "no more requests run than rows exist",
        "SCH-08",
        max_num_seqs=1,
        lines=(
            Add("one", range(3), max_tokens=1),
            Add("two", range(3), max_tokens=1),
            Plan({"one": 3}, new=("one",)),
            Answer({"one": 90}, ended={"one": LENGTH}),
            Plan({"two": 3}, new=("two",), finished=("one",)),
            Answer({"two": 90}, ended={"two": LENGTH}),
            Plan({}, finished=("two",)),
            Answer({}),
            NoPlan(),
        ),
    ),
)
