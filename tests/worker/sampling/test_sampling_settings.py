"""Every sampling setting, through the runner, against the definitions: in any batch, with any
chunks, and across preemptions."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.protocol.errors import PlanMismatch
from longshore.protocol.outputs import ModelRunnerOutput, TokenLogprobs
from longshore.protocol.plan import Rewind
from longshore.protocol.sampling import SamplingParams
from longshore.worker.sampling import logprobs, penalties
from longshore.worker.sampling.logit_edits import RowEdits
from tests.worker import reference_sampler
from tests.worker.bigram import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    as_numpy,
    bigram_runner,
    bigram_table,
)
from tests.worker.kernels.variants import in_triton
from tests.worker.plans import Entry, Planner

VOCAB_SIZE = 24
EOS = (3, 5)
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(seed=4)

token_ids = st.integers(0, VOCAB_SIZE - 1)
any_sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.8]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.8, 0.97]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    min_tokens=st.sampled_from([0, 0, 2, 6]),
    stop_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.9, -0.3]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=3),
    bad_words_token_ids=st.lists(
        st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=4
    ).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)


@dataclass
class Run:
    """One request and its results by position."""

    prompt: list[int]
    sampling: SamplingParams
    outputs: list[int] = field(default_factory=list)
    scores: dict[int, tuple[int, list[int], list[float]]] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.outputs


class Bench:
    """A runner on a bigram table and the requests on its rows."""

    def __init__(self, seed: int = 0) -> None:
        self.table = bigram_table(VOCAB_SIZE, seed)
        self.runner = bigram_runner(self.table, eos_token_ids=EOS)
        self.plans = Planner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.runs: dict[int, Run] = {}
        self.last: ModelRunnerOutput | None = None

    def step(
        self, added: dict[int, Run] | None = None, *, chunk: int = 512, dropped: Sequence[int] = ()
    ) -> None:
        """One step of all rows: prompts in chunks, then one token each."""
        for row in dropped:
            del self.runs[row]
        entries = [
            Entry(row, run.prompt, tuple(run.outputs), run.sampling)
            for row, run in (added or {}).items()
        ]
        self.runs.update(added or {})
        left = {
            row: len(run.token_ids) - (0 if row in (added or {}) else self._num_computed(row))
            for row, run in self.runs.items()
        }
        scheduled = {row: min(chunk, count) for row, count in left.items() if count > 0}
        output = self.runner.execute(self.plans.plan(scheduled, added=entries, finished=dropped))
        self.last = output
        for row, token_id in self.plans.tokens_of(output).items():
            self.runs[row].outputs.append(token_id)
        for row, position, rank, ids, values in entries_of(output.logprobs):
            self.runs[row].scores[position] = (rank, ids, values)

    def _num_computed(self, row: int) -> int:
        return int(self.plans.rows.num_computed[row])

    def check(self, run: Run) -> None:
        """Tokens and scores are those of the definitions."""
        table, prompt, sampling = as_numpy(self.table), run.prompt, run.sampling
        wanted = reference_sampler.generate(table, prompt, sampling, len(run.outputs), EOS)
        assert run.outputs == wanted
        positions: dict[int, int] = {}
        if sampling.prompt_logprobs is not None:
            positions |= dict.fromkeys(range(1, len(prompt)), sampling.prompt_logprobs)
        if sampling.logprobs is not None:
            positions |= dict.fromkeys(range(len(prompt), len(run.token_ids)), sampling.logprobs)
        assert run.scores.keys() == positions.keys()
        for position, num_best in positions.items():
            logits = table[run.token_ids[position - 1]]
            check_score(logits, run.token_ids[position], num_best, run.scores[position])


def entries_of(
    scored: TokenLogprobs | None,
) -> list[tuple[int, int, int, list[int], list[float]]]:
    """Owner, position, rank, ids and log probabilities; checks that the columns fit."""
    if scored is None:
        return []
    entries, start = [], 0
    columns = (scored.owners, scored.positions, scored.ranks, scored.num_listed)
    for owner, position, rank, count in zip(*(c.tolist() for c in columns), strict=True):
        place = slice(start, start + count)
        entries.append(
            (owner, position, rank, scored.token_ids[place].tolist(), scored.logprobs[place])
        )
        start += count
    assert start == len(scored.token_ids) == len(scored.logprobs)
    by_owner = [(owner, position) for owner, position, *_ in entries]
    for owner in {owner for owner, _ in by_owner}:
        positions = [position for each, position in by_owner if each == owner]
        assert positions == sorted(set(positions))
    return [(o, p, r, ids, values.tolist()) for o, p, r, ids, values in entries]


def check_score(
    logits: reference_sampler.Float32s,
    token_id: int,
    num_best: int,
    score: tuple[int, list[int], list[float]],
) -> None:
    rank, ids, values = score
    assert ids[0] == token_id
    assert ids[1:] == np.argsort(-logits, kind="stable")[:num_best].tolist()
    assert rank == reference_sampler.rank(logits, token_id)
    wanted = [reference_sampler.log_probability(logits, each) for each in ids]
    assert values == pytest.approx(wanted, abs=2e-5)


@settings(max_examples=75)
@given(
    st.lists(any_sampling, min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 512]),
)
def test_every_setting_follows_its_definition_in_any_batch(
    samplings: list[SamplingParams], seed: int, chunk: int
) -> None:
    choose = random.Random(seed)
    bench = Bench(seed % 7)
    rows = choose.sample(range(8), len(samplings))
    runs = [
        Run(choose.choices(range(VOCAB_SIZE), k=choose.randint(1, 9)), sampling)
        for sampling in samplings
    ]
    waiting = dict(zip(rows, runs, strict=True))
    for _ in range(18):
        dropped: list[int] = []
        added = {row: waiting.pop(row) for row in list(waiting) if choose.random() < 0.5}
        if not added and bench.runs and choose.random() < 0.2:
            dropped = [choose.choice(list(bench.runs))]
            waiting[dropped[0]] = bench.runs[dropped[0]]  # it comes back: it was preempted
        bench.step(added, chunk=chunk, dropped=dropped)
    while not all(
        run.outputs for run in runs
    ):  # a prompt that was preempted late is not scored yet
        bench.step(waiting, chunk=chunk)
        waiting = {}
    for run in runs:
        bench.check(run)


def test_the_kernels_of_a_gpu_follow_the_definitions() -> None:
    bench = Bench()
    settings_of_rows: list[dict[str, Any]] = [
        {"temperature": 0.7, "logprobs": 3},
        {"top_k": 5, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": -0.3},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
        {"min_p": 0.05, "bad_words_token_ids": ((1, 2), (3,)), "prompt_logprobs": 1},
    ]
    runs = {
        row: Run([row, 1, row], SamplingParams(seed=row, **each))
        for row, each in enumerate(settings_of_rows)
    }
    with in_triton():
        bench.step(runs)
        for _ in range(3):
            bench.step()
    for run in runs.values():
        bench.check(run)


def alone(sampling: SamplingParams, prompt: Sequence[int], num_tokens: int) -> Run:
    bench, run = Bench(), Run(list(prompt), sampling)
    bench.step({0: run})
    for _ in range(num_tokens - 1):
        bench.step()
    bench.check(run)
    return run


def test_asking_for_log_probabilities_changes_no_token() -> None:
    sampling = SamplingParams(seed=9, top_p=0.9, presence_penalty=0.4, min_tokens=4)
    asking = msgspec.structs.replace(sampling, logprobs=5, prompt_logprobs=2)
    silent, scored = alone(sampling, [1, 2, 3], 12), alone(asking, [1, 2, 3], 12)
    assert silent.outputs == scored.outputs
    assert not silent.scores
    assert sorted(scored.scores) == list(range(1, 15))


def test_a_stop_token_comes_no_earlier_than_min_tokens() -> None:
    eager = SamplingParams(temperature=0, logit_bias={3: 90.0, 7: 95.0}, stop_token_ids=(7,))
    assert alone(eager, [1], 5).outputs == [7] * 5
    patient = msgspec.structs.replace(eager, min_tokens=3)
    outputs = alone(patient, [1], 5).outputs
    assert not {3, 5, 7} & set(outputs[:3])  # 3 and 5 are the model's own ends
    assert outputs[3:] == [7, 7]


def test_a_stop_id_beyond_the_vocabulary_forbids_nothing() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=4, stop_token_ids=(VOCAB_SIZE, 10**9))
    bench, run = Bench(), Run([1], sampling)
    bench.step({0: run})
    assert len(run.outputs) == 1


def test_a_negative_end_forbids_nothing_in_the_row_before() -> None:
    sampling = SamplingParams(min_tokens=4, stop_token_ids=(2,))
    prompt = np.zeros(0, np.int32)
    edits = RowEdits.of(sampling, prompt, eos_token_ids=(-1,), vocab_size=VOCAB_SIZE)
    assert edits is not None
    assert edits.before.ids.tolist() == [2]


def test_a_row_with_every_token_forbidden_is_reported_and_others_continue() -> None:
    everything = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    stuck = Run([1], SamplingParams(temperature=0, bad_words_token_ids=everything))
    free = Run([1], SamplingParams(temperature=0))
    bench = Bench()
    bench.step({0: stuck, 1: free})
    assert bench.last is not None
    assert bench.last.nan_rows.tolist() == [0]
    assert bench.last.num_nans.tolist() == [1]
    bench.check(free)


def test_a_bad_word_never_appears_and_its_beginning_may() -> None:
    free = alone(SamplingParams(temperature=0), [1, 2], 12).outputs
    words = (tuple(free[2:5]), (free[7],))
    forbidden = alone(SamplingParams(temperature=0, bad_words_token_ids=words), [1, 2], 12).outputs
    assert forbidden[:4] == free[:4]
    assert forbidden[4] != free[4]
    assert free[7] not in forbidden


def test_a_short_bad_word_listed_after_longer_ones_takes_effect_early() -> None:
    free = alone(SamplingParams(temperature=0), [1, 2], 2).outputs
    words = ((20, 20, 20), (21, 21, 21, 21), tuple(free))
    forbidden = alone(SamplingParams(temperature=0, bad_words_token_ids=words), [1, 2], 2).outputs
    assert forbidden[0] == free[0]
    assert forbidden[1] != free[1]


def test_a_bad_word_that_began_in_the_prompt_may_end_in_the_output() -> None:
    free = alone(GREEDY, [1, 2], 1).outputs
    sampling = SamplingParams(temperature=0, bad_words_token_ids=((2, free[0]),))
    assert alone(sampling, [1, 2], 1).outputs == free


def test_presence_counts_outputs_only_and_repetition_the_prompt_too() -> None:
    table = as_numpy(bigram_table(VOCAB_SIZE, 0))
    favourite = int(table[1].argmax())
    prompt = [favourite, 1]
    absent = SamplingParams(temperature=0, presence_penalty=2.0, logit_bias={favourite: 0.5})
    assert alone(absent, prompt, 1).outputs == [favourite]
    repeated = SamplingParams(temperature=0, repetition_penalty=50.0)
    assert alone(repeated, prompt, 1).outputs != [favourite]


@pytest.mark.parametrize("chunk", [1, 2, 5, 512])
def test_prompt_scores_do_not_depend_on_the_chunks(chunk: int) -> None:
    prompt = random.Random(3).choices(range(VOCAB_SIZE), k=23)
    run = Run(prompt, SamplingParams(temperature=0, prompt_logprobs=4, logprobs=0))
    other = Run(prompt[:7], GREEDY)
    bench = Bench()
    bench.step({2: run, 6: other}, chunk=chunk)
    while len(run.outputs) < 3:
        bench.step(chunk=chunk)
    bench.check(run)
    assert not other.scores


def test_a_long_prompt_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.worker.sampling.extras.MAX_SCORED_ELEMENTS", 7 * VOCAB_SIZE)
    sizes: list[int] = []
    score = logprobs.score

    def counted(logits: torch.Tensor, *rest: Any) -> logprobs.Scores:
        sizes.append(len(logits))
        return score(logits, *rest)

    monkeypatch.setattr("longshore.worker.sampling.extras.score", counted)
    prompt = random.Random(4).choices(range(VOCAB_SIZE), k=20)
    run = Run(prompt, SamplingParams(temperature=0, prompt_logprobs=3))
    bench = Bench()
    bench.step({0: run})
    bench.check(run)
    assert sizes == [7, 7, 5]


def test_penalties_counted_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "MAX_COUNTED_ELEMENTS", 2 * VOCAB_SIZE)
    bench = Bench()
    runs = {
        row: Run([row, 1], SamplingParams(seed=row, frequency_penalty=0.6, repetition_penalty=1.2))
        for row in range(5)
    }
    bench.step(runs)
    for _ in range(9):
        bench.step()
    for run in runs.values():
        bench.check(run)


def test_a_rewound_row_counts_only_the_tokens_it_has_kept() -> None:
    sampling = SamplingParams(seed=2, frequency_penalty=2.0, logprobs=1)
    bench, run = Bench(), Run([1, 2, 3, 4], sampling)
    bench.step({0: run})
    for _ in range(8):
        bench.step()
    whole = list(run.outputs)
    rewind = Rewind(row=0, num_computed_tokens=4, num_known_tokens=8)
    output = bench.runner.execute(bench.plans.plan({0: 4}, rewound=[rewind]))
    again = output.sampled_tokens.tolist()
    for _ in range(4):
        again += bench.runner.execute(bench.plans.plan()).sampled_tokens.tolist()
    assert whole[:4] + again == whole


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias={VOCAB_SIZE: 1.0}),
        SamplingParams(logit_bias={2**40: 1.0}),
        SamplingParams(bad_words_token_ids=((1, VOCAB_SIZE),)),
    ],
    ids=str,
)
def test_an_edited_id_beyond_the_vocabulary_is_a_plan_mismatch(
    sampling: SamplingParams,
) -> None:
    with pytest.raises(PlanMismatch, match="token id"):
        Bench().step({0: Run([1], sampling)})


class Recorder(TorchDispatchMode):
    """Names of the torch operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_without_extras_runs_no_additional_operations() -> None:
    def operations(first: SamplingParams, second: SamplingParams) -> Counter[str]:
        bench = Bench()
        bench.step({0: Run([1, 2], first), 1: Run([3], second)})
        with Recorder() as recorder:
            bench.step()
        return Counter(recorder.names)

    asked_once = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    plain = operations(GREEDY, GREEDY)
    assert operations(GREEDY, asked_once) == plain
    for name in ("logsumexp", "topk", "scatter_add", "index_add", "masked_fill", "sort", "where"):
        assert not [each for each in plain if name in each]
    for settings_ in ({"logprobs": 0}, {"presence_penalty": 1.0}, {"logit_bias": {1: 1.0}}):
        asking = msgspec.structs.replace(GREEDY, **settings_)
        assert sum(operations(GREEDY, asking).values()) > sum(plain.values())


