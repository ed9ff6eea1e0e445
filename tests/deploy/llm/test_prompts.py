"""The forms in which prompts and chats are given."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.llm.chats import ChatParameters, as_chats, other_template, rendered_chat
from longshore.deploy.llm.prompts import PromptInput, as_prompts
from longshore.deploy.llm.request_reader import RequestReader
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.llm.tokenization import as_tokenization
from longshore.deploy.llm.tokenizer import Tokenizer
from longshore.deploy.requests.structured_outputs import StructuredOutputsParams
from longshore.protocol.requests import CacheHint, CachePrefix, FreeText, RequestOptions
from tests.deploy.gateway.api.test_thinking_budget import tagged
from tests.deploy.tiny_tokenizer import BOS_ID, byte_level_tokenizer

CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ style }}"
)


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(byte_level_tokenizer(), ChatTemplate(TEMPLATE, {}))


def reader_with(tokenizer: ModelTokenizer | None) -> RequestReader:
    model: Any = SimpleNamespace(path=Path("folder"), vocab_size=320)
    return RequestReader(model, tokenizer, None, max_model_len=64)


@pytest.fixture
def reader(tokenizer: ModelTokenizer) -> RequestReader:
    return reader_with(tokenizer)


@pytest.mark.parametrize(
    ("given", "num_prompts"),
    [
        ("text", 1),
        (["text", "other"], 2),
        ({"prompt": "text"}, 1),
        ([1, 2, 3], 1),
        (np.arange(3), 1),
        ([[1, 2, 3]], 1),
        ([[1, 2], "text", {"prompt_token_ids": [3]}], 3),
        ([], 0),
    ],
    ids=str,
)
def test_one_prompt_or_a_list_of_them(given: Any, num_prompts: int) -> None:
    assert len(as_prompts(given)) == num_prompts


def test_a_prompt_is_a_text_or_token_ids(reader: RequestReader, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("quay")
    for text in ("quay", {"prompt": "quay"}):
        assert reader.read(text, "prompt") == PromptInput(ids, "quay")
    for given in (ids, np.array(ids), {"prompt_token_ids": tuple(ids)}):
        assert reader.read(given, "prompt") == PromptInput(ids)
    both = {"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "s"}
    assert reader.read(both, "prompt") == PromptInput(ids, "shown", RequestOptions(cache_salt="s"))


def test_a_prompt_says_how_long_its_kv_is_kept(reader: RequestReader) -> None:
    retention = {"ttl_s": 60, "prefixes": [{"num_tokens": 9, "ttl_s": 600, "priority": 3}]}
    prompt = {"prompt_token_ids": [5], "kv_cache_retention": retention, "prompt_cache_key": "s"}
    hint = CacheHint(60.0, "s", prefixes=(CachePrefix(9, 600.0, 3),))
    assert reader.read(prompt, "prompt").options.cache_hint == hint
    session = {"prompt_token_ids": np.array([5]), "prompt_cache_key": "s"}
    assert reader.read(session, "prompt").options.cache_hint == CacheHint(300.0, "s")


def test_a_prompt_that_is_not_stored_has_a_salt_of_its_own(reader: RequestReader) -> None:
    prompt = {"prompt_token_ids": [5], "no_store": True}
    one, other = (reader.read(prompt, "prompt") for _ in range(2))
    assert one.options.no_store
    assert one.options.cache_salt != other.options.cache_salt
    (answer,) = reader.answers("a", one, reader.check(SamplingParams()))
    assert answer.options.no_store
    assert answer.options.cache_salt == one.options.cache_salt


def test_a_chat_says_what_is_kept_of_it_and_two_chats_what_of_each(reader: RequestReader) -> None:
    chat = [{"role": "user", "content": "one"}]
    template = "{{ messages[0].content }}"
    read = partial(reader.read_chats, parameters=parameters(), chat_template=template)
    (hinted,) = read(chat, cache={"prompt_cache_key": "s"})
    assert hinted.options.cache_hint == CacheHint(300.0, "s")
    plain, private = read([chat, chat], cache=[None, {"no_store": True}])
    assert (plain.options.no_store, private.options.no_store) == (False, True)
    salts = [each.options.cache_salt for each in read([chat, chat], cache={"no_store": True})]
    assert salts[0] != salts[1]
    with pytest.raises(ValueError, match="1 cache settings for 2 chats"):
        read([chat, chat], cache=[None])
    with pytest.raises(ValueError, match=r"messages\[0\]: prompt is no key of CachedPrompt"):
        read(chat, cache={"prompt": "x"})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "prompt must be a text, token ids"),
        ([], "prompt has no tokens"),
        ([1.5], "token ids must be integers"),
        ([400], "token id 400, outside the vocabulary"),
        ([5] * 64, "maximum context length is 64 tokens"),
        ({}, "prompt must be a text"),
        ({"prompt": 3}, "prompt must be a text"),
        (
            {"prompt": "x", "cache_salt": 3},
            r"Expected `str \| null`, got `int` - at `\$.cache_salt`",
        ),
        ({"prompt": "x", "kv_cache_retention": {}}, "neither ttl_s nor prefixes"),
        ({"prompt": "x", "kv_cache_retention": {"ttl_s": 0}}, r"at `\$.kv_cache_retention.ttl_s`"),
        ({"prompt": "x", "no_store": True, "cache_salt": "s"}, "no_store cannot be combined"),
        ({"prompt": "x", "multi_modal_data": {}}, "multi_modal_data is not supported; .*images"),
        ({"text": "x"}, "text is not supported; a prompt is a text"),
        ("\ud800", "surrogates not allowed"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_a_value_error(
    reader: RequestReader, prompt: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        reader.read(prompt, "prompt")


def test_texts_need_a_tokenizer() -> None:
    reader = reader_with(None)
    assert reader.read([5], "prompt") == PromptInput([5])
    with pytest.raises(ValueError, match=r"prompt needs a tokenizer, .* the model folder has none"):
        reader.read("x", "prompt")


def test_a_text_that_can_never_fit_is_not_tokenized_whole(reader: RequestReader) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\] has at least \d+ tokens"):
        reader.read_all(["fits", "quay " * 1_000_000])


def parameters(
    *, add: bool = True, continues: bool = False, tools: Any = None, variables: Any = None
) -> ChatParameters:
    return ChatParameters(add, continues, tools, variables)


def test_a_chat_is_rendered_with_its_tools_and_variables(tokenizer: ModelTokenizer) -> None:
    template = tokenizer.chat_template
    assert as_chats(CHAT) == [CHAT]
    assert as_chats([CHAT, CHAT]) == [CHAT, CHAT]
    assert (
        rendered_chat(template, CHAT, parameters(), "chat")
        == "<user>What?<assistant>That.<assistant>"
    )
    with_tools = rendered_chat(template, CHAT[:1], parameters(tools=TOOLS), "chat")
    assert with_tools.startswith('tools: [{"type": "function", "function": {"name": "find"')
    styled = rendered_chat(template, CHAT[:1], parameters(variables={"style": "!"}), "chat")
    assert styled == "<user>What?<assistant>!"
    open_end = parameters(add=False, continues=True)
    assert rendered_chat(template, CHAT, open_end, "chat") == "<user>What?<assistant>That."


def test_what_is_no_chat_is_a_value_error(tokenizer: ModelTokenizer) -> None:
    template = tokenizer.chat_template
    with pytest.raises(ValueError, match=r"chat: .*role"):
        rendered_chat(template, [{"content": "x"}], parameters(), "chat")
    with pytest.raises(ValueError, match="chat: messages is empty"):
        rendered_chat(template, [], parameters(), "chat")
    with pytest.raises(ValueError, match="one of them to false"):
        rendered_chat(template, CHAT, parameters(continues=True), "chat")
    for name in ("tools", "documents"):  # a template gets no documents
        with pytest.raises(ValueError, match=f"must not have {name}"):
            rendered_chat(template, CHAT, parameters(variables={name: TOOLS}), "chat")
    refusing = other_template("{{ raise_exception('no such role') }}", template)
    with pytest.raises(ValueError, match="no such role"):
        rendered_chat(refusing, CHAT, parameters(), "chat")
    with pytest.raises(ValueError, match="does not compile"):
        other_template("{% if %}", template)


def test_the_tokenizer_has_the_methods_of_hugging_face() -> None:
    plain = ModelTokenizer(byte_level_tokenizer(), ChatTemplate(PLAIN_TEMPLATE, {"bos_token": "B"}))
    tokenizer = Tokenizer(plain)
    ids = tokenizer.encode("the quay", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the quay"
    assert tokenizer.batch_decode([ids, ids[:1]]) == ["the quay", tokenizer.decode(ids[0])]
    special = sorted(plain.special_token_ids)[0]
    assert tokenizer.decode([special, *ids], skip_special_tokens=True) == "the quay"
    assert tokenizer.decode([special, *ids]) != "the quay"
    assert len(tokenizer) == tokenizer.vocab_size > max(ids)
    text = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert text == "Buser: What?\nassistant:"
    assert tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True) == tokenizer.encode(
        text, add_special_tokens=False
    )


def with_beginning(keeps_end: bool = False) -> ModelTokenizer:
    """A tokenizer that puts a token before every text."""
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return ModelTokenizer(tokenizer, ChatTemplate(TEMPLATE, {}), keeps_end=keeps_end)


def test_special_tokens_are_added_as_asked_for(tokenizer: ModelTokenizer) -> None:
    reader = reader_with(with_beginning())
    ids = tokenizer.encode("quay")
    for given, text, chat in ((None, True, False), (True, True, True), (False, False, False)):
        tokenization = as_tokenization({"add_special_tokens": given})
        prompt = reader.read("quay", "prompt", tokenization=tokenization)
        assert prompt.token_ids == [BOS_ID] * text + ids
        (read,) = reader.read_chats(
            [{"role": "user", "content": "quay"}],
            parameters(),
            chat_template="{{ messages[0].content }}",
            tokenization=tokenization,
        )
        assert read.token_ids == [BOS_ID] * chat + ids


TAGS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("prompt_end", "tags", "has_reasoning", "is_begun"),
    [
        ("", TAGS, True, False),
        ("<think>\n", TAGS, True, True),
        ("<think>\n</think>\n", TAGS, False, False),
        ("<think>", (), False, False),  # no tokens of their own
    ],
)
def test_a_constraint_of_a_chat_holds_after_its_reasoning(
    prompt_end: str, tags: tuple[str, ...], has_reasoning: bool, is_begun: bool
) -> None:
    source = "{# </think> #}{{ messages[0].content }}{% if add_generation_prompt %}{{ style }}"
    bare = tagged(*tags)
    reader = reader_with(ModelTokenizer(bare, ChatTemplate(f"{source}{{% endif %}}", {})))
    chat = [{"role": "user", "content": "quay"}]
    (read,) = reader.read_chats(chat, parameters(variables={"style": prompt_end}))
    params = reader.check(
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    )
    (answer,) = reader.answers("a", read, params)
    constraint = answer.options.structured_output
    assert constraint is not None
    begin, end = map(bare.token_to_id, TAGS)
    expected = FreeText(((end,),), None if is_begun else begin) if has_reasoning else None
    assert constraint.free == expected
    (answer,) = reader.answers("b", reader.read("quay", "prompt"), params)
    assert answer.options.structured_output == msgspec.structs.replace(constraint, free=None)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("keeps_end", [False, True])
def test_prompts_are_truncated_as_over_http(side: Any, keeps_end: bool) -> None:
    tokenizer = with_beginning(keeps_end)
    reader = reader_with(tokenizer)
    text = "0123456789" * 12
    whole = tokenizer.encode_rendered(text)

    def parsed(prompt: Any, number: int, gives_tokens: bool) -> list[int]:
        given = {"truncate_prompt_tokens": number, "truncation_side": side}
        return reader.read(
            prompt, "prompt", gives_tokens=gives_tokens, tokenization=as_tokenization(given)
        ).token_ids

    for gives_tokens in (True, False):
        removes_start = side == "left" or (side is None and (gives_tokens or keeps_end))
        longest = 63 if gives_tokens else 64
        for number, length in ((-1, longest), (longest, longest), (5, 5)):
            kept = whole[-length:] if removes_start else whole[:length]
            assert parsed({"prompt_token_ids": whole}, number, gives_tokens) == kept
            kept = whole[1 - length :] if removes_start else whole[: length - 1]
            assert parsed(text, number, gives_tokens) == [BOS_ID, *kept]
        with pytest.raises(ValueError, match=f"must be -1 or between 1 and {longest}"):
            parsed(text, longest + 1, gives_tokens)
    (chat,) = reader.read_chats(
        [{"role": "user", "content": text}],
        parameters(),
        chat_template="{{ messages[0].content }}",
        tokenization=as_tokenization({"truncate_prompt_tokens": 5}),
    )
    assert chat.token_ids == whole[-5:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_length": 5}, "max_length is not supported; the keys are add_special_tokens"),
        ({"truncate_prompt_tokens": "5"}, r"Expected `int \| null`.*`\$.truncate_prompt_tokens`"),
        ({"truncate_prompt_tokens": True}, r"Expected `int \| null`.*`\$.truncate_prompt_tokens`"),
        ({"add_special_tokens": "no"}, r"Expected `bool \| null`.*`\$.add_special_tokens`"),
        ({"truncation_side": "end"}, r"Invalid enum value 'end'.*`\$.truncation_side`"),
        ({"truncation_side": "left"}, "truncation_side has no effect without"),
    ],
    ids=str,
)
def test_tokenization_that_is_invalid_is_a_value_error(
    reader: RequestReader, given: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"tokenization_kwargs: {message}"):
        reader.read("quay", "prompt", tokenization=as_tokenization(given))


def test_chats_say_where_next_turns_depart_if_the_model_keeps_states(
    tokenizer: ModelTokenizer,
) -> None:
    model: Any = SimpleNamespace(path=Path("folder"), vocab_size=320)
    reader = RequestReader(model, tokenizer, None, max_model_len=64, keeps_states=True)
    chat = [{"role": "user", "content": "text"}]

    def ends(reader: RequestReader, **parameters: Any) -> tuple[int, ...]:
        given: dict[str, Any] = {
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": None,
            "chat_template_kwargs": None,
        }
        (prompt,) = reader.read_chats(chat, ChatParameters(**given | parameters))
        return prompt.options.turn_ends

    num_tokens = len("<user>text")
    assert ends(reader) == (num_tokens - 1, num_tokens + len("<assistant>"))
    styled = {"chat_template_kwargs": {"style": "!"}}
    assert ends(reader, **styled) == (num_tokens - 1, num_tokens + len("<assistant>") - 1)
    assert ends(reader, add_generation_prompt=False, continue_final_message=True) == ()
    assert ends(reader_with(tokenizer)) == ()
