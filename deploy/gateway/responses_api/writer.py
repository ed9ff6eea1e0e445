"""Writes a response: as a whole, as events, and for the store."""

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from longshore.deploy.gateway.openai.endpoint import NamedEventWriter
from longshore.deploy.gateway.openai.errors import ApiError, invalid
from longshore.deploy.gateway.openai.generation_spec import GenerationSpec, Piece
from longshore.deploy.gateway.openai.responses import Usage
from longshore.deploy.gateway.responses_api.bodies import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    ContentPartAdded,
    ContentPartDone,
    ErrorEvent,
    FailureBody,
    IncompleteDetails,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ResponseBody,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    StoredResponse,
    response_usage,
)
from longshore.deploy.gateway.responses_api.requests import ResponseChat
from longshore.deploy.gateway.responses_api.store import ResponseStore, new_response_id

_FAILURES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseApiWriter(NamedEventWriter):
    """One response. Its output is one message.

    store: where the response is kept; None: it is not stored.
    """

    def __init__(
        self,
        request: ResponseChat,
        spec: GenerationSpec,
        model_name: str,
        store: ResponseStore | None,
    ) -> None:
        original = request.original
        self._request = request
        self._store = store
        self._num_events = 0
        self._text = ""
        self._is_cut = False
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self.response = ResponseBody(
            id=new_response_id(),
            created_at=int(time.time()),
            status=QUEUED if original.background else IN_PROGRESS,
            background=bool(original.background),
            instructions=original.instructions,
            max_output_tokens=original.max_output_tokens,
            model=model_name,
            previous_response_id=original.previous_response_id,
            store=store is not None,
            temperature=spec.sampling.temperature,
            text={"format": {"type": "text"}},
            top_p=spec.sampling.top_p,
            metadata=original.metadata or {},
        )

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        response, item = self.response, OutputMessage(id=self._item_id, status=IN_PROGRESS)
        return [
            ResponseCreated(response=response, sequence_number=self._next()),
            ResponseInProgress(response=response, sequence_number=self._next()),
            OutputItemAdded(item=item, sequence_number=self._next()),
            ContentPartAdded(
                item_id=self._item_id, part=OutputText(""), sequence_number=self._next()
            ),
        ]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        self._text += piece.text
        self._is_cut = piece.finish_reason == "length"
        chunks: list[msgspec.Struct] = []
        if piece.text:
            chunks.append(
                OutputTextDelta(
                    item_id=self._item_id, delta=piece.text, sequence_number=self._next()
                )
            )
        if piece.finish_reason is not None:
            text, item_id = self._text, self._item_id
            chunks += [
                OutputTextDone(item_id=item_id, text=text, sequence_number=self._next()),
                ContentPartDone(
                    item_id=item_id, part=OutputText(text), sequence_number=self._next()
                ),
                OutputItemDone(item=self._item(), sequence_number=self._next()),
            ]
        return chunks

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        kind = ResponseIncomplete if self._is_cut else ResponseCompleted
        return [kind(response=self._completed(usage), sequence_number=self._next())]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (piece,) = pieces
        self._text, self._is_cut = piece.text, piece.finish_reason == "length"
        return self._completed(usage)

    def error_events(self, error: ApiError) -> Sequence[bytes]:
        failed = self.failed(error)
        body = error.body
        events = (
            ErrorEvent(
                code=body.code,
                message=body.message,
                param=body.param,
                sequence_number=self._next(),
            ),
            ResponseFailed(response=failed, sequence_number=self._next()),
        )
        return [self.event(event) for event in events]

    def failed(self, error: ApiError) -> ResponseBody:
        """The response after an error."""
        failure = FailureBody(_FAILURES.get(error.status, "server_error"), error.body.message)
        self.response = msgspec.structs.replace(self.response, status=FAILED, error=failure)
        return self.response

    async def keep(self) -> None:
        if self._store is not None:
            with _storing():
                await self._store.put(self._request.owner, self.record())

    async def begin(self) -> None:
        """Store the response before it is computed in the background."""
        assert self._store is not None
        with _storing():
            await self._store.begin(self._request.owner, self.record())

    def record(self) -> StoredResponse:
        """The response as it is now, for the store."""
        messages = list(self._request.conversation)
        if self.response.status in (COMPLETED, INCOMPLETE):
            messages.append(("assistant", self._text))
        return StoredResponse(self.response, self._request.items, messages)

    def _completed(self, usage: Usage) -> ResponseBody:
        self.response = msgspec.structs.replace(
            self.response,
            status=INCOMPLETE if self._is_cut else COMPLETED,
            completed_at=None if self._is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
            output=[self._item()],
            usage=response_usage(usage),
        )
        return self.response

    def _item(self) -> OutputMessage:
        return OutputMessage(
            id=self._item_id,
            status=INCOMPLETE if self._is_cut else COMPLETED,
            content=[OutputText(self._text)],
        )

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1


@contextmanager
def _storing() -> Iterator[None]:
    """Raises ApiError if a response cannot be stored."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error), param="store") from error
    except OSError as error:
        raise ApiError(500, f"the response cannot be stored: {error.strerror}") from error
