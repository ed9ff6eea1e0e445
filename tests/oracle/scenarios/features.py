"""Drafts, adapters, multimodal items, vectors, sessions, repetition, jobs and epochs."""

from typing import Final

from longshore.protocol.outputs import FinishReason
from longshore.protocol.sampling import RepetitionDetection
from tests.oracle.script import (
    Abort,
    Add,
    Answer,
    Chunk,
    Free,
    NewEpoch,
    NoPlan,
    Plan,
    Usage,
    scenario,
)

LENGTH: Final = FinishReason.LENGTH_CAPPED
STOPPED: Final = FinishReason.STOPPED

DRAFTS: Final = (
    scenario(
        "three drafts of which one is right take two computed tokens back",
        "SPD-02",
        "SPD-03",
        "NUM-14",
        feature="drafts",
        num_speculative_tokens=3,
        lines=(
            Add("one", range(4)),
            Plan({"one": 4}, new=("one",)),
            Answer({"one": 90}, drafts={"one": (91, 92, 93, 94)}),  # one too many
            Plan({"one": 4}, drafts={"one": (91, 92, 93)}, tables={"one": (1, 2)}),
            Answer({"one": (91, 80)}, drafts={"one": (81,)}),
            # Six are computed, seven known: the last one and the draft fill the second block.
            Plan({"one": 2}, drafts={"one": (81,)}, tables={"one": (1, 2)}),
            Answer({"one": (81, 82)}),
            Plan({"one": 1}, drafts={"one": ()}, tables={"one": (1, 2, 3)}),
        ),
    ),
    scenario(
        "drafts are trimmed to the budget and to the last token",
        "SPD-02",
        feature="drafts",
        num_speculative_tokens=3,
        budget=4,
        lines=(
            Add("one", range(3), max_tokens=4),
            Plan({"one": 3}, new=("one",)),
            Answer({"one": 90}, drafts={"one": (91, 92, 93)}),
            Add("two", [70]),
            # Three outputs are missing, so two drafts can be of use.
            Plan({"one": 3, "two": 1}, new=("two",), drafts={"one": (91, 92)}),
            Answer({"one": (91, 92, 93), "two": 90}, ended={"one": LENGTH}),
        ),
    ),
    scenario(
        "accepted tokens behind a stop are dropped",
        "SPD-03",
        "SCH-23",
        feature="drafts",
        num_speculative_tokens=2,
        lines=(
            Add("one", range(3), stop_ids=(91,)),
            Plan({"one": 3}, new=("one",)),
            Answer({"one": 90}, drafts={"one": (91, 92)}),
            Plan({"one": 3}, drafts={"one": (91, 92)}),
            Answer({"one": (91, 92, 93)}, told={"one": 1}, ended={"one": STOPPED}),
            Usage("one", 2),
        ),
    ),
    scenario(
        "with two steps in flight drafts have no ids and are counted as right until answered",
        "SPD-03",
        "SPD-06",
        feature="drafts",
        in_flight=2,
        num_speculative_tokens=2,
        lines=(
            Add("one", range(4)),
            Plan({"one": 4}, new=("one",), tables={"one": (1,)}),
            Plan({"one": 3}, drafts={"one": (-1, -1)}, tables={"one": (1, 2)}),
            Answer({"one": 90}),
            # Computed as planned: 7. Known and on the way: 8, and two drafts more.
            Plan({"one": 3}, drafts={"one": (-1, -1)}, tables={"one": (1, 2, 3)}),
            Answer({"one": 91}),
            # Both drafts were wrong: 10 - 2 are computed, 6 are known, 3 on the way.
            Plan({"one": 3}, drafts={"one": (-1, -1)}, tables={"one": (1, 2, 3)}),
        ),
    ),
    scenario(
        "slots for what a drafter writes are part of what is taken",
        "SPD-01",
        "KVM-06",
        feature="drafts",
        num_speculative_tokens=1,
        num_lookahead_tokens=2,
        max_model_len=8,
        lines=(
            Add("one", range(3)),
            Plan({"one": 3}, new=("one",), tables={"one": (1, 2)}),
            Answer({"one": 90}),
            Plan({"one": 1}, tables={"one": (1, 2)}),
            Answer({"one": 91}),
            Plan({"one": 1}, tables={"one": (1, 2)}),  # 7 slots, and none beyond the model's 8
        ),
    ),
)

