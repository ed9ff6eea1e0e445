"""How a chat becomes a prompt, as vLLM's parameters say it."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import msgspec

from longshore.deploy.gateway.openai.chat_messages import ChatMessage, template_input
from longshore.deploy.gateway.openai.errors import invalid
from longshore.deploy.gateway.text.chat_template import ChatTemplate, TemplateRefused
from longshore.deploy.gateway.text.tokenizer import MAX_INLINE_CHARACTERS, ModelTokenizer

# Parameters of their own, or not supported.
_NOT_KWARGS: Final = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"}
)
# Private use: no tokenizer's text and no template's.
_END_OF_MESSAGE: Final = "\ue000end\ue001of\ue002message\ue000"


class FormParameters(Protocol):
    """The part of a request body that this is about; None: not said."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


class ChatForm(msgspec.Struct, frozen=True):
    """adds_generation_prompt: the prompt ends where the assistant's answer begins.
    continues_final_message: it ends where the text of the last message does, to be gone on with.
    variables: what the template knows beside the messages.
    """

    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    variables: Mapping[str, Any] = {}


def chat_form(request: FormParameters) -> ChatForm:
    """What the request asks for. Raises ApiError for what contradicts itself."""
    continues = bool(request.continue_final_message)
    adds = request.add_generation_prompt
    if continues and adds:
        raise invalid(
            "continue_final_message goes on with the last message, add_generation_prompt begins a "
            "new one; leave one of the two out",
            param="continue_final_message",
        )
    variables = request.chat_template_kwargs or {}
    for name in sorted(_NOT_KWARGS & variables.keys()):
        raise invalid(
            f"chat_template_kwargs holds {name}, which templates get from the request itself; "
            "leave it out there",
            param="chat_template_kwargs",
        )
    return ChatForm(not continues if adds is None else adds, continues, variables)


class ChatRenderer:
    """Renders the chats of one gateway, large ones on a thread, one at a time, so that live streams
    do not wait for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "chat renderer")
        self._template: ChatTemplate | None = None  # that thread's

    async def text(
        self, tokenizer: ModelTokenizer, messages: Sequence[ChatMessage], form: ChatForm
    ) -> str:
        """The prompt's. Raises as `template_input` and `render_chat` do."""

        def render_there() -> str:
            template = self._template = self._template or tokenizer.chat_template.twin()
            return render_chat(template, template_input(messages), form)

        # JSON, because small messages take time too.
        if len(msgspec.json.encode((messages, form.variables))) > MAX_INLINE_CHARACTERS:
            return await asyncio.get_running_loop().run_in_executor(self._thread, render_there)
        return render_chat(tokenizer.chat_template, template_input(messages), form)


def render_chat(
    template: ChatTemplate, messages: Sequence[Mapping[str, object]], form: ChatForm
) -> str:
    """The prompt's text. Raises ApiError with the template's words if it refuses the messages."""
    if form.continues_final_message:
        last = messages[-1]
        marked = {**last, "content": f"{last['content']}{_END_OF_MESSAGE}"}
        messages = [*messages[:-1], marked]
    try:
        text = template.render(
            messages,
            add_generation_prompt=form.adds_generation_prompt,
            variables=form.variables,
        )
    except TemplateRefused as error:
        raise invalid(
            f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error
    if not form.continues_final_message:
        return text
    text, mark, _ = text.rpartition(_END_OF_MESSAGE)
    if not mark:
        raise invalid(
            "the model's chat template does not show the last message as it is, so that nothing "
            "can go on with it; leave continue_final_message out",
            param="continue_final_message",
        )
    return text
