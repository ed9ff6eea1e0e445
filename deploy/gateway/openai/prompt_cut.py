"""Truncation of the prompts of completions and chats (`truncate_prompt_tokens`), as in vLLM."""

from typing import Final, Literal, Protocol

import msgspec

from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer

AS_MANY_AS_FIT: Final = -1


class CutParameters(Protocol):
    """The parameters of a request body; None: not set."""

    @property
    def truncate_prompt_tokens(self) -> int | None: ...

    @property
    def truncation_side(self) -> Literal["left", "right"] | None: ...


class PromptCut(msgspec.Struct, frozen=True):
    """keeps_end: remove the beginning of a prompt, otherwise its end."""

    max_tokens: int
    keeps_end: bool

    def token_ids(self, given: list[int]) -> list[int]:
        return given[-self.max_tokens :] if self.keeps_end else given[: self.max_tokens]

    def encode(self, text: str, tokenizer: ModelTokenizer, *, with_special: bool) -> list[int]:
        """The tokens of a text, special ones included. Those are kept."""
        return tokenizer.encode_cut(
            text, self.max_tokens, with_special=with_special, keeps_end=self.keeps_end
        )


def prompt_cut(
    request: CutParameters, *, max_model_len: int, max_output_tokens: int | None
) -> PromptCut | None:
    """None: prompts are not truncated. Raises ApiError for an invalid number.

    max_output_tokens: tokens to leave for the output with -1; None: one.
    """
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        if request.truncation_side is not None:
            raise truncates_nothing()
        return None
    longest = max_model_len - 1
    if wanted == AS_MANY_AS_FIT:
        wanted = max(1, max_model_len - max(1, max_output_tokens or 1))
    elif not 1 <= wanted <= longest:
        raise invalid(
            f"truncate_prompt_tokens={wanted} must be -1 or between 1 and {longest}, the maximum "
            "for this model",
            param="truncate_prompt_tokens",
        )
    return PromptCut(wanted, keeps_end=request.truncation_side != "right")


def truncates_nothing() -> ApiError:
    return invalid(
        "truncation_side has no effect without truncate_prompt_tokens; remove it",
        param="truncation_side",
    )
