"""Token masks of structured output, against their definition: in any batch, with every setting."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import UInt8Array, int32_array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SampleMask
from longshore.protocol.sampling import SamplingParams
from longshore.worker.sampling.token_masks import TokenMask, mask_width
from tests.worker import reference_sampler
from tests.worker.bigram import BLOCK_SIZE, NUM_BLOCKS, as_numpy, bigram_runner, bigram_table
from tests.worker.plans import Entry, Planner

VOCAB_SIZE = 21  # its masks end within a byte
EOS = (3, 5)
NUM_STEPS = 7
EPOCH = 1

token_ids = st.integers(0, VOCAB_SIZE - 1)
any_sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.8]),
    top_k=st.sampled_from([0, 0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.97]),
    min_p=st.sampled_from([0.0, 0.0, 0.3]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    logit_bias=st.none() | st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=3),
    bad_words_token_ids=st.lists(
        st.lists(token_ids, min_size=1, max_size=2).map(tuple), max_size=4
    ).map(tuple),
    logprobs=st.none() | st.integers(0, 5),
)
masks = st.lists(
    st.lists(st.booleans(), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE).filter(any)
    | token_ids.map(lambda only: [token_id == only for token_id in range(VOCAB_SIZE)]),
    min_size=NUM_STEPS,
    max_size=NUM_STEPS,
)


def packed(allowed: list[list[bool]]) -> UInt8Array:
    bits: UInt8Array = np.packbits(np.array(allowed), axis=1, bitorder="little").reshape(-1)
    return bits


def allowed_logits(
    logits: reference_sampler.Float32s, allowed: list[bool]
) -> reference_sampler.Float32s:
    return np.where(allowed, logits, np.float32(-math.inf)).astype(np.float32)


class Bench:
    """A runner on a bigram table; each row has a prompt, and a mask per step or none."""

    def __init__(self) -> None:
        self.table = bigram_table(VOCAB_SIZE, seed=1)
        self.runner = bigram_runner(self.table, eos_token_ids=EOS)
        self.plans = Planner(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.outputs: list[ModelRunnerOutput] = []

    def step(self, allowed: dict[int, list[bool]], added: list[Entry] | None = None) -> None:
        scheduled = {entry.row: len(entry.prompt) for entry in added or ()}
        plan = self.plans.plan(scheduled, added=added or ())
        rows, mask = self.plans.rows_to_mask(), None
        if rows:
            bits = packed([allowed[row] for row in rows])
            mask = SampleMask(EPOCH, plan.step, int32_array(rows), bits)
        self.outputs.append(self.runner.execute(plan, mask))

    def tokens_of(self, row: int) -> list[int]:
        return [self.plans.tokens_of(output)[row] for output in self.outputs]


def reference(
    table: reference_sampler.Float32s,
    prompt: list[int],
    sampling: SamplingParams,
    allowed: list[list[bool]] | None,
) -> list[int]:
    """The tokens of one request. A mask that the settings leave nothing of wins over them."""
    outputs: list[int] = []
    for step in range(NUM_STEPS):
        raw = table[[*prompt, *outputs][-1]]
        logits = reference_sampler.edited(raw, prompt, outputs, sampling, EOS)
        if allowed is not None:
            logits = allowed_logits(logits, allowed[step])
            if np.isneginf(logits).all():
                logits = allowed_logits(raw, allowed[step])
        outputs.append(reference_sampler.pick(logits, sampling, len(outputs)))
    return outputs


@settings(max_examples=60)
@given(
    st.lists(st.tuples(any_sampling, st.none() | masks), min_size=1, max_size=6),
    st.integers(0, 2**32),
)
def test_any_mask_with_any_setting_gives_the_tokens_of_the_reference(
    requests: list[tuple[SamplingParams, list[list[bool]] | None]], seed: int
) -> None:
    choose, bench = random.Random(seed), Bench()
    rows = choose.sample(range(8), len(requests))
    prompts = [choose.choices(range(VOCAB_SIZE), k=choose.randint(1, 9)) for _ in rows]
    added = [
        Entry(row, prompt, sampling=sampling, has_structured_output=allowed is not None)
        for row, prompt, (sampling, allowed) in zip(rows, prompts, requests, strict=True)
    ]
    for step in range(NUM_STEPS):
        allowed_now = {
            row: allowed[step]
            for row, (_, allowed) in zip(rows, requests, strict=True)
            if allowed is not None
        }
        bench.step(allowed_now, added if step == 0 else None)
    table = as_numpy(bench.table)
    for row, prompt, (sampling, allowed) in zip(rows, prompts, requests, strict=True):
        wanted = reference(table, prompt, sampling, allowed)
        is_free = allowed is None and any(
            np.isin(np.concatenate([o.nan_rows for o in bench.outputs]), row)
        )
        if not is_free:  # the settings of a request without a mask may forbid every token
            assert bench.tokens_of(row) == wanted
        for step, token_id in enumerate(wanted if allowed is not None else ()):
            assert allowed is not None
            assert allowed[step][token_id]


def test_log_probabilities_are_those_of_the_logits_before_the_mask() -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    bench = Bench()
    only = [token_id == 9 for token_id in range(VOCAB_SIZE)]
    bench.step({0: only}, [Entry(0, [4], sampling=sampling, has_structured_output=True)])
    scored = bench.outputs[0].logprobs
    assert scored is not None
    logits = as_numpy(bench.table)[4]
    best = np.argsort(-logits)[:2].tolist()
    assert scored.token_ids.tolist() == [9, *best]
    wanted = [reference_sampler.log_probability(logits, token_id) for token_id in (9, *best)]
    assert scored.logprobs.tolist() == pytest.approx(wanted, abs=2e-5)


def test_a_row_whose_mask_allows_no_token_is_reported_and_others_continue() -> None:
    bench = Bench()
    added = [Entry(row, [4], has_structured_output=row < 2) for row in range(3)]
    nothing, only = [False] * VOCAB_SIZE, [token_id == 9 for token_id in range(VOCAB_SIZE)]
    bench.step({0: nothing, 1: only}, added)
    assert bench.outputs[0].nan_rows.tolist() == [0]
    assert bench.tokens_of(1) == [9]
    assert bench.tokens_of(2) == [int(as_numpy(bench.table)[4].argmax())]


def test_a_mask_wins_over_min_tokens_and_bad_words_that_forbid_all_it_allows() -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=4, bad_words_token_ids=((9,),))
    bench = Bench()
    ends = [token_id in EOS for token_id in range(VOCAB_SIZE)]
    added = [Entry(row, [4], sampling=sampling, has_structured_output=True) for row in range(2)]
    bench.step({0: ends, 1: [token_id in (9, 12) for token_id in range(VOCAB_SIZE)]}, added)
    assert bench.tokens_of(0)[0] in EOS
    assert bench.tokens_of(1) == [12]  # here something is left
    assert not len(bench.outputs[0].nan_rows)


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 63, 64, 65, 1003])
def test_packed_bits_forbid_what_plain_torch_forbids(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator)
    allowed = torch.rand(3, vocab_size, generator=generator) < 0.5
    samples = np.array([4, 0, 2])
    wanted = logits.clone()
    wanted[samples] = wanted[samples].masked_fill(~allowed, -math.inf)
    bits = packed(allowed.tolist())
    assert len(bits) == 3 * mask_width(vocab_size)
    mask = TokenMask.of(samples, bits, vocab_size=vocab_size, pin_memory=False)
    bits[:] = 0  # the message is freed
    masked = mask.on_device(torch.device("cpu")).apply(logits)
    assert torch.equal(logits, wanted)
    assert torch.equal(masked, wanted[samples])


def test_a_mask_changes_no_token_that_it_allows() -> None:
    """What a grammar allows anyway is sampled as without a grammar, also at random."""
    sampling = SamplingParams(seed=8, temperature=1.3, top_p=0.9)
    outputs = []
    for has_grammar in (False, True):
        bench = Bench()
        entry = Entry(0, [4], sampling=sampling, has_structured_output=has_grammar)
        bench.step({0: [True] * VOCAB_SIZE}, [entry])
        for _ in range(9):
            bench.step({0: [True] * VOCAB_SIZE})
        outputs.append(bench.tokens_of(0))
    assert outputs[0] == outputs[1]
