"""Finish reasons and their names in the OpenAI API."""

import pytest

from longshore.protocol.outputs import FinishReason


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.STOPPED, "stop"),
        (FinishReason.LENGTH_CAPPED, "length"),
        (FinishReason.ABORTED, "abort"),
        (FinishReason.IGNORED, "length"),
        (FinishReason.ERROR, "error"),
        (FinishReason.REPETITION, "repetition"),
    ],
)
def test_a_finish_reason_has_its_name_in_the_api(reason: FinishReason, name: str) -> None:
    assert reason.api_name == name


def test_every_finish_reason_has_a_name() -> None:
    assert all(reason.api_name for reason in FinishReason)
