"""Several answers to one prompt: a request each, that share the prompt's blocks.

They are sent together. All but the first are forks of it (`AddRequest.fork_of`): the prompt is
computed once, with or without a prefix cache, and each copies only the block that it writes to.
This is the one place where a request is made into several.
"""

import hashlib

import msgspec

from longshore.protocol.sampling import SamplingParams

SEED_BYTES = 7  # of a derived seed: it fits a signed 64-bit integer wherever it travels


def sample_params(sampling: SamplingParams, num_samples: int) -> list[SamplingParams]:
    """The settings of each sample. The first has the seed of `sampling`, each other one a seed that
    follows from it and the sample's number; without a seed each gets one when it is sent.
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
