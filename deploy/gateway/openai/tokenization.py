"""POST /tokenize and /detokenize, with vLLM's bodies; computed without the engine.

`/tokenize` returns exactly the ids that `/v1/completions` (`prompt`) or `/v1/chat/completions`
(`messages`) would send to the engine.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.openai.chat_messages import ChatMessage
from longshore.deploy.gateway.openai.chat_prompt import chat_prompt_options
from longshore.deploy.gateway.openai.endpoint import (
    ApiEndpoint,
    Service,
    check_model,
    read_in_turn,
)
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.parameters import read_parameters
from longshore.deploy.gateway.openai.prompts import no_tokenizer
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_CHARACTERS, ModelTokenizer

MAX_DETOKENIZED: Final = 16_384
"""Limit of the token ids of a text, or the model's maximum length if that is larger."""

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
ArgumentT = TypeVar("ArgumentT")


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Either `prompt` or `messages`.

    add_special_tokens: add the special tokens that the model's text begins with. None: like the
        generation endpoints, only for `prompt`; a chat template adds its own.
    return_token_strs: also return the vocabulary's entry of each token.
    add_generation_prompt, continue_final_message, chat_template_kwargs, tools: as for chats.
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class TokenizeEndpoint(ApiEndpoint):
    """Tokenizes long texts on another thread, so that streams do not wait for them. Texts that
    cannot fit the model are rejected."""

    path = "/tokenize"

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        request = await _read(exchange, service, TokenizeRequest)
        check_model(request.model, service)
        param = "prompt" if request.messages is None else "messages"
        tokenizer = _tokenizer(service, param)
        text, with_special = await _text(request, service, tokenizer)

        def answer(text: str) -> bytes:
            service.prompts.reject_too_long(text, tokenizer, param)
            encode = tokenizer.encode if with_special else tokenizer.encode_rendered
            ids = encode(text)
            strings = tokenizer.entries(ids) if request.return_token_strs else None
            return msgspec.json.encode(
                TokenizeResponse(len(ids), service.prompts.max_model_len, ids, strings)
            )

        is_long = len(text) > tokenizer.max_inline_characters
        await exchange.send_json(await _off_loop_if(is_long, answer, text))


class DetokenizeEndpoint(ApiEndpoint):
    """Returns the text of token ids; ids outside the vocabulary have no text."""

    path = "/detokenize"

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        request = await _read(exchange, service, DetokenizeRequest)
        check_model(request.model, service)
        tokenizer = _tokenizer(service, "tokens")
        maximum = max(MAX_DETOKENIZED, service.prompts.max_model_len)
        if len(request.tokens) > maximum:
            raise invalid(
                f"tokens has {len(request.tokens)} token ids; at most {maximum} are allowed",
                param="tokens",
            )

        def answer(token_ids: list[int]) -> bytes:
            for token_id in token_ids:
                if not 0 <= token_id < 2**31:
                    raise invalid(f"tokens has {token_id}, which is not a token id", param="tokens")
            return msgspec.json.encode(DetokenizeResponse(tokenizer.decode(token_ids)))

        is_long = len(request.tokens) > MAX_INLINE_CHARACTERS
        await exchange.send_json(await _off_loop_if(is_long, answer, request.tokens))


async def _text(
    request: TokenizeRequest, service: Service, tokenizer: ModelTokenizer
) -> tuple[str, bool]:
    """The text to tokenize, and whether to add special tokens."""
    special = request.add_special_tokens
    match request.prompt, request.messages:
        case str(text), None:
            return text, special is None or special
        case None, list(messages):
            renderer = service.prompts.chat_renderer
            return await renderer.text(tokenizer, messages, chat_prompt_options(request)), bool(
                special
            )
    raise invalid("either prompt or messages is required, but not both", param="prompt")


async def _off_loop_if(
    is_long: bool, function: Callable[[ArgumentT], bytes], argument: ArgumentT
) -> bytes:
    if is_long:
        return await asyncio.to_thread(function, argument)
    return function(argument)


async def _read(exchange: Exchange, service: Service, kind: type[BodyT]) -> BodyT:
    body = await read_in_turn(exchange, service)
    return await service.json.run(len(body), read_parameters, kind, body)


def _tokenizer(service: Service, param: str) -> ModelTokenizer:
    if service.tokenizer is None:
        raise no_tokenizer(param)
    return service.tokenizer
