"""Settings as users write them: numpy's numbers are accepted, fractions of a token are not."""

from typing import Any

import numpy as np
import pytest

from longshore.deploy.requests.validation import plain_params
from longshore.protocol.sampling import RepetitionDetection, SamplingParams


def test_numbers_of_numpy_become_plain_ones() -> None:
    given = {
        "temperature": np.float64(0.5),
        "max_tokens": np.int64(4),
        "stop_token_ids": [np.int32(5)],
        "logit_bias": {np.int64(6): np.float32(2)},
        "bad_words_token_ids": [np.array([3, 4])],
        "repetition": RepetitionDetection(np.int64(3)),  # type: ignore[arg-type]
    }
    plain = plain_params(given)
    assert plain == SamplingParams(
        temperature=0.5,
        max_tokens=4,
        stop_token_ids=(5,),
        logit_bias={6: 2.0},
        bad_words_token_ids=((3, 4),),
        repetition=RepetitionDetection(3),
    )
    assert type(plain.max_tokens) is int
    assert [type(key) for key in plain.logit_bias or ()] == [int]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 3.5},
        {"top_k": 2.5},
        {"logprobs": True},
        {"logit_bias": {5.5: 1}},
        {"stop_token_ids": [5.0]},
    ],
)
def test_a_setting_of_another_type_is_rejected_by_its_name(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        plain_params(settings)
