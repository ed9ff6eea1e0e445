"""Plans in, tokens out: every path of a request gives the tokens of `generate`."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import EngineDead, PlanMismatch
from longshore.protocol.outputs import (
    ModelRunnerOutput,
    WorkerFailed,
    WorkerReport,
)
from longshore.protocol.plan import Rewind, RowState, SchedulerOutput, plan_digest
from longshore.protocol.sampling import SamplingParams
from longshore.worker.config import WorkerConfig
from longshore.worker.queues.compute_queue import CpuComputeQueue
from longshore.worker.sampling.uniform import uniform
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.step.step_inputs import StepInputs, StepResult
from longshore.worker.worker import Worker
from tests.worker.plans import Entry, Planner

NUM_BLOCKS = 500
OpenRunner = Callable[..., ModelRunner]


@pytest.fixture
def open_runner(checkpoint: tuple[Path, Any]) -> Iterator[OpenRunner]:
    """Runners on the shared checkpoint; their threads end with the test."""
    workers = []

    def open_(*, block_size: int = 16, queue: CpuComputeQueue | None = None) -> ModelRunner:
        config = WorkerConfig(
            model=str(checkpoint[0]),
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            max_num_seqs=8,
            show_progress=False,
        )
        workers.append(Worker(config))
        return workers[-1].start(queue=queue)

    yield open_
    for worker in workers:
        worker.close()


def planner(block_size: int = 16) -> Planner:
    return Planner(num_blocks=NUM_BLOCKS, block_size=block_size)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)


def generate(reference: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy tokens of transformers."""
    with torch.inference_mode():
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


class Outputs:
    """Sampled tokens by row, in the order of the steps."""

    def __init__(self, plans: Planner) -> None:
        self._plans = plans
        self.tokens: dict[int, list[int]] = {}

    def add(self, report: WorkerReport) -> None:
        assert isinstance(report, ModelRunnerOutput), report
        for row, token in self._plans.tokens_of(report).items():
            self.tokens.setdefault(row, []).append(token)


PROMPTS = {0: prompt_of(37, 0), 2: prompt_of(1, 1), 3: prompt_of(70, 2), 6: prompt_of(16, 3)}


def chunked_plans(
    plans: Planner, chunk: int, num_steps: int, **kwargs: Any
) -> Iterator[SchedulerOutput]:
    """PROMPTS, with one more row in each of the first steps, computed in chunks; then decodes."""
    waiting = list(PROMPTS.items())
    for _ in range(num_steps):
        added = []
        if waiting:
            row, prompt = waiting.pop(0)
            added = [Entry(row, prompt, **kwargs)]
        left = {
            row: len(prompt) - int(plans.rows.num_computed[row])
            for row, prompt in PROMPTS.items()
            if plans.rows.generation[row] or (added and row == added[0].row)
        }
        scheduled = {row: min(chunk, n) for row, n in left.items() if n > 0}
        yield plans.plan(scheduled, added=added)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 13, 256])
