"""Drafts through a real worker: whatever they are, the tokens are those without drafts."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import Rewind, SampleMask, SchedulerOutput
from longshore.protocol.requests import PoolingParams
from longshore.protocol.sampling import SamplingParams
from longshore.worker.config import WorkerConfig
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.worker import Worker
from tests.worker.kernels.variants import TRITON, using
from tests.worker.plans import Entry, Planner

NUM_BLOCKS = 500
MAX_DRAFTS = 6
VOCAB_SIZE = 128
WRONG = 2
"""No request samples it: it is forbidden by every setting here."""

NEVER_WRONG = {WRONG: -100.0}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, logit_bias=NEVER_WRONG),
    "drawn": SamplingParams(seed=1, logit_bias=NEVER_WRONG),
    "cut": SamplingParams(seed=2, top_k=20, top_p=0.9, min_p=0.01, logit_bias=NEVER_WRONG),
    "penalties": SamplingParams(
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=1.0,
        logit_bias=NEVER_WRONG,
    ),
    "bad words": SamplingParams(
        temperature=0.0,
        bad_words_token_ids=tuple((i, i + 1) for i in range(60)),
        logit_bias=NEVER_WRONG,
    ),
    "min_tokens": SamplingParams(
        temperature=0.0,
        min_tokens=13,
        stop_token_ids=tuple(range(3, 40)),
        logit_bias=NEVER_WRONG,
    ),
}
ROWS = (0, 2, 3, 6)
OpenRunner = Callable[..., ModelRunner]


@pytest.fixture
def open_runner(checkpoint: tuple[Path, Any]) -> Iterator[OpenRunner]:
    workers = []

    def open_(**settings: Any) -> ModelRunner:
        drafts = f'{{"method": "ngram", "num_speculative_tokens": {MAX_DRAFTS}}}'
        config = WorkerConfig(
            model=str(checkpoint[0]),
            num_blocks=NUM_BLOCKS,
            max_num_seqs=8,
            show_progress=False,
            **{"block_size": 4, "speculative_config": drafts, **settings},
        )
        workers.append(Worker(config))
        return workers[-1].start()

    yield open_
    for worker in workers:
        worker.close()


def planner() -> Planner:
    return Planner(num_blocks=NUM_BLOCKS, block_size=4)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


PROMPTS = {row: prompt_of(5 + 9 * row, row) for row in ROWS}


def begin(runner: ModelRunner, plans: Planner, sampling: SamplingParams) -> dict[int, list[int]]:
    """The first tokens of PROMPTS."""
    entries = [Entry(row, prompt, sampling=sampling) for row, prompt in PROMPTS.items()]
    plan = plans.plan({row: len(prompt) for row, prompt in PROMPTS.items()}, added=entries)
    return plans.verified(runner.execute(plan))


def without_drafts(
    open_runner: OpenRunner, sampling: SamplingParams, num_tokens: int
) -> tuple[dict[int, list[int]], list[ModelRunnerOutput]]:
    runner, plans = open_runner(), planner()
    tokens, outputs = begin(runner, plans, sampling), []
    for _ in range(num_tokens - 1):
        outputs.append(runner.execute(plans.plan()))
        for row, ids in plans.verified(outputs[-1]).items():
            tokens[row] += ids
    return tokens, outputs


def drafts_after(expected: Sequence[int], num_known: int, count: int, num_right: int) -> list[int]:
    """`count` drafts, the first `num_right` of them right."""
    right = list(expected[num_known : num_known + num_right])
    return [*right, *[WRONG] * (count - len(right))]


def with_drafts(
    runner: ModelRunner,
    expected: dict[int, list[int]],
    sampling: SamplingParams,
    chance: random.Random,
) -> tuple[dict[int, list[int]], list[ModelRunnerOutput]]:
    """The same with drafts of any number, of which any number is right, until no row has tokens
    left. In each step some rows have none."""
    plans = planner()
    tokens, outputs = begin(runner, plans, sampling), []
    while min(map(len, tokens.values())) < len(expected[ROWS[0]]):
        drafts = {
            row: drafts_after(expected[row], len(tokens[row]), count, chance.randint(0, count))
            for row in ROWS
            if (count := chance.randint(0, MAX_DRAFTS))
        }
        outputs.append(runner.execute(plans.plan(drafts=drafts)))
        for row, ids in plans.verified(outputs[-1]).items():
            tokens[row] += ids
    return tokens, outputs


@pytest.mark.req("SPD-03")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on_drafts(name: str, seed: int, open_runner: OpenRunner) -> None:
    sampling = SETTINGS[name]
    expected, _ = without_drafts(open_runner, sampling, 40)
    runner = open_runner(poison_kv=True)
    tokens, outputs = with_drafts(runner, expected, sampling, random.Random(seed))
    assert {row: ids[:40] for row, ids in tokens.items()} == expected
    assert len(outputs) < 30  # some drafts were right
    assert sum(len(output.draft_rows) for output in outputs) == 0  # `ngram` finds no repetition


@pytest.mark.slow
def test_the_kernels_of_a_gpu_verify_drafts(open_runner: OpenRunner) -> None:
    """In Triton's interpreter."""
    sampling = SETTINGS["penalties"]
    with using(TRITON):
        expected, _ = without_drafts(open_runner, sampling, 7)
        tokens, _ = with_drafts(open_runner(), expected, sampling, random.Random(0))
    assert {row: ids[:7] for row, ids in tokens.items()} == expected


