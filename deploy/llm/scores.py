"""`LLM.score` and `LLM.classify`: pairs of texts, and what outputs say about them."""

import math
from collections.abc import Sequence

import numpy as np

from longshore.deploy.llm.outputs import (
    ClassificationOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from longshore.deploy.model.classifier import ClassifierModel
from longshore.protocol.arrays import Float32Array


def text_pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text with each of the others, or as many of each. Raises ValueError."""
    ones = [data_1] if isinstance(data_1, str) else list(data_1)
    others = [data_2] if isinstance(data_2, str) else list(data_2)
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise ValueError(
            f"data_1 has {len(ones)} texts and data_2 has {len(others)}; pass one text as data_1, "
            "or as many as data_2"
        )
    if not all(ones) or not all(others):
        raise ValueError("data_1 and data_2 must not have empty texts")
    return list(zip(ones, others, strict=True))


def probabilities(
    classifier: ClassifierModel, scores: Float32Array, *, use_activation: bool | None
) -> list[float]:
    """Of the labels. scores: empty if the request failed; then the list is too."""
    if not scores.size:
        return []
    return (scores if use_activation is False else classifier.activated(scores)).tolist()


def labelled(classifier: ClassifierModel, probs: list[float]) -> ClassificationOutput:
    return ClassificationOutput(probs, classifier.labels[int(np.argmax(probs))] if probs else "")


def compared(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """The cosine of two embeddings of length 1."""
    error = one.error or other.error
    cosine = math.nan
    if error is None:
        cosine = float(np.dot(one.outputs.embedding, other.outputs.embedding))
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(cosine),
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        num_preemptions=one.num_preemptions + other.num_preemptions,
        error=error,
    )
