"""Whether a prompt and its settings fit the model, asked before they are sent to an engine."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from longshore.protocol.sampling import RepetitionDetection, SamplingParams


def prompt_problem(token_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> str | None:
    """What keeps the prompt from being answered, with the numbers; None if nothing does."""
    if not token_ids:
        return "the prompt has no tokens; there is nothing to continue"
    if len(token_ids) >= max_model_len:
        return (  # client libraries know this kind of error by the words `maximum context length`
            f"the prompt has {len(token_ids)} tokens; this model's maximum context length is "
            f"{max_model_len} tokens, at least one of them for the answer"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        outside = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        return f"the prompt holds token id {outside}; the vocabulary is 0..{vocab_size - 1}"
    return None


def plain_params(sampling: SamplingParams) -> SamplingParams:
    """The same settings as plain Python numbers: users pass numpy's, and results of a division.

    Raises ValueError naming a setting of another type.
    """
    values = {name: _plain(value) for name, value in msgspec.structs.asdict(sampling).items()}
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"SamplingParams: {error}") from error


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {_plain(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case np.generic() | np.ndarray():
            return value.tolist()
        case RepetitionDetection():
            return {name: _plain(v) for name, v in msgspec.structs.asdict(value).items()}
    return value


def sampling_problem(sampling: SamplingParams, *, vocab_size: int) -> str | None:
    """Which setting asks for something that the model does not have; None if none does."""
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            return f"stop_token_ids={token_id} is no token; the vocabulary is 0..{vocab_size - 1}"
    for token_id in sampling.logit_bias or ():
        if token_id >= vocab_size:
            return f"logit_bias: {token_id} is no token; the vocabulary is 0..{vocab_size - 1}"
    for word in sampling.bad_words_token_ids:
        if max(word) >= vocab_size:
            return (
                f"bad_words_token_ids: {max(word)} is no token; "
                f"the vocabulary is 0..{vocab_size - 1}"
            )
    return None