def test_right_drafts_are_all_accepted_and_wrong_ones_are_not(open_runner: OpenRunner) -> None:
    sampling = SETTINGS["drawn"]
    expected, _ = without_drafts(open_runner, sampling, 20)
    runner, plans = open_runner(), planner()
    tokens = begin(runner, plans, sampling)
    for num_right in (6, 0, 3):
        drafts = {
            row: drafts_after(expected[row], len(tokens[row]), MAX_DRAFTS, num_right)
            for row in ROWS
        }
        output = runner.execute(plans.plan(drafts=drafts))
        assert output.num_sampled.tolist() == [num_right + 1] * len(ROWS)
        for row, ids in plans.verified(output).items():
            tokens[row] += ids
            assert tokens[row] == expected[row][: len(tokens[row])]


def test_log_probabilities_are_those_without_drafts(open_runner: OpenRunner) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=3, logit_bias=NEVER_WRONG)

    def scores(outputs: Sequence[ModelRunnerOutput]) -> dict[tuple[int, int], list[Any]]:
        found = {}
        for output in outputs:
            scored = output.logprobs
            assert scored is not None
            assert len(scored.owners) == len(output.sampled_tokens)
            ends = np.cumsum(scored.num_listed)
            for index, key in enumerate(
                zip(scored.owners.tolist(), scored.positions.tolist(), strict=True)
            ):
                own = slice(ends[index] - scored.num_listed[index], ends[index])
                ids, values = scored.token_ids[own], scored.logprobs[own]
                assert key not in found
                found[key] = [int(scored.ranks[index]), *ids.tolist(), *values.tolist()]
        return found

    expected, outputs = without_drafts(open_runner, sampling, 25)
    _, drafted = with_drafts(open_runner(), expected, sampling, random.Random(0))
    found = scores(drafted)
    for key, score in scores(outputs).items():
        assert found[key] == pytest.approx(score, abs=1e-5)


def test_a_row_may_be_rewound_or_preempted_after_rejected_drafts(open_runner: OpenRunner) -> None:
    sampling = SETTINGS["penalties"]
    expected, _ = without_drafts(open_runner, sampling, 30)
    runner, plans = open_runner(poison_kv=True), planner()
    tokens = begin(runner, plans, sampling)
    drafts = {row: drafts_after(expected[row], 1, 5, 2) for row in ROWS}
    for row, ids in plans.verified(runner.execute(plans.plan(drafts=drafts))).items():
        tokens[row] += ids
    known = len(PROMPTS[2]) + 2  # of its four tokens the last two are discarded
    del tokens[2][2:]
    resumed = Entry(7, PROMPTS[6], tuple(tokens[6]), sampling=sampling)
    plan = plans.plan(
        {2: known - 4, 7: len(PROMPTS[6]) + len(tokens[6])},
        preempted=[6],
        rewound=[Rewind(2, 4, num_known_tokens=known)],
        added=[resumed],
    )
    tokens[7] = tokens.pop(6)
    expected[7] = expected.pop(6)
    for row, ids in plans.verified(runner.execute(plan)).items():
        tokens[row] += ids
    for _ in range(4):
        drafts = {
            row: drafts_after(expected[row], len(tokens[row]), 4, 3) for row in sorted(tokens)
        }
        for row, ids in plans.verified(runner.execute(plans.plan(drafts=drafts))).items():
            tokens[row] += ids
    for row, ids in tokens.items():
        assert ids == expected[row][: len(ids)]
        assert len(ids) > 15


