"""Validates the settings of a prompt, before they are sent to an engine."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from longshore.protocol.sampling import RepetitionDetection, SamplingParams


def plain_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Settings as users write them, who may pass numpy's numbers, or floats for integers.

    Raises ValueError naming a setting that is out of range or of the wrong type.
    """
    values = {name: _plain(value) for name, value in settings.items()}
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
    """Which setting has a token id outside the vocabulary; None if none has."""
    for token_id in sampling.stop_token_ids:
        if token_id >= vocab_size:
            return f"stop_token_ids={token_id} is outside the vocabulary (0 to {vocab_size - 1})"
    for token_id in sampling.logit_bias or ():
        if token_id >= vocab_size:
            return f"logit_bias: {token_id} is outside the vocabulary (0 to {vocab_size - 1})"
    for word in sampling.bad_words_token_ids:
        if max(word) >= vocab_size:
            return (
                f"bad_words_token_ids: {max(word)} is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
    return None
