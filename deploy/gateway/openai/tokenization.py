"""POST /tokenize and /detokenize, with vLLM's bodies; computed without the engine.

`/tokenize` returns exactly the ids that `/v1/completions` (`prompt`) or `/v1/chat/completions`
(`messages`) would send to the engine.
"""

from typing import Any, ClassVar, Final, TypeVar

import msgspec

from longshore.deploy.gateway.api.endpoint import ApiEndpoint, Service, check_model, read_in_turn
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.api.requests import Effort
from longshore.deploy.gateway.api.tools import client_tools
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.requests.chat_messages import ChatMessage
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.prompts import PromptForm

MAX_DETOKENIZED: Final = 16_384
"""Limit of the token ids of a text, or the model's maximum length if that is larger."""

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Either `prompt` or `messages`.

    add_special_tokens: add the special tokens that the model's text begins with. None: like the
        generation endpoints, only for `prompt`; a chat template adds its own.
    return_token_strs: also return the vocabulary's entry of each token.
    add_generation_prompt, continue_final_message, chat_template_kwargs, documents,
        reasoning_effort, tools: as for chats.
    """

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = None
    effort_name: ClassVar[str] = "reasoning_effort"
    thinks: ClassVar[bool | None] = None


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
        tokenizer = service.prompts.tokenizer_for(param)
        text, form = await _text(request, service)

        def answer() -> bytes:
            ids = service.prompts.encoded(text, form, "the prompt", param=param)
            strings = tokenizer.entries(ids) if request.return_token_strs else None
            return msgspec.json.encode(
                TokenizeResponse(len(ids), service.prompts.max_model_len, ids, strings)
            )

        await exchange.send_json(await service.prompts.off_loop_if_long(answer, len(text)))


class DetokenizeEndpoint(ApiEndpoint):
    """Returns the text of token ids; ids outside the vocabulary have no text."""

    path = "/detokenize"

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        request = await _read(exchange, service, DetokenizeRequest)
        check_model(request.model, service)
        tokenizer = service.prompts.tokenizer_for("tokens")
        maximum = max(MAX_DETOKENIZED, service.prompts.max_model_len)
        if len(request.tokens) > maximum:
            raise invalid(
                f"tokens has {len(request.tokens)} token ids; at most {maximum} are allowed",
                param="tokens",
            )

        def answer() -> bytes:
            for token_id in request.tokens:
                if not 0 <= token_id < 2**31:
                    raise invalid(f"tokens has {token_id}, which is not a token id", param="tokens")
            return msgspec.json.encode(DetokenizeResponse(tokenizer.decode(request.tokens)))

        size = len(request.tokens)
        await exchange.send_json(await service.prompts.off_loop_if_long(answer, size))


async def _text(request: TokenizeRequest, service: Service) -> tuple[str, PromptForm]:
    """The text to tokenize, and how."""
    special = request.add_special_tokens
    match request.prompt, request.messages:
        case str(text), None:
            return text, PromptForm(with_special=special is not False)
        case None, list(messages):
            request.tools = client_tools(request.tools)
            text = await service.prompts.chat_text(messages, request)
            return text, PromptForm(with_special=bool(special))
    raise invalid("either prompt or messages is required, but not both", param="prompt")


async def _read(exchange: Exchange, service: Service, kind: type[BodyT]) -> BodyT:
    body = await read_in_turn(exchange, service)
    return await service.json.run(len(body), read_parameters, kind, body)
