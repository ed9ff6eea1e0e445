"""Requests that are rejected instead of queued."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from longshore.protocol.arrays import EMPTY_UINT8, int32_array
from longshore.protocol.handshake import Feature
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import (
    AddRequest,
    CacheHint,
    CachePrefix,
    ContinueSession,
    LoRARequest,
    MultimodalFeature,
    PoolingParams,
    PromptEmbeds,
    RequestOptions,
    StructuredOutput,
)
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.validation import RequestValidator

OFFERED = [feature for feature in Feature if feature is not Feature.POOLING_ONLY]


def intake(*features: Feature, has_connector: bool = False, **settings: Any) -> RequestValidator:
    return RequestValidator(
        SchedulerConfig(max_model_len=16, **settings),
        vocab_size=100,
        features=frozenset(features),
        has_connector=has_connector,
        has_grammars=True,
    )


def refused(
    prompt: list[int],
    *,
    is_duplicate: bool = False,
    handle: int = 0,
    by: RequestValidator | None = None,
    outputs: Sequence[int] = (),
    age_s: float = 0.0,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[FinishReason, str] | None:
    message = AddRequest(
        "name",
        handle,
        int32_array(prompt),
        SamplingParams(**(sampling or {})),
        RequestOptions(**options),
        int32_array(list(outputs)),
        age_s,
    )
    return (by or intake()).rejection(message, is_duplicate=is_duplicate)


@pytest.mark.parametrize(
    ("request_fields", "reason", "text"),
    [
        ({"prompt": [1] * 16}, FinishReason.IGNORED, "the prompt has 16 tokens.*output is 16"),
        ({"prompt": [1] * 8, "outputs": [1] * 8}, FinishReason.IGNORED, "16 tokens"),
        (
            {"prompt": [1] * 17, "pooling": PoolingParams(), "by": intake(Feature.POOLING)},
            FinishReason.IGNORED,
            "the prompt has 17 tokens.*limit is 16; shorten it",
        ),
        ({"prompt": []}, FinishReason.ERROR, "the prompt has no tokens"),
        ({"prompt": [100]}, FinishReason.ERROR, r"a token id is outside 0\.\.99"),
        ({"prompt": [-1]}, FinishReason.ERROR, r"a token id is outside 0\.\.99"),
        ({"prompt": [1], "outputs": [100]}, FinishReason.ERROR, "a token id is outside"),
        ({"prompt": [1], "handle": -1}, FinishReason.ERROR, "handle -1 is"),
        ({"prompt": [1], "handle": 2**31}, FinishReason.ERROR, f"handle {2**31} is"),
        ({"prompt": [1], "handle": 2**63}, FinishReason.ERROR, "handle"),
        ({"prompt": [1], "cache_salt": "s" * 2000}, FinishReason.ERROR, "cache_salt is longer"),
        ({"prompt": [1], "cache_hint": CacheHint(0.0)}, FinishReason.ERROR, "cache_hint.ttl_s=0"),
        (
            {"prompt": [1], "cache_hint": CacheHint(1.0, priority=4)},
            FinishReason.ERROR,
            "cache_hint.priority=4 is not in 1..3",
        ),
        (
            {"prompt": [1], "cache_hint": CacheHint(0.0, prefixes=(CachePrefix(0, 1.0),))},
            FinishReason.ERROR,
            "a prefix of 0 tokens",
        ),
        (
            {"prompt": [1], "cache_hint": CacheHint(0.0, prefixes=(CachePrefix(1, 1e9),))},
            FinishReason.ERROR,
            "ttl_s=1000000000.0 of a prefix",
        ),
        (
            {"prompt": [1], "cache_hint": CacheHint(1.0, prefixes=(CachePrefix(1, 1.0),) * 9)},
            FinishReason.ERROR,
            "more than 8 prefixes",
        ),
        (
            {"prompt": [1], "cache_hint": CacheHint(1.0, "s" * 2000)},
            FinishReason.ERROR,
            "cache_hint.session is longer",
        ),
        ({"prompt": [1], "age_s": -1.0}, FinishReason.ERROR, "age_s=-1.0"),
        ({"prompt": [1], "age_s": float("nan")}, FinishReason.ERROR, "age_s=nan"),
        (
            {"prompt": [1], "sampling": {"stop_token_ids": (2**63,)}},
            FinishReason.ERROR,
            r"a stop token id is outside 0\.\.99",
        ),
        ({"prompt": [1], "is_duplicate": True}, FinishReason.ERROR, "'name'.*still running"),
        (
            {"prompt": [1], "kv_transfer_params": {}},
            FinishReason.ERROR,
            "kv_transfer_params were given, but this engine has no KV connector",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_rejected_with_the_reason(
    request_fields: dict[str, Any], reason: FinishReason, text: str
) -> None:
    answer = refused(**request_fields)
    assert answer is not None
    assert answer[0] is reason
    assert re.search(text, answer[1])


def test_a_request_that_leaves_one_token_for_the_output_is_accepted() -> None:
    assert refused([0, 99] + [1] * 13) is None
    assert refused([1] * 7, outputs=[1] * 8, handle=2**31 - 1, age_s=5.0) is None


EMBEDS = PromptEmbeds(np.zeros(2 * 8 * 2, np.uint8), hidden_size=8, dtype="float16")
IMAGE = MultimodalFeature("image", offset=1, num_tokens=4)


@pytest.mark.parametrize(
    ("feature", "field", "value"),
    [
        (Feature.PROMPT_EMBEDS, "prompt_embeds", EMBEDS),
        (Feature.LORA, "lora", LoRARequest("poet")),
        (Feature.MULTIMODAL, "multimodal", (IMAGE,)),
        (Feature.POOLING, "pooling", PoolingParams()),
        (Feature.STRUCTURED_OUTPUT, "structured_output", StructuredOutput("regex", "a+")),
    ],
)
def test_a_feature_that_the_workers_do_not_support_is_rejected_with_its_name(
    feature: Feature, field: str, value: Any
) -> None:
    prompt = [1] * (2 if field == "prompt_embeds" else 8)
    settings = {"max_loras": 1, "max_num_encoder_input_tokens": 4}
    others = [other for other in OFFERED if other is not feature]
    answer = refused(prompt, by=intake(*others, **settings), **{field: value})
    assert answer is not None
    assert answer[0] is FinishReason.ERROR
    assert feature.value in answer[1]
    assert refused(prompt, by=intake(feature, **settings), **{field: value}) is None


def test_a_model_without_a_head_accepts_pooling_requests_only() -> None:
    by = intake(Feature.POOLING, Feature.POOLING_ONLY)
    assert refused([1] * 8, by=by, pooling=PoolingParams()) is None
    answer = refused([1] * 8, by=by)
    assert answer is not None
    assert answer[0] is FinishReason.ERROR
    assert "no output head: it gives vectors" in answer[1]


def test_only_a_model_with_a_classification_head_scores_labels() -> None:
    scores = PoolingParams("classify", normalize=False)
    answer = refused([1] * 8, by=intake(Feature.POOLING), pooling=scores)
    assert answer is not None
    assert answer[0] is FinishReason.ERROR
    assert "no classification head" in answer[1]
    by = intake(Feature.POOLING, Feature.POOLING_ONLY, Feature.CLASSIFY)
    assert refused([1] * 8, by=by, pooling=scores) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"lora": LoRARequest("poet")}, "max_loras=0"),
        ({"multimodal": (IMAGE,)}, r"4 tokens.*max_num_encoder_input_tokens"),
        ({"multimodal": (MultimodalFeature("x", 6, 3),)}, "item at 6 with 3 tokens"),
        ({"multimodal": (IMAGE, MultimodalFeature("x", 4, 1))}, "item at 4 with 1 tokens"),
        ({"prompt_embeds": EMBEDS}, "prompt_embeds has 32 bytes, but 8 tokens.*need 128"),
        ({"job_id": "j" * 2000}, "job_id is longer"),
        ({"prompt_embeds": PromptEmbeds(EMPTY_UINT8, 0, "float16")}, "hidden_size=0"),
        (
            {"multimodal": (MultimodalFeature("x", 0, 2), MultimodalFeature("x", 2, 3))},
            "the same hash but different numbers",
        ),
        ({"pooling": PoolingParams(), "outputs": [1]}, "pooling request cannot have output"),
        ({"resumable": True, "pooling": PoolingParams()}, "resumable.*pooling"),
    ],
)
def test_inputs_that_do_not_fit_the_prompt_or_the_settings_are_rejected(
    fields: dict[str, Any], text: str
) -> None:
    answer = refused([1] * 8, by=intake(*OFFERED), **fields)
    assert answer is not None
    assert answer[0] is FinishReason.ERROR
    assert re.search(text, answer[1])


def test_parameters_for_a_connector_pass_when_there_is_one() -> None:
    assert refused([1], by=intake(has_connector=True), kv_transfer_params={"a": 1}) is None


def test_the_next_input_of_a_session_is_checked_like_a_prompt() -> None:
    def chunk(ids: list[int]) -> ContinueSession:
        return ContinueSession(0, int32_array(ids), SamplingParams())

    assert intake().chunk_rejection(chunk([1] * 7), num_tokens=8) is None
    too_long = intake().chunk_rejection(chunk([1] * 8), num_tokens=8)
    assert too_long is not None
    assert too_long[0] is FinishReason.IGNORED
    bad = intake().chunk_rejection(chunk([100]), num_tokens=8)
    assert bad is not None
    assert bad[0] is FinishReason.ERROR


def test_inputs_larger_than_a_plan_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.scheduler.validation.MAX_ADDED_BYTES", 64)
    item = MultimodalFeature("x", 0, 4, data=np.zeros(40, np.uint8))
    by = intake(*OFFERED, max_num_encoder_input_tokens=4)
    answer = refused([1] * 8, by=by, multimodal=(item,))
    assert answer is not None
    assert "72 bytes; the limit is 64" in answer[1]
    assert refused([1] * 6, by=by, multimodal=(item,)) is None
