"""POST /v1/score and /v1/rerank: how well documents fit queries.

A model with a classification head of one label scores a query and a document in one prompt (a
cross-encoder). An embedding model gives the cosine similarity of the two embeddings; each text is
computed once.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from longshore.deploy.gateway.api.embeddings import embedding_model, embedding_pooling
from longshore.deploy.gateway.api.endpoint import Service
from longshore.deploy.gateway.api.pooled_inputs import MAX_INPUTS
from longshore.deploy.gateway.api.pooling_endpoint import (
    PoolingCall,
    PoolingEndpoint,
    PoolingRequest,
    PoolingUsage,
    usage_of,
)
from longshore.deploy.gateway.api.requests import Int32, each_of
from longshore.deploy.gateway.openai.pair_prompts import PairPrompts
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.model.classifier import CLASSIFIED
from longshore.deploy.model.embedding import cosine
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.prompts import PromptCut, PromptForm, Text, text_pairs
from longshore.protocol.outputs import FinishedRequest

Pairs: TypeAlias = Sequence[tuple[Text, Text]]

SCORE_NAMES: Final = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""What the two texts of a pair are called in requests for scores."""


class ScoringRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """use_activation: as in vLLM; False returns scores before the head's activation.
    max_tokens_per_doc: truncate documents to this many tokens.
    """

    use_activation: bool | None = None
    max_tokens_per_doc: Int32 | None = None

    @property
    def truncates(self) -> bool:
        return super().truncates or bool(self.max_tokens_per_doc)


class ScoreRequest(ScoringRequest, kw_only=True, forbid_unknown_fields=True):
    """One of the pairs in SCORE_NAMES, as in vLLM: one text with each of the others, or as many of
    each."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def pairs(self) -> Pairs:
        """The pairs of texts to score. Raises RequestError."""
        every = dict.fromkeys(name for names in SCORE_NAMES for name in names)
        given = {name: value for name in every if (value := getattr(self, name)) is not None}
        if tuple(given) not in SCORE_NAMES:
            raise invalid(
                "text_1 and text_2 are required, or queries and documents instead of them",
                param=_missing_name(list(given)),
            )
        first, second = given
        return _pairs(given[first], given[second], (first, second))


class RerankDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(ScoringRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/rerank, with the fields of Cohere's, Jina's and vLLM's API.

    top_n: number of results; None or 0: all.
    return_documents: whether results have the document's text.
    rank_fields, max_chunks_per_doc: of Cohere's older API. Documents have one field, and are not
           divided into chunks.
    """

    query: str
    documents: list[str | RerankDocument]
    top_n: Int32 | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_chunks_per_doc: Int32 | None = None

    def pairs(self) -> Pairs:
        """The query with each document. Raises RequestError."""
        if self.top_n is not None and self.top_n < 0:
            raise invalid(f"top_n={self.top_n} must be at least 0", param="top_n")
        if self.rank_fields not in (None, ["text"]):
            raise invalid('rank_fields is not supported; send ["text"]', param="rank_fields")
        if self.max_chunks_per_doc not in (None, 1):
            raise invalid(
                "max_chunks_per_doc is not supported; use max_tokens_per_doc",
                param="max_chunks_per_doc",
            )
        texts = [each if isinstance(each, str) else each.text for each in self.documents]
        return _pairs(self.query, texts, ("query", "documents"))


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: str = "list"


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """index: of the document in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """results: best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage


ScoringRequestT = TypeVar("ScoringRequestT", bound=ScoringRequest)


