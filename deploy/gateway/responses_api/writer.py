"""Writes a response: as a whole, as events, and for the store."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from longshore.deploy.gateway.api.endpoint import NamedEventWriter
from longshore.deploy.gateway.api.errors import ApiError, body_of, status_of
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.responses_api.bodies import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    QUEUED,
    ContentPartAdded,
    ContentPartDone,
    CustomToolCall,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    ErrorEvent,
    FailureBody,
    FunctionCall,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    IncompleteDetails,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
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
from longshore.deploy.gateway.responses_api.tools import TextSettings
from longshore.deploy.requests.answer_blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockDelta,
    BlockEnd,
    BlockEvent,
    BlockStart,
)
from longshore.deploy.requests.errors import PromptTooLong, RequestError, invalid
from longshore.deploy.requests.generation_spec import Piece
from longshore.protocol.sampling import SamplingParams

_DELTAS: Final = {
    "text": OutputTextDelta,
    "reasoning": ReasoningTextDelta,
    "call": FunctionCallArgumentsDelta,
    "custom": CustomToolCallInputDelta,
}
_ID_PREFIXES: Final = {"text": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
_FAILURES: Final = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseApiWriter(NamedEventWriter):
    """One response. Each block of the answer is an item of its output.

    store: where the response is kept; None: it is not stored.
    """

    def __init__(
        self,
        request: ResponseChat,
        sampling: SamplingParams,
        model_name: str,
        blocks: AnswerBlocks,
        store: ResponseStore | None,
        seal: ReasoningSeal,
    ) -> None:
        original = request.original
        self._request = request
        self._store = store
        self._num_events = 0
        self._is_cut = False
        self._blocks = blocks
        self._item_ids: list[str] = []
        self._seal = seal if original.seals_reasoning else None
        self._sealed: dict[int, str] = {}  # by index of the item
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
            temperature=sampling.temperature,
            text=_text_settings(original.text),
            parallel_tool_calls=original.parallel_tool_calls is not False,
            tools=original.tools or (),
            tool_choice=original.tool_choice or "auto",
            top_p=sampling.top_p,
            metadata=original.metadata or {},
        )

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return [
            ResponseCreated(response=self.response, sequence_number=self._next()),
            ResponseInProgress(response=self.response, sequence_number=self._next()),
        ]

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        self._is_cut = piece.finish_reason == "length"
        return [chunk for event in self._blocks.feed(piece) for chunk in self._of_block(event)]

    def _of_block(self, event: BlockEvent) -> Iterator[msgspec.Struct]:
        index, block = event.index, event.block
        item = self._item(index, block, is_open=not isinstance(event, BlockEnd))
        at: Any = {"item_id": item.id, "output_index": index}
        match event:
            case BlockStart():
                yield OutputItemAdded(output_index=index, item=item, sequence_number=self._next())
                if (part := _part(AnswerBlock(block.kind))) is not None:
                    yield ContentPartAdded(**at, part=part, sequence_number=self._next())
            case BlockDelta(text=text):
                kind = _DELTAS[block.kind]
                yield kind(**at, delta=text, sequence_number=self._next())
            case BlockEnd():
                yield self._block_done(block, at)
                if (part := _part(block)) is not None:
                    yield ContentPartDone(**at, part=part, sequence_number=self._next())
                yield OutputItemDone(output_index=index, item=item, sequence_number=self._next())

    def _block_done(self, block: AnswerBlock, at: Any) -> msgspec.Struct:
        number, text = self._next(), block.text
        match block.kind:
            case "text":
                return OutputTextDone(**at, text=text, sequence_number=number)
            case "reasoning":
                return ReasoningTextDone(**at, text=text, sequence_number=number)
            case "call":
                return FunctionCallArgumentsDone(
                    **at, name=block.name, arguments=text, sequence_number=number
                )
            case "custom":
                return CustomToolCallInputDone(**at, input=text, sequence_number=number)

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        kind = ResponseIncomplete if self._is_cut else ResponseCompleted
        return [kind(response=self._completed(usage), sequence_number=self._next())]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct:
        (piece,) = pieces
        self._blocks.feed(piece)
        self._is_cut = piece.finish_reason == "length"
        return self._completed(usage)

    def error_events(self, error: RequestError) -> Sequence[bytes]:
        failed = self.failed(error)
        body = body_of(error)
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

    def failed(self, error: RequestError) -> ResponseBody:
        """The response after an error."""
        code = _FAILURES.get(status_of(error), "server_error")
        if isinstance(error, PromptTooLong):
            code = error.code or code
        failure = FailureBody(code, str(error))
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
            messages.append(self._blocks.message())
        return StoredResponse(self.response, self._request.items, messages)

    def _completed(self, usage: Usage) -> ResponseBody:
        self.response = msgspec.structs.replace(
            self.response,
            status=INCOMPLETE if self._is_cut else COMPLETED,
            completed_at=None if self._is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
            output=[self._item(i, block) for i, block in enumerate(self._blocks.blocks)],
            usage=response_usage(usage),
        )
        return self.response

    def _item(self, index: int, block: AnswerBlock, *, is_open: bool = False) -> OutputItem:
        """The item of a block. is_open: the block still grows, and the item is shown without it."""
        while index >= len(self._item_ids):
            self._item_ids.append(f"{_ID_PREFIXES[block.kind]}_{uuid.uuid4().hex}")
        item_id, status = self._item_ids[index], COMPLETED
        if is_open:
            status = IN_PROGRESS
        elif self._is_cut and index == len(self._blocks.blocks) - 1:
            status = INCOMPLETE
        match block.kind:
            case "text":
                parts = () if is_open else (OutputText(block.text),)
                return OutputMessage(id=item_id, status=status, content=parts)
            case "reasoning":
                thoughts = () if is_open else (ReasoningText(block.text),)
                sealed = msgspec.UNSET if is_open else self._sealed_reasoning(index, block)
                return ReasoningItem(
                    id=item_id, status=status, content=thoughts, encrypted_content=sealed
                )
            case "call":
                return FunctionCall(
                    id=item_id,
                    status=status,
                    call_id=block.call_id,
                    name=block.name,
                    arguments="" if is_open else block.text,
                )
            case "custom":
                return CustomToolCall(
                    id=item_id,
                    status=status,
                    call_id=block.call_id,
                    name=block.name,
                    input="" if is_open else block.text,
                )

    def _sealed_reasoning(self, index: int, block: AnswerBlock) -> str | msgspec.UnsetType:
        if self._seal is None:
            return msgspec.UNSET
        if index not in self._sealed:
            self._sealed[index] = self._seal.seal(block.text)
        return self._sealed[index]

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _text_settings(settings: TextSettings | None) -> Mapping[str, Any]:
    given = {} if settings is None else msgspec.to_builtins(settings)
    return {"format": given.get("format") or {"type": "text"}}


def _part(block: AnswerBlock) -> OutputText | ReasoningText | None:
    """The only content part of a block; None: it has none."""
    match block.kind:
        case "text":
            return OutputText(block.text)
        case "reasoning":
            return ReasoningText(block.text)
        case "call" | "custom":
            return None


@contextmanager
def _storing() -> Iterator[None]:
    """Raises RequestError if a response cannot be stored."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error), param="store") from error
    except OSError as error:
        raise ApiError(500, f"the response cannot be stored: {error.strerror}") from error
