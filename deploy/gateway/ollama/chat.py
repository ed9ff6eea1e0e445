"""POST /api/chat and /api/generate: chats whose requests and responses have Ollama's format."""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.api.chat import ChatEndpoint, chat_parsing
from longshore.deploy.gateway.api.endpoint import ResponseWriter, Service
from longshore.deploy.gateway.api.error_body import ollama_error
from longshore.deploy.gateway.api.logprobs import ChatTokenLogprob, LogprobsWriter
from longshore.deploy.gateway.api.requests import ChatRequest, TokenIds
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.http.exchange import JSON_LINES, Exchange, StreamFormat
from longshore.deploy.gateway.ollama.bodies import (
    OllamaCall,
    OllamaCalledFunction,
    OllamaChatAnswer,
    OllamaDurations,
    OllamaGenerateAnswer,
    timestamp,
)
from longshore.deploy.gateway.ollama.requests import (
    OllamaChat,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaNames,
    OllamaRequest,
    keep,
    parse_chat,
    served_name,
)
from longshore.deploy.parsers.json_text import is_json_object
from longshore.deploy.requests.answer_blocks import AnswerBlocks, BlockDelta, BlockEnd, BlockEvent
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece

_encode = msgspec.json.Encoder().encode
_NAMES: Final = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "seed": "options.seed",
    "stop": "options.stop",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}


class OllamaChatEndpoint(OllamaNames, ChatEndpoint):
    """One answer to messages. Without any, the request only asks to load the model."""

    path = "/api/chat"
    id_prefix = "chat"
    names: Mapping[str, str] = _NAMES
    body_type: type[OllamaRequest] = OllamaChatRequest
    answer_type: type[OllamaChatAnswer | OllamaGenerateAnswer] = OllamaChatAnswer

    async def read(self, exchange: Exchange, service: Service) -> ChatRequest:
        body = await self.read_body(exchange, service)
        chat = await service.json.run(len(body), partial(parse_chat, self.body_type), body)
        chat.model = served_name(chat.model, service.names)
        return chat

    async def respond(
        self, exchange: Exchange, service: Service, request: ChatRequest, arrived_s: float
    ) -> None:
        assert isinstance(request, OllamaChat)
        keep(service, request.keep_s)
        if not request.asks_nothing:
            await super().respond(exchange, service, request, arrived_s)
            return
        unloads = service.idle_sleep is not None and request.keep_s == 0
        if service.idle_sleep is not None and not unloads:
            service.idle_sleep.note_request()
        answer = self.answer_type(
            model=service.model_name,
            created_at=timestamp(),
            done=True,
            done_reason="unload" if unloads else "load",
            **self.answer_type.part("", "", ()),
        )
        await exchange.send_json(_encode(answer))

    async def prompt(self, service: Service, request: ChatRequest) -> TokenIds:
        assert isinstance(request, OllamaChat)
        if request.raw_prompt is None:
            return await super().prompt(service, request)
        prompts = service.prompts
        (prompt,) = await prompts.prompts(
            [request.raw_prompt],
            request,
            max_output_tokens=request.max_tokens or 1,
            suffix=request.suffix,
        )
        return prompt

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        return OllamaWriter(
            spec,
            service.model_name,
            AnswerBlocks(chat_parsing(service, request), service.tokenizer),
            LogprobsWriter(service.tokenizer),
            self.answer_type,
            num_logprobs=request.num_logprobs,
        )


class OllamaGenerateEndpoint(OllamaChatEndpoint):
    """One answer to a prompt, which is a message, or continued as it is."""

    path = "/api/generate"
    id_prefix = "generate"
    names: Mapping[str, str] = {**_NAMES, "messages": "prompt"}
    body_type = OllamaGenerateRequest
    answer_type = OllamaGenerateAnswer


class OllamaWriter(ResponseWriter):
    """Writes an answer as lines of JSON: text, reasoning and whole calls, then counts and
    durations.

    num_logprobs: number of most likely tokens to list; None: no log probabilities.
    """

    stream_format: StreamFormat = JSON_LINES
    end = b""

    def __init__(
        self,
        spec: GenerationSpec,
        model_name: str,
        blocks: AnswerBlocks,
        logprobs: LogprobsWriter,
        answer_type: type[OllamaChatAnswer | OllamaGenerateAnswer],
        *,
        num_logprobs: int | None,
    ) -> None:
        self._arrived_s = spec.arrived_s
        self._model_name = model_name
        self._blocks = blocks
        self._logprobs = logprobs
        self._answer_type = answer_type
        self._num_logprobs = num_logprobs
        self._num_calls = 0
        self._last: Piece | None = None

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return ()

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        if piece.finish_reason is not None:
            self._last = piece
        text, thinking, calls = self._parts(self._blocks.feed(piece))
        logprobs = self._piece_logprobs(piece)
        if not (text or thinking or calls or logprobs):
            return ()
        return [self._answer(text, thinking, calls, done=False, logprobs=logprobs or msgspec.UNSET)]

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        assert self._last is not None
        return [self._answer("", "", (), **_end(self._last, usage, self._arrived_s))]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (piece,) = pieces
        text, thinking, calls = self._parts(self._blocks.feed(piece))
        logprobs = self._piece_logprobs(piece) or msgspec.UNSET
        end = _end(piece, usage, self._arrived_s)
        return self._answer(text, thinking, calls, logprobs=logprobs, **end)

    def event(self, chunk: msgspec.Struct) -> bytes:
        return _encode(chunk) + b"\n"

    def error_events(self, error: RequestError) -> Sequence[bytes]:
        return [_encode(ollama_error(error)) + b"\n"]

    def _parts(self, events: Sequence[BlockEvent]) -> tuple[str, str, list[OllamaCall]]:
        """Text, reasoning and calls. Arguments that are cut off, and so no object, are text."""
        texts: dict[str, list[str]] = {"text": [], "reasoning": []}
        calls = []
        for event in events:
            match event:
                case BlockDelta(block=block, text=text) if block.kind in texts:
                    texts[block.kind].append(text)
                case BlockEnd(block=block) if block.kind not in texts:
                    arguments = block.text or "{}"
                    if not is_json_object(arguments):
                        texts["text"].append(arguments)
                        continue
                    function = OllamaCalledFunction(
                        block.name, msgspec.Raw(arguments.encode()), self._num_calls
                    )
                    self._num_calls += 1
                    calls.append(OllamaCall(block.call_id, function))
        return "".join(texts["text"]), "".join(texts["reasoning"]), calls

    def _piece_logprobs(self, piece: Piece) -> Sequence[ChatTokenLogprob]:
        if self._num_logprobs is None or not piece.scores:
            return ()
        return self._logprobs.chat(piece.scores, self._num_logprobs).content

    def _answer(
        self, text: str, thinking: str, calls: Sequence[OllamaCall], **fields: Any
    ) -> msgspec.Struct:
        part = self._answer_type.part(text, thinking, calls)
        return self._answer_type(model=self._model_name, created_at=timestamp(), **part, **fields)


def _end(piece: Piece, usage: Usage, arrived_s: float) -> dict[str, Any]:
    """The fields of the last line."""
    durations = OllamaDurations.between(arrived_s, piece.first_token_s, time.perf_counter())
    return {
        "done": True,
        "done_reason": "length" if piece.finish_reason == "length" else "stop",
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "eval_count": usage.completion_tokens,
        **durations._asdict(),
    }
