"""How well a model predicts a text."""

import math
from collections.abc import Sequence
from pydoc_data import topics
from typing import Final

from longshore.deploy.llm.llm import LLM
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.protocol.errors import ConfigError

DEFAULT_NUM_TOKENS: Final = 8192
WINDOW: Final = 512
"""Tokens that are predicted from those before them in the same window."""


def default_text() -> str:
    """English prose that every installation has: the reference of Python's language."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def text_tokens(llm: LLM, text: str, num_tokens: int = DEFAULT_NUM_TOKENS) -> list[int]:
    """The first tokens of a text. Raises ConfigError if there are fewer than two."""
    found: list[int] = llm.get_tokenizer().encode(text[: 16 * num_tokens])[:num_tokens]
    if len(found) < 2:
        raise ConfigError("the text has fewer than two tokens, so nothing can be predicted")
    return found


def perplexity(llm: LLM, token_ids: Sequence[int]) -> float:
    """The exponential of the mean negative log probability of each token but the first of each
    window of WINDOW tokens."""
    windows = [token_ids[first : first + WINDOW] for first in range(0, len(token_ids), WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate(
        [{"prompt_token_ids": list(window)} for window in windows], params, use_tqdm=False
    )
    scores = []
    for output, window in zip(outputs, windows, strict=True):
        assert output.prompt_logprobs is not None
        for token, found in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            scores.append(found[token].logprob)
    return math.exp(-sum(scores) / len(scores))
