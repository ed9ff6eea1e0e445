"""Sampling settings against transformers' logits processors, each of which implements one of
them."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from longshore.protocol.arrays import int32_array
from longshore.protocol.plan import RowStart
from longshore.protocol.sampling import SamplingParams
from longshore.worker.sampling.columns import SamplingColumns
from longshore.worker.sampling.extras import make_extras
from longshore.worker.sampling.sampler import sample
from longshore.worker.step.step_batch import StepBatch
from longshore.worker.step.token_table import TokenTable
from tests.worker.draws import make_draws

VOCAB_SIZE = 50
EOS = (4, 9)
WIDTH = 64


def edited(
    logits: Tensor, prompt: Sequence[int], outputs: Sequence[int], sampling: SamplingParams
) -> Tensor:
    """(1, vocab_size) logits after the worker's edits, before it draws."""
    columns = SamplingColumns(2, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    start = RowStart(
        row=1,
        generation=1,
        request_id="r",
        num_computed_tokens=0,
        last_computed=WIDTH - 1,
        prompt_token_ids=int32_array(list(prompt)),
        output_token_ids=int32_array(list(outputs)),
        block_ids=(),
        sampling=sampling,
    )
    columns.start(start)
    tokens = TokenTable(2, WIDTH - 1, torch.device("cpu"))
    tokens.start_row(1, torch.tensor([*prompt, *outputs], dtype=torch.int32))
    row, position = np.array([1]), np.array([start.num_known_tokens])
    extras = make_extras(
        columns,
        StepBatch(row, position - 1, np.array([1]), num_decodes=1),
        sampled_rows=row,
        sampled_positions=position,
        token_width=tokens.width,
        vocab_size=VOCAB_SIZE,
        pin_memory=False,
    )
    assert extras is not None
    logits = logits.clone()
    extras.on_device(torch.device("cpu")).edit(logits, tokens)
    return logits


def random_case(seed: int) -> tuple[Tensor, list[int], list[int]]:
    choose = random.Random(seed)
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    prompt = choose.choices(range(VOCAB_SIZE), k=choose.randint(1, 20))
    return logits, prompt, choose.choices(range(VOCAB_SIZE), k=choose.randint(0, 20))


def processed(processor: Any, logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    return processor(torch.tensor([list(token_ids)]), logits.clone())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("penalty", [0.5, 1.1, 3.0])
def test_repetition_penalty_is_that_of_transformers(seed: int, penalty: float) -> None:
    logits, prompt, outputs = random_case(seed)
    ours = edited(logits, prompt, outputs, SamplingParams(repetition_penalty=penalty))
    theirs = processed(hf.RepetitionPenaltyLogitsProcessor(penalty), logits, [*prompt, *outputs])
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", range(20))
def test_bad_words_are_those_of_transformers(seed: int) -> None:
    logits, _, outputs = random_case(seed)
    outputs = [*outputs, 11, 12, 13]
    words = [[5], [13, 6], [12, 13, 7], [11, 13, 8], [12, 9], [1, 2, 3, 4], [11, 12, 13, 14]]
    sampling = SamplingParams(bad_words_token_ids=tuple(map(tuple, words)))
    ours = edited(logits, [49], outputs, sampling)
    theirs = processed(hf.NoBadWordsLogitsProcessor(words), logits, outputs)
    assert ours.isinf().nonzero()[:, 1].tolist() == [5, 6, 7, 14]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("num_outputs", range(5))
def test_min_tokens_is_that_of_transformers(num_outputs: int) -> None:
    logits, prompt, _ = random_case(0)
    outputs = [1] * num_outputs
    sampling = SamplingParams(min_tokens=3, stop_token_ids=(20,))
    ours = edited(logits, prompt, outputs, sampling)
    processor = hf.MinNewTokensLengthLogitsProcessor(len(prompt), 3, [*EOS, 20])
    torch.testing.assert_close(ours, processed(processor, logits, [*prompt, *outputs]))


@pytest.mark.parametrize("seed", range(3))
def test_logit_bias_is_the_sequence_bias_of_transformers(seed: int) -> None:
    logits, prompt, outputs = random_case(seed)
    biases = {3: 2.5, 17: -100.0, 49: 100.0}
    ours = edited(logits, prompt, outputs, SamplingParams(logit_bias=biases))
    processor = hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    torch.testing.assert_close(ours, processed(processor, logits, [*prompt, *outputs]))


WARPERS: list[tuple[dict[str, float], list[Any]]] = [
    ({"temperature": 0.7}, [hf.TemperatureLogitsWarper(0.7)]),
    ({"min_p": 0.08}, [hf.MinPLogitsWarper(0.08)]),
    ({"min_p": 1.0}, [hf.MinPLogitsWarper(1.0)]),
    ({"top_k": 7}, [hf.TopKLogitsWarper(7)]),
    ({"top_p": 0.85}, [hf.TopPLogitsWarper(0.85)]),
    (
        {"temperature": 1.4, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
        [
            hf.TemperatureLogitsWarper(1.4),
            hf.MinPLogitsWarper(0.02),
            hf.TopKLogitsWarper(12),
            hf.TopPLogitsWarper(0.9),
        ],
    ),
]


@pytest.mark.parametrize(("cut", "warpers"), WARPERS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_drawn_follows_the_warpers_of_transformers(
    cut: dict[str, float], warpers: list[Any], seed: int
) -> None:
    logits, prompt, _ = random_case(seed)
    num_draws = 8000
    u = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    needs_sort = "top_k" in cut or "top_p" in cut
    drawn = sample(
        logits.expand(num_draws, -1),
        make_draws(u, **cut),
        num_whole=0 if needs_sort else num_draws,
    )
    warped = logits
    for warper in warpers:
        warped = processed(warper, warped, prompt)
    wanted = warped.softmax(-1)[0]
    got = torch.bincount(drawn.long(), minlength=VOCAB_SIZE) / num_draws
    torch.testing.assert_close(got, wanted, atol=3e-4, rtol=0)
    assert not got[wanted == 0].any()
