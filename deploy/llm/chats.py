"""Chats of `LLM.chat`: messages in OpenAI's format, rendered with the model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from longshore.deploy.gateway.openai.chat_messages import ChatMessage, template_input
from longshore.deploy.gateway.openai.chat_prompt import ChatPromptOptions, render_chat
from longshore.deploy.gateway.openai.chat_tools import function_names
from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.protocol.errors import ConfigError

Message: TypeAlias = Mapping[str, Any]

# Variables that templates get from other arguments.
_NOT_VARIABLES: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message")


def as_chats(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of one or more chats."""
    if len(messages) and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def chat_options(
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> ChatPromptOptions:
    """Raises ValueError for tools that are no functions, and for arguments that contradict each
    other."""
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message continues the last message, but add_generation_prompt begins a "
            "new one; set one of them to False"
        )
    for name in _NOT_VARIABLES:
        if name in (variables or {}):
            raise ValueError(f"chat_template_kwargs must not have {name}; pass it as an argument")
    try:
        function_names(tools or ())
    except ApiError as error:
        raise ValueError(str(error)) from error
    return ChatPromptOptions(
        add_generation_prompt, continue_final_message, variables or {}, list(tools or ()) or None
    )


def other_template(source: str, template: ChatTemplate) -> ChatTemplate:
    """The template `source`, with the special tokens of another one. Raises ValueError."""
    try:
        return ChatTemplate(source, template.special_tokens)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def rendered_chat(
    template: ChatTemplate, chat: Sequence[Message], options: ChatPromptOptions, where: str
) -> str:
    """The text of the prompt. where: name of the chat in errors. Raises ValueError if the messages
    are invalid or the template rejects them."""
    try:
        messages = msgspec.json.decode(msgspec.json.encode(chat), type=list[ChatMessage])
        return render_chat(template, template_input(messages), options)
    except (msgspec.MsgspecError, ApiError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"{where}: {error}") from error
