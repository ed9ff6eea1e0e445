"""Request bodies of Ollama's API, and the chats that they mean."""

import math
import re
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Final, TypeVar

import msgspec

from longshore.deploy.gateway.api.embeddings import EmbeddingRequest
from longshore.deploy.gateway.api.endpoint import ApiEndpoint, Names, Service, Services
from longshore.deploy.gateway.api.field_rules import FIELD_RULES
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.api.requests import OF_CHATS, ChatRequest, Int32, StreamOptions
from longshore.deploy.gateway.api.structured_output import JsonSchemaFormat, ResponseFormat
from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.requests.chat_messages import ChatMessage, MessageToolCall, Unread
from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened

_UNITS_S: Final = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
MAX_DURATION_LENGTH: Final = 64
MAX_KEEP_S: Final = 1e9
"""Some 30 years."""
_NUMBER: Final = re.compile(r"[+-]?\d+(?:\.\d+)?")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s|us|µs|ns)")
_DURATION: Final = re.compile(rf"[+-]?(?:{_PART.pattern})+")
LATEST = ":latest"
"""A tag that clients add to names without one."""


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How an answer is generated. None: the model's default, not Ollama's.

    num_predict:    limit of tokens; 0 or below: none.
    repeat_last_n:  number of tokens that penalties are about: 0: they are off; -1: all.
    seed:           -1: a random one.
    """

    num_predict: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def apply(self, chat: ChatRequest) -> None:
        """Set the parameters of the chat. Raises RequestError."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            setattr(chat, name, getattr(self, name))
        if self.num_predict is not None and self.num_predict > 0:
            chat.max_tokens = self.num_predict
        chat.seed = None if self.seed == -1 else self.seed
        chat.stop = self.stop
        chat.stops("options.stop")
        if self.repeat_last_n == 0:
            chat.repetition_penalty, chat.presence_penalty, chat.frequency_penalty = 1.0, 0.0, 0.0
            return
        chat.repetition_penalty = self.repeat_penalty
        chat.presence_penalty = self.presence_penalty
        chat.frequency_penalty = self.frequency_penalty
        if self.repeat_last_n not in (None, -1):
            ignore_fields(("options.repeat_last_n",))


class OllamaChat(ChatRequest, kw_only=True):
    """A chat with what only Ollama's API has.

    thinking:   whether the model reasons.
    raw_prompt: what to continue without a template, instead of the messages; suffix: the text after
                the answer.
    keep_s:     seconds for which the model stays loaded without a request; None: as before.
    """

    effort_name: ClassVar[str] = "think"

    thinking: bool | None = None
    raw_prompt: str | None = None
    suffix: str = ""
    keep_s: float | None = None

    @property
    def thinks(self) -> bool | None:
        return self.thinking

    @property
    def asks_nothing(self) -> bool:
        """The model is only to be loaded."""
        return not self.messages and not self.raw_prompt


class OllamaRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the requests of both endpoints have.

    options: see `OllamaOptions`.
    format:  `json`, or the JSON schema that the answer conforms to.
    think:   whether the model reasons, or its effort. False also leaves reasoning out.
    stream:  as by default.
    keep_alive: see `keep_seconds`.
    """

    model: str
    keep_alive: float | str | None = None
    options: Unread = msgspec.UNSET
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None

    def chat(self) -> OllamaChat:
        """The request as a chat. Raises RequestError naming the invalid parameter."""
        chat = OllamaChat(model=self.model, messages=[], keep_s=keep_seconds(self.keep_alive))
        if self.options is not msgspec.UNSET and bytes(self.options) != b"null":
            rules = FIELD_RULES["ollama_options"]
            read_parameters(OllamaOptions, bytes(self.options), rules=rules).apply(chat)
        chat.response_format = self._response_format()
        if isinstance(self.think, str):
            chat.reasoning_effort = self.think
        else:
            chat.thinking = self.think
        chat.include_reasoning = self.think is not False
        chat.logprobs, chat.top_logprobs = self.logprobs, self.top_logprobs
        chat.stream = self.stream is not False
        if chat.stream:
            chat.stream_options = StreamOptions(include_usage=True)
        return chat

    def _response_format(self) -> ResponseFormat | None:
        match self.format:
            case None | "":
                return None
            case "json":
                return ResponseFormat("json_object")
            case str():
                raise invalid(
                    f'format is {shortened(self.format)!r}; it must be "json" or a JSON schema',
                    param="format",
                )
            case schema:
                return ResponseFormat("json_schema", JsonSchemaFormat("format", schema))


class OllamaMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. tool_name, tool_call_id: which call a message of the role `tool` answers."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Unread = msgspec.UNSET


class OllamaChatRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] = []
    tools: list[dict[str, Any]] | None = None

    def chat(self) -> OllamaChat:
        chat = super().chat()
        chat.messages = _chat_messages(self.messages)
        chat.tools = self.tools or None
        chat.check()
        return chat


class OllamaGenerateRequest(OllamaRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate.

    system: a message before the prompt.
    suffix: the text after the answer, for models that fill in the middle; without a template.
    raw:    without a template.
    """

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None

    def chat(self) -> OllamaChat:
        chat = super().chat()
        chat.suffix = self.suffix or ""
        if self.raw or chat.suffix:
            if self.system:
                raise invalid(
                    "system needs a template, which raw and suffix exclude; remove it",
                    param="system",
                )
            chat.raw_prompt = self.prompt or ""
        elif self.prompt:
            system = [ChatMessage("system", self.system)] if self.system else []
            chat.messages = [*system, ChatMessage("user", self.prompt)]
        chat.check()
        return chat


class OllamaEmbedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed. truncate: cut the end of inputs that are too long, as by default."""

    model: str
    keep_alive: float | str | None = None
    input: str | list[str] = ""
    truncate: bool | None = None
    dimensions: Int32 | None = None

    def embedding(self) -> EmbeddingRequest:
        """Embeddings are normalized."""
        return _embedding(
            self.model,
            self.input,
            truncates=self.truncate is not False,
            dimensions=self.dimensions,
            normalize=True,
        )


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, the former /api/embed."""

    model: str
    keep_alive: float | str | None = None
    prompt: str = ""

    def embedding(self) -> EmbeddingRequest:
        return _embedding(self.model, self.prompt, truncates=True)


OllamaRequestT = TypeVar("OllamaRequestT", bound=OllamaRequest)


def parse_chat(kind: type[OllamaRequestT], body: bytes) -> OllamaChat:
    """A request body of the given kind, as a chat. Raises RequestError naming the invalid
    parameter."""
    return read_parameters(kind, body, rules={**OF_CHATS, **FIELD_RULES["ollama"]}).chat()


def parse_embedding(
    kind: type[OllamaEmbedRequest | OllamaEmbeddingsRequest], body: bytes
) -> tuple[EmbeddingRequest, float | None]:
    """A request body of the given kind, and for how many seconds the model stays loaded; see
    OllamaChat. Raises RequestError naming the invalid parameter."""
    request = read_parameters(kind, body, rules=FIELD_RULES["ollama"])
    return request.embedding(), keep_seconds(request.keep_alive)


def keep_seconds(given: float | str | None) -> float | None:
    """Seconds from a duration as Ollama's clients write it: a number of seconds, or text such as
    `1h30m`; infinite if it is negative, or longer than MAX_KEEP_S. Raises RequestError."""
    if given is None or given == "":
        return None
    if isinstance(given, str):
        seconds = _seconds(given)
        if seconds is None:
            raise invalid(
                f"keep_alive is {shortened(given)!r}; it must be seconds, or a duration such as 5m",
                param="keep_alive",
            )
        given = seconds
    return given if 0 <= given <= MAX_KEEP_S else math.inf


def keep(service: Service, seconds: float | None) -> None:
    """Let the model sleep after so many seconds without a request, if models sleep; None: as
    before."""
    if seconds is not None and service.idle_sleep is not None:
        service.idle_sleep.keep_for(seconds)


def _seconds(text: str) -> float | None:
    """Of a number, or of Go's durations; None for another text."""
    if len(text) > MAX_DURATION_LENGTH:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    if not _DURATION.fullmatch(text):
        return None
    parts = (float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
    return -sum(parts) if text.startswith("-") else sum(parts)


class OllamaNames(ApiEndpoint):
    """An endpoint that takes the names that Ollama's clients send."""

    def named_model(self, names: Names, services: Services) -> str | None:
        name = names.name if isinstance(names.name, str) else None
        return served_name(names.model or name or None, services.names)


def served_name(name: str | None, names: Sequence[str]) -> str | None:
    """The name without `:latest`, unless the model is served with it."""
    if name is None or name in names:
        return name
    return name.removesuffix(LATEST)


def _embedding(
    model: str, given: str | list[str], *, truncates: bool, **settings: Any
) -> EmbeddingRequest:
    return EmbeddingRequest(
        model=model,
        input=list(given) if isinstance(given, list) else given,
        truncate_prompt_tokens=-1 if truncates else None,
        truncation_side="right" if truncates else None,
        **settings,
    )


def _chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The messages in OpenAI's format. Calls get ids, which some templates need and clients leave
    out; a result without an id is that of the first unanswered call, of that name if it has one."""
    given = []
    num_calls = 0
    unanswered: deque[MessageToolCall] = deque()
    for position, message in enumerate(messages):
        if message.images is not msgspec.UNSET and bytes(message.images) not in (b"null", b"[]"):
            raise invalid(
                f"messages[{position}].images is not supported; remove it",
                param="messages",
                code="unsupported_parameter",
            )
        for call in message.tool_calls or ():
            num_calls += 1
            call.id = call.id or f"call{num_calls:05}"  # nine characters, as Mistral's have
            unanswered.append(call)
        call_id = message.tool_call_id
        if message.role == "tool":
            found = _answered(message, unanswered)
            if found is not None:
                unanswered.remove(found)
                call_id = found.id
        given.append(
            ChatMessage(
                message.role,
                message.content,
                message.tool_name,
                tool_calls=message.tool_calls or None,
                tool_call_id=call_id,
                reasoning_content=message.thinking or None,
            )
        )
    return given


def _answered(message: OllamaMessage, calls: Sequence[MessageToolCall]) -> MessageToolCall | None:
    for call in calls:
        if message.tool_call_id is not None:
            if call.id == message.tool_call_id:
                return call
        elif message.tool_name in (None, call.function.name):
            return call
    return None