def test_ragged_batches_give_the_tokens_of_generate(
    block_size: int, chunk: int, open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    runner, plans = open_runner(block_size=block_size), planner(block_size)
    outputs = Outputs(plans)
    for plan in chunked_plans(plans, chunk, num_steps=90 if chunk == 1 else 20):
        outputs.add(runner.execute(plan))
    assert outputs.tokens.keys() == PROMPTS.keys()
    for row, prompt in PROMPTS.items():
        tokens = outputs.tokens[row]
        assert len(tokens) > 10
        assert tokens == generate(checkpoint[1], prompt, len(tokens))


class Adversary:
    """Delays operations, so that the host is sometimes far ahead of the device and sometimes waits
    for it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self) -> None:
        time.sleep(self._random.choice([0, 0, 0.002, 0.01]))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        # Only the device knows the newest token when these steps are prepared.
        SamplingParams(seed=2, repetition_penalty=1.3, frequency_penalty=1.0),
        SamplingParams(temperature=0.0, bad_words_token_ids=tuple((i, i + 1) for i in range(60))),
    ],
    ids=["greedy", "drawn", "penalties", "bad words"],
)
def test_two_steps_in_flight_give_the_tokens_of_one_at_a_time(
    seed: int, sampling: SamplingParams, open_runner: OpenRunner
) -> None:
    plans = planner()
    alone, runner = Outputs(plans), open_runner()
    for plan in chunked_plans(plans, 11, num_steps=25, sampling=sampling):
        alone.add(runner.execute(plan))

    plans = planner()
    ahead, runner = Outputs(plans), open_runner(queue=CpuComputeQueue(Adversary(seed)))
    completions = []
    order: list[int] = []

    def on_report(report: WorkerReport) -> None:
        assert isinstance(report, ModelRunnerOutput)
        order.append(report.step)
        ahead.add(report)

    for plan in chunked_plans(plans, 11, num_steps=25, sampling=sampling):
        if len(completions) >= 2:
            completions[-2].wait()
        completion = runner.submit(plan, on_report)
        assert completion is not None
        completions.append(completion)
    completions[-1].wait()
    assert order == list(range(1, 26))
    assert ahead.tokens == alone.tokens


@pytest.mark.req("WBT-07")
def test_a_host_that_never_waits_is_held_back_before_it_overwrites_a_step(
    open_runner: OpenRunner,
) -> None:
    plans = planner()
    alone, runner = Outputs(plans), open_runner()
    for plan in chunked_plans(plans, 11, num_steps=12):
        alone.add(runner.execute(plan))
    plans = planner()
    ahead = Outputs(plans)
    runner = open_runner(queue=CpuComputeQueue(before_each=lambda: time.sleep(0.005)))
    for plan in list(chunked_plans(plans, 11, num_steps=12)):
        last = runner.submit(plan, ahead.add)
    assert last is not None
    last.wait()
    assert ahead.tokens == alone.tokens


def test_submit_returns_while_the_device_is_still_busy(open_runner: OpenRunner) -> None:
    gate = threading.Event()
    gate.set()
    runner, plans = open_runner(queue=CpuComputeQueue(gate.wait)), planner()
    outputs = Outputs(plans)
    gate.clear()
    first = runner.submit(plans.plan({0: 20}, added=[Entry(0, prompt_of(20, 0))]), outputs.add)
    second = runner.submit(plans.plan(), outputs.add)
    assert first is not None
    assert second is not None
    assert not first.is_done()
    assert not outputs.tokens
    gate.set()
    assert second.wait(10)
    assert len(outputs.tokens[0]) == 2


def reference_logprobs(reference: Any, token_ids: Sequence[int]) -> list[float]:
    """Log probabilities of every token but the first."""
    with torch.inference_mode():
        logits = reference(torch.tensor([list(token_ids)])).logits[0, :-1]
    chosen = torch.tensor(token_ids[1:]).unsqueeze(1)
    values: list[float] = logits.double().log_softmax(-1).gather(1, chosen).squeeze(1).tolist()
    return values


def scores_by_position(outputs: Sequence[ModelRunnerOutput], row: int) -> dict[int, float]:
    scores = {}
    for output in outputs:
        if (scored := output.logprobs) is not None:
            own = np.cumsum(scored.num_listed) - scored.num_listed
            for owner, position, first in zip(scored.owners, scored.positions, own, strict=True):
                if owner == row:
                    scores[int(position)] = float(scored.logprobs[first])
    return scores


@pytest.mark.parametrize("chunk", [9, 256])
def test_log_probabilities_are_those_of_transformers(
    chunk: int, open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0, logprobs=3)
    runner, plans = open_runner(), planner()
    tokens = Outputs(plans)
    outputs = []
    for plan in chunked_plans(plans, chunk, num_steps=20, sampling=sampling):
        outputs.append(runner.execute(plan))
        tokens.add(outputs[-1])
    for row, prompt in PROMPTS.items():
        whole = [*prompt, *tokens.tokens[row]]
        wanted = dict(enumerate(reference_logprobs(checkpoint[1], whole), start=1))
        assert scores_by_position(outputs, row) == pytest.approx(wanted, abs=1e-4)


def test_after_a_prefix_hit_the_prompt_is_scored_from_there_on(
    open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=None)
    runner, plans = open_runner(), planner()
    prompt = prompt_of(40, 5)
    runner.execute(plans.plan({0: 40}, added=[Entry(0, prompt)]))
    hit = Entry(1, prompt, blocks=plans.blocks[0][:2], num_computed_tokens=32, sampling=sampling)
    scores = scores_by_position([runner.execute(plans.plan({1: 8}, added=[hit]))], 1)
    wanted = dict(enumerate(reference_logprobs(checkpoint[1], prompt), start=1))
    assert scores == pytest.approx({p: wanted[p] for p in range(33, 40)}, abs=1e-4)


def test_a_prefix_hit_gives_the_tokens_of_a_whole_prompt(
    open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    runner, plans = open_runner(), planner()
    shared = prompt_of(48, 5)
    prompts = [shared + prompt_of(9, 6), shared + prompt_of(5, 7), shared + prompt_of(16, 8)]
    outputs = Outputs(plans)
    outputs.add(runner.execute(plans.plan({0: 57}, added=[Entry(0, prompts[0])])))
    hits = [
        Entry(row, prompts[row], blocks=plans.blocks[0][:3], num_computed_tokens=48)
        for row in (1, 2)
    ]
    outputs.add(runner.execute(plans.plan({1: 5, 2: 16}, added=hits)))
    for _ in range(10):
        outputs.add(runner.execute(plans.plan()))
    for row, tokens in outputs.tokens.items():
        assert tokens == generate(checkpoint[1], prompts[row], len(tokens))


def test_a_prefix_may_be_hit_in_the_step_that_computes_it(
    open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    runner, plans = open_runner(), planner()
    shared = prompt_of(32, 5)
    prompts = {5: shared + prompt_of(9, 6), 1: shared + prompt_of(4, 7)}
    blocks = plans.free[:2]
    del plans.free[:2]
    entries = [
        Entry(5, prompts[5], blocks=list(blocks)),
        Entry(1, prompts[1], blocks=list(blocks), num_computed_tokens=32),
    ]
    outputs = Outputs(plans)
    outputs.add(runner.execute(plans.plan({5: 41, 1: 4}, added=entries)))
    for _ in range(6):
        outputs.add(runner.execute(plans.plan()))
    for row, tokens in outputs.tokens.items():
        assert tokens == generate(checkpoint[1], prompts[row], len(tokens))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_resumed_request_continues_as_if_it_had_never_been_preempted(
    temperature: float, open_runner: OpenRunner
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=11, top_p=0.95)
    prompt = prompt_of(21, 9)

    def run(preempt_after: int | None) -> list[int]:
        runner, plans = open_runner(), planner()
        outputs = Outputs(plans)
        outputs.add(
            runner.execute(plans.plan({0: 21}, added=[Entry(0, prompt, sampling=sampling)]))
        )
        tokens = outputs.tokens[0]
        for step in range(20):
            if step == preempt_after:
                other = Entry(0, prompt_of(30, 1))
                resumed = Entry(4, prompt, tuple(tokens), sampling=sampling)
                plan = plans.plan(
                    {0: 30, 4: 21 + len(tokens)}, added=[other, resumed], finished=[0]
                )
                outputs.tokens = {4: tokens}
            else:
                plan = plans.plan()
            outputs.add(runner.execute(plan))
        return tokens

    assert run(preempt_after=7) == run(preempt_after=None)


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_any_row_of_a_batch(
    open_runner: OpenRunner,
) -> None:
    prompt = prompt_of(12, 0)
    sampling = SamplingParams(temperature=1.0, seed=-5, top_k=40)

    def run(row: int, others: dict[int, SamplingParams]) -> list[int]:
        runner, plans = open_runner(), planner()
        entries = [Entry(row, prompt, sampling=sampling)]
        entries += [Entry(r, prompt_of(20, r), sampling=s) for r, s in others.items()]
        counts = {entry.row: len(entry.prompt) for entry in entries}
        outputs = Outputs(plans)
        outputs.add(runner.execute(plans.plan(counts, added=entries)))
        for _ in range(15):
            outputs.add(runner.execute(plans.plan()))
        return outputs.tokens[row]

    alone = run(0, {})
    assert len(set(alone)) > 5
    greedy, other = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7, seed=3)
    assert run(3, {0: greedy, 1: other, 7: sampling}) == alone
    assert run(7, {0: other, 2: other}) == alone


def test_a_draw_counts_its_position_from_the_end_of_the_prompt(
    open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    prompt, emitted = prompt_of(12, 0), prompt_of(5, 1)
    runner, plans = open_runner(), planner()
    sampling = SamplingParams(temperature=1.0, seed=8)
    entries = [Entry(row, prompt, emitted, sampling=sampling) for row in range(2)]
    output = runner.execute(plans.plan({0: 17, 1: 17}, added=entries))
    with torch.inference_mode():
        logits = checkpoint[1](torch.tensor([prompt + emitted])).logits[0, -1]
    mass = logits.double().softmax(-1).cumsum(-1)
    (u,) = uniform(np.array([8], np.uint64), np.array([len(emitted)]))
    assert output.sampled_tokens.tolist() == [int((mass <= u).sum())] * 2


def test_requests_without_a_seed_differ_by_their_id(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    sampling = SamplingParams(temperature=1.0)
    prompt = prompt_of(12, 0)
    entries = [Entry(row, prompt, sampling=sampling, request_id=f"r{row // 2}") for row in range(4)]
    outputs = Outputs(plans)
    outputs.add(runner.execute(plans.plan(dict.fromkeys(range(4), 12), added=entries)))
    for _ in range(15):
        outputs.add(runner.execute(plans.plan()))
    tokens = outputs.tokens
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]


def test_a_rewound_row_computes_again_what_was_discarded(
    open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    runner, plans = open_runner(), planner()
    prompt = prompt_of(30, 4)
    outputs = Outputs(plans)
    outputs.add(runner.execute(plans.plan({3: 30}, added=[Entry(3, prompt)])))
    for _ in range(9):
        outputs.add(runner.execute(plans.plan()))
    # 39 tokens are computed and 40 known; the last 4 are void, and KV is valid only for the first
    # 16.
    tokens = outputs.tokens[3][:-4]
    outputs.tokens[3] = tokens
    rewind = Rewind(row=3, num_computed_tokens=16, num_known_tokens=36)
    plan = plans.plan({3: 20}, rewound=[rewind])
    state = RowState(3, 1, 16, 20, (int32_array(plans.blocks[3]),))
    outputs.add(runner.execute(msgspec.structs.replace(plan, full_state=(state,))))
    for _ in range(5):
        outputs.add(runner.execute(plans.plan()))
    assert len(tokens) == 12
    assert tokens == generate(checkpoint[1], prompt, 12)


def test_a_plan_without_tokens_is_answered_and_its_changes_stay(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    empty = runner.execute(plans.plan())
    assert (empty.step, len(empty.sampled_tokens)) == (1, 0)
    prompt = prompt_of(20, 0)
    parked = runner.execute(plans.plan({0: 0}, added=[Entry(0, prompt)]))
    assert len(parked.sampled_tokens) == 0
    late = runner.execute(plans.plan({0: 20})).sampled_tokens.tolist()
    runner, plans = open_runner(), planner()
    assert (
        runner.execute(plans.plan({0: 20}, added=[Entry(0, prompt)])).sampled_tokens.tolist()
        == late
    )


def test_a_repeated_plan_is_ignored(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    outputs = Outputs(plans)
    plan = plans.plan({0: 20}, added=[Entry(0, prompt_of(20, 0))])
    assert runner.submit(plan, outputs.add) is not None
    assert runner.submit(plan, outputs.add) is None
    outputs.add(runner.execute(plans.plan()))
    assert len(outputs.tokens[0]) == 2


def valid_plan(plans: Planner) -> SchedulerOutput:
    return plans.plan({0: 20}, added=[Entry(0, prompt_of(20, 0))])


def edited(**changes: Any) -> Callable[[Planner], SchedulerOutput]:
    return lambda plans: msgspec.structs.replace(valid_plan(plans), **changes)


def with_entry(entry: Entry, num_tokens: int) -> Callable[[Planner], SchedulerOutput]:
    return lambda plans: plans.plan({entry.row: num_tokens}, added=[entry])


def beyond_its_blocks(plans: Planner) -> SchedulerOutput:
    plans.block_size = 32  # the planner believes in larger blocks than the worker has
    return valid_plan(plans)


def with_blocks(*block_ids: int) -> Callable[[Planner], SchedulerOutput]:
    """The scheduler's full state has these blocks for row 0, which holds two."""

    def make(plans: Planner) -> SchedulerOutput:
        state = RowState(0, 1, 0, 20, (int32_array(block_ids),))
        return msgspec.structs.replace(valid_plan(plans), full_state=(state,))

    return make


IDS = int32_array([1])


def with_digest(plan: SchedulerOutput) -> SchedulerOutput:
    return msgspec.structs.replace(plan, digest=plan_digest(0, plan))


def with_copies(*copies: tuple[int, int, int]) -> Callable[[Planner], SchedulerOutput]:
    def make(plans: Planner) -> SchedulerOutput:
        return plans.plan({0: 20}, added=[Entry(0, prompt_of(20, 0))], copies=copies)

    return make


REFUSED: dict[str, tuple[Callable[[Planner], SchedulerOutput], str]] = {
    "gap": (edited(step=3, previous_step=2), "follows step 2"),
    "another epoch": (edited(epoch=9), "epoch 9"),
    "damaged": (edited(digest=1), "digest"),
    "beyond its blocks": (beyond_its_blocks, "without blocks"),
    "unknown block": (with_entry(Entry(0, [5], blocks=[NUM_BLOCKS]), 1), "block id"),
    "negative block": (with_entry(Entry(0, [5], blocks=[-1]), 1), "block id"),
    "unknown token": (with_entry(Entry(0, [128]), 1), "token id"),
    "negative token": (with_entry(Entry(0, [5], [-1]), 2), "token id"),
    "request too long": (with_entry(Entry(0, [5] * 257), 1), "has 257 tokens"),
    "nothing to compute": (
        with_entry(Entry(0, [5] * 16, blocks=[1], num_computed_tokens=16), 1),
        "at least one must remain",
    ),
    "copied block is unknown": (with_copies((NUM_BLOCKS, 5, 1)), "block id"),
    "copy to an unknown block": (with_copies((5, NUM_BLOCKS, 1)), "block id"),
    "copy to the null block": (with_copies((5, 0, 1)), "the null block"),
    "two copies to one block": (with_copies((5, 7, 1), (6, 7, 1)), "twice to one block"),
    "copy of more than a block": (with_copies((5, 7, 17)), "number of copied tokens"),
    "more copies than rows": (
        with_copies(*((1, target, 1) for target in range(2, 11))),
        "copies 9 blocks for 8 rows",
    ),
    "copies without targets": (
        lambda plans: with_digest(msgspec.structs.replace(valid_plan(plans), copy_source_ids=IDS)),
        "copies 1 blocks to 0",
    ),
    "copies that the digest does not cover": (
        edited(copy_source_ids=IDS, copy_target_ids=IDS, copy_num_tokens=IDS),
        "digest",
    ),
    "zeroed block is unknown": (edited(zero_block_ids=int32_array([NUM_BLOCKS])), "block id"),
    "other blocks than the full state": (with_blocks(1, 2), r"holds blocks \[\[1, 2\]\]"),
    "another block behind one given back": (with_blocks(0, 1), r"holds blocks \[\[0, 1\]\]"),
    "fewer blocks than the full state": (with_blocks(0, 0, 0), r"holds blocks \[\[0, 0, 0\]\]"),
    "pipeline parallelism": (edited(sampled_rows=IDS), "pipeline parallelism"),
    "drafts": (edited(draft_rows=IDS), "this worker has no speculative_config"),
    "encoder inputs": (edited(encoder_inputs=((0, 0),)), "multimodal"),
    "connector": (
        edited(connector_metadata=b"x"),
        "metadata for a KV connector, but this worker has none",
    ),
    "structured output of no row": (
        edited(has_structured_output=True),
        "0 of its rows sample with structured output",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_be_executed_exactly_is_rejected(
    case: str, open_runner: OpenRunner
) -> None:
    make_plan, reason = REFUSED[case]
    runner, plans = open_runner(), planner()
    with pytest.raises(PlanMismatch, match=reason):
        runner.execute(make_plan(plans))


def test_a_step_of_more_tokens_than_the_buffers_hold_is_rejected(
    checkpoint: tuple[Path, Any],
) -> None:
    config = WorkerConfig(
        model=str(checkpoint[0]), num_blocks=40, max_num_batched_tokens=19, show_progress=False
    )
    with Worker(config) as worker:
        runner = worker.start()
        with pytest.raises(PlanMismatch, match="20 tokens; max_num_batched_tokens is 19"):
            runner.execute(valid_plan(Planner(num_blocks=40, block_size=16, max_num_seqs=256)))


def test_a_matching_full_state_is_accepted(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    plan = valid_plan(plans)
    state = RowState(0, 1, 0, 20, (int32_array(plans.blocks[0]),))
    runner.execute(msgspec.structs.replace(plan, full_state=(state,)))


def test_blocks_that_the_scheduler_has_freed_are_not_compared(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    plan = valid_plan(plans)
    state = RowState(0, 1, 0, 20, (int32_array([0, plans.blocks[0][1]]),))
    runner.execute(msgspec.structs.replace(plan, full_state=(state,)))


def test_blocks_named_in_the_plan_are_zeroed_before_the_step(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    cache = runner._launcher.state.cache.view(0).planes
    cache[1:] = 7.0
    plan = msgspec.structs.replace(valid_plan(plans), zero_block_ids=int32_array([plans.free[0]]))
    runner.execute(plan)
    cleared = {block_id for block_id in range(NUM_BLOCKS) if not cache[block_id].any()}
    assert cleared == {0, plans.free[0]}


@pytest.mark.req("COW-02", "COW-03")
def test_a_fork_continues_from_a_copy_that_is_made_before_anything_is_computed(
    open_runner: OpenRunner, checkpoint: tuple[Path, Any]
) -> None:
    """The parent writes to the block in the same step that copies it; what it wrote in unanswered
    steps before may be NaN."""
    runner, plans = open_runner(), planner()
    cache = runner._launcher.state.cache.view(0).planes
    prompt = prompt_of(38, 0)
    parent = Outputs(plans)
    parent.add(runner.execute(plans.plan({0: 38}, added=[Entry(0, prompt)])))
    first, second, source = plans.blocks[0]
    target = plans.free.pop()
    cache[target] = 9.0
    other = [*prompt[:37], (prompt[37] + 1) % 128]
    cache[source, :, :, :, 7:] = math.nan  # no request's tokens yet
    plan = plans.plan(
        {1: 1},
        added=[Entry(1, other, blocks=[first, second, target], num_computed_tokens=37)],
        copies=[(source, target, 5)],
    )
    cache[source, :, :, :, 6:] = 0.0
    cache[source, :, :, :, 7:] = math.nan
    before = cache[source, :, :, :, :5].clone()
    report = runner.execute(plan)
    assert torch.equal(cache[target, :, :, :, :5], before)
    assert not cache[target, :, :, :, 6:].any()
    assert isinstance(report, ModelRunnerOutput)
    tokens = plans.tokens_of(report)
    assert tokens[1] == generate(checkpoint[1], other, 1)[0]
    children = [tokens[1]]
    cache[source, :, :, :, 7:] = 0.0
    for _ in range(6):
        report = runner.execute(plans.plan())
        children.append(plans.tokens_of(report)[1])
    assert children == generate(checkpoint[1], other, 7)


def test_non_finite_logits_are_reported_by_row_and_do_not_affect_other_rows(
    checkpoint: tuple[Path, Any],
) -> None:
    config = WorkerConfig(model=str(checkpoint[0]), num_blocks=40, show_progress=False)
    with Worker(config) as worker:
        worker.model.embedding.weight[127] = math.nan
        runner = worker.start()
        plans = Planner(num_blocks=40, block_size=16, max_num_seqs=256)
        good = prompt_of(20, 0)
        assert 127 not in good
        poisoned = [Entry(2, [5, 127, 6]), Entry(4, good), Entry(9, [127])]
        output = runner.execute(plans.plan({2: 3, 4: 20, 9: 1}, added=poisoned))
        assert output.nan_rows.tolist() == [2, 9]
        assert output.num_nans.tolist() == [128, 128]
        # The next owner of those blocks reads beyond its own tokens in them, and must not read NaN.
        plans.free.sort(key=lambda block_id: block_id in plans.blocks[2] + plans.blocks[9])
        used = [*plans.blocks[2], *plans.blocks[9]]
        plan = plans.plan({1: 2, 3: 2}, added=[Entry(1, [5, 6]), Entry(3, [7, 8])], finished=[2, 9])
        assert sorted([*plans.blocks[1], *plans.blocks[3]]) == sorted(used)
        for next_plan in (plan, plans.plan(), plans.plan()):
            assert len(runner.execute(next_plan).nan_rows) == 0
        tokens = runner.execute(plans.plan()).sampled_tokens
        assert len(tokens) == 3


def test_a_step_that_fails_is_reported_and_so_is_every_one_after_it(
    open_runner: OpenRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, plans = open_runner(), planner()
    runner.execute(valid_plan(plans))

    def fail(*args: object) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(runner._launcher.state.model, "forward", fail)
    reports: list[WorkerReport] = []
    first = runner.submit(plans.plan(), reports.append)
    assert first is not None
    first.wait()
    monkeypatch.undo()  # the queue ends, whatever else could run
    last = runner.submit(plans.plan(), reports.append)
    assert last is not None
    last.wait()
    for report in reports:
        assert isinstance(report, WorkerFailed)
        assert "RuntimeError: the device is on fire" in report.reason
    assert [("step 2" in r.reason, "step 3" in r.reason) for r in reports] == [  # type: ignore[union-attr]
        (True, False),
        (False, True),
    ]
    with pytest.raises(EngineDead, match="on fire"):
        runner.execute(plans.plan())


def test_an_answer_says_how_long_its_step_took(open_runner: OpenRunner) -> None:
    output = open_runner().execute(valid_plan(planner()))
    assert 0 < output.compute_s < 60


@pytest.mark.req("SYS-04")
def test_serving_allocates_no_kv_memory(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    state = runner._launcher.state
    before = (state.cache.buffer.data_ptr(), state.tokens.ids.data_ptr(), state.cache.buffer.nbytes)
    for plan in chunked_plans(plans, 13, num_steps=12):
        runner.execute(plan)
    assert before == (
        state.cache.buffer.data_ptr(),
        state.tokens.ids.data_ptr(),
        state.cache.buffer.nbytes,
    )


def test_warming_up_leaves_the_null_block_empty(open_runner: OpenRunner) -> None:
    assert not open_runner()._launcher.state.cache.buffer.any()


def test_a_request_may_fill_its_row_to_the_last_token(open_runner: OpenRunner) -> None:
    runner, plans = open_runner(), planner()
    outputs = Outputs(plans)
    outputs.add(runner.execute(plans.plan({0: 250}, added=[Entry(0, prompt_of(250, 0))])))
    for _ in range(10):
        outputs.add(runner.execute(plans.plan()))
    assert int(plans.rows.num_computed[0]) == 255
    assert len(outputs.tokens[0]) == 6


def test_a_step_whose_answer_cannot_be_made_fails(
    open_runner: OpenRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it for ever."""

    def result(inputs: StepInputs) -> StepResult:
        raise ZeroDivisionError("of nothing")

    runner, plans = open_runner(), planner()
    monkeypatch.setattr(StepInputs, "result", result)
    with pytest.raises(EngineDead, match="its answer cannot be made: ZeroDivisionError: of"):
        runner.execute(plans.plan({0: 4}, added=[Entry(0, prompt_of(4, 0))]))
    assert "the answer of a step cannot be made" in caplog.text
