"""What `LLM.embed`, `encode`, `classify` and `score` do with one model's vectors."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from longshore.deploy.llm.prompts import Prompt, PromptInput
from longshore.deploy.llm.request_reader import RequestReader
from longshore.deploy.llm.scores import compared, labelled, probabilities
from longshore.deploy.model.classifier import ClassifierModel
from longshore.deploy.model.folder import ModelFolder
from longshore.protocol.arrays import Float32Array
from longshore.protocol.requests import PoolingParams as EnginePoolingParams

Run: TypeAlias = Callable[[str, Sequence[PromptInput], EnginePoolingParams, Progress], list[Answer]]
"""Runs requests to their end; the text names them in the progress bar."""


@dataclass(frozen=True)
class Pooler:
    """All methods raise as those of `LLM`, which check that the model supports them."""

    model: ModelFolder
    reader: RequestReader
    run: Run

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, use_tqdm: Progress
    ) -> list[EmbeddingRequestOutput]:
        return [
            pooled_output(answer, lambda pooled: EmbeddingOutput(pooled.tolist()))
            for answer in self._embedded(prompts, params, use_tqdm)
        ]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, use_tqdm: Progress
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        answers = self._embedded(prompts, params, use_tqdm)
        return [pooled_output(answer, PoolingOutput) for answer in answers]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, use_tqdm: Progress
    ) -> list[ClassificationRequestOutput]:
        classifier = self._classifier()

        def output(pooled: Float32Array) -> ClassificationOutput:
            probs = probabilities(classifier, pooled, use_activation=params.use_activation)
            return labelled(classifier, probs)

        answers = self._labelled(
            self.reader.read_all(prompts, gives_tokens=False), params, use_tqdm
        )
        return [pooled_output(answer, output) for answer in answers]

    def encode_labels(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, use_tqdm: Progress
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        classifier = self._classifier()

        def output(pooled: Float32Array) -> PoolingOutput:
            probs = probabilities(classifier, pooled, use_activation=params.use_activation)
            return PoolingOutput(np.array(probs, np.float32))

        answers = self._labelled(
            self.reader.read_all(prompts, gives_tokens=False), params, use_tqdm
        )
        return [pooled_output(answer, output) for answer in answers]

    def score(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, use_tqdm: Progress
    ) -> list[ScoringRequestOutput]:
        classifier = self.model.classifier
        if classifier is None:
            return self._cosines(pairs, params, use_tqdm)
        if len(classifier.labels) > 1:
            raise ValueError(
                f"{self.model.name} has {len(classifier.labels)} labels, so no single score: use "
                "LLM.classify"
            )

        def output(pooled: Float32Array) -> ScoringOutput:
            probs = probabilities(classifier, pooled, use_activation=params.use_activation)
            return ScoringOutput(probs[0] if probs else math.nan)

        answers = self._labelled(self.reader.read_pairs(pairs), params, use_tqdm)
        return [pooled_output(answer, output) for answer in answers]

    def _cosines(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, use_tqdm: Progress
    ) -> list[ScoringRequestOutput]:
        if params.use_activation is not None:
            raise ValueError("PoolingParams: use_activation needs a classification head")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = self.embed(texts, dataclasses.replace(params, use_activation=True), use_tqdm)
        ends = dict(zip(texts, vectors, strict=True))
        return [compared(ends[one], ends[other]) for one, other in pairs]

    def _classifier(self) -> ClassifierModel:
        """Raises ValueError if the model is none."""
        if self.model.classifier is None:
            raise ValueError(f"{self.model.name} has no classification head")
        return self.model.classifier

    def _embedded(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams, use_tqdm: Progress
    ) -> list[Answer]:
        assert self.model.embedding is not None
        pooling = params.of_embedding(self.model.embedding)
        return self.run(
            "embed", self.reader.read_all(prompts, gives_tokens=False), pooling, use_tqdm
        )

    def _labelled(
        self, prompts: Sequence[PromptInput], params: PoolingParams, use_tqdm: Progress
    ) -> list[Answer]:
        return self.run("classify", prompts, params.of_labels(), use_tqdm)