OTHERS: Final = (
    scenario(
        "a new adapter beyond the limit is set aside, a known one is not",
        "FEA-02",
        "QUE-05",
        feature="lora",
        max_loras=1,
        lines=(
            Add("one", range(3), lora="red"),
            Add("two", range(3), lora="blue"),
            Add("three", range(20, 23), lora="red"),
            Add("four", range(40, 43)),
            Plan({"one": 3, "three": 3, "four": 3}, new=("one", "three", "four")),
            Answer({"one": 90, "three": 90, "four": 90}),
            Abort("one"),
            Plan({"three": 1, "four": 1}, finished=("one",)),
            Answer({"three": 91, "four": 91}),
            Abort("three"),
            Plan({"four": 1, "two": 3}, new=("two",), finished=("three",)),
        ),
    ),
    scenario(
        "a chunk ends before an item that the encoder has no room for",
        "FEA-03",
        feature="encoder",
        max_num_encoder_input_tokens=4,
        encoder_cache_size=6,
        lines=(
            Add("one", range(14), items=(("a", 1, 3), ("b", 6, 2), ("c", 10, 4))),
            # "a" leaves a budget of 1.
            Plan({"one": 6}, new=("one",), encoder_inputs=(("one", 0),)),
            Answer({}),
            # "b" leaves 2; "a" is computed, its output stays while there is room.
            Plan({"one": 4}, encoder_inputs=(("one", 1),)),
            Answer({}),
            # 5 of 6 are taken by what nobody needs any more; the oldest goes.
            Plan({"one": 4}, encoder_inputs=(("one", 2),), freed_hashes=("a",)),
            Answer({"one": 90}),
            Add("two", range(40, 46), items=(("c", 1, 4),)),
            Plan({"one": 1, "two": 6}, new=("two",)),  # "c" is there still
        ),
    ),
    scenario(
        "an item too large for the encoder is refused",
        "FEA-03",
        feature="encoder",
        max_num_encoder_input_tokens=4,
        encoder_cache_size=3,
        lines=(
            Add("one", range(8), items=(("a", 1, 4),), refused=FinishReason.ERROR),
            Add("two", range(8), items=(("b", 1, 3),)),
            Plan({"two": 8}, new=("two",), encoder_inputs=(("two", 0),)),
        ),
    ),
    scenario(
        "a request for a vector computes its prompt and ends",
        "FEA-04",
        feature="pooling",
        in_flight=2,
        budget=4,
        lines=(
            Add("one", range(6), is_pooling=True),
            Plan({"one": 4}, new=("one",)),
            Plan({"one": 2}),
            Answer({}),
            NoPlan(),
            Answer({"one": ()}, pooled={"one": (0.5,)}, ended={"one": STOPPED}),
            Usage("one", 0),
        ),
    ),
    scenario(
        "a session goes on behind its output",
        "FEA-05",
        "REQ-07",
        feature="session",
        lines=(
            Add("one", range(4), max_tokens=1, resumable=True),
            Plan({"one": 4}, new=("one",)),
            Answer({"one": 90}, ended={"one": LENGTH}),
            Free(16),
            Plan({}, finished=("one",)),
            Answer({}),
            NoPlan(),
            Chunk("one", [5, 6], max_tokens=2, is_last=True),
            Plan({"one": 3}, new=("one",), cached={"one": 4}, tables={"one": (1, 2)}),
            Answer({"one": 91}),
            Plan({"one": 1}),
            Answer({"one": 92}, ended={"one": LENGTH}),
            Usage("one", 2, num_cached_tokens=4),
        ),
    ),
    scenario(
        "an output that goes round in circles ends",
        "REQ-10",
        feature="repetition",
        lines=(
            Add("one", range(3), repetition=RepetitionDetection(2, 2, 2)),
            Plan({"one": 3}, new=("one",)),
            Answer({"one": 90}),
            Plan({"one": 1}),
            Answer({"one": 91}),
            Plan({"one": 1}),
            Answer({"one": 90}),
            Plan({"one": 1}),
            Answer({"one": 91}, ended={"one": FinishReason.REPETITION}),
            Usage("one", 4),
        ),
    ),
    scenario(
        "a later turn of an older job goes first",
        "CTM-01",
        "QUE-07",
        feature="continuum",
        policy="continuum",
        max_num_seqs=1,
        lines=(
            Add("old", range(3), age_s=9.0, job_id="job"),
            Plan({"old": 3}, new=("old",)),
            Add("other", range(20, 23), age_s=5.0),
            Add("turn", range(40, 43), job_id="job"),
            Answer({"old": 90}),
            Abort("old"),
            Plan({"turn": 3}, new=("turn",), finished=("old",)),
        ),
    ),
    scenario(
        "a new epoch computes everything anew, in the order of admission",
        "QUE-06",
        feature="epoch",
        in_flight=2,
        lines=(
            Add("one", range(4)),
            Add("two", range(20, 24)),
            Plan({"one": 4, "two": 4}, new=("one", "two"), tables={"one": (1,), "two": (2,)}),
            Plan({"one": 1, "two": 1}),
            Answer({"one": 90, "two": 95}),
            Add("three", range(4)),
            NewEpoch(2),
            Free(16),
            Plan(
                {"one": 5, "two": 5, "three": 4},
                new=("three",),
                resumed=("one", "two"),
                cached={"one": 0, "two": 0},
                tables={"one": (1, 2), "two": (3, 4)},
            ),
            Answer({"one": 91, "two": 96, "three": 90}),
        ),
    ),
)