class ScoringEndpoint(PoolingEndpoint[ScoringRequestT]):
    """Available for models with a classification head of one label, and for embedding models."""

    def __init__(self) -> None:
        super().__init__()
        self._pair_prompts = PairPrompts()

    def check_service(self, service: Service) -> None:
        classifier = service.classifier
        if classifier is None:
            embedding_model(service, self.path)
        elif len(classifier.labels) > 1:
            raise invalid(
                f"{service.model_name} has {len(classifier.labels)} labels, so no single score; "
                f"use /classify; {self.path} is for models with one label and embedding models",
                param="model",
            )

    async def scored(
        self, call: PoolingCall[ScoringRequestT], pairs: Pairs
    ) -> tuple[list[float], PoolingUsage]:
        """The score of each pair. Raises RequestError."""
        service, request = call.service, call.request
        tokenizer = service.prompts.tokenizer_for(self.param)
        cut = None
        if request.truncate_prompt_tokens is not None:
            cut = service.prompts.cut(request, gives_tokens=False)
        if request.max_tokens_per_doc:
            cut_documents = partial(_cut, keeps_end=request.keeps_end)
            pairs = await asyncio.to_thread(
                cut_documents, pairs, tokenizer, request.max_tokens_per_doc
            )
        if service.classifier is None:
            return await self._compared(call, pairs, cut)
        prompts = await self._pair_prompts.token_ids(pairs, service, cut)
        ends = await self.pooled(call, prompts, CLASSIFIED)
        scores = service.classifier.probabilities(
            np.concatenate([end.pooled for end in ends])[:, None],
            use_activation=request.use_activation,
        )
        return scores[:, 0].tolist(), usage_of(prompts, ends)

    async def _compared(
        self, call: PoolingCall[ScoringRequestT], pairs: Pairs, cut: PromptCut | None
    ) -> tuple[list[float], PoolingUsage]:
        service = call.service
        if call.request.use_activation is not None:
            raise invalid(
                "use_activation is for models with a classification head; remove it",
                param="use_activation",
            )
        pooling = embedding_pooling(embedding_model(service, self.path), normalize=True)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        prompts = await service.prompts.encode_all(
            [each.text for each in texts],
            PromptForm(cut, gives_tokens=False),
            lambda index: texts[index].name,
        )
        ends = await self.pooled(call, prompts, pooling)
        num_bytes = sum(end.pooled.nbytes for end in ends)
        scores = await service.json.run(num_bytes, _cosines, pairs, texts, ends)
        return scores, usage_of(prompts, ends)


class ScoreEndpoint(ScoringEndpoint[ScoreRequest]):
    path = "/v1/score"
    other_paths = ("/score",)
    id_prefix = "score"
    param = "text_2"
    request_type = ScoreRequest

    async def answer(self, call: PoolingCall[ScoreRequest]) -> bytes:
        scores, usage = await self.scored(call, call.request.pairs())
        return msgspec.json.encode(
            ScoreResponse(
                id=call.request_id,
                created=int(time.time()),
                model=call.service.model_name,
                data=[Score(index, score) for index, score in enumerate(scores)],
                usage=usage,
            )
        )


class RerankEndpoint(ScoringEndpoint[RerankRequest]):
    path = "/v1/rerank"
    other_paths = ("/rerank", "/v2/rerank")
    id_prefix = "rerank"
    param = "documents"
    request_type = RerankRequest

    async def answer(self, call: PoolingCall[RerankRequest]) -> bytes:
        request = call.request
        pairs = request.pairs()
        scores, usage = await self.scored(call, pairs)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        has_text = request.return_documents is not False
        results = [
            RerankResult(
                index, scores[index], RerankDocument(pairs[index][1].text) if has_text else None
            )
            for index in order[: request.top_n or None]
        ]
        response = RerankResponse(
            id=call.request_id, model=call.service.model_name, results=results, usage=usage
        )
        size = sum(len(document.text) for _, document in pairs) if has_text else 0
        return await call.service.json.run(size, msgspec.json.encode, response)


def _missing_name(given: list[str]) -> str:
    """The parameter that makes a pair with the only given one; else the first."""
    if len(given) == 1:
        for names in SCORE_NAMES:
            if given[0] in names:
                return names[1 - names.index(given[0])]
    return SCORE_NAMES[0][0]


def _pairs(first: str | list[str], second: str | list[str], names: tuple[str, str]) -> Pairs:
    """Raises RequestError for none, too many and empty texts."""
    for given, name in zip((first, second), names, strict=True):
        each_of(given, name, MAX_INPUTS)
    return text_pairs(first, second, names)


def _cut(
    pairs: Pairs, tokenizer: ModelTokenizer, max_tokens: int, *, keeps_end: bool | None
) -> Pairs:
    """Truncate the documents. Raises RequestError."""
    if max_tokens < 0:
        raise invalid(
            f"max_tokens_per_doc={max_tokens} must be at least 1", param="max_tokens_per_doc"
        )
    return [
        (
            query,
            replace(document, text=tokenizer.cut(document.text, max_tokens, keeps_end=keeps_end)),
        )
        for query, document in pairs
    ]


def _cosines(pairs: Pairs, texts: Sequence[Text], ends: Sequence[FinishedRequest]) -> list[float]:
    """The cosine of the two vectors of each pair."""
    vectors = {text: end.pooled for text, end in zip(texts, ends, strict=True)}
    return [cosine(vectors[one], vectors[other]) for one, other in pairs]
