"""What `LLM.embed`, `encode`, `classify` and `score`, and `AsyncLLM.encode`, do with one model's
vectors."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.embeddings import pooled_output
from longshore.deploy.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from longshore.deploy.llm.pooling_params import PoolingParams
from longshore.deploy.llm.progress import Progress
from longshore.deploy.llm.prompts import PromptInput
from longshore.deploy.llm.request_reader import RequestReader
from longshore.deploy.llm.scores import compared, labelled, probabilities
from longshore.deploy.llm.tokenization import Tokenization
from longshore.deploy.model.classifier import ClassifierModel
from longshore.deploy.model.folder import ModelFolder
from longshore.protocol.arrays import Float32Array
from longshore.protocol.requests import PoolingParams as EnginePoolingParams

Run: TypeAlias = Callable[[str, Sequence[PromptInput], EnginePoolingParams, Progress], list[Answer]]
"""Runs requests to their end; the text names them in the progress bar."""

PoolingTask: TypeAlias = Literal["embed", "classify"]


@dataclass(frozen=True)
class Encoding:
    """How prompts become arrays. pooling: for the engine. output: from its vector, which is empty
    if the request failed."""

    pooling: EnginePoolingParams
    output: Callable[[Float32Array], PoolingOutput]


def encoding(model: ModelFolder, task: PoolingTask | None, params: PoolingParams) -> Encoding:
    """task: None: what the model is made for. Raises ValueError if the model does not support the
    task or a setting."""
    if task not in (None, "embed", "classify"):
        raise ValueError(f"pooling_task={task!r} is not supported; use embed, classify")
    classifier = model.classifier
    if task == "classify" or (task is None and classifier is not None):
        known = classifier_of(model)

        def labels(pooled: Float32Array) -> PoolingOutput:
            probs = probabilities(known, pooled, use_activation=params.use_activation)
            return PoolingOutput(np.array(probs, np.float32))

        return Encoding(params.of_labels(), labels)
    if classifier is not None:
        raise ValueError(f"{model.name} classifies text: it has no embeddings")
    if model.embedding is None:
        raise ValueError(f"{model.name} has no embeddings")
    return Encoding(params.of_embedding(model.embedding), PoolingOutput)


def classifier_of(model: ModelFolder) -> ClassifierModel:
    """Raises ValueError if the model is none."""
    if model.classifier is None:
        raise ValueError(f"{model.name} has no classification head")
    return model.classifier


@dataclass(frozen=True)
class Pooler:
    """All methods raise as those of `LLM`, which check that the model supports them."""

    model: ModelFolder
    reader: RequestReader
    run: Run

    def embed(
        self, prompts: Sequence[PromptInput], params: PoolingParams, use_tqdm: Progress
    ) -> list[EmbeddingRequestOutput]:
        assert self.model.embedding is not None
        answers = self.run("embed", prompts, params.of_embedding(self.model.embedding), use_tqdm)
        return [
            pooled_output(answer, lambda pooled: EmbeddingOutput(pooled.tolist()))
            for answer in answers
        ]

    def encode(
        self,
        prompts: Sequence[PromptInput],
        task: PoolingTask | None,
        params: PoolingParams,
        use_tqdm: Progress,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        how = encoding(self.model, task, params)
        answers = self.run("encode", prompts, how.pooling, use_tqdm)
        return [pooled_output(answer, how.output) for answer in answers]

    def classify(
        self, prompts: Sequence[PromptInput], params: PoolingParams, use_tqdm: Progress
    ) -> list[ClassificationRequestOutput]:
        classifier = classifier_of(self.model)

        def output(pooled: Float32Array) -> ClassificationOutput:
            probs = probabilities(classifier, pooled, use_activation=params.use_activation)
            return labelled(classifier, probs)

        answers = self._labelled(prompts, params, use_tqdm)
        return [pooled_output(answer, output) for answer in answers]

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        use_tqdm: Progress,
        tokenization: Tokenization,
    ) -> list[ScoringRequestOutput]:
        classifier = self.model.classifier
        if classifier is None:
            return self._cosines(pairs, params, use_tqdm, tokenization)
        if len(classifier.labels) > 1:
            raise ValueError(
                f"{self.model.name} has {len(classifier.labels)} labels, so no single score: use "
                "LLM.classify"
            )

        def output(pooled: Float32Array) -> ScoringOutput:
            probs = probabilities(classifier, pooled, use_activation=params.use_activation)
            return ScoringOutput(probs[0] if probs else math.nan)

        answers = self._labelled(self.reader.read_pairs(pairs, tokenization), params, use_tqdm)
        return [pooled_output(answer, output) for answer in answers]

    def _cosines(
        self,
        pairs: Sequence[tuple[str, str]],
        params: PoolingParams,
        use_tqdm: Progress,
        tokenization: Tokenization,
    ) -> list[ScoringRequestOutput]:
        if params.use_activation is not None:
            raise ValueError("PoolingParams: use_activation needs a classification head")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        prompts = self.reader.read_all(texts, gives_tokens=False, tokenization=tokenization)
        vectors = self.embed(prompts, dataclasses.replace(params, use_activation=True), use_tqdm)
        ends = dict(zip(texts, vectors, strict=True))
        return [compared(ends[one], ends[other]) for one, other in pairs]

    def _labelled(
        self, prompts: Sequence[PromptInput], params: PoolingParams, use_tqdm: Progress
    ) -> list[Answer]:
        return self.run("classify", prompts, params.of_labels(), use_tqdm)