def test_logits_that_are_not_finite_are_counted_before_tokens_are_forbidden() -> None:
    bench = Bench()
    bench.table[7, 2:5] = float("nan")
    word = SamplingParams(temperature=0, bad_words_token_ids=((1,),), logprobs=2)
    bench.step({0: Run([7], word), 1: Run([8], word), 4: Run([1, 7], GREEDY)})
    assert bench.last is not None
    assert bench.last.nan_rows.tolist() == [0, 4]
    assert bench.last.num_nans.tolist() == [3, 3]


CUTS: list[dict[str, Any]] = [
    {"top_p": 0.7},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
]


@pytest.mark.parametrize(
    "cut",
    [
        *CUTS,
        *(
            pytest.param(cut, marks=pytest.mark.slow)
            for cut in ({}, {"temperature": 0.6}, {"top_k": 5}, {"min_p": 0.1})
        ),
    ],
    ids=str,
)
def test_drawn_tokens_follow_the_distribution_that_is_left(cut: dict[str, Any]) -> None:
    """Chi-square over the seeds of many requests, each drawing its own tokens."""
    table = bigram_table(VOCAB_SIZE, 5)
    logits = as_numpy(table)[1]
    weights = reference_sampler.kept(logits, SamplingParams(**cut))
    total = sum(weights.values())
    runner = bigram_runner(table)
    plans = Planner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    counts: Counter[int] = Counter()
    num_steps, num_rows = 500, 8
    for step in range(num_steps):
        entries = [
            Entry(row, [1], sampling=SamplingParams(seed=step * num_rows + row, **cut))
            for row in range(num_rows)
        ]
        dropped = range(num_rows) if step else ()
        plan = plans.plan(dict.fromkeys(range(num_rows), 1), added=entries, finished=dropped)
        counts.update(runner.execute(plan).sampled_tokens.tolist())
    num_draws = num_steps * num_rows
    expected = {token_id: num_draws * weight / total for token_id, weight in weights.items()}
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[i] - wanted) ** 2 / wanted for i, wanted in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * (2 * max(freedom, 1)) ** 0.5
