"""The scores of a GPU, in Triton's interpreter, against those of torch."""

import math

import pytest
import torch

from longshore.worker.kernels import logprobs as kernels
from longshore.worker.sampling.logprobs import score
from tests.worker.kernels.variants import in_triton


@pytest.mark.parametrize("num_best", [0, 1, 20])
@pytest.mark.parametrize("vocab_size", [21, 4095, 4096, 4097, 9000])
def test_scores_are_those_of_torch(vocab_size: int, num_best: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(3, vocab_size + 5, generator=generator) * 4
    logits = wide[:, :vocab_size]
    logits[1] = logits[1].round()  # equal logits have the same rank
    logits[2, 7:] = -math.inf
    token_ids = torch.tensor([vocab_size - 1, 0, 3], dtype=torch.int32)
    wanted = score(logits, token_ids, 1 + num_best)
    with in_triton():
        got = score(logits, token_ids, 1 + num_best)
    assert torch.equal(got.ranks, wanted.ranks)
    assert torch.equal(got.token_ids, wanted.token_ids)
    torch.testing.assert_close(got.logprobs, wanted.logprobs)
    assert got.logprobs.dtype == torch.float32


def test_a_score_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    token_ids = torch.tensor([1, 2, 3], dtype=torch.int32)
    with in_triton():
        together = score(logits, token_ids, 3).logprobs
        alone = score(logits[1:2], token_ids[1:2], 3).logprobs
    assert torch.equal(together[1:2], alone)


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    logits, token_ids = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="logits"):
        kernels.score(logits.double(), token_ids, None)
    with pytest.raises(ValueError, match="token ids"):
        kernels.score(logits, token_ids.long(), None)
    with pytest.raises(ValueError, match="listed tokens"):
        kernels.score(logits, token_ids, torch.zeros(2, 3))
