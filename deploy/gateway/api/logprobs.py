"""Log probabilities in the format of the OpenAI API, and the text of a single token."""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from longshore.deploy.gateway.text.detokenizer import REPLACEMENT, TokenDecoder
from longshore.deploy.requests.token_scores import TokenScore

LEAST_LOGPROB: Final = -9999.0
"""The API's value for minus infinity, which JSON cannot represent."""


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of /v1/completions, one entry per token.

    top_logprobs: by text, always including the token itself. None for a prompt's first token.
    text_offset:  characters before each token, summed over the tokens' texts.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, frozen=True):
    """`bytes` of a part of a character are its own; None: they are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, frozen=True):
    """A token of the answer. `top_logprobs` has the requested number, most likely first, and may
    include the token itself."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """An entry of vLLM's `prompt_logprobs`."""

    logprob: float
    rank: int
    decoded_token: str


class TokenTexts(TokenDecoder, Protocol):
    """Also knows the bytes of parts of characters."""

    def token_bytes(self, token_id: int) -> bytes | None: ...


class LogprobsWriter:
    """Writes scores in the API's format. tokenizer: if None, tokens are written as `token_id:7`."""

    def __init__(self, tokenizer: TokenTexts | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def token_text(self, token_id: int) -> str:
        """The token's text within a text; replacement characters for part of a character."""
        if (text := self._texts.get(token_id)) is None:
            text = self._texts[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        one = self._tokenizer.decode([token_id])
        if self._tokenizer.is_bytewise or REPLACEMENT in one:
            return one
        # Some tokenizers drop the space before a text's first word: use the second one.
        return self._tokenizer.decode([token_id, token_id]).removeprefix(one) or one

    def completion(
        self, scores: Sequence[TokenScore | int], num_best: int, offset: int
    ) -> CompletionLogprobs:
        """scores: a token id for a token without a score. offset: text offset of the first
        token."""
        lines = CompletionLogprobs([], [], [], [])
        for score in scores:
            token_id = score if isinstance(score, int) else score.token_id
            text = self.token_text(token_id)
            lines.tokens.append(text)
            lines.text_offset.append(offset)
            offset += len(text)
            if isinstance(score, int):
                lines.token_logprobs.append(None)
                lines.top_logprobs.append(None)
                continue
            lines.token_logprobs.append(_finite(score.logprob))
            best = {text: _finite(score.logprob)}
            for token_id, logprob in score.best[:num_best]:
                best.setdefault(self.token_text(token_id), _finite(logprob))
            lines.top_logprobs.append(best)
        return lines

    def chat(self, scores: Sequence[TokenScore], num_best: int) -> ChatLogprobs:
        content = []
        for score in scores:
            best = [self._top(*each) for each in score.best[:num_best]]
            own = self._top(score.token_id, score.logprob)
            content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, best))
        return ChatLogprobs(content)

    def prompt(
        self, scores: Sequence[TokenScore | None], num_best: int
    ) -> list[dict[int, PromptLogprob] | None]:
        """An entry per prompt token; None for the first."""
        return [None if score is None else self._by_token(score, num_best) for score in scores]

    def _by_token(self, score: TokenScore, num_best: int) -> dict[int, PromptLogprob]:
        own = {score.token_id, *(token_id for token_id, _ in score.best[:num_best])}
        return {
            token_id: PromptLogprob(_finite(each.logprob), each.rank, self.token_text(token_id))
            for token_id, each in score.by_token().items()
            if token_id in own
        }

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        text = self.token_text(token_id)
        return TopLogprob(text, _finite(logprob), self._bytes(token_id, text))

    def _bytes(self, token_id: int, text: str) -> list[int] | None:
        if self._tokenizer is None:
            return None
        own = text.encode() if REPLACEMENT not in text else self._tokenizer.token_bytes(token_id)
        return None if own is None else list(own)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
