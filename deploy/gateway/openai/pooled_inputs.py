"""The token ids of texts of which vectors are computed, within the limits of a request."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from longshore.deploy.gateway.openai.endpoint import Service
from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.gateway.openai.parameters import MAX_TOKEN_IDS
from longshore.deploy.gateway.openai.pooling_endpoint import PoolingRequest
from longshore.deploy.gateway.openai.prompts import max_inline, no_tokenizer
from longshore.deploy.gateway.openai.requests import TokenIds, each_of
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_TEXTS

MAX_INPUTS: Final = 2048


class InputRequest(PoolingRequest, kw_only=True, forbid_unknown_fields=True):
    """`add_special_tokens` as in vLLM."""

    input: str | list[str | int | TokenIds]
    add_special_tokens: bool | None = None

    async def token_ids(self, service: Service) -> list[TokenIds]:
        """Of each input; see `token_ids_of`. Raises ApiError, also as `each_of` does."""
        return await token_ids_of(
            each_of(self.input, "input", MAX_INPUTS),
            service,
            max_tokens=max_tokens_of(self.truncate_prompt_tokens, service),
            keeps_end=self.keeps_end,
            with_special=self.add_special_tokens is not False,
        )


def max_tokens_of(truncate_prompt_tokens: int | None, service: Service) -> int | None:
    """The length to which inputs are truncated; None: they are not. Raises ApiError."""
    longest = service.prompts.max_model_len
    cut = truncate_prompt_tokens
    if cut is not None and cut != -1 and not 1 <= cut <= longest:
        raise invalid(
            f"truncate_prompt_tokens={cut} must be -1 or between 1 and {longest}, the maximum for "
            "this model",
            param="truncate_prompt_tokens",
        )
    return longest if cut == -1 else cut


async def token_ids_of(
    inputs: Sequence[str | TokenIds],
    service: Service,
    *,
    max_tokens: int | None,
    keeps_end: bool | None,
    with_special: bool = True,
    name_of: Callable[[int], str] = "input[{}]".format,
) -> list[TokenIds]:
    """Valid token ids of each input, encoded on a thread if they are long. Raises ApiError.

    keeps_end: truncation removes the beginning; None: as the tokenizer is configured.
    name_of:   returns the parameter of an input, with its index in brackets if it has one.
    """
    encode = partial(_token_ids, inputs, service, max_tokens, keeps_end, with_special, name_of)
    if sum(map(len, inputs)) > max_inline(service.tokenizer) or len(inputs) > MAX_INLINE_TEXTS:
        return await asyncio.to_thread(encode)
    return encode()


def _token_ids(
    inputs: Sequence[str | TokenIds],
    service: Service,
    max_tokens: int | None,
    keeps_end: bool | None,
    with_special: bool,
    name_of: Callable[[int], str],
) -> list[TokenIds]:
    prompts, tokenizer = service.prompts, service.tokenizer
    if keeps_end is None:
        keeps_end = tokenizer is not None and tokenizer.keeps_end
    encoded, num_tokens = [], 0
    for index, given in enumerate(inputs):
        name = name_of(index)
        if not given:
            raise empty(name)
        if not isinstance(given, str):
            ids = given[-(max_tokens or 0) :] if keeps_end else given[:max_tokens]
        elif tokenizer is None:
            raise no_tokenizer(parameter_of(name))
        elif max_tokens is not None:
            ids = tokenizer.encode_cut(
                given, max_tokens, with_special=with_special, keeps_end=keeps_end
            )
        else:
            prompts.reject_too_long(given, tokenizer, parameter_of(name))
            ids = tokenizer.encode(given) if with_special else tokenizer.encode_rendered(given)
        check_input(ids, name, service)
        num_tokens += len(ids)
        check_total(num_tokens, name)
        encoded.append(ids)
    return encoded


def parameter_of(name: str) -> str:
    return name.partition("[")[0]


def empty(name: str) -> ApiError:
    return invalid(f"{name} is empty; there is nothing to compute", param=parameter_of(name))


def check_input(token_ids: TokenIds, name: str, service: Service) -> None:
    """Raise ApiError for an input that the engine would reject."""
    longest, vocab_size = service.prompts.max_model_len, service.prompts.vocab_size
    param = parameter_of(name)
    if not token_ids:
        raise invalid(f"{name} has no tokens; there is nothing to compute", param=param)
    if len(token_ids) > longest:
        raise invalid(
            f"{name} has {len(token_ids)} tokens; the maximum for this model is {longest}. "
            "Shorten it, or set truncate_prompt_tokens to -1",
            param=param,
            code="context_length_exceeded",
        )
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"{name} has token id {token_id}, outside the vocabulary (0 to {vocab_size - 1})",
                param=param,
            )


def check_total(num_tokens: int, name: str) -> None:
    """Raise ApiError if all inputs up to this one are too long."""
    if num_tokens > MAX_TOKEN_IDS:
        raise invalid(
            f"the inputs up to {name} have {num_tokens} tokens; at most {MAX_TOKEN_IDS} are "
            "allowed in a request",
            param=parameter_of(name),
        )
