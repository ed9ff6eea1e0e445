"""The API as an OpenAPI 3.1 document, generated from the structs of the bodies."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

import longshore
from longshore.deploy.gateway.anthropic import requests as anthropic_requests
from longshore.deploy.gateway.anthropic.bodies import Message, MessageEvent, TokenCount
from longshore.deploy.gateway.anthropic.errors import AnthropicError
from longshore.deploy.gateway.anthropic.requests import Conversation, MessagesRequest
from longshore.deploy.gateway.dashboard.dashboard import DashboardState
from longshore.deploy.gateway.openai.classification import (
    ClassificationRequest,
    ClassificationResponse,
)
from longshore.deploy.gateway.openai.embeddings import EmbeddingRequest, EmbeddingResponse
from longshore.deploy.gateway.openai.errors import ErrorEnvelope
from longshore.deploy.gateway.openai.parameters import HINTS, IGNORED, UNSUPPORTED
from longshore.deploy.gateway.openai.requests import (
    OF_CHATS,
    ChatRequest,
    CompletionRequest,
)
from longshore.deploy.gateway.openai.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    Model,
    ModelList,
    ServerLoad,
    ServerVersion,
    Transcript,
    TranscriptDelta,
    TranscriptDone,
)
from longshore.deploy.gateway.openai.scoring import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from longshore.deploy.gateway.openai.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from longshore.deploy.gateway.openai.transcription_requests import TranscriptionRequest
from longshore.deploy.gateway.responses_api import requests as responses_requests
from longshore.deploy.gateway.responses_api.bodies import (
    DeletedResponse,
    InputItemList,
    ResponseBody,
    ResponseStreamEvent,
)
from longshore.deploy.gateway.responses_api.requests import ResponsesRequest
from longshore.protocol.statistics import EngineReport

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
FORM: Final = "multipart/form-data"
TEXT: Final = "text/plain"
HTML: Final = "text/html"
_REF: Final = "#/components/schemas/{name}"


@dataclass(frozen=True)
class _Operation:
    """answers: body of a 200, by media type; None: plain text. events: the data of those of a
    stream. has_done: a stream ends with `[DONE]`. errors: statuses in addition to 401. error: the
    body of other errors than plain text. query: optional query parameter, a number. is_list_too:
    the body may be a list of answers."""

    method: str
    path: str
    summary: str
    answers: dict[str, type | None]
    body: type | None = None
    body_type: str = JSON
    errors: Sequence[int] = ()
    error: type = ErrorEnvelope
    query: str | None = None
    is_list_too: bool = False
    events: Sequence[type] = ()
    has_done: bool = True


_ASKING: Final = (400, 404, 413, 415, 429, 500, 503, 504)
_OPERATIONS: Final = (
    _Operation("get", "/v1/models", "The served model, by all its names.", {JSON: ModelList}),
    _Operation(
        "get", "/v1/models/{name}", "The served model, by one name.", {JSON: Model}, errors=(404,)
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Complete texts or token ids.",
        {JSON: CompletionResponse},
        CompletionRequest,
        errors=_ASKING,
        events=(CompletionResponse, ErrorEnvelope),
    ),
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a chat.",
        {JSON: ChatResponse},
        ChatRequest,
        errors=_ASKING,
        events=(ChatChunk, ErrorEnvelope),
    ),
    _Operation(
        "post",
        "/v1/embeddings",
        "Embed texts or token ids.",
        {JSON: EmbeddingResponse},
        EmbeddingRequest,
        errors=_ASKING,
    ),
    *(
        _Operation("post", path, summary, {JSON: answer}, body, errors=_ASKING)
        for paths, summary, answer, body in (
            (
                ("/v1/score", "/score"),
                "Score pairs of texts.",
                ScoreResponse,
                ScoreRequest,
            ),
            (
                ("/v1/rerank", "/rerank", "/v2/rerank"),
                "Order documents by their relevance to a query.",
                RerankResponse,
                RerankRequest,
            ),
            (
                ("/classify", "/v1/classify"),
                "The labels of texts or token ids.",
                ClassificationResponse,
                ClassificationRequest,
            ),
        )
        for path in paths
    ),
    *(
        _Operation(
            "post",
            f"/v1/audio/{name}",
            summary,
            {JSON: Transcript, TEXT: None},
            TranscriptionRequest,
            FORM,
            errors=_ASKING,
            events=(TranscriptDelta, TranscriptDone, ErrorEnvelope),
        )
        for name, summary in (
            ("transcriptions", "Transcribe audio in its language."),
            ("translations", "Translate audio to English text."),
        )
    ),
    _Operation(
        "post",
        "/tokenize",
        "Token ids of a text or a chat.",
        {JSON: TokenizeResponse},
        TokenizeRequest,
        errors=(400, 404, 413, 415, 503),
    ),
    _Operation(
        "post",
        "/detokenize",
        "The text of token ids.",
        {JSON: DetokenizeResponse},
        DetokenizeRequest,
        errors=(400, 404, 413, 415, 503),
    ),
    _Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, in the format of Anthropic's API.",
        {JSON: Message},
        MessagesRequest,
        errors=_ASKING,
        error=AnthropicError,
        events=(*get_args(MessageEvent), AnthropicError),
        has_done=False,
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "The number of tokens of a conversation.",
        {JSON: TokenCount},
        Conversation,
        errors=(400, 404, 413, 415, 503),
        error=AnthropicError,
    ),
    _Operation(
        "post",
        "/v1/responses",
        "Answer a text or a conversation, which may continue a stored response.",
        {JSON: ResponseBody},
        ResponsesRequest,
        errors=_ASKING,
        events=get_args(ResponseStreamEvent),
        has_done=False,
    ),
    _Operation(
        "get",
        "/v1/responses/{response_id}",
        "A stored response.",
        {JSON: ResponseBody},
        errors=(400, 404),
    ),
    _Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Delete a stored response.",
        {JSON: DeletedResponse},
        errors=(404,),
    ),
    _Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "Cancel a response that is computed in the background.",
        {JSON: ResponseBody},
        errors=(400, 404),
    ),
    _Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "The input of a stored response.",
        {JSON: InputItemList},
        errors=(400, 404),
    ),
    _Operation("get", "/health", "Whether the process answers.", {TEXT: None}),
    _Operation("get", "/ready", "Whether requests are accepted.", {TEXT: None}, errors=(503,)),
    *(
        _Operation(
            method, "/ping", "Whether this gateway serves requests.", {TEXT: None}, errors=(503,)
        )
        for method in ("get", "post")
    ),
    _Operation("get", "/version", "The version of Longshore.", {JSON: ServerVersion}),
    _Operation("get", "/load", "The number of requests in the engines.", {JSON: ServerLoad}),
    _Operation("get", "/docs", "This API as a page.", {HTML: None}),
    _Operation("get", "/metrics", "Metrics for Prometheus.", {TEXT: None}),
    _Operation(
        "get",
        "/engine/report",
        "The state of the engine, and what each waiting request waits for.",
        {JSON: EngineReport},
        errors=(404, 503, 504),
        query="engine",
        is_list_too=True,
    ),
    _Operation("get", "/dashboard", "A live page with the state of the engine.", {HTML: None}),
    _Operation(
        "get",
        "/dashboard/state",
        "The data of the page: blocks, their holders, and the report.",
        {JSON: DashboardState},
        errors=(404, 503, 504),
    ),
)


@functools.cache
def document_json() -> bytes:
    """The document as JSON. Made once, because that takes some milliseconds."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The document, as plain data."""
    types: dict[type, None] = dict.fromkeys(operation.error for operation in _OPERATIONS)
    for operation in _OPERATIONS:
        kinds = (operation.body, *operation.answers.values(), *operation.events)
        types |= dict.fromkeys(kind for kind in kinds if kind)
    _, components = msgspec.json.schema_components(list(types), ref_template=_REF)
    for component in components.values():  # unknown fields are ignored
        component.pop("additionalProperties", None)
    for kind, ignored, unsupported in (
        (ChatRequest, IGNORED, UNSUPPORTED),
        (CompletionRequest, IGNORED, UNSUPPORTED),
        (Conversation, anthropic_requests.IGNORED, anthropic_requests.UNSUPPORTED),
        (MessagesRequest, anthropic_requests.IGNORED, OF_CHATS | anthropic_requests.UNSUPPORTED),
        (ResponsesRequest, responses_requests.IGNORED, OF_CHATS | responses_requests.UNSUPPORTED),
    ):
        components[kind.__name__]["properties"] |= _neutral(kind, ignored, unsupported)
    for pools in (EmbeddingRequest, ScoreRequest, RerankRequest, ClassificationRequest):
        components[pools.__name__]["properties"] |= {name: {} for name in sorted(IGNORED)}
    report = components[EngineReport.__name__]  # sent without the tag that messages have
    del report["properties"]["type"]
    report["required"].remove("type")
    file = {"type": "string", "format": "binary", "description": "wav, flac, ogg or mp3"}
    form = components[TranscriptionRequest.__name__]
    form["properties"] = {"file": file, **form["properties"]}
    form["required"] = ["file"]
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Longshore",
            "version": longshore.__version__,
            "description": "Unknown fields of a request are ignored, and the response header "
            "x-longshore-ignored-fields names them. With --strict-requests they are rejected.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _neutral(
    kind: type[msgspec.Struct],
    ignored: Collection[str],
    unsupported: Mapping[str, tuple[object, ...]],
) -> dict[str, Any]:
    """Parameters accepted in addition: ignored ones with any value, unsupported ones with neutral
    values."""
    fields = kind.__struct_fields__
    neutral = {name: list(values) for name, values in unsupported.items() if name not in fields}
    return {
        **{name: {"enum": [None, *values]} for name, values in neutral.items()},
        **{name: {} for name in sorted({*ignored, *(HINTS & neutral.keys())})},
    }


