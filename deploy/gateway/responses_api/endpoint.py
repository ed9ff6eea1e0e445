"""POST /v1/responses."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from longshore.deploy.gateway.api.beams import BeamGeneration
from longshore.deploy.gateway.api.chat import ChatEndpoint, chat_parsing
from longshore.deploy.gateway.api.endpoint import (
    ResponseWriter,
    Service,
    deadline_passed,
    generating,
)
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.api.generation import Generation
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.http.middleware import api_key_of
from longshore.deploy.gateway.request_log import in_background, note_failure
from longshore.deploy.gateway.responses_api.bodies import COMPLETED, INCOMPLETE
from longshore.deploy.gateway.responses_api.items import num_characters
from longshore.deploy.gateway.responses_api.requests import (
    ResponseChat,
    ResponsesRequest,
    chat_of,
    parse_response_request,
)
from longshore.deploy.gateway.responses_api.store import ResponseStore
from longshore.deploy.gateway.responses_api.writer import ResponseApiWriter
from longshore.deploy.requests.answer_blocks import AnswerBlocks
from longshore.deploy.requests.chat_messages import ChatMessage
from longshore.deploy.requests.errors import PromptTooLong, RequestError, invalid
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece
from longshore.protocol.errors import shortened
from longshore.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.25
"""How often a response that is computed in the background looks whether it is still wanted."""
MAX_STORED_CHARACTERS: Final = 1 << 20
"""Limit of a stored conversation with its instructions, before the output."""


class ResponsesEndpoint(ChatEndpoint):
    """One answer, which can be stored, continue a stored one, or be computed in the background.

    store: None: this server stores no responses.
    """

    path = "/v1/responses"
    id_prefix = "resp"
    names: Mapping[str, str] = {
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    def __init__(self, store: ResponseStore | None) -> None:
        super().__init__()
        self._store = store
        self._running: set[asyncio.Task[None]] = set()

    async def read_chat(self, exchange: Exchange, service: Service) -> ResponseChat:
        """The chat of a request, with the stored one that it continues. Raises RequestError."""
        body = await self.read_body(exchange, service)
        request = await service.json.run(len(body), parse_response_request, body)
        owner = api_key_of(exchange.scope).owner
        former = await self._former(request, owner)
        size = len(body) + sum(map(num_characters, former))
        return await service.json.run(size, chat_of, request, former, owner, service.seal)

    async def read(self, exchange: Exchange, service: Service) -> ChatRequest:
        chat = await self.read_chat(exchange, service)
        if self._store_for(chat.original) is not None:
            size = sum(map(num_characters, chat.messages))
            if size > MAX_STORED_CHARACTERS:
                raise invalid(
                    f"the conversation has {size} characters; at most "
                    f"{MAX_STORED_CHARACTERS} can be stored. Set store=false",
                    param="store",
                )
        return chat

    def _store_for(self, request: ResponsesRequest) -> ResponseStore | None:
        """Where to store the response. Raises RequestError if that is required but impossible."""
        if self._store is None and (request.store or request.background):
            raise invalid(
                "this server stores no responses (--stored-responses-mib 0); set store=false and "
                "background=false",
                param="store",
            )
        return None if request.store is False else self._store

    async def _former(self, request: ResponsesRequest, owner: str) -> Sequence[ChatMessage]:
        """The conversation that a request continues."""
        if (former_id := request.previous_response_id) is None:
            return []
        record = None if self._store is None else await self._store.get(owner, former_id)
        if record is None:
            raise invalid(
                f"there is no stored response {shortened(former_id)!r}; it may have expired",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if record.response.status not in (COMPLETED, INCOMPLETE):
            raise invalid(
                f"the response {former_id} is {record.response.status}; only a completed one can "
                "be continued",
                param="previous_response_id",
            )
        return record.conversation

    async def reject(
        self, exchange: Exchange, service: Service, request: ChatRequest, error: RequestError
    ) -> None:
        """A stream fails by an event if the prompt is too long, as OpenAI's does: agents that then
        compact their conversation look for it there."""
        if request.stream and isinstance(error, PromptTooLong):
            sampling = service.prompts.sampling(request, request.max_completion_tokens)
            writer = self._writer(service, request, sampling)
            await exchange.start_stream(writer.error_events)
            await exchange.send_events(*map(writer.event, writer.first_chunks()))
        raise error from None

    def writer(
        self, service: Service, request: ChatRequest, spec: GenerationSpec
    ) -> ResponseWriter:
        return self._writer(service, request, spec.sampling)

    def _writer(
        self, service: Service, request: ChatRequest, sampling: SamplingParams
    ) -> ResponseApiWriter:
        assert isinstance(request, ResponseChat)
        return ResponseApiWriter(
            request,
            sampling,
            service.model_name,
            AnswerBlocks(chat_parsing(service, request), service.tokenizer),
            self._store_for(request.original),
            service.seal,
        )

    async def answer(
        self,
        exchange: Exchange,
        service: Service,
        request: ChatRequest,
        spec: GenerationSpec,
        writer: ResponseWriter,
    ) -> None:
        assert isinstance(request, ResponseChat)
        assert isinstance(writer, ResponseApiWriter)
        if not request.original.background:
            await super().answer(exchange, service, request, spec, writer)
            return
        assert self._store is not None
        async with AsyncExitStack() as stack:
            generation = await stack.enter_async_context(
                generating(spec, api_key_of(exchange.scope), service, service.tokenizer)
            )
            await generation.start()
            queued = msgspec.json.encode(writer.response)
            await writer.begin()
            left = stack.pop_all()  # the task closes it
        task = asyncio.create_task(
            self._complete(left, generation, request, spec, writer, self._store)
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await exchange.send_json(queued)

    async def _complete(
        self,
        stack: AsyncExitStack,
        generation: Generation | BeamGeneration,
        request: ResponseChat,
        spec: GenerationSpec,
        writer: ResponseApiWriter,
        store: ResponseStore,
    ) -> None:
        """Compute a response in the background, unless it is cancelled, and store it."""
        owner, response_id = request.owner, writer.response.id
        with in_background():
            async with stack:
                pieces = asyncio.ensure_future(_pieces(generation))
                watch = asyncio.ensure_future(_until_unwanted(store, owner, response_id))
                try:
                    left_s = None
                    if request.deadline_s is not None:
                        left_s = request.deadline_s - (time.perf_counter() - spec.arrived_s)
                    await asyncio.wait(
                        (pieces, watch), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    if watch.done():
                        return
                    if not pieces.done():
                        raise deadline_passed(request.deadline_s)
                    writer.whole(pieces.result(), generation.usage())
                except RequestError as error:
                    note_failure(error)
                    writer.failed(error)
                except Exception:
                    logger.exception("a response in the background failed")
                    writer.failed(ApiError(500, "internal error; see the server's log"))
                finally:
                    pieces.cancel()
                    watch.cancel()
                    await asyncio.wait((pieces, watch))
        try:
            if await store.end(owner, response_id):
                await writer.keep()
        except (RequestError, OSError) as error:
            logger.warning("a response in the background was not stored: %s", error)


async def _pieces(generation: Generation | BeamGeneration) -> list[Piece]:
    return [piece async for pieces in generation.pieces() for piece in pieces]


async def _until_unwanted(store: ResponseStore, owner: str, response_id: str) -> None:
    while await store.is_running(owner, response_id):
        await asyncio.sleep(POLL_INTERVAL_S)
