"""Renders a chat to a prompt, with vLLM's parameters."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import msgspec

from longshore.deploy.gateway.openai.chat_messages import ChatMessage, template_input
from longshore.deploy.gateway.openai.chat_tools import function_names
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.text.chat_template import ChatTemplate, TemplateRejected
from longshore.deploy.gateway.text.template_bounds import TemplateTooCostly
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_CHARACTERS, ModelTokenizer

# Parameters of the request itself, or not supported.
_NOT_KWARGS: Final = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
)
# A message or a part of one takes as long as a text of this length.
CHARACTERS_PER_STEP: Final = 64
MAX_INLINE_PARTS: Final = MAX_INLINE_CHARACTERS // CHARACTERS_PER_STEP
# Private-use characters, which no template or message should contain.
_END_OF_MESSAGE: Final = "\ue000end\ue001of\ue002message\ue000"


class ChatPromptParameters(Protocol):
    """The parameters of a request body for its prompt; None: not set."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


class ChatPromptOptions(msgspec.Struct, frozen=True):
    """adds_generation_prompt: the prompt ends where the assistant's answer begins.
    continues_final_message: the prompt ends with the text of the last message, to be continued.
    variables: variables of the template in addition to the messages.
    tools:     definitions of functions; None: the template gets none.
    """

    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    variables: Mapping[str, Any] = {}
    tools: Sequence[Mapping[str, Any]] | None = None


def chat_prompt_options(request: ChatPromptParameters) -> ChatPromptOptions:
    """The options of a request. Raises ApiError for invalid ones."""
    function_names(request.tools or ())
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    if continues and adds:
        raise invalid(
            "continue_final_message continues the last message, but add_generation_prompt begins a "
            "new one; remove one of them",
            param="continue_final_message",
        )
    variables = request.chat_template_kwargs or {}
    for name in sorted(_NOT_KWARGS & variables.keys()):
        raise invalid(
            f"chat_template_kwargs must not have {name}, which templates get from the request; "
            "remove it",
            param="chat_template_kwargs",
        )
    return ChatPromptOptions(
        not continues if adds is None else adds, continues, variables, request.tools or None
    )


class ChatRenderer:
    """Renders the chats of one gateway. Large ones are rendered on a thread, one at a time, so that
    streams do not wait for them, and all once a small one has taken too long."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "chat renderer")
        self._template: ChatTemplate | None = None  # of the thread
        self._is_costly = False

    async def text(
        self, tokenizer: ModelTokenizer, messages: Sequence[ChatMessage], form: ChatPromptOptions
    ) -> str:
        """The prompt's text. Raises as `template_input` and `render_chat` do."""

        def render_there() -> str:
            template = self._template = self._template or tokenizer.chat_template.twin()
            return render_chat(template, template_input(messages), form)

        if not self._is_costly and not _is_large(messages, (form.variables, form.tools)):
            chat = template_input(messages)
            try:
                return render_chat(tokenizer.chat_template, chat, form, is_inline=True)
            except TemplateTooCostly:
                self._is_costly = True
        return await asyncio.get_running_loop().run_in_executor(self._thread, render_there)


def _is_large(messages: Sequence[ChatMessage], others: object) -> bool:
    """Whether rendering takes more than a few milliseconds. others: the other input."""
    size = len(msgspec.json.encode(others))
    for message in messages:
        parts = message.content if isinstance(message.content, list) else ()
        calls = message.tool_calls or ()
        texts = (
            message.content,
            message.name,
            message.reasoning_content,
            message.reasoning,
            *(part.text for part in parts[:MAX_INLINE_PARTS]),
        )
        size += CHARACTERS_PER_STEP * (1 + len(parts) + len(calls))
        size += sum(_size(call.function.arguments) for call in calls[:MAX_INLINE_PARTS])
        size += sum(len(text) for text in texts if isinstance(text, str))
        if size > MAX_INLINE_CHARACTERS:
            return True
    return False


def _size(arguments: object) -> int:
    """Characters and values of plain data; of large data, any number above
    MAX_INLINE_CHARACTERS."""
    size, pending = 0, [arguments]
    while pending and size <= MAX_INLINE_CHARACTERS:
        value = pending.pop()
        size += len(value) if isinstance(value, str | list | dict) else 1
        if size <= MAX_INLINE_CHARACTERS and isinstance(value, list | dict):
            pending += value
            pending += value.values() if isinstance(value, dict) else ()
    return size


def render_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    form: ChatPromptOptions,
    *,
    is_inline: bool = False,
) -> str:
    """The prompt's text. Raises ApiError, with the template's message, if it rejects the chat.
    is_inline: raise TemplateTooCostly if it takes too long for the event loop."""
    _check_shows_tools(template, messages, form)
    if form.continues_final_message:
        last = messages[-1]
        marked = {**last, "content": f"{last['content'] or ''}{_END_OF_MESSAGE}"}
        messages = [*messages[:-1], marked]
    try:
        text = template.render(
            messages,
            add_generation_prompt=form.adds_generation_prompt,
            tools=form.tools,
            variables=form.variables,
            is_inline=is_inline,
        )
    except TemplateRejected as error:
        raise invalid(
            f"the model's chat template rejects these messages: {error}", param="messages"
        ) from error
    if not form.continues_final_message:
        return text
    text, mark, _ = text.rpartition(_END_OF_MESSAGE)
    if not mark:
        raise invalid(
            "the model's chat template changes the last message, so it cannot be continued; "
            "remove continue_final_message",
            param="continue_final_message",
        )
    return text


def _check_shows_tools(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], form: ChatPromptOptions
) -> None:
    """Raise ApiError if the template would drop the tools, or calls of them."""
    if form.tools and "tools" not in template.words:
        raise invalid(
            "the model's chat template does not tell the model about tools; remove tools, or set "
            "a template that does with --chat-template",
            param="tools",
            code="unsupported_parameter",
        )
    if any("tool_calls" in message for message in messages) and "tool_calls" not in template.words:
        raise invalid(
            "the model's chat template drops the tool_calls of messages; set a template that "
            "shows them with --chat-template",
            param="messages",
            code="unsupported_parameter",
        )