def _described(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary}
    for name in re.findall(r"{(\w+)}", operation.path):
        in_path = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [in_path]
    if operation.query is not None:
        number = {"type": "integer", "minimum": 0}
        query = {"name": operation.query, "in": "query", "schema": number}
        described["parameters"] = [query]
    if operation.body is not None:
        content = {operation.body_type: {"schema": _reference(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    answers = {
        media: {"schema": {"type": "string"} if kind is None else _answer(operation, kind)}
        for media, kind in operation.answers.items()
    }
    if operation.events:
        answers[EVENTS] = {"schema": _event(operation)}
    described["responses"] = {"200": {"description": "The answer.", "content": answers}}
    is_plain = TEXT in operation.answers and len(operation.answers) == 1
    for status in (*operation.errors, 401):
        is_text = is_plain and status != 401
        schema = {"type": "string"} if is_text else _reference(operation.error)
        media = TEXT if is_text else JSON
        described["responses"][str(status)] = {
            "description": "The error.",
            "content": {media: {"schema": schema}},
        }
    return described


def _answer(operation: _Operation, kind: type) -> dict[str, Any]:
    one = _reference(kind)
    return {"anyOf": [one, {"type": "array", "items": one}]} if operation.is_list_too else one


def _event(operation: _Operation) -> dict[str, Any]:
    """Of each event in a stream, as an object with the fields that such events have."""
    kinds = [_reference(kind) for kind in operation.events]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": kinds},
    }
    if operation.has_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    fields = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "properties": fields, "required": ["data"]}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
