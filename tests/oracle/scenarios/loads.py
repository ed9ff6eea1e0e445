"""What a connector brings, in the background or before the step, and what if it does not."""

from typing import Final

from longshore.connectors.base import AskLater, Matched
from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Abort, Add, Answer, Free, Loads, NoPlan, Plan, Received, scenario

LOADS: Final = (
    scenario(
        "a load in the background is waited for by its request alone",
        "CON-05",
        "CON-11",
        "SCH-13",
        feature="connector",
        num_ranks=2,
        offers={"one": (Matched(8, is_async=True),)},
        lines=(
            Add("one", range(8)),
            Add("two", range(20, 23)),
            Plan({"two": 3}, new=("two",), tables={"two": (3,)}),
            Loads((("one", (1, 2), 8),)),
            Received(("one",)),
            Received(("one",)),  # the same rank again
            Answer({"two": 90}),
            Plan({"two": 1}),
            Received(("one", "nobody"), rank=1),
            Answer({"two": 91}),
            # Everything is there; the last token is computed to sample from.
            Plan({"two": 1, "one": 1}, new=("one",), cached={"one": 7}, tables={"one": (1, 2)}),
        ),
    ),
    scenario(
        "what comes behind a block that failed is computed",
        "MET-07",
        feature="connector",
        offers={"one": (Matched(11, is_async=True),)},
        lines=(
            Add("one", range(13)),
            Plan({}),
            Loads((("one", (1, 2, 3), 11),)),
            Answer({}),
            Received(("one",), failed=(2,)),
            Plan({"one": 9}, new=("one",), cached={"one": 4}, tables={"one": (1, 2, 3, 4)}),
        ),
    ),
    scenario(
        "blocks of an abandoned load are free when it has ended",
        "MET-08",
        feature="connector",
        offers={"one": (Matched(8, is_async=True),)},
        lines=(
            Add("one", range(9)),
            Plan({}),
            Loads((("one", (1, 2, 3), 8),)),
            Abort("one"),
            Free(13),
            Received(("one",)),
            Free(16),
            Received(("one",)),
        ),
    ),
    scenario(
        "a load takes no block that an unanswered step names",
        "CON-05",
        feature="connector",
        usable_blocks=4,
        in_flight=2,
        offers={"one": (Matched(8, is_async=True),)},
        lines=(
            Add("zero", range(20, 29)),
            Plan({"zero": 9}, new=("zero",), tables={"zero": (1, 2, 3)}),
            Abort("zero"),
            Add("one", range(8)),
            Plan({}, finished=("zero",)),  # four blocks are free, but only 4 may be written
            Loads(()),
            Answer({"zero": 90}, dropped=("zero",)),
            Plan({}),
            Loads((("one", (3, 4), 8),)),
        ),
    ),
    scenario(
        "whoever is asked later is set aside meanwhile",
        "CON-04",
        "QUE-05",
        feature="connector",
        offers={"one": (AskLater(), Matched(4))},
        lines=(
            Add("one", range(6)),
            Add("two", range(20, 23)),
            Plan({"two": 3}, new=("two",), tables={"two": (1,)}),
            Loads(()),
            Answer({"two": 90}),
            Plan({"two": 1, "one": 2}, new=("one",), cached={"one": 4}, tables={"one": (2, 3)}),
            Loads((("one", (2, 3), 4),)),
        ),
    ),
    scenario(
        "a load before the step that fails sends back all who relied on it",
        "MET-05",
        "MET-06",
        feature="rewind",
        in_flight=2,
        offers={"one": (Matched(8),)},
        lines=(
            Add("one", range(10)),
            Add("two", range(10)),
            Plan(
                {"one": 2, "two": 2},
                new=("one", "two"),
                cached={"one": 8, "two": 8},
                tables={"one": (1, 2, 3), "two": (1, 2, 4)},
            ),
            Plan({"one": 1, "two": 1}),
            Answer({"one": 70, "two": 70}, dropped=("one", "two"), failed=(2,)),
            Plan({"one": 6, "two": 6}, rewound=(("one", 4), ("two", 4))),
            Answer({"one": 71, "two": 71}, dropped=("one", "two")),
            Answer({"one": 90, "two": 90}),
        ),
    ),
    scenario(
        "a load that fails ends its request if it is to",
        "MET-05",
        feature="connector",
        load_failure_policy="fail",
        offers={"one": (Matched(8, is_async=True),)},
        lines=(
            Add("one", range(9)),
            Plan({}),
            Answer({}),
            Received(("one",), failed=(2,), ended={"one": FinishReason.ERROR}),
            Free(16),
            NoPlan(),
        ),
    ),
)
