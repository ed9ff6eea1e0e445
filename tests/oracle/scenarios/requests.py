"""In which order requests start, and how they end."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from tests.oracle.script import Abort, Add, Answer, Free, NoPlan, Plan, StopAt, Usage, scenario

ERROR: Final = FinishReason.ERROR
IGNORED: Final = FinishReason.IGNORED
LENGTH: Final = FinishReason.LENGTH_CAPPED
STOPPED: Final = FinishReason.STOPPED

REQUESTS: Final = (
    scenario(
        "first come first served looks at nothing else",
        "QUE-02",
        max_num_seqs=1,
        lines=(
            Add("b", [70], max_tokens=1, priority=1),
            Add("c", [71], max_tokens=1, age_s=9.0),
            Add("a", [72], max_tokens=1, priority=-1),
            Plan({"b": 1}, new=("b",)),
            Answer({"b": 90}, ended={"b": LENGTH}),
            Plan({"c": 1}, new=("c",), finished=("b",)),
            Answer({"c": 90}, ended={"c": LENGTH}),
            Plan({"a": 1}, new=("a",), finished=("c",)),
        ),
    ),
    scenario(
        "urgency is priority, then arrival, then id",
        "QUE-03",
        "REQ-11",
        max_num_seqs=1,
        priority=True,
        lines=(
            Add("casual", [70], max_tokens=1, priority=1, age_s=100.0),
            Add("b", [71], max_tokens=1),
            Add("a", [72], max_tokens=1),
            Add("old", [73], max_tokens=1, age_s=5.0),
            Add("urgent", [74], max_tokens=1, priority=-1),
            Plan({"urgent": 1}, new=("urgent",)),
            Answer({"urgent": 90}, ended={"urgent": LENGTH}),
            Plan({"old": 1}, new=("old",), finished=("urgent",)),
            Answer({"old": 90}, ended={"old": LENGTH}),
            Plan({"a": 1}, new=("a",), finished=("old",)),
            Answer({"a": 90}, ended={"a": LENGTH}),
            Plan({"b": 1}, new=("b",), finished=("a",)),
            Answer({"b": 90}, ended={"b": LENGTH}),
            Plan({"casual": 1}, new=("casual",), finished=("b",)),
        ),
    ),
    scenario(
        "what cannot run is answered on the spot",
        "REQ-10",
        lines=(
            Add("empty", [], refused=ERROR),
            Add("long", range(16), refused=IGNORED),
            Add("long with outputs", range(10), outputs=range(6), refused=IGNORED),
            Add("has all tokens", [70], outputs=(90,), max_tokens=1, refused=LENGTH),
            NoPlan(),
            Add("one", range(15)),
            Add("one", [70], refused=ERROR),
            Add("two", [70], handle=0, refused=ERROR),
            Plan({"one": 15}, new=("one",)),
            Answer({"one": 90}, ended={"one": LENGTH}),
        ),
    ),
    scenario(
        "stop ids count from min_tokens, and win over length",
        "SCH-23",
        eos=(2,),
        lines=(
            Add("early", [70], min_tokens=2, stop_ids=(5,)),
            Add("ignores", [71], stop_ids=(5,), ignore_eos=True),
            Add("eos", [72], max_tokens=1),
            Plan({"early": 1, "ignores": 1, "eos": 1}, new=("early", "ignores", "eos")),
            Answer({"early": 5, "ignores": 2, "eos": 2}, ended={"eos": STOPPED}),
            Plan({"early": 1, "ignores": 1}, finished=("eos",)),
            Answer({"early": 2, "ignores": 5}, ended={"early": STOPPED, "ignores": STOPPED}),
            Usage("early", 2),
        ),
    ),
    scenario(
        "limits count the outputs that a resubmitted request brings",
        "SCH-06",
        lines=(
            Add("one", range(3), outputs=(90, 91), max_tokens=4),
            Plan({"one": 5}, new=("one",)),
            Answer({"one": 92}),
            Plan({"one": 1}),
            Answer({"one": 93}, ended={"one": LENGTH}),
            Usage("one", 4),
        ),
    ),
    scenario(
        "a waiting request is aborted without a trace",
        "SCH-22",
        lines=(Add("one", [70]), Abort("one"), NoPlan(), Usage("one", 0)),
    ),
    scenario(
        "a stop string cuts the output",
        "REQ-10",
        lines=(
            Add("one", [70]),
            Plan({"one": 1}, new=("one",)),
            Answer({"one": 90}),
            Plan({"one": 1}),
            Answer({"one": 91}),
            StopAt("one", 1),
            Usage("one", 1),
            Free(16),
            Plan({}, finished=("one",)),
        ),
    ),
)
