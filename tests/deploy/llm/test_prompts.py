"""The forms in which prompts and chats are given."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.llm.answer import Answer
from longshore.deploy.llm.chats import as_chats, chat_options, other_template, rendered_chat
from longshore.deploy.llm.prompts import PromptInput, PromptParser, as_prompts
from longshore.deploy.llm.request_reader import RequestReader
from longshore.deploy.llm.tokenization import as_tokenization
from longshore.deploy.llm.tokenizer import Tokenizer
from longshore.deploy.requests.live_requests import LiveRequests
from longshore.protocol.requests import CacheHint, CachePrefix
from longshore.protocol.sampling import SamplingParams
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


@pytest.fixture
def parser(tokenizer: ModelTokenizer) -> PromptParser:
    return PromptParser(tokenizer, Path("folder"), vocab_size=320, max_model_len=64)


@pytest.fixture
def reader(tokenizer: ModelTokenizer) -> RequestReader:
    model: Any = SimpleNamespace(path=Path("folder"), vocab_size=320)
    return RequestReader(model, tokenizer, None, max_model_len=64)


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


def test_a_prompt_is_a_text_or_token_ids(parser: PromptParser, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("quay")
    for text in ("quay", {"prompt": "quay"}):
        assert parser.parse(text, "prompt") == PromptInput(ids, "quay")
    for given in (ids, np.array(ids), {"prompt_token_ids": tuple(ids)}):
        assert parser.parse(given, "prompt") == PromptInput(ids)
    both = {"prompt": "shown", "prompt_token_ids": ids, "cache_salt": "s"}
    assert parser.parse(both, "prompt") == PromptInput(ids, "shown", "s")


def test_a_prompt_says_how_long_its_kv_is_kept(parser: PromptParser) -> None:
    retention = {"ttl_s": 60, "prefixes": [{"num_tokens": 9, "ttl_s": 600, "priority": 3}]}
    prompt = {"prompt_token_ids": [5], "kv_cache_retention": retention, "prompt_cache_key": "s"}
    hint = CacheHint(60.0, "s", prefixes=(CachePrefix(9, 600.0, 3),))
    assert parser.parse(prompt, "prompt").cache_hint == hint
    session = {"prompt_token_ids": np.array([5]), "prompt_cache_key": "s"}
    assert parser.parse(session, "prompt").cache_hint == CacheHint(300.0, "s")


def test_a_prompt_that_is_not_stored_has_a_salt_of_its_own(parser: PromptParser) -> None:
    prompt = {"prompt_token_ids": [5], "no_store": True}
    one, other = (parser.parse(prompt, "prompt") for _ in range(2))
    assert one.no_store
    assert one.cache_salt != other.cache_salt
    answer = Answer("a", one, SamplingParams())
    _, message = LiveRequests().open("a", [5], answer.sampling, **answer.fields())
    assert message.no_store
    assert message.cache_salt == one.cache_salt


def test_a_chat_says_what_is_kept_of_it_and_two_chats_what_of_each(reader: RequestReader) -> None:
    chat = [{"role": "user", "content": "one"}]
    read = partial(
        reader.read_chats,
        chat_template="{{ messages[0].content }}",
        add_generation_prompt=True,
        continue_final_message=False,
        tools=None,
        variables=None,
    )
    (hinted,) = read(chat, cache={"prompt_cache_key": "s"})
    assert hinted.cache_hint == CacheHint(300.0, "s")
    plain, private = read([chat, chat], cache=[None, {"no_store": True}])
    assert (plain.no_store, private.no_store) == (False, True)
    salts = [each.cache_salt for each in read([chat, chat], cache={"no_store": True})]
    assert salts[0] != salts[1]
    with pytest.raises(ValueError, match="1 cache settings for 2 chats"):
        read([chat, chat], cache=[None])
    with pytest.raises(ValueError, match=r"messages\[0\]: prompt is no key of CachedPrompt"):
        read(chat, cache={"prompt": "x"})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "prompt must be a text, token ids"),
        ([], "the prompt has no tokens"),
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
    parser: PromptParser, prompt: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parser.parse(prompt, "prompt")


def test_texts_need_a_tokenizer() -> None:
    parser = PromptParser(None, Path("folder"), vocab_size=320, max_model_len=64)
    assert parser.parse([5], "prompt") == PromptInput([5])
    with pytest.raises(ValueError, match=r"folder has no tokenizer\.json"):
        parser.parse("x", "prompt")


def options(**given: Any) -> Any:
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    return chat_options(**{**defaults, "tools": None, "variables": None, **given})


def test_a_chat_is_rendered_with_its_tools_and_variables(tokenizer: ModelTokenizer) -> None:
    template = tokenizer.chat_template
    assert as_chats(CHAT) == [CHAT]
    assert as_chats([CHAT, CHAT]) == [CHAT, CHAT]
    assert (
        rendered_chat(template, CHAT, options(), "chat") == "<user>What?<assistant>That.<assistant>"
    )
    with_tools = rendered_chat(template, CHAT[:1], options(tools=TOOLS), "chat")
    assert with_tools.startswith('tools: [{"type": "function", "function": {"name": "find"')
    styled = rendered_chat(template, CHAT[:1], options(variables={"style": "!"}), "chat")
    assert styled == "<user>What?<assistant>!"
    open_end = options(add_generation_prompt=False, continue_final_message=True)
    assert rendered_chat(template, CHAT, open_end, "chat") == "<user>What?<assistant>That."


def test_what_is_no_chat_is_a_value_error(tokenizer: ModelTokenizer) -> None:
    template = tokenizer.chat_template
    with pytest.raises(ValueError, match=r"chat: .*role"):
        rendered_chat(template, [{"content": "x"}], options(), "chat")
    with pytest.raises(ValueError, match="chat: messages is empty"):
        rendered_chat(template, [], options(), "chat")
    with pytest.raises(ValueError, match="one of them to False"):
        options(continue_final_message=True)
    with pytest.raises(ValueError, match="must not have tools"):
        options(variables={"tools": TOOLS})
    refusing = other_template("{{ raise_exception('no such role') }}", template)
    with pytest.raises(ValueError, match="no such role"):
        rendered_chat(refusing, CHAT, options(), "chat")
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
    parser = PromptParser(with_beginning(), Path("folder"), vocab_size=320, max_model_len=64)
    ids = tokenizer.encode("quay")
    for given, text, chat in ((None, True, False), (True, True, True), (False, False, False)):
        tokenization = as_tokenization({"add_special_tokens": given})
        prompt = parser.parse("quay", "prompt", tokenization=tokenization)
        assert prompt.token_ids == [BOS_ID] * text + ids
        assert (
            parser.parse_rendered("quay", "chat", tokenization).token_ids == [BOS_ID] * chat + ids
        )


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("keeps_end", [False, True])
def test_prompts_are_truncated_as_over_http(side: Any, keeps_end: bool) -> None:
    tokenizer = with_beginning(keeps_end)
    parser = PromptParser(tokenizer, Path("folder"), vocab_size=320, max_model_len=64)
    text = "0123456789" * 12
    whole = tokenizer.encode_rendered(text)

    def parsed(prompt: Any, number: int, gives_tokens: bool) -> list[int]:
        given = {"truncate_prompt_tokens": number, "truncation_side": side}
        return parser.parse(
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
    chat = parser.parse_rendered(text, "chat", as_tokenization({"truncate_prompt_tokens": 5}))
    assert chat.token_ids == whole[-5:]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_length": 5}, "max_length is not supported; the keys are add_special_tokens"),
        ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens must be an integer"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens must be an integer"),
        ({"add_special_tokens": "no"}, "add_special_tokens must be True or False"),
        ({"truncation_side": "end"}, "truncation_side must be left or right"),
        ({"truncation_side": "left"}, "truncation_side has no effect without"),
    ],
    ids=str,
)
def test_tokenization_that_is_invalid_is_a_value_error(
    parser: PromptParser, given: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"tokenization_kwargs: {message}"):
        parser.parse("quay", "prompt", tokenization=as_tokenization(given))
