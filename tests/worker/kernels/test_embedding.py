"""Embeddings from a table that is divided among ranks."""

import pytest
import torch

from longshore.worker.kernels.embedding import embed_part
from tests.worker.kernels.variants import TRITON, using


@pytest.mark.parametrize("variant", ["torch", TRITON])  # there is no native kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_the_parts_of_all_ranks_add_up_to_the_vectors(
    variant: str, dtype: torch.dtype, ids_dtype: torch.dtype
) -> None:
    """The last rank has rows of padding, which must not be read for tokens."""
    table = torch.randn(11, 1100).to(dtype)
    padded = torch.cat((table[8:], torch.full((1, 1100), torch.nan, dtype=dtype)))
    parts = [(table[:4], 0, 4), (table[4:8], 4, 4), (padded, 8, 3)]
    token_ids = torch.tensor([10, 0, 3, 4, 7, 8, 3], dtype=ids_dtype)
    with using(variant):
        vectors = [embed_part(token_ids, *part) for part in parts]
        assert embed_part(token_ids[:0], *parts[0]).shape == (0, 1100)
    assert torch.equal(sum(vectors), table[token_ids.long()])
    assert not vectors[0][0].any()