def test_masks_are_given_for_every_position(open_runner: OpenRunner) -> None:
    """Of a row with two drafts there are three masks; the first draft is allowed, the second is
    not."""
    runner, plans = open_runner(), planner()
    entries = [Entry(0, prompt_of(9, 1), has_structured_output=True), Entry(1, prompt_of(5, 2))]

    def mask_of(plan: SchedulerOutput, *allowed: int) -> SampleMask:
        bits = np.zeros((len(allowed), VOCAB_SIZE // 8), np.uint8)
        for place, token_id in enumerate(allowed):
            bits[place, token_id // 8] = 1 << token_id % 8
        rows = int32_array([0] * len(allowed))
        return SampleMask(plan.epoch, plan.step, rows, bits.reshape(-1))

    plan = plans.plan({0: 9, 1: 5}, added=entries)
    assert plans.verified(runner.execute(plan, mask_of(plan, 17)))[0] == [17]
    plan = plans.plan(drafts={0: [30, 31]})
    assert plans.verified(runner.execute(plan, mask_of(plan, 30, 40, 50)))[0] == [30, 40]
    plan = plans.plan()
    assert plans.verified(runner.execute(plan, mask_of(plan, 60)))[0] == [60]


def test_a_pooling_request_may_end_in_a_step_with_drafts(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    runner.execute(plans.plan({3: 6}, added=[Entry(3, prompt_of(6, 0))]))
    pooling = Entry(1, prompt_of(7, 1), pooling=PoolingParams())
    output = runner.execute(plans.plan({1: 7}, added=[pooling], drafts={3: [WRONG, WRONG]}))
    assert output.num_sampled.tolist() == [1, 1]
    assert output.sampled_tokens.tolist()[0] == 0
    assert output.pooled_rows.tolist() == [1]


def refused(plan: SchedulerOutput, **changes: Any) -> SchedulerOutput:
    """The plan after others, with a digest that fits."""
    return msgspec.structs.replace(plan, **changes)


@pytest.mark.parametrize(
    ("rows", "token_ids", "reason"),
    [
        ([0], [1, 2], "ascending order"),
        ([2, 0], [1, 1], "ascending order"),
        ([-1], [1], "ascending order"),
        ([8], [1], "ascending order"),
        ([0], [VOCAB_SIZE], "outside 0..127"),
        ([0], [-1], "outside 0..127"),
        ([0], [1], "which compute"),
        ([0, 0, 0], [1, 1, 1], "which compute"),
        ([5, 5], [1, 1], "which compute"),
    ],
)
def test_impossible_drafts_are_rejected(
    rows: list[int], token_ids: list[int], reason: str, open_runner: OpenRunner
) -> None:
    runner, plans = open_runner(), planner()
    begin(runner, plans, SETTINGS["greedy"])
    plan = plans.plan({0: 3})
    drafts = {"draft_rows": int32_array(rows), "draft_tokens": int32_array(token_ids)}
    with pytest.raises(PlanMismatch, match=reason):
        runner.execute(refused(plan, **drafts))


def test_more_drafts_than_the_worker_takes_are_rejected(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    begin(runner, plans, SETTINGS["greedy"])
    with pytest.raises(PlanMismatch, match="at most 6"):
        runner.execute(plans.plan(drafts={0: [1] * 7}))


def test_the_worker_proposes_what_followed_a_repetition(open_runner: OpenRunner) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}'
    runner, plans = open_runner(speculative_config=config), planner()
    forced = SamplingParams(temperature=0.0, logit_bias={11: 100.0})
    prompt = [9, 10, 11, 20, 21, 22, 23, 9, 10]
    output = runner.execute(plans.plan({1: 9}, added=[Entry(1, prompt, sampling=forced)]))
    assert output.sampled_tokens.tolist() == [11]
    assert output.draft_rows.tolist() == [1, 1, 1]
    assert output.draft_tokens.tolist() == [20, 21, 22]
    plans.verified(output)
    output = runner.execute(plans.plan(drafts={1: [20, 21, 22]}))
    assert plans.verified(output) == {1: [11]}
    assert not len(output.draft_rows)  # 11, 11 has not occurred before
