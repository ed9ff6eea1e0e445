"""What `LLM.embed`, `encode`, `classify` and `score`, and `AsyncLLM.encode`, do with one model's
vectors."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias

import msgspec
import numpy as np

from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PooledT,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from longshore.deploy.llm.pooling_params import PoolingParams
from longshore.deploy.llm.progress import Progress
from longshore.deploy.llm.prompts import PromptInput
from longshore.deploy.llm.request_reader import RequestReader
from longshore.deploy.llm.tokenization import Tokenization
from longshore.deploy.model.classifier import ClassifierModel
from longshore.deploy.model.embedding import NOT_SAMPLED, cosine
from longshore.deploy.model.folder import ModelFolder
from longshore.deploy.requests.prompts import Text
from longshore.protocol.arrays import EMPTY_FLOAT32, Float32Array
from longshore.protocol.requests import PoolingParams as EnginePoolingParams

Run: TypeAlias = Callable[[str, Sequence[PromptInput], EnginePoolingParams, Progress], list[Answer]]
"""Runs requests to their end; the text names them in the progress bar."""

PoolingTask: TypeAlias = Literal["embed", "classify"]


@dataclass(frozen=True)
class Encoding(Generic[PooledT]):
    """How prompts become outputs. pooling: for the engine. output: from its vector, which is empty
    if the request failed."""

    pooling: EnginePoolingParams
    output: Callable[[Float32Array], PooledT]


def pooled_answer(
    request_id: str,
    prompt: PromptInput,
    pooling: EnginePoolingParams,
    *,
    priority: int = 0,
    trace_headers: Mapping[str, str] | None = None,
) -> Answer:
    options = msgspec.structs.replace(
        prompt.options,
        pooling=pooling,
        priority=priority,
        trace_headers=None if trace_headers is None else dict(trace_headers),
    )
    return Answer(request_id, prompt, NOT_SAMPLED, options=options)


def pooled_output(
    answer: Answer, make: Callable[[Float32Array], PooledT]
) -> PoolingRequestOutput[PooledT]:
    """The output; call it when the request has finished or was aborted."""
    end = answer.end
    return PoolingRequestOutput(
        answer.request_id,
        make(EMPTY_FLOAT32 if end is None else end.pooled),
        answer.prompt.token_ids,
        num_cached_tokens=0 if end is None else end.num_cached_tokens,
        num_preemptions=0 if end is None else end.num_preemptions,
        error="the request was aborted" if end is None else end.message,
    )


def encoding(
    model: ModelFolder, task: PoolingTask | None, params: PoolingParams
) -> Encoding[PoolingOutput]:
    """task: None: what the model is made for. Raises ValueError if the model does not support the
    task or a setting."""
    if task not in (None, "embed", "classify"):
        raise ValueError(f"pooling_task={task!r} is not supported; use embed, classify")
    classifier = model.classifier
    if task == "classify" or (task is None and classifier is not None):
        known = classifier_of(model)

        def labels(pooled: Float32Array) -> PoolingOutput:
            probs = known.probabilities(pooled, use_activation=params.use_activation)
            return PoolingOutput(probs.astype(np.float32))

        return Encoding(params.of_labels(), labels)
    if classifier is not None:
        raise ValueError(f"{model.name} classifies text: it has no embeddings")
    if model.embedding is None:
        raise ValueError(f"{model.name} has no embeddings")
    return Encoding(params.of_embedding(model.embedding), PoolingOutput)


def classifier_of(model: ModelFolder) -> ClassifierModel:
    """The model's classification head. Raises ValueError if it has none."""
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
        how = Encoding(
            params.of_embedding(self.model.embedding),
            lambda pooled: EmbeddingOutput(pooled.tolist()),
        )
        return self._outputs("embed", prompts, how, use_tqdm)

    def encode(
        self,
        prompts: Sequence[PromptInput],
        task: PoolingTask | None,
        params: PoolingParams,
        use_tqdm: Progress,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        return self._outputs("encode", prompts, encoding(self.model, task, params), use_tqdm)

    def classify(
        self, prompts: Sequence[PromptInput], params: PoolingParams, use_tqdm: Progress
    ) -> list[ClassificationRequestOutput]:
        classifier = classifier_of(self.model)

        def output(pooled: Float32Array) -> ClassificationOutput:
            probs = classifier.probabilities(pooled, use_activation=params.use_activation)
            label = classifier.labels[int(np.argmax(probs))] if probs.size else ""
            return ClassificationOutput(probs.tolist(), label)

        return self._outputs("classify", prompts, Encoding(params.of_labels(), output), use_tqdm)

    def score(
        self,
        pairs: Sequence[tuple[Text, Text]],
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
            probs = classifier.probabilities(pooled, use_activation=params.use_activation)
            return ScoringOutput(probs.item() if probs.size else math.nan)

        prompts = self.reader.read_pairs(pairs, tokenization)
        return self._outputs("classify", prompts, Encoding(params.of_labels(), output), use_tqdm)

    def _cosines(
        self,
        pairs: Sequence[tuple[Text, Text]],
        params: PoolingParams,
        use_tqdm: Progress,
        tokenization: Tokenization,
    ) -> list[ScoringRequestOutput]:
        if params.use_activation is not None:
            raise ValueError("PoolingParams: use_activation needs a classification head")
        texts = list(dict.fromkeys(each.text for pair in pairs for each in pair))
        prompts = self.reader.read_all(texts, gives_tokens=False, tokenization=tokenization)
        how = encoding(self.model, "embed", dataclasses.replace(params, use_activation=True))
        vectors = self._outputs("embed", prompts, how, use_tqdm)
        ends = dict(zip(texts, vectors, strict=True))
        return [_compared(ends[one.text], ends[other.text]) for one, other in pairs]

    def _outputs(
        self, what: str, prompts: Sequence[PromptInput], how: Encoding[PooledT], use_tqdm: Progress
    ) -> list[PoolingRequestOutput[PooledT]]:
        answers = self.run(what, prompts, how.pooling, use_tqdm)
        return [pooled_output(answer, how.output) for answer in answers]


def _compared(
    one: PoolingRequestOutput[PoolingOutput], other: PoolingRequestOutput[PoolingOutput]
) -> ScoringRequestOutput:
    """The cosine of two embeddings of length 1."""
    error = one.error or other.error
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(math.nan if error else cosine(one.outputs.data, other.outputs.data)),
        one.prompt_token_ids + other.prompt_token_ids,
        one.num_cached_tokens + other.num_cached_tokens,
        num_preemptions=one.num_preemptions + other.num_preemptions,
        error=error,
    )
