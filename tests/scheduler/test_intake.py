"""Requests that are answered instead of queued."""

import re
from typing import Any

import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.client import AddRequest, FinishReason
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.intake import refusal

CONFIG = SchedulerConfig(max_model_len=16)


def refused(
    prompt: list[int], *, is_duplicate: bool = False, handle: int = 0, **fields: Any
) -> tuple[FinishReason, str] | None:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    if "outputs" in fields:
        fields["output_token_ids"] = int32_array(fields.pop("outputs"))
    message = AddRequest("name", handle, int32_array(prompt), sampling, **fields)
    return refusal(message, config=CONFIG, vocab_size=100, is_duplicate=is_duplicate)


@pytest.mark.parametrize(
    ("request_fields", "reason", "text"),
    [
        ({"prompt": [1] * 16}, FinishReason.IGNORED, "the prompt has 16 tokens.*is 16"),
        ({"prompt": [1] * 8, "outputs": [1] * 8}, FinishReason.IGNORED, "16 tokens"),
        ({"prompt": []}, FinishReason.ERROR, "the prompt has no tokens"),
        ({"prompt": [100]}, FinishReason.ERROR, r"a token id lies outside 0\.\.99"),
        ({"prompt": [-1]}, FinishReason.ERROR, r"a token id lies outside 0\.\.99"),
        ({"prompt": [1], "outputs": [100]}, FinishReason.ERROR, "a token id lies outside"),
        ({"prompt": [1], "handle": -1}, FinishReason.ERROR, "handle -1 is"),
        ({"prompt": [1], "handle": 2**31}, FinishReason.ERROR, f"handle {2**31} is"),
        ({"prompt": [1], "handle": 2**63}, FinishReason.ERROR, "handle"),
        ({"prompt": [1], "cache_salt": "s" * 2000}, FinishReason.ERROR, "cache_salt is longer"),
        ({"prompt": [1], "age_s": -1.0}, FinishReason.ERROR, "age_s=-1.0"),
        ({"prompt": [1], "age_s": float("nan")}, FinishReason.ERROR, "age_s=nan"),
        (
            {"prompt": [1], "sampling": {"stop_token_ids": (2**63,)}},
            FinishReason.ERROR,
            r"a stop token id lies outside 0\.\.99",
        ),
        ({"prompt": [1], "is_duplicate": True}, FinishReason.ERROR, "'name'.*still running"),
        (
            {"prompt": [1], "kv_transfer_params": {}},
            FinishReason.ERROR,
            "kv_transfer_params were given, but this engine has no KV connector",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_told_why(
    request_fields: dict[str, Any], reason: FinishReason, text: str
) -> None:
    answer = refused(**request_fields)
    assert answer is not None
    assert answer[0] is reason
    assert re.search(text, answer[1])


def test_a_request_that_leaves_one_token_for_the_output_is_accepted() -> None:
    assert refused([0, 99] + [1] * 13) is None
    assert refused([1] * 7, outputs=[1] * 8, handle=2**31 - 1, age_s=5.0) is None
