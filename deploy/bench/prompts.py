"""Prompts of random token ids, different except for an optional shared prefix."""

import numpy as np

# Many vocabularies have special tokens below this id.
FIRST_ORDINARY_ID = 3


def random_prompts(
    num_prompts: int,
    *,
    input_len: int,
    shared_prefix: int,
    vocab_size: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """`num_prompts` lists of `input_len` ids, equal in their first `shared_prefix`."""
    low = min(FIRST_ORDINARY_ID, vocab_size - 1)
    ids = generator.integers(low, vocab_size, (num_prompts, input_len))
    ids[:, :shared_prefix] = ids[0, :shared_prefix]
    return ids.tolist()
