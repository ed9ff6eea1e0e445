"""Sampling settings of several answers to one prompt, each of which is a request.

The requests are sent together. All but the first are forks of it (`AddRequest.fork_of`): the prompt
is computed once, with or without a prefix cache, and each fork copies only the block that it writes
to.
"""

import hashlib

import msgspec

from longshore.protocol.sampling import SamplingParams

SEED_BYTES = 7  # size of a derived seed, which must fit a signed 64-bit integer


def sample_params(sampling: SamplingParams, num_samples: int) -> list[SamplingParams]:
    """The settings of each sample. The first has the seed of `sampling`, the others a seed derived
    from it and the sample's index. Without a seed, each gets one when it is sent.
    """
    return [
        msgspec.structs.replace(sampling, seed=_derived(sampling.seed, index))
        for index in range(num_samples)
    ]


def _derived(seed: int | None, index: int) -> int | None:
    if seed is None or index == 0:
        return seed
    text = f"{seed}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=SEED_BYTES).digest(), "little")
