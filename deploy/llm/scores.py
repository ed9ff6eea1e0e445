"""`LLM.score` and `LLM.classify`: pairs of texts, and the outputs, in vLLM's form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longshore.deploy.llm.embeddings import EmbeddingOutput
from longshore.deploy.model.classifier import ClassifierModel


@dataclass(frozen=True)
class ScoringOutput:
    """score: not a number if the request failed."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one pair of texts.

    prompt_token_ids:  of the pair, or of both texts if their embeddings were compared.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    error:             why the request failed; None if it did not.
    """

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class ClassificationOutput:
    """label: of the highest score. probs: of all labels; empty if the request failed."""

    label: str
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """The label of one prompt; otherwise as ScoringRequestOutput."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    error: str | None = None


def text_pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text with each of the others, or as many of each. Raises ValueError."""
    ones = [text_1] if isinstance(text_1, str) else list(text_1)
    others = [text_2] if isinstance(text_2, str) else list(text_2)
    if len(ones) == 1:
        ones *= len(others)
    if len(ones) != len(others):
        raise ValueError(
            f"text_1 has {len(ones)} texts and text_2 has {len(others)}; pass one text as text_1, "
            "or as many as text_2"
        )
    if not all(ones) or not all(others):
        raise ValueError("text_1 and text_2 must not have empty texts")
    return list(zip(ones, others, strict=True))


def classified(
    end: EmbeddingOutput, classifier: ClassifierModel, *, use_activation: bool
) -> ClassificationRequestOutput:
    """end: its embedding has the scores of the labels."""
    probs: list[float] = []
    if end.error is None:
        scores = end.embedding
        probs = (classifier.activated(scores) if use_activation else scores).tolist()
    label = classifier.labels[int(np.argmax(probs))] if probs else ""
    return ClassificationRequestOutput(
        end.request_id,
        ClassificationOutput(label, probs),
        end.prompt_token_ids,
        end.num_cached_tokens,
        end.error,
    )


def scored(output: ClassificationRequestOutput) -> ScoringRequestOutput:
    """The score of the only label."""
    probs = output.outputs.probs
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(probs[0] if probs else math.nan),
        output.prompt_token_ids,
        output.num_cached_tokens,
        output.error,
    )


def compared(one: EmbeddingOutput, other: EmbeddingOutput) -> ScoringRequestOutput:
    """The cosine of two embeddings of length 1."""
    error = one.error or other.error
    cosine = math.nan
    if error is None:
        cosine = float(one.embedding.astype(np.float64) @ other.embedding.astype(np.float64))
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(cosine),
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        error,
    )
