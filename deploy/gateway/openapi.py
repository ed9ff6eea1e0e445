"""The API as an OpenAPI 3.1 document, generated from the structs of the bodies."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import msgspec

import longshore
from longshore.deploy.gateway.anthropic.bodies import Message, MessageEvent, TokenCount
from longshore.deploy.gateway.anthropic.requests import Conversation, MessagesRequest
from longshore.deploy.gateway.api.embeddings import EmbeddingRequest
from longshore.deploy.gateway.api.error_body import AnthropicError, OllamaError
from longshore.deploy.gateway.api.errors import ErrorEnvelope
from longshore.deploy.gateway.api.field_rules import FIELD_RULES, LABEL, FieldRules, Hint
from longshore.deploy.gateway.api.requests import OF_CHATS, ChatRequest
from longshore.deploy.gateway.api.uncached_clients import UncachedClientList
from longshore.deploy.gateway.batches.bodies import (
    Batch,
    BatchList,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    UploadRequest,
)
from longshore.deploy.gateway.dashboard.dashboard import DashboardHistory, DashboardState
from longshore.deploy.gateway.ollama.bodies import (
    OllamaChatAnswer,
    OllamaEmbeddingResponse,
    OllamaEmbedResponse,
    OllamaGenerateAnswer,
    OllamaModelCard,
    OllamaModels,
    OllamaVersion,
)
from longshore.deploy.gateway.ollama.model_routes import REFUSED_OPERATIONS, OllamaShowRequest
from longshore.deploy.gateway.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from longshore.deploy.gateway.openai.classification import (
    ClassificationRequest,
    ClassificationResponse,
)
from longshore.deploy.gateway.openai.embeddings import EmbeddingResponse
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.gateway.openai.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    Model,
    ModelList,
    ServerInfo,
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
from longshore.deploy.gateway.responses_api.bodies import (
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseBody,
    ResponseStreamEvent,
)
from longshore.deploy.gateway.responses_api.requests import ResponsesRequest
from longshore.protocol.statistics import EngineReport

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
FORM: Final = "multipart/form-data"
TEXT: Final = "text/plain"
BYTES: Final = "application/octet-stream"
HTML: Final = "text/html"
_REF: Final = "#/components/schemas/{name}"


@dataclass(frozen=True)
class _Operation:
    """answers: body of a 200, by media type; None: plain text. events: the data of those of a
    stream. has_done: a stream ends with `[DONE]`. lines: those of a stream of JSON. errors:
    statuses in addition to 401. error: the body of other errors than plain text. query: optional
    query parameter, a number. is_list_too: the body may be a list of answers."""

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
    lines: Sequence[type] = ()


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
        "post",
        "/v1/responses/input_tokens",
        "The number of tokens of a text or a conversation.",
        {JSON: InputTokens},
        ResponsesRequest,
        errors=(400, 404, 413, 415, 503),
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
    _Operation(
        "post",
        "/v1/files",
        "Store a file of requests for a batch.",
        {JSON: FileObject},
        UploadRequest,
        FORM,
        errors=(400, 404, 413),
    ),
    _Operation(
        "get", "/v1/files", "The stored files.", {JSON: FileList}, errors=(400, 404), query="limit"
    ),
    _Operation("get", "/v1/files/{file_id}", "A file.", {JSON: FileObject}, errors=(404,)),
    _Operation(
        "delete", "/v1/files/{file_id}", "Delete a file.", {JSON: DeletedFile}, errors=(404,)
    ),
    _Operation(
        "get",
        "/v1/files/{file_id}/content",
        "The content of a file.",
        {BYTES: None},
        errors=(404,),
    ),
    _Operation(
        "post",
        "/v1/batches",
        "Begin to answer the requests of a file.",
        {JSON: Batch},
        BatchRequest,
        errors=(400, 404, 413, 415),
    ),
    _Operation(
        "get", "/v1/batches", "The batches.", {JSON: BatchList}, errors=(400, 404), query="limit"
    ),
    _Operation("get", "/v1/batches/{batch_id}", "A batch.", {JSON: Batch}, errors=(404,)),
    _Operation(
        "post",
        "/v1/batches/{batch_id}/cancel",
        "End a batch with the answers that it has.",
        {JSON: Batch},
        errors=(400, 404),
    ),
    *(
        _Operation(
            "post",
            path,
            summary,
            {JSON: answer},
            body,
            errors=_ASKING,
            error=OllamaError,
            lines=lines,
        )
        for path, summary, answer, body, lines in (
            (
                "/api/chat",
                "Answer a chat, in the format of Ollama's API.",
                OllamaChatAnswer,
                OllamaChatRequest,
                (OllamaChatAnswer, OllamaError),
            ),
            (
                "/api/generate",
                "Answer a prompt, or continue it.",
                OllamaGenerateAnswer,
                OllamaGenerateRequest,
                (OllamaGenerateAnswer, OllamaError),
            ),
            ("/api/embed", "Embed texts.", OllamaEmbedResponse, OllamaEmbedRequest, ()),
            (
                "/api/embeddings",
                "Embed a text.",
                OllamaEmbeddingResponse,
                OllamaEmbeddingsRequest,
                (),
            ),
        )
    ),
    _Operation("get", "/api/tags", "The served model, by all its names.", {JSON: OllamaModels}),
    _Operation("get", "/api/ps", "The loaded model, by all its names.", {JSON: OllamaModels}),
    _Operation("get", "/api/version", "Ollama's version with this API.", {JSON: OllamaVersion}),
    _Operation(
        "post",
        "/api/show",
        "What the server knows of the model.",
        {JSON: OllamaModelCard},
        OllamaShowRequest,
        errors=(400, 404, 413, 415, 503),
        error=OllamaError,
    ),
    *(
        _Operation(
            method.lower(),
            path,
            "Refused: the server serves one model.",
            {},
            errors=(400,),
            error=OllamaError,
        )
        for path, method, _ in REFUSED_OPERATIONS
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
    _Operation(
        "get", "/server_info", "The settings of the server, without secrets.", {JSON: ServerInfo}
    ),
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
    _Operation(
        "get",
        "/engine/uncached-clients",
        "Clients whose long prompts always differ in their first blocks.",
        {JSON: UncachedClientList},
    ),
    _Operation("get", "/dashboard", "A live page with the state of the engine.", {HTML: None}),
    _Operation(
        "get",
        "/dashboard/state",
        "The data of the page: blocks, their holders, and the report.",
        {JSON: DashboardState},
        errors=(404, 503, 504),
    ),
    _Operation(
        "get",
        "/dashboard/history",
        "The charts of the last hour.",
        {JSON: DashboardHistory},
        errors=(404, 503),
        query="engine",
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
        kinds = (
            *(operation.body, *operation.answers.values()),
            *(*operation.events, *operation.lines),
        )
        types |= dict.fromkeys(kind for kind in kinds if kind)
    _, components = msgspec.json.schema_components(list(types), ref_template=_REF)
    for component in components.values():  # unknown fields are ignored
        component.pop("additionalProperties", None)
    for kind, rules in (
        (ChatRequest, FIELD_RULES["openai"]),
        (CompletionRequest, FIELD_RULES["openai"]),
        (Conversation, FIELD_RULES["anthropic"]),
        (MessagesRequest, {**OF_CHATS, **FIELD_RULES["anthropic"]}),
        (ResponsesRequest, {**OF_CHATS, **FIELD_RULES["responses"]}),
        (OllamaChatRequest, {**OF_CHATS, **FIELD_RULES["ollama"]}),
        (OllamaGenerateRequest, {**OF_CHATS, **FIELD_RULES["ollama"]}),
        (OllamaEmbedRequest, FIELD_RULES["ollama"]),
        (OllamaEmbeddingsRequest, FIELD_RULES["ollama"]),
    ):
        components[kind.__name__]["properties"] |= _accepted(kind, rules)
    labels = {name: rule for name, rule in FIELD_RULES["openai"].items() if rule is LABEL}
    for pools in (EmbeddingRequest, ScoreRequest, RerankRequest, ClassificationRequest):
        components[pools.__name__]["properties"] |= _accepted(pools, labels)
    report = components[EngineReport.__name__]  # sent without the tag that messages have
    del report["properties"]["type"]
    report["required"].remove("type")
    for form_kind, content in (
        (TranscriptionRequest, "wav, flac, ogg or mp3"),
        (UploadRequest, "a request in JSON per line"),
    ):
        file = {"type": "string", "format": "binary", "description": content}
        form = components[form_kind.__name__]
        form["properties"] = {"file": file, **form["properties"]}
        form["required"] = ["file", *form.get("required", ())]
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


def _accepted(kind: type[msgspec.Struct], rules: FieldRules) -> dict[str, Any]:
    """Parameters accepted in addition: hints with any value, refused ones with neutral values."""
    return {
        name: {} if isinstance(rule, Hint) else {"enum": [None, *rule.neutral]}
        for name, rule in rules.items()
        if name not in kind.__struct_fields__
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
    if operation.lines:
        answers[LINES] = {"schema": {"anyOf": [_reference(kind) for kind in operation.lines]}}
    described["responses"] = {}
    if answers:
        described["responses"]["200"] = {"description": "The answer.", "content": answers}
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
