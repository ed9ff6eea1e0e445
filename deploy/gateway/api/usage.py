"""Token counts of a request, as OpenAI's API names them."""

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one HTTP request, summed over its prompts. A stream knows the details at its
    end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @property
    def num_cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        return 0 if details is msgspec.UNSET else details.cached_tokens


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptTokensDetails(cached_tokens),
    )
