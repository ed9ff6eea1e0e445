"""Renders a chat to a prompt, with vLLM's parameters."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from longshore.deploy.gateway.settings import TEMPLATE_INPUT
from longshore.deploy.gateway.text.chat_template import ChatTemplate, TemplateRejected
from longshore.deploy.gateway.text.template_bounds import TemplateTooCostly
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_CHARACTERS, ModelTokenizer
from longshore.deploy.requests.chat_messages import ChatMessage, template_input
from longshore.deploy.requests.chat_tools import as_functions, function_names
from longshore.deploy.requests.errors import invalid

_EFFORT: Final = "reasoning_effort"
_SWITCHES: Final = ("enable_thinking", "thinking")
"""What templates call the variable that turns reasoning on and off."""
NEXT_TURN: Final = (ChatMessage("assistant", "An answer."), ChatMessage("user", "A question."))
# A message or a part of one takes as long as a text of this length.
CHARACTERS_PER_STEP: Final = 64
MAX_INLINE_PARTS: Final = MAX_INLINE_CHARACTERS // CHARACTERS_PER_STEP
# Private-use characters, which no template or message should contain.
_END_OF_MESSAGE: Final = "\ue000end\ue001of\ue002message\ue000"


class ChatPromptParameters(Protocol):
    """The parameters of a request for its prompt; None: not set."""

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any] | None: ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]] | None: ...

    @property
    def documents(self) -> Sequence[Mapping[str, Any]] | None: ...


class ReasonedChat(ChatPromptParameters, Protocol):
    """A request that may say how much the model reasons: see `thinking_variables`. effort_name:
    what its API calls that."""

    @property
    def reasoning_effort(self) -> str | None: ...

    @property
    def thinks(self) -> bool | None: ...

    @property
    def effort_name(self) -> str: ...


class ChatPromptOptions(msgspec.Struct, frozen=True):
    """adds_generation_prompt: the prompt ends where the assistant's answer begins.
    continues_final_message: the prompt ends with the text of the last message, to be continued.
    variables: variables of the template in addition to the messages.
    tools:     definitions of functions; None: the template gets none.
    documents: that the answer is about, as the template has them; None: it gets none.
    """

    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    variables: Mapping[str, Any] = {}
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None


def chat_prompt_options(request: ChatPromptParameters) -> ChatPromptOptions:
    """The options of a request. Raises RequestError for invalid ones."""
    tools = request.tools or ()
    function_names(tools)
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    if continues and adds:
        raise invalid(
            "continue_final_message continues the last message, but add_generation_prompt begins a "
            "new one; set one of them to false",
            param="continue_final_message",
        )
    variables = request.chat_template_kwargs or {}
    for name in sorted(TEMPLATE_INPUT & variables.keys()):
        raise invalid(
            f"chat_template_kwargs must not have {name}, which templates get from the request; "
            "remove it",
            param="chat_template_kwargs",
        )
    return ChatPromptOptions(
        not continues if adds is None else adds,
        continues,
        variables,
        as_functions(tools) or None,
        request.documents or None,
    )


def thinking_variables(
    template: ChatTemplate, effort: str | None, *, thinks: bool | None = None
) -> dict[str, object]:
    """The variables by which this template learns how much to reason; empty: it has none for that.

    effort: as in OpenAI's API; `none` turns reasoning off. thinks: on or off, without an effort.
    """
    if effort is not None:
        thinks = effort != "none" if thinks is None else thinks
    values: dict[str, object] = {}
    if thinks is not None:
        values = {name: thinks for name in _SWITCHES if name in template.variables}
    knows_effort = _EFFORT in template.variables and (effort != "none" or "none" in template.words)
    if effort is not None and knows_effort:
        values[_EFFORT] = effort
    return values


def uses_effort(variables: Mapping[str, object], effort: str) -> bool:
    """Whether these variables tell the template of the effort, not only that there is one."""
    return _EFFORT in variables or (effort == "none" and bool(variables))


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

        if not self._is_costly and not _is_large(
            messages, (form.variables, form.tools, form.documents)
        ):
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
    """The prompt's text. Raises RequestError, with the template's message, if it rejects the chat.
    is_inline: raise TemplateTooCostly if it takes too long for the event loop."""
    template = template.for_tools(form.tools)
    _check_shows_all(template, messages, form)
    if form.continues_final_message:
        last = messages[-1]
        marked = {**last, "content": f"{last['content'] or ''}{_END_OF_MESSAGE}"}
        messages = [*messages[:-1], marked]
    render = partial(
        template.render,
        add_generation_prompt=form.adds_generation_prompt,
        variables=form.variables,
        documents=form.documents,
        is_inline=is_inline,
    )
    text = _accepted(render, messages, form.tools)
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


def _accepted(
    render: Callable[..., str],
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """The first of what is asked and its other forms that the template accepts without dropping a
    message. Raises RequestError if it rejects all of them."""
    rejected: TemplateRejected | None = None
    incomplete: str | None = None
    for chat, functions in _forms(messages, tools):
        try:
            text = render(chat, tools=functions)
        except TemplateRejected as error:
            rejected = rejected or error
            continue
        if all(text_of.strip() in text for text_of in _further_system_texts(chat)):
            return text
        incomplete = incomplete or text
    if incomplete is not None:
        return incomplete
    raise invalid(
        f"the model's chat template rejects these messages: {rejected}", param="messages"
    ) from rejected


def _forms(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, Any]] | None
) -> Iterator[tuple[Sequence[Mapping[str, object]], Sequence[Mapping[str, Any]] | None]]:
    """What is asked, and the same with what templates may need and OpenAI's API leaves optional."""
    yield messages, tools
    complete = None if tools is None else [_complete_function(tool) for tool in tools]
    if complete is not None:
        yield messages, complete
    if any(True for _ in _further_system_texts(messages)):
        folded = _with_one_system_message(messages)
        yield folded, tools
        if complete is not None:
            yield folded, complete


