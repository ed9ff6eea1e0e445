"""The state before each piece of the chunks of a step, from what every piece adds."""

from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def carry_state(
    state: Tensor, added: Tensor, log_decay: Tensor, firsts: Tensor, num_pieces: Tensor
) -> None:
    """state: (num_chunks, num_heads, head_dim, state_size) float32, contiguous; before the chunks,
               and afterwards after them.
    added:     (pieces, num_heads, head_dim, state_size) float32, contiguous; what each piece adds
               to the state, and afterwards the state before it.
    log_decay: (pieces, num_heads) float32, contiguous; how much the state decays in each piece.
    firsts:    (rounds,) int64, the first of the nth pieces of all chunks. The first chunks have as
               many pieces as there are rounds; those with fewer come last.
    num_pieces: (num_chunks,) int64, of each chunk.
    """
    if uses_triton(state):
        from longshore.worker.kernels.gpu import carry_state as gpu

        gpu.carry_state(state, added, log_decay, firsts, num_pieces)
        return
    reference(state, added, log_decay, firsts, num_pieces)


def reference(
    state: Tensor, added: Tensor, log_decay: Tensor, firsts: Tensor, num_pieces: Tensor
) -> None:
    """Compute the same in plain torch."""
    decay = log_decay.exp()[:, :, None, None]
    counts = num_pieces.tolist()
    for nth, first in enumerate(firsts.tolist()):
        number = sum(count > nth for count in counts)
        pieces = slice(first, first + number)
        after = state[:number] * decay[pieces] + added[pieces]
        added[pieces] = state[:number]
        state[:number] = after
