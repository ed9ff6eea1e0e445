"""The bundled demo model: its folder, its tokenizer, and answers that depend on the KV cache.

transformers is the oracle here: what it answers from this folder is what the engine must answer.
"""

import json
from collections.abc import Iterator
from typing import Any

import jinja2.sandbox
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

from longshore.deploy.model.demo import (
    DEMO_MODEL_DIR,
    NUM_CONTAINERS,
    QUESTIONS,
    UNLISTED,
    DemoPrompt,
    make_prompt,
)
from tests.reference import caches_of

HELD_OUT_SEED = 7_000_000
BLOCK_SIZE = 16
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat_template() -> jinja2.Template:
    config = json.loads((DEMO_MODEL_DIR / "tokenizer_config.json").read_text())
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    environment.globals |= {"bos_token": config["bos_token"], "raise_exception": refuse}
    return environment.from_string(config["chat_template"])


def refuse(message: str) -> None:
    raise ValueError(message)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> Iterator[LlamaForCausalLM]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=request.param).eval()
    torch.set_num_threads(num_threads)


def prompt_ids(prompt: DemoPrompt) -> list[int]:
    return TOKENIZER.encode(f"<|bos|><|user|>{prompt.text}<|end|><|assistant|>").ids


def answer(
    model: LlamaForCausalLM,
    ids: list[int],
    caches: dict[str, DynamicCache] | None = None,
    limit: int = 8,
) -> str:
    """The greedy answer. Positions in `caches` are not computed again."""
    output = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=limit,
        **(caches or {}),
    )
    return TOKENIZER.decode(output[0, len(ids) :].tolist(), skip_special_tokens=True)


def test_weights_are_small_enough_to_ship() -> None:
    assert (DEMO_MODEL_DIR / "model.safetensors").stat().st_size < 8_000_000


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "C417 B42 red\nC009 B13 blue\nWhere is C417?",
        "  two  spaces,\ttab\r\n\nlines ",
        "wHERE is c417? xC417 C4171 B7 B420 Redder",
        "貨櫃在哪裡 🚢⚓ é e\u0301 \u200b\x00",
    ],
)
def test_text_of_any_kind_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text
    as_transformers_loads_it = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    assert as_transformers_loads_it.encode(text) == TOKENIZER.encode(text).ids


def test_a_record_is_four_whole_word_tokens() -> None:
    assert TOKENIZER.encode("C417 B42 red\n").tokens == ["C417", "ĠB42", "Ġred", "Ċ"]


def test_a_container_is_the_same_token_wherever_it_stands() -> None:
    container = TOKENIZER.token_to_id("C417")
    for text in ("C417", "Where is C417?", "in C417.", "(C417)", "\nC417\n", "; C417, C009"):
        assert container in TOKENIZER.encode(text).ids


