"""The token masks of a GPU, in Triton's interpreter, against those of torch."""

import math

import numpy as np
import pytest
import torch

from longshore.worker.kernels.token_masks import forbid_tokens
from longshore.worker.sampling.token_masks import DeviceMask
from tests.worker.kernels.variants import in_triton


@pytest.mark.parametrize("has_unedited", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 8, 9, 8191, 8192, 8193])
def test_masked_rows_are_those_of_torch(vocab_size: int, has_unedited: bool) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(6, vocab_size + 3, generator=generator)
    allowed = torch.rand(4, vocab_size, generator=generator) < 0.5
    allowed[:, 0] = True
    bits = torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little"))
    mask = DeviceMask(torch.tensor([4, 0, 2, 1]), bits)
    logits = wide[:, :vocab_size]
    unedited = logits.index_select(0, mask.samples) if has_unedited else None
    logits[0] = -math.inf  # nothing is left
    logits[2, allowed[2]] = -math.inf  # nothing that is allowed
    wanted, got = wide.clone()[:, :vocab_size], wide.clone()[:, :vocab_size]
    rows = mask.apply(wanted, unedited)
    with in_triton():
        assert torch.equal(mask.apply(got, unedited), rows)
    assert torch.equal(got, wanted)


def test_wrong_shapes_and_dtypes_are_rejected() -> None:
    logits, samples = torch.zeros(2, 9), torch.zeros(1, dtype=torch.int64)
    bits = torch.zeros(1, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="logits"):
        forbid_tokens(logits.half(), samples, bits, None)
    for wrong in (bits.int(), bits[:, :1], bits.expand(2, -1)):
        with pytest.raises(ValueError, match="bits"):
            forbid_tokens(logits, samples, wrong, None)
    with pytest.raises(ValueError, match="unedited"):
        forbid_tokens(logits, samples, bits, logits)