def _further_system_texts(messages: Sequence[Mapping[str, object]]) -> Iterator[str]:
    return (str(each["content"] or "") for each in messages[1:] if each["role"] == "system")


def _with_one_system_message(
    messages: Sequence[Mapping[str, object]],
) -> Sequence[Mapping[str, object]]:
    """The chat for templates that know one system message, at the beginning: later ones are texts
    of the user. Texts of the same role in a row are one message."""
    folded: list[Mapping[str, object]] = []
    for message in messages:
        role = message["role"]
        last = folded[-1] if folded else message
        if role == "system" and last["role"] != "system":
            role = "user"
        if folded and last["role"] == role and role in ("system", "user"):
            texts = (str(each["content"] or "") for each in (last, message))
            folded[-1] = {**last, "content": "\n\n".join(filter(None, texts))}
        else:
            folded.append({**message, "role": role})
    return folded


def _complete_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {name: value for name, value in tool["function"].items() if value is not None}
    parameters = {"type": "object", "properties": {}, **given.get("parameters", {})}
    return {**tool, "function": {"description": "", **given, "parameters": parameters}}


def _check_shows_all(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], form: ChatPromptOptions
) -> None:
    """Raise RequestError if the template would drop the tools, calls of them, or documents."""
    if form.documents and "documents" not in template.words:
        raise invalid(
            "the model's chat template does not show documents to the model; put them into a "
            "message, or set a template that does with --chat-template",
            param="documents",
            code="unsupported_parameter",
        )
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


def turn_ends(
    text: str, num_tokens: int, others: Iterable[str], tokenizer: ModelTokenizer
) -> tuple[int, ...]:
    """See RequestOptions: after how many tokens of a prompt the prompts of next turns depart from
    it. A token may cross this place, so it may be a few tokens less.

    others: the chat with NEXT_TURN, and without what a prompt ends with for the answer to begin.
            A template may drop the reasoning of former turns once a user writes.
    """
    rests = [text[num_common(text, other) :] for other in others]
    ends = {
        num_tokens - (len(tokenizer.encode_rendered(rest)) + 1 if rest else 0) for rest in rests
    }
    return tuple(sorted(end for end in ends if end > 0))


def num_common(one: str, other: str) -> int:
    """The number of leading characters that two texts have in common."""
    first, last = 0, min(len(one), len(other))
    while first < last:
        middle = (first + last + 1) // 2
        if one[first:middle] == other[first:middle]:
            first = middle
        else:
            last = middle - 1
    return first
