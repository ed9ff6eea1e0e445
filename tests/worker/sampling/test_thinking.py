"""Thinking budgets: where the end of the reasoning is forced, and where it is not."""

import msgspec
import pytest

from longshore.protocol.sampling import SamplingParams, ThinkingBudget
from tests.worker.sampling.test_sampling_settings import Bench, Run, alone

GREEDY = SamplingParams(temperature=0)
PROMPT = [1, 2]
FREE = alone(GREEDY, PROMPT, 14).outputs
UNUSED = next(token_id for token_id in range(64) if token_id not in (*FREE, *PROMPT))
END = (UNUSED, FREE[3])


def budget(
    num_tokens: int,
    *,
    begin: tuple[int, ...] = (2,),
    mark: tuple[int, ...] = (UNUSED,),
    base: SamplingParams = GREEDY,
) -> SamplingParams:
    return msgspec.structs.replace(base, thinking=ThinkingBudget(num_tokens, begin, END, mark))


def outputs(sampling: SamplingParams, prompt: list[int] = PROMPT) -> list[int]:
    bench, run = Bench(), Run(prompt, sampling)
    bench.step({0: run})
    while len(run.outputs) < 14:
        bench.step()
    return run.outputs


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 12])
def test_reasoning_that_the_prompt_opened_ends_at_the_budget(num_tokens: int) -> None:
    given = outputs(budget(num_tokens))
    assert given[:num_tokens] == FREE[:num_tokens]
    assert tuple(given[num_tokens : num_tokens + 2]) == END
    # The model goes on by itself: it is a bigram model, so as from the last token.
    after = given[num_tokens + 2 :]
    assert after == alone(GREEDY, [END[-1]], 14).outputs[: len(after)]


def test_reasoning_that_the_output_opens_is_counted_from_there() -> None:
    for begin in (tuple(FREE[:1]), tuple(FREE[:2])):
        given = outputs(budget(4, begin=begin))
        place = len(begin) + 4
        assert given[:place] == FREE[:place]
        assert tuple(given[place : place + 2]) == END


@pytest.mark.parametrize(
    "sampling",
    [
        budget(4, begin=(UNUSED,)),
        budget(4, begin=(FREE[1],)),
        budget(4, mark=(FREE[2],)),
        budget(5, mark=tuple(FREE[2:5])),
        budget(2000),
    ],
    ids=["never begun", "begun late", "ended", "ended by several tokens", "far off"],
)
def test_nothing_is_forced_without_reasoning_at_the_budget(sampling: SamplingParams) -> None:
    assert outputs(sampling) == FREE


def test_an_end_after_the_budget_or_a_part_of_it_is_none_before() -> None:
    assert outputs(budget(2, mark=(FREE[2],)))[2:4] == list(END)
    assert outputs(budget(4, mark=tuple(FREE[2:5])))[4:6] == list(END)


def test_a_prompt_may_have_white_space_after_its_opening_and_may_close_it() -> None:
    mark = (UNUSED,)
    assert tuple(outputs(budget(3, begin=(9,), mark=mark), [9, 1, 2])[3:5]) == END
    assert outputs(budget(3, begin=(9,), mark=mark), [9, UNUSED, 1, 2]) == FREE
    assert outputs(budget(3, begin=(9,), mark=mark), [9, 1, 1, 1, 1, 2]) == FREE


def test_no_other_setting_prevents_the_end_and_others_in_the_step_are_free() -> None:
    hindered = msgspec.structs.replace(
        GREEDY,
        logit_bias={UNUSED: -100.0},
        bad_words_token_ids=((UNUSED,),),
        repetition_penalty=2.0,
        temperature=1.0,
        seed=3,
    )
    bench = Bench()
    rows = {
        0: Run(PROMPT, GREEDY),
        1: Run(PROMPT, budget(4, base=hindered)),
        2: Run(PROMPT, budget(6)),
    }
    bench.step(rows)
    while len(rows[0].outputs) < 14:
        bench.step()
    assert rows[0].outputs == FREE
    assert tuple(rows[1].outputs[4:6]) == END
    assert tuple(rows[2].outputs[6:8]) == END


def test_a_preempted_row_ends_its_reasoning_at_the_same_place() -> None:
    for num_before in (3, 4, 5):
        whole = outputs(budget(4))
        bench, run = Bench(), Run(PROMPT, budget(4), outputs=whole[:num_before])
        bench.step({0: run})
        while len(run.outputs) < 10:
            bench.step()
        assert run.outputs == whole[:10]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_tokens": -1}, "thinking_token_budget=-1"),
        ({"begin_token_ids": ()}, "begin_token_ids"),
        ({"end_token_ids": (-1,)}, "end_token_ids"),
        ({"mark_token_ids": (1,) * 33}, "mark_token_ids"),
    ],
)
def test_a_budget_that_cannot_be_is_rejected(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        msgspec.structs.replace(ThinkingBudget(1, (1,), (2,), (3,)), **change)