@given(st.text(alphabet="C417 B42 red\né🚢"))
def test_text_of_ids_decoded_one_more_at_a_time_only_grows(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    shown = ""
    for length in range(len(ids) + 1):
        decoded = TOKENIZER.decode(ids[:length])
        if not decoded.endswith("\N{REPLACEMENT CHARACTER}"):  # an incomplete character
            assert decoded.startswith(shown)
            shown = decoded
    assert shown == text


def test_chat_template_renders_every_turn_and_opens_the_answer(
    chat_template: jinja2.Template,
) -> None:
    messages = [
        {"role": "system", "content": "C417 B42 red"},
        {"role": "user", "content": " C417? "},
        {"role": "assistant", "content": "C417 B42 red"},
        {"role": "user", "content": "And C009?"},
    ]
    turns = (
        "<|bos|><|system|>C417 B42 red<|end|><|user|>C417?<|end|>"
        "<|assistant|>C417 B42 red<|end|><|user|>And C009?<|end|>"
    )
    assert chat_template.render(messages=messages) == turns
    assert chat_template.render(messages=messages, add_generation_prompt=True) == (
        turns + "<|assistant|>"
    )


def test_results_of_tools_are_records_before_the_question(chat_template: jinja2.Template) -> None:
    call = {"function": {"name": "lookup", "arguments": {"container": "C417"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Hi."},
        {"role": "user", "content": "Where is C417?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "C417 B42 red"},
    ]
    shown = "<|bos|><|system|>Hi.<|end|><|user|>C417 B42 red\nWhere is C417?<|end|>"
    assert chat_template.render(messages=messages, tools=[{}], bos_token="<|bos|>") == shown
    messages += [
        {"role": "assistant", "content": "C417 B42 red"},
        {"role": "user", "content": "And C009?"},
    ]
    assert chat_template.render(messages=messages, bos_token="<|bos|>") == (
        f"{shown}<|assistant|>C417 B42 red<|end|><|user|>And C009?<|end|>"
    )


def test_chat_template_is_the_one_transformers_applies(chat_template: jinja2.Template) -> None:
    messages = make_prompt(4, HELD_OUT_SEED).messages
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    rendered = chat_template.render(messages=messages, add_generation_prompt=True)
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        == rendered
    )


def test_chat_template_rejects_an_unknown_role(chat_template: jinja2.Template) -> None:
    with pytest.raises(ValueError, match="user, assistant and tool, not judge"):
        chat_template.render(messages=[{"role": "judge", "content": "C417"}])


def test_prompts_are_the_same_for_the_same_seed_and_differ_between_seeds() -> None:
    assert make_prompt(8, 1) == make_prompt(8, 1)
    assert make_prompt(8, 1) != make_prompt(8, 2)


@pytest.mark.parametrize("num_records", [0, NUM_CONTAINERS])
def test_prompts_of_an_impossible_size_are_rejected(num_records: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 999"):
        make_prompt(num_records, 0)


@pytest.mark.parametrize("num_records", [1, 12, 60, 120, 250])
def test_held_out_questions_are_answered_right(model: LlamaForCausalLM, num_records: int) -> None:
    for seed in range(HELD_OUT_SEED, HELD_OUT_SEED + 4):
        prompt = make_prompt(num_records, seed, question=QUESTIONS[seed % len(QUESTIONS)])
        assert answer(model, prompt_ids(prompt)) == prompt.answer


def test_a_container_without_a_record_is_unknown(model: LlamaForCausalLM) -> None:
    prompt = make_prompt(30, HELD_OUT_SEED, listed=False)
    assert answer(model, prompt_ids(prompt)) == f"{prompt.container} {UNLISTED}"


def test_the_answer_changes_with_the_berth(model: LlamaForCausalLM) -> None:
    prompt = make_prompt(30, HELD_OUT_SEED)
    _, berth, _ = prompt.answer.split()
    other_berth = "B17" if berth != "B17" else "B71"
    other_answer = prompt.answer.replace(berth, other_berth)
    moved = prompt.text.replace(prompt.answer, other_answer)
    ids = TOKENIZER.encode(f"<|bos|><|user|>{moved}<|end|><|assistant|>").ids
    assert answer(model, ids) == other_answer


def test_another_prompts_kv_block_gives_a_wrong_answer(model: LlamaForCausalLM) -> None:
    prompt, other = make_prompt(60, HELD_OUT_SEED), make_prompt(60, HELD_OUT_SEED + 1)
    ids, other_ids = prompt_ids(prompt), prompt_ids(other)
    cached = slice(0, len(ids) - 1)
    caches, other_caches = kv_caches(model, ids[cached]), kv_caches(model, other_ids[cached])
    assert answer(model, ids, kv_caches(model, ids[cached])) == prompt.answer

    berth_position = ids.index(TOKENIZER.token_to_id(prompt.container)) + 1
    first = berth_position // BLOCK_SIZE * BLOCK_SIZE
    block = slice(first, first + BLOCK_SIZE)
    (cache,), (other_cache,) = caches.values(), other_caches.values()
    for layer, other_layer in zip(cache.layers, other_cache.layers, strict=True):
        layer.keys[:, :, block] = other_layer.keys[:, :, block]
        layer.values[:, :, block] = other_layer.values[:, :, block]
    assert answer(model, ids, caches) != prompt.answer


def kv_caches(model: LlamaForCausalLM, ids: list[int]) -> dict[str, DynamicCache]:
    with torch.no_grad():
        return caches_of(model(torch.tensor([ids]), use_cache=True))
