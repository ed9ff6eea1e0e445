"""Scripts written for vLLM's `LLM` run as they are, on the demo model, in processes and in one."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from longshore import (
    LLM,
    BeamSearchParams,
    Logprob,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from longshore.deploy.llm.metrics import Counter, Gauge, Histogram
from longshore.deploy.llm.outputs import CompletionOutput
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError, EngineDead

SETTINGS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 16, "threads": 1}
FACTS = "Berth 4 holds the ship Aurora. Which berth holds the ship Aurora?"
CHAT = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": FACTS},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_berth",
            "description": "Find the berth of a ship",
            "parameters": {"type": "object", "properties": {"ship": {"type": "string"}}},
        },
    }
]
CHOICE = StructuredOutputsParams(choice=["Positive", "Negative"])
TOOL_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
)


@pytest.fixture(scope="module", params=[False, True], ids=["processes", "in process"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        model=DEMO_MODEL_DIR,
        in_process=request.param,
        enforce_eager=True,
        swap_space=4,
        trust_remote_code=True,
        runner="pooling",
        **SETTINGS,
    ) as llm:
        yield llm


def test_the_basic_script(llm: LLM) -> None:
    prompts = ["Hello, my name is", FACTS, "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=1)
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.get_tokenizer().encode(prompt)
        assert output.finished
        (answer,) = output.outputs
        assert answer.index == 0
        assert 1 <= len(answer.token_ids) <= 8
        assert answer.finish_reason in ("stop", "length")
        decoded = llm.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
        assert answer.text.strip() == decoded.strip().rstrip("\ufffd")
    assert len({output.request_id for output in outputs}) == 3


def test_default_sampling_params_can_be_changed(llm: LLM) -> None:
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 3
    sampling_params.ignore_eos = True
    (output,) = llm.generate(FACTS, sampling_params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_prompts_in_every_form_give_the_same_answer(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(FACTS)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    prompts: list[Any] = [
        *(FACTS, TextPrompt(prompt=FACTS)),
        *({"prompt_token_ids": ids}, TokensPrompt(prompt_token_ids=ids), ids),
    ]
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    outputs += llm.generate([ids], [greedy], use_tqdm=False)
    outputs += llm.generate(ids, greedy, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [FACTS, FACTS, *[None] * 5]


def test_settings_per_prompt_stops_words_and_scores(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    (whole,) = llm.generate(FACTS, greedy, use_tqdm=False)
    text, logprobs = whole.outputs[0].text, whole.outputs[0].logprobs
    assert logprobs is not None
    chosen = [each[token] for each, token in zip(logprobs, whole.outputs[0].token_ids, strict=True)]
    assert all(isinstance(each, Logprob) for each in chosen)
    assert whole.outputs[0].cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))
    tokenizer = llm.get_tokenizer()
    assert [each.decoded_token for each in chosen] == [
        tokenizer.decode(token) for token in whole.outputs[0].token_ids
    ]
    stop, word = text[4:6], text.split()[0]
    third = whole.outputs[0].token_ids[2]
    outputs = llm.generate(
        [FACTS] * 4,
        [
            SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop]),
            SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, bad_words=[word]),
            SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[third]),
            SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=5, top_k=-1, detokenize=False),
        ],
        use_tqdm=False,
    )
    stopped, other, ended, several = outputs
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert other.outputs[0].token_ids != whole.outputs[0].token_ids
    assert ended.outputs[0].token_ids[-1] == ended.outputs[0].stop_reason == third
    assert [answer.index for answer in several.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in several.outputs}) > 1
    assert {answer.text for answer in several.outputs} == {""}


def test_special_and_stop_tokens_are_shown_on_request(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "C417 B42 red\nC009 B13 blue\nWhere is C417?"}]

    def answer(**settings: Any) -> CompletionOutput:
        params = SamplingParams(temperature=0, max_tokens=40, **settings)
        return llm.chat(messages, params, use_tqdm=False)[0].outputs[0]

    plain = answer()
    assert (plain.text, plain.finish_reason) == ("C417 B42 red", "stop")
    end = tokenizer.decode(plain.token_ids[-1])  # a special token
    assert answer(skip_special_tokens=False).text == plain.text
    assert answer(include_stop_str_in_output=True).text == plain.text
    for spaces in (False, True):
        shown = answer(
            skip_special_tokens=False,
            spaces_between_special_tokens=spaces,
            include_stop_str_in_output=True,
        )
        assert shown.text == plain.text + end
    third = plain.token_ids[2]
    assert answer(stop_token_ids=[third]).text == tokenizer.decode(plain.token_ids[:2])
    shown = answer(stop_token_ids=[third], include_stop_str_in_output=True)
    assert shown.text == tokenizer.decode(plain.token_ids[:3])


def test_prompts_are_tokenized_as_asked_for(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1)
    ids = llm.get_tokenizer().encode(FACTS)
    cut: Any = {"truncate_prompt_tokens": 5}
    (output,) = llm.generate(FACTS, short, use_tqdm=False, tokenization_kwargs=cut)
    assert (output.prompt, output.prompt_token_ids[-4:]) == (FACTS, ids[-4:])
    assert len(output.prompt_token_ids) == 5
    (output,) = llm.chat(CHAT, short, use_tqdm=False, tokenization_kwargs=cut)
    assert len(output.prompt_token_ids) == 5
    (output,) = llm.generate(
        FACTS, short, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False}
    )
    assert output.prompt_token_ids == llm.get_tokenizer().encode(FACTS, add_special_tokens=False)
    for call in (llm.embed, llm.encode):
        (vector,) = call(FACTS, use_tqdm=False, tokenization_kwargs=cut)  # type: ignore[operator]
        assert len(vector.prompt_token_ids) == 5
    with pytest.raises(ValueError, match="max_length is not supported"):
        llm.generate(FACTS, short, tokenization_kwargs={"max_length": 5})


def test_the_chat_script(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (one,) = llm.chat(CHAT, greedy, use_tqdm=False)
    many = llm.chat([CHAT, CHAT[1:]], greedy, use_tqdm=True)
    assert many[0].outputs[0].text == one.outputs[0].text
    rendered = llm.get_tokenizer().apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert one.prompt == rendered
    assert many[1].prompt != rendered


def test_tools_and_another_template_make_the_prompt(llm: LLM) -> None:
    (output,) = llm.chat(
        CHAT,
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        chat_template=TOOL_TEMPLATE,
        tools=TOOLS,
    )
    assert output.prompt is not None
    assert output.prompt.endswith(f"find_berth\nYou are a helpful assistant.\n{FACTS}\n")
    with pytest.raises(ValueError, match="chat_template_content_format='openai' is not supported"):
        llm.chat(CHAT, chat_template_content_format="openai")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        llm.chat([CHAT, [{"role": "nobody", "content": ""}]], use_tqdm=False)


def test_the_tool_script(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=16)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is C417?"}]
    (call,) = llm.chat(messages, greedy, use_tqdm=False, tools=TOOLS)
    assert call.outputs[0].text == "C417 unknown"  # how the demo model calls a function
    function = {"name": "find_berth", "arguments": '{"ship": "C417"}'}
    messages += [
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "id": "1", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "C417 B42 red"},
    ]
    (answer,) = llm.chat(messages, greedy, use_tqdm=False, tools=TOOLS)
    assert answer.outputs[0].text == "C417 B42 red"
    with pytest.raises(ValueError, match=r"tools\[0\]\.type is 'search'"):
        llm.chat(messages, tools=[{"type": "search"}])


def test_a_progress_bar_can_be_of_another_class(llm: LLM) -> None:
    class Bar(tqdm):  # type: ignore[type-arg]
        pass

    bars: list[Bar] = []

    def make_bar(**settings: Any) -> Bar:
        bars.append(Bar(**settings))
        return bars[-1]

    llm.generate(["x", "y"], SamplingParams(max_tokens=1), use_tqdm=make_bar)
    assert [(bar.n, bar.total) for bar in bars] == [(2, 2)]


def test_the_embedding_script(llm: LLM) -> None:
    texts = ["the quay", "a crane"]
    outputs = llm.embed(texts, use_tqdm=False)
    for output, array in zip(outputs, llm.encode(texts, pooling_task="embed"), strict=True):
        vector = output.outputs.embedding
        assert output.outputs.hidden_size == len(vector) == len(array.outputs.data)
        assert vector == pytest.approx(array.outputs.data.tolist(), abs=1e-5)
        assert sum(each * each for each in vector) == pytest.approx(1, abs=1e-3)
    (short,) = llm.embed(texts[0], pooling_params=PoolingParams(dimensions=32))
    assert len(short.outputs.embedding) == 32
    (raw,) = llm.encode(texts[0], PoolingParams(use_activation=False))
    assert float(raw.outputs.data @ raw.outputs.data) > 1.1
    with pytest.raises(ValueError, match="pooling_task='token_embed' is not supported"):
        llm.encode("x", pooling_task="token_embed")  # type: ignore[arg-type]


def test_the_score_script(llm: LLM) -> None:
    texts = ["the quay", "a crane"]
    same, other = llm.score(texts[0], texts, use_tqdm=False)
    assert same.outputs.score == pytest.approx(1, abs=1e-5)
    assert other.outputs.score < same.outputs.score
    (cut,) = llm.score("a b c", "a d e", tokenization_kwargs={"truncate_prompt_tokens": 1})
    assert cut.outputs.score == pytest.approx(1, abs=1e-5)  # the first token is left
    with pytest.raises(ValueError, match="use_activation needs a classification head"):
        llm.score("x", "y", pooling_params=PoolingParams(use_activation=False))
    with pytest.raises(ValueError, match="demo_model has no classification head"):
        llm.classify("x")


def test_the_beam_search_script(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    first, second = llm.beam_search([{"prompt": FACTS}, {"prompt": "The quay"}], params)
    num_tokens = len(llm.get_tokenizer().encode(FACTS))
    for sequence in first.sequences:
        assert sequence.text.strip().startswith(FACTS)
        assert len(sequence.tokens) == num_tokens + 6
        assert sequence.score == pytest.approx(sequence.cum_logprob / 6)
    likely = [sequence.cum_logprob for sequence in second.sequences]
    assert likely == sorted(likely, reverse=True)
    (greedy,) = llm.generate(
        FACTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    )
    assert first.sequences[0].cum_logprob >= greedy.outputs[0].cumulative_logprob - 1e-3
    with pytest.raises(ValueError, match="BeamSearchParams: temperature is not supported"):
        BeamSearchParams(beam_width=3, max_tokens=6, temperature=0.5)  # type: ignore[call-arg]


@pytest.mark.req("FEA-01")
def test_the_structured_output_script(llm: LLM) -> None:
    schema = {"enum": ["free", None, 3]}  # no whitespace, which the demo model likes
    grammar = 'root ::= "SELECT " column\ncolumn ::= "a" | "b"'
    constraints = [
        CHOICE,
        StructuredOutputsParams(regex=r"[a-z]{1,9}@quay\.org"),
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(grammar=grammar),
    ]
    outputs = llm.generate(
        [FACTS] * 4,
        [SamplingParams(n=2, seed=4, max_tokens=200, structured_outputs=c) for c in constraints],
        use_tqdm=False,
    )
    answers = [answer for output in outputs for answer in output.outputs]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    choice, regex, json_text, of_grammar = ([a.text for a in o.outputs] for o in outputs)
    assert set(choice) <= {"Positive", "Negative"}
    assert all(re.fullmatch(r"[a-z]{1,9}@quay\.org", text) for text in regex)
    assert set(json_text) <= {'"free"', "null", "3"}
    assert set(of_grammar) <= {"SELECT a", "SELECT b"}


def test_a_request_that_the_engine_rejects_is_a_value_error(llm: LLM) -> None:
    grammar = StructuredOutputsParams(grammar='root ::= "a" missing')
    bad = SamplingParams(structured_outputs=grammar)
    with pytest.raises(ValueError, match="missing"):
        llm.generate([FACTS] * 2, [SamplingParams(max_tokens=100), bad], use_tqdm=False)
    assert not llm._requests.all()
    assert llm.generate(FACTS, SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_a_reset_prefix_cache_is_empty(llm: LLM) -> None:
    prompt = "A story that is long enough for several blocks of the cache. " * 4
    short = SamplingParams(max_tokens=1)

    def num_cached() -> int:
        return llm.generate(prompt, short, use_tqdm=False)[0].num_cached_tokens

    num_cached()
    assert num_cached() > 0
    assert llm.reset_prefix_cache()
    assert num_cached() == 0
    salted = {"prompt": prompt, "cache_salt": "other"}
    assert llm.generate(salted, short, use_tqdm=False)[0].num_cached_tokens == 0
    again = SamplingParams(max_tokens=1, skip_reading_prefix_cache=True)
    assert llm.generate(prompt, again, use_tqdm=False)[0].num_cached_tokens == 0
    assert num_cached() > 0


def test_the_metrics_script(llm: LLM) -> None:
    llm.generate("x", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    deadline_s = time.monotonic() + 60
    # The newest metrics may be some of before these steps.
    while not (metrics := llm.get_metrics()) or not any(
        isinstance(each, Counter) and each.name == "longshore_scheduler_steps" and each.value
        for each in metrics
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    by_name = {metric.name: metric for metric in metrics}
    blocks = by_name["longshore_scheduler_blocks"]
    assert isinstance(blocks, Gauge)
    assert blocks.value == 600
    for metric in metrics:
        if isinstance(metric, Histogram):
            assert metric.buckets["+Inf"] == metric.count


@pytest.mark.parametrize("name", ["sleep", "wake_up", "llm_engine", "collective_rpc"])
def test_what_does_not_exist_is_refused_by_name(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"LLM\.{name} is not supported: \w"):
        getattr(llm, name)
    assert not hasattr(llm, name)


def test_priorities_are_one_per_prompt(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1)
    assert len(llm.generate(["x", "y"], short, use_tqdm=False, priority=[2, 1])) == 2
    with pytest.raises(ValueError, match="1 priorities for 2 prompts"):
        llm.generate(["x", "y"], short, use_tqdm=False, priority=[2])


def test_a_lora_adapter_is_refused(llm: LLM) -> None:
    short = SamplingParams(max_tokens=1)
    assert llm.generate("x", short, use_tqdm=False, lora_request=None)
    for method, given in ((llm.generate, "x"), (llm.chat, CHAT)):
        with pytest.raises(ValueError, match="lora_request is not supported"):
            method(given, short, lora_request=object())  # type: ignore[operator]


def test_an_argument_that_does_not_exist_is_answered_with_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is not supported: use num_blocks"):
        LLM(DEMO_MODEL_DIR, kv_cache_memory_bytes=1 << 30)


def test_a_share_of_a_gpus_memory_is_a_warning_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(DEMO_MODEL_DIR, in_process=True, gpu_memory_utilization=0.9, **SETTINGS):
        assert "gpu_memory_utilization=0.9 has no effect on a CPU" in caplog.text


def test_a_closed_llm_says_so() -> None:
    llm = LLM(DEMO_MODEL_DIR, in_process=True, **SETTINGS)
    llm.close()
    for call in (llm.reset_prefix_cache, llm.get_metrics):
        with pytest.raises(EngineDead, match="closed"):
            call()
