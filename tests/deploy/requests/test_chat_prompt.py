"""How a chat becomes a prompt: new answers, continued answers, and arguments of the template."""

import asyncio
from typing import Any

import pytest

from longshore.deploy.gateway.api.errors import status_of
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.text.chat_template import ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.chat_messages import ChatMessage, template_input
from longshore.deploy.requests.chat_prompt import ChatRenderer, chat_prompt_options, render_chat
from longshore.deploy.requests.errors import RequestError
from tests.deploy.tiny_tokenizer import CHAT_TEMPLATE, byte_level_tokenizer

CHAT: list[dict[str, object]] = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "</s> Berth "},
]
BEGUN = "<s>[user]Where?</s>[assistant]</s> Berth "
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(template: str = CHAT_TEMPLATE, **form: Any) -> str:
    return render_chat(
        ChatTemplate(template, SPECIAL), CHAT, chat_prompt_options(ChatRequest(messages=[], **form))
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({}, BEGUN + "</s>[assistant]"),
        ({"add_generation_prompt": True}, BEGUN + "</s>[assistant]"),
        ({"add_generation_prompt": False}, BEGUN + "</s>"),
        ({"continue_final_message": True}, BEGUN),
        ({"continue_final_message": True, "add_generation_prompt": False}, BEGUN),
        ({"continue_final_message": False}, BEGUN + "</s>[assistant]"),
    ],
)
def test_the_prompt_ends_where_the_answer_begins(form: dict[str, Any], expected: str) -> None:
    assert rendered(**form) == expected


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ONE_SYSTEM_MESSAGE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
DROPPING = ROLES.replace(
    "[{{ m.role", "{% if m.role == 'system' and not loop.first %}{% else %}[{{ m.role"
).replace("m.content }}", "m.content }}{% endif %}")


@pytest.mark.parametrize("template", [ONE_SYSTEM_MESSAGE + ROLES, ALTERNATING + ROLES, DROPPING])
def test_further_system_messages_are_texts_of_the_user_where_a_template_knows_but_one(
    template: str,
) -> None:
    """Claude Code sends one after the question."""
    texts = [("system", "A"), ("system", "B"), ("user", "C"), ("system", "D\n"), ("assistant", "E")]
    chat = [{"role": role, "content": text} for role, text in [*texts, ("user", "F")]]
    form = chat_prompt_options(ChatRequest(messages=[]))

    def prompt(template: str) -> str:
        return render_chat(ChatTemplate(template, SPECIAL), chat, form)

    assert prompt(template) == "[system]A\n\nB[user]C\n\nD\n[assistant]E[user]F"
    # Others get the messages as they are.
    assert prompt(ROLES) == "[system]A[system]B[user]C[system]D\n[assistant]E[user]F"
    with pytest.raises(RequestError, match="rejects these messages: no"):
        prompt("{{ raise_exception('no') }}")


def test_a_template_gets_the_words_that_it_is_given() -> None:
    template = "{{ bos_token }}{{ 'thinks' if enable_thinking else 'speaks' }}"
    assert rendered(template) == "<s>speaks"
    assert rendered(template, chat_template_kwargs={"enable_thinking": True}) == "<s>thinks"
    assert rendered(template, chat_template_kwargs={"bos_token": "^"}) == "^speaks"


def test_a_template_for_rag_gets_the_documents() -> None:
    template = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }};{% endfor %}"
    documents = [{"title": "Berths", "text": "B42"}, {"title": "Cranes", "text": "7"}]
    assert rendered(template, documents=documents) == "Berths: B42;Cranes: 7;"
    assert rendered(template, documents=[]) == ""


@pytest.mark.parametrize(
    ("template", "form", "param", "says"),
    [
        (CHAT_TEMPLATE, {"documents": [{"text": "x"}]}, "documents", "does not show documents"),
        (
            CHAT_TEMPLATE,
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "one of them to false",
        ),
        (
            "{% for m in messages[:1] %}{{ m.content }}{% endfor %}",
            {"continue_final_message": True},
            "continue_final_message",
            "changes the last message",
        ),
        (CHAT_TEMPLATE, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        (CHAT_TEMPLATE, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "mess"),
        ("{{ raise_exception('no system here') }}", {}, "messages", "no system here"),
    ],
)
def test_what_contradicts_itself_is_rejected_by_name(
    template: str, form: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refusal:
        rendered(template, **form)
    assert (status_of(refusal.value), refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("messages", "variables", "is_inline"),
    [
        ([ChatMessage("user", "x")] * 3, {}, True),
        ([ChatMessage("user", "x")] * 3000, {}, False),
        ([ChatMessage("user", "x" * 20_000)], {}, False),
        ([ChatMessage("user", "x")], {"documents_of_mine": [0] * 20_000}, False),
    ],
    ids=["small", "many messages", "a long one", "many variables"],
)
async def test_a_large_chat_is_rendered_beside_the_loop(
    messages: list[ChatMessage], variables: dict[str, Any], is_inline: bool
) -> None:
    tokenizer = ModelTokenizer(byte_level_tokenizer(), ChatTemplate(CHAT_TEMPLATE, SPECIAL))
    renderer = ChatRenderer()
    form = chat_prompt_options(ChatRequest(messages=[], chat_template_kwargs=variables))
    rendering = asyncio.create_task(renderer.text(tokenizer, messages, form))
    await asyncio.sleep(0)  # which is its first step
    assert rendering.done() == is_inline
    text = await rendering
    assert text == render_chat(tokenizer.chat_template, template_input(messages), form)


async def test_once_a_small_chat_has_taken_too_long_all_are_rendered_beside_the_loop() -> None:
    source = (
        "{% if messages | length == 2 %}{% for a in range(20000) %}{{ a }}{% endfor %}"
        "{% else %}short{% endif %}"
    )
    tokenizer = ModelTokenizer(byte_level_tokenizer(), ChatTemplate(source, SPECIAL))
    renderer = ChatRenderer()
    form = chat_prompt_options(ChatRequest(messages=[]))
    for num_messages, is_inline in ((1, True), (2, False), (1, False)):
        messages = [ChatMessage("user", "x")] * num_messages
        rendering = asyncio.create_task(renderer.text(tokenizer, messages, form))
        await asyncio.sleep(0)
        assert rendering.done() == is_inline
        text = await rendering
        assert text == ("short" if num_messages == 1 else "".join(map(str, range(20_000))))
