"""Chats of `LLM.chat`: messages in OpenAI's format, rendered with the model's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import msgspec

from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.llm.prompts import value_errors
from longshore.deploy.requests.chat_messages import ChatMessage, template_input
from longshore.deploy.requests.chat_prompt import chat_prompt_options, render_chat
from longshore.protocol.errors import ConfigError

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class ChatParameters:
    """The arguments of a chat; see `LLM.chat`."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    documents: ClassVar[None] = None  # of requests


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of one or more chats."""
    if len(messages) and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def other_template(source: str, template: ChatTemplate) -> ChatTemplate:
    """The template `source`, with the special tokens of another one. Raises ValueError."""
    try:
        return ChatTemplate(source, template.special_tokens)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def rendered_chat(
    template: ChatTemplate, chat: Sequence[Message], parameters: ChatParameters, name: str
) -> str:
    """The text of the prompt. name: of the chat in errors. Raises ValueError if an argument or a
    message is invalid, or the template rejects them."""
    with value_errors():
        options = chat_prompt_options(parameters)
    try:
        with value_errors(name):
            messages = msgspec.json.decode(msgspec.json.encode(chat), type=list[ChatMessage])
            return render_chat(template, template_input(messages), options)
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"{name}: {error}") from error
