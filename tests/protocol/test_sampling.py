"""Invalid sampling parameters are rejected with the name of the setting."""

from typing import Any

import msgspec
import pytest

from longshore.protocol.sampling import MAX_STOP_TOKEN_IDS, SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 must be a finite number, at least 0"),
        ({"temperature": float("nan")}, r"temperature=nan must be a finite number"),
        ({"temperature": float("inf")}, r"temperature=inf must be a finite number"),
        ({"top_k": -1}, r"top_k=-1 must be 0"),
        ({"top_p": 0.0}, r"top_p=0.0 must be above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p=1.5 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, r"top_p=nan must be above 0"),
        ({"seed": 2**64}, r"seed=18446744073709551616 does not fit in 64 bits"),
        ({"seed": -(2**63) - 1}, r"does not fit in 64 bits"),
        ({"max_tokens": 0}, r"max_tokens=0 must be at least 1"),
        ({"min_tokens": -1}, r"min_tokens=-1 must be at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens=5 is more than max_tokens=4"),
        ({"stop_token_ids": (1, -2)}, r"stop_token_ids=\(1, -2\) contains a negative id"),
        (
            {"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))},
            r"stop_token_ids has 129 ids; at most 128 are allowed",
        ),
        ({"min_p": None}, r"min_p=None must lie within 0..1"),
        ({"presence_penalty": None}, r"presence_penalty=None must lie within -2..2"),
    ],
)
def test_a_setting_out_of_range_is_reported_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 10**6},
        {"max_tokens": 3, "min_tokens": 3},
    ],
)
def test_settings_at_their_limits_are_accepted(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    for name, value in settings.items():
        assert getattr(params, name) == value


def test_stop_ids_given_as_a_list_become_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]


def test_parameters_are_immutable() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_an_unknown_setting_is_rejected() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)
