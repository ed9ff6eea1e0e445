"""The requests that both sides of a comparison get: the same prompts, limits and pool, made from one
seed. Imported by Longshore's benchmarks and by the peers' programs, so it knows neither.

steady    N requests of 512 to 543 tokens that decode to the end of the run: block borders are crossed by the
          same number of requests in every step.
churn     N requests of 64 tokens; each lives for 10 steps, so in every step a tenth of them ends and
          as many come. The pool holds the whole load and as much again.
pressure  N requests of 64 tokens that bring 64 more, in a pool with room for about half of them at their
          ends: they preempt one another. Each that ends is replaced.
"""

from dataclasses import dataclass

import numpy as np

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
WINDOW = 256  # of all groups of the KV cache but the first
SHARED_LEN = 48  # of every second short prompt, one of NUM_SHARED prefixes
NUM_SHARED = 16


@dataclass(frozen=True)
class Arrival:
    """One request: (n,) int32 prompt and the number of output tokens that ends it."""

    prompt: np.ndarray
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """`first` are there at the start; the next of `later` comes for each that ends. `num_blocks` is
    the pool, with the null block."""

    first: list[Arrival]
    later: list[Arrival]
    num_blocks: int


def make(name: str, num_running: int, num_steps: int) -> Workload:
    """The workload of this name, with enough different requests for `num_steps` steps."""
    rng = np.random.default_rng(0)
    if name == "steady":
        lives = num_steps + 64
        first = [Arrival(_tokens(rng, 512 + index % 32), lives) for index in range(num_running)]
        return Workload(first, [], num_running * -(-(544 + lives) // BLOCK_SIZE) + 1)
    shared = [_tokens(rng, SHARED_LEN) for _ in range(NUM_SHARED)]
    lives = {"churn": 10, "pressure": 64}[name]
    blocks_at_end = -(-(64 + lives) // BLOCK_SIZE)
    first = [
        Arrival(_prompt(rng, shared, index), 1 + index * lives // num_running)
        for index in range(num_running)
    ]
    num_later = num_running * num_steps // lives + num_running
    later = [Arrival(_prompt(rng, shared, index), lives) for index in range(num_later)]
    share = {"churn": 2.0, "pressure": 0.55}[name]
    return Workload(first, later, max(int(num_running * blocks_at_end * share), blocks_at_end) + 1)


def num_right(row: int | np.ndarray, step: int, num_drafts: int) -> int | np.ndarray:
    """How many of a row's drafts in a step are right."""
    return (row + step) % (num_drafts + 1)


def _tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(3, VOCAB_SIZE, count).astype(np.int32)


def _prompt(rng: np.random.Generator, shared: list[np.ndarray], index: int) -> np.ndarray:
    if index % 2:
        return _tokens(rng, 64)
    prefix = shared[int(rng.integers(NUM_SHARED))]
    return np.concatenate((prefix, _tokens(rng, 64 - SHARED_LEN)))
