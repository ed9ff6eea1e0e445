"""`LLM.embed` and `LLM.encode`: requests for embeddings, and their outputs."""

from collections.abc import Callable

from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.outputs import PooledT, PoolingRequestOutput
from longshore.deploy.llm.prompts import PromptInput
from longshore.deploy.model.embedding import NOT_SAMPLED
from longshore.protocol.arrays import EMPTY_FLOAT32, Float32Array
from longshore.protocol.requests import PoolingParams


def pooled_answer(
    request_id: str, prompt: PromptInput, pooling: PoolingParams, *, priority: int = 0
) -> Answer:
    return Answer(request_id, prompt, NOT_SAMPLED, pooling=pooling, priority=priority)


def pooled_output(
    answer: Answer, make: Callable[[Float32Array], PooledT]
) -> PoolingRequestOutput[PooledT]:
    """The output; call it when the request has finished or was aborted."""
    end = None if answer.live is None else answer.live.finished
    if end is None:
        return PoolingRequestOutput(
            answer.request_id,
            make(EMPTY_FLOAT32),
            answer.prompt.token_ids,
            num_cached_tokens=0,
            error="the request was aborted",
        )
    return PoolingRequestOutput(
        answer.request_id,
        make(end.pooled),
        answer.prompt.token_ids,
        end.num_cached_tokens,
        num_preemptions=end.num_preemptions,
        error=end.message,
    )
