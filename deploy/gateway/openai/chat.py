"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from longshore.deploy.gateway.openai.chat_deltas import ChatDeltas, ChatParsing
from longshore.deploy.gateway.openai.chat_messages import template_input
from longshore.deploy.gateway.openai.chat_tools import tool_use
from longshore.deploy.gateway.openai.continuous_usage import UsageSoFar
from longshore.deploy.gateway.openai.endpoint import (
    GenerationEndpoint,
    ResponseWriter,
    Service,
)
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece
from longshore.deploy.gateway.openai.logprobs import ChatLogprobs, LogprobsWriter
from longshore.deploy.gateway.openai.prompts import chat_max_tokens
from longshore.deploy.gateway.openai.requests import ChatRequest
from longshore.deploy.gateway.openai.responses import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatResponse,
    Usage,
)
from longshore.deploy.gateway.openai.routed_experts import encoded
from longshore.deploy.gateway.openai.structured_output import read_constraint
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.answer import AnswerParsers
from longshore.deploy.parsers.forced import ForcedCalls

PROMPT_END_TOKENS: Final = 16


class ChatEndpoint(GenerationEndpoint[ChatRequest]):
    """`n` answers to a list of messages."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl"
    request_type = ChatRequest

    async def specify(
        self, service: Service, request: ChatRequest, request_id: str, arrived_s: float
    ) -> GenerationSpec:
        parsing = chat_parsing(service, request)
        prompt = await service.prompts.chat_prompt(request)
        return GenerationSpec(
            request_id=request_id,
            prompts=[prompt],
            sampling=service.prompts.sampling(
                request,
                chat_max_tokens(request, service.prompts.defaults),
                logprobs=request.num_logprobs,
                prompt_logprobs=request.prompt_logprobs,
            ),
            priority=request.priority or 0,
            is_stream=bool(request.stream),
            arrived_s=arrived_s,
            num_samples=request.num_samples,
            stops=service.prompts.stops(request),
            shown_special_token_ids=shown_special_token_ids(parsing, service.tokenizer),
            structured_output=await read_constraint(
                request, service.json, ignores_end=request.ignore_eos
            ),
            num_echoed_characters=len(_echoed(request)),
            num_returned_prompt_ids=len(prompt) if request.return_token_ids else 0,
        )

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        return ChatWriter(
            request,
            spec.request_id,
            service.model_name,
            service.tokenizer,
            chat_parsing(service, request),
        )


def chat_parsing(service: Service, request: ChatRequest) -> ChatParsing | None:
    """How the answers are parsed; None: they are text. Raises ApiError."""
    use = tool_use(request)
    parsers = service.parsers
    max_calls = None if use.is_parallel else 1
    if use.is_forced:
        forced = ForcedCalls(use.forced_name, parsers.tools)
        return ChatParsing(
            AnswerParsers(tools=forced),
            use.names,
            max_calls,
            names_call=use.forced_name is not None,
        )
    if use.may_call and parsers.tools is None:
        raise invalid(
            "tools: this server has no parser for the model's tool calls. Start it with "
            '--tool-call-parser NAME, or set tool_choice to "required" or "none".',
            param="tools",
            code="unsupported_parameter",
        )
    if request.constraint() is not None:
        return None  # the answer is what the constraint allows, from its first token on
    tools = parsers.tools if use.may_call else None
    if tools is None and parsers.reasoning is None:
        return None
    return ChatParsing(
        AnswerParsers(parsers.reasoning, tools),
        use.names,
        max_calls,
        has_reasoning=request.include_reasoning is not False,
    )


def shown_special_token_ids(
    parsing: ChatParsing | None, tokenizer: ModelTokenizer | None
) -> frozenset[int]:
    """The special tokens that the parsers have to see."""
    if parsing is None or tokenizer is None:
        return frozenset()
    added = tokenizer.added_tokens
    return frozenset(added[token] for token in parsing.parsers.special_tokens & added.keys())


def _echoed(request: ChatRequest) -> str:
    """The text that answers begin with: that of the last message, if it is to be echoed."""
    if not request.echo:
        return ""
    (last,) = template_input(request.messages[-1:])
    opens_no_answer = request.add_generation_prompt is False or request.continue_final_message
    return str(last["content"] or "") if last["role"] == "assistant" or opens_no_answer else ""


class ChatWriter(ResponseWriter):
    """Chat completions. A stream has first the role, then text or calls, then the finish reason.

    parsing: how the answers are parsed; None: they are text.
    """

    def __init__(
        self,
        request: ChatRequest,
        request_id: str,
        model_name: str,
        tokenizer: ModelTokenizer | None,
        parsing: ChatParsing | None = None,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._parsing = parsing
        self._deltas: dict[int, ChatDeltas] = {}
        self._logprobs = LogprobsWriter(None if request.return_tokens_as_token_ids else tokenizer)
        self._echoed = _echoed(request)
        self._usage_so_far = UsageSoFar() if request.includes_continuous_usage else None
        self._prompt_ids_are_due = bool(request.return_token_ids)
        self._id = request_id
        self._created = int(time.time())
        self._model = model_name
        self._chunk_usage: Usage | msgspec.UnsetType | None = (
            None if request.include_usage else msgspec.UNSET
        )

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        deltas = [ChatDelta(role="assistant", content="")]
        if self._echoed:
            deltas.append(ChatDelta(content=self._echoed))
        indices = range(self._request.num_samples)
        return [self._chunk(index, delta) for index in indices for delta in deltas]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        chunks = []
        if self._usage_so_far is not None:
            self._chunk_usage = self._usage_so_far.after(piece)
        logprobs = self._piece_logprobs(piece)
        reason = piece.finish_reason
        delta = ChatDelta(content=piece.text) if piece.text else None
        if self._parsing is not None:
            deltas = self._deltas_of(piece, self._parsing)
            delta = deltas.feed(piece.text, is_last=reason is not None)
            reason = reason and deltas.finish_reason(reason)
        token_ids = self._piece_token_ids(piece)
        if delta is not None or logprobs is not None or token_ids:
            delta = delta or ChatDelta(content="")
            chunk = self._chunk(piece.index, delta, logprobs=logprobs, token_ids=token_ids)
            if self._prompt_ids_are_due and piece.prompt is not None:
                self._prompt_ids_are_due = False
                chunk = msgspec.structs.replace(chunk, prompt_token_ids=piece.prompt.token_ids)
            chunks.append(chunk)
        if reason is not None:
            experts = encoded(piece.routed_experts)
            chunks.append(self._chunk(piece.index, ChatDelta(), reason, routed_experts=experts))
        return chunks

    def _deltas_of(self, piece: Piece, parsing: ChatParsing) -> ChatDeltas:
        """The deltas of the answer that the piece belongs to."""
        deltas = self._deltas.get(piece.index)
        if deltas is None:
            prompt_end = ""
            if piece.prompt is not None and self._tokenizer is not None:
                prompt_end = self._tokenizer.decode(piece.prompt.token_ids[-PROMPT_END_TOKENS:])
            deltas = self._deltas[piece.index] = ChatDeltas(parsing, prompt_end)
        return deltas

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return [
            ChatChunk(
                id=self._id, created=self._created, model=self._model, choices=(), usage=usage
            )
        ]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        choices = [self._choice(piece) for piece in pieces]
        response = ChatResponse(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=tuple(choices),
            usage=usage,
            kv_transfer_params=msgspec.UNSET
            if (params := pieces[0].kv_transfer_params) is None
            else params,
        )
        wanted, prompt = self._request.prompt_logprobs, pieces[0].prompt
        if self._request.return_token_ids and prompt is not None:
            response = msgspec.structs.replace(response, prompt_token_ids=prompt.token_ids)
        if wanted is None or prompt is None or prompt.scores is None:
            return response
        by_token = self._logprobs.prompt(prompt.scores, wanted)
        return msgspec.structs.replace(response, prompt_logprobs=by_token)

    def _choice(self, piece: Piece) -> ChatChoice:
        message, reason = ChatAnswer(piece.text), piece.finish_reason
        if self._parsing is not None:
            deltas = self._deltas_of(piece, self._parsing)
            message = deltas.message(piece.text)
            reason = reason and deltas.finish_reason(reason)
        if self._echoed:
            content = self._echoed + (message.content or "")
            message = msgspec.structs.replace(message, content=content)
        return ChatChoice(
            message,
            reason,
            piece.index,
            self._piece_logprobs(piece),
            self._piece_token_ids(piece),
            encoded(piece.routed_experts),
        )

    def _piece_token_ids(self, piece: Piece) -> list[int] | msgspec.UnsetType:
        return piece.token_ids if self._request.return_token_ids else msgspec.UNSET

    def _piece_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_best = self._request.num_logprobs
        if num_best is None or not piece.scores:
            return None
        return self._logprobs.chat(piece.scores, num_best)

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
        finish_reason: str | None = None,
        logprobs: ChatLogprobs | None = None,
        token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
        routed_experts: str | msgspec.UnsetType = msgspec.UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=(
                ChatChunkChoice(delta, finish_reason, index, logprobs, token_ids, routed_experts),
            ),
            usage=self._chunk_usage,
        )
