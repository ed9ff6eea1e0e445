"""`LLM.embed`: requests for embeddings, and their outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.deploy.llm.answer import Answer
from longshore.deploy.model.embedding import NOT_SAMPLED
from longshore.protocol.arrays import Float32Array
from longshore.protocol.requests import PoolingParams


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """The embedding of one prompt.

    embedding:         float32; empty if the request failed.
    num_cached_tokens: prompt tokens whose KV was found in the prefix cache.
    num_preemptions:   how often the request was preempted.
    error:             why the request failed; None if it did not.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: Float32Array
    num_cached_tokens: int
    num_preemptions: int
    error: str | None = None


def pooled_answers(prompts: Sequence[list[int]], pooling: PoolingParams) -> list[Answer]:
    return [Answer(ids, NOT_SAMPLED, pooling=pooling) for ids in prompts]


def embedding_output(answer: Answer) -> EmbeddingOutput:
    """The output; call it when the request has finished."""
    live = answer.live
    assert live is not None
    end = live.finished
    assert end is not None
    return EmbeddingOutput(
        live.request_id,
        answer.prompt_token_ids,
        end.pooled,
        end.num_cached_tokens,
        end.num_preemptions,
        end.message,
    )
