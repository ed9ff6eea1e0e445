"""States carried from piece to piece: the Triton kernel against float64."""

import numpy as np
import pytest
import torch

from longshore.worker.kernels.carry_state import carry_state, reference
from longshore.worker.kernels.operators import num_launches
from tests.worker.kernels.variants import in_triton


@pytest.mark.parametrize("size", [(2, 3), (16, 32), (20, 33)], ids=str)
@pytest.mark.parametrize("num_pieces", [[1], [4], [3, 3, 2, 1]], ids=str)
def test_each_piece_begins_with_what_earlier_ones_of_its_chunk_left(
    num_pieces: list[int], size: tuple[int, int]
) -> None:
    num_active = [sum(n > nth for n in num_pieces) for nth in range(num_pieces[0])]
    firsts = torch.from_numpy(np.cumsum(num_active) - num_active)
    generator = torch.Generator().manual_seed(len(num_pieces))
    state = torch.randn(len(num_pieces), 2, *size, generator=generator)
    added = torch.randn(sum(num_pieces), 2, *size, generator=generator)
    log_decay = -torch.rand(sum(num_pieces), 2, generator=generator)
    exact_state, exact_added = state.double(), added.double()
    counts = torch.tensor(num_pieces)
    reference(exact_state, exact_added, log_decay.double(), firsts, counts)

    # What the reference says, chunk by chunk.
    of_first = state[0].double()
    for first in firsts.tolist():
        torch.testing.assert_close(exact_added[first], of_first)
        of_first = of_first * log_decay[first].double().exp()[:, None, None] + added[first]
    torch.testing.assert_close(exact_state[0], of_first)

    with in_triton():
        carry_state(state, added, log_decay, firsts, counts)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(added.double(), exact_added, rtol=1e-5, atol=1e-5)
    assert num_launches("carry_state") == 1
