"""Finish reasons and the columns of outputs."""

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
def test_every_reason_has_its_word_in_the_api(reason: FinishReason, name: str) -> None:
    assert reason.api_name == name


def test_no_reason_is_without_a_word() -> None:
    assert all(reason.api_name for reason in FinishReason)
