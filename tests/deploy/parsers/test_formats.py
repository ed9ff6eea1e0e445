"""Tool calls and reasoning in the formats of model families: what the parsers find."""

import json
from typing import Any

import pytest

from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.demo import DemoTools
from longshore.deploy.parsers.hermes import HermesTools
from longshore.deploy.parsers.json_text import (
    MAX_HELD_CHARACTERS,
    MAX_MALFORMED,
    JsonScanner,
)
from longshore.deploy.parsers.parser import AnswerContext, Content
from tests.deploy.parsers.answers import CONTEXT, parse

A = '{"id": "C417"}'
LONG = json.dumps({"text": 'a "quoted" \\ text }] ' * 100})
assert len(LONG) > MAX_HELD_CHARACTERS
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
HARMONY = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"

LOOKUP = f'{{"name": "lookup", "arguments": {A}}}'
NOW = '{"name": "now", "parameters": {}}'
LONG_NOW = f'{{"name": "now", "arguments": {LONG}}}'
CALL = "<|channel|>commentary to=functions."
BOTH = [("lookup", A), ("now", "{}")]

CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"<tool_call>\n{LOOKUP}\n</tool_call>", "", BOTH[:1]),
    (
        "hermes",
        f"Wait.\n<tool_call>{LOOKUP}</tool_call>\n"
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\n',
        "Wait.",
        BOTH,
    ),
    ("hermes", '<tool_call>{"name": "now"}', "", BOTH[1:]),
    ("hermes", f"<tool_call>{LONG_NOW}</tool_call>", "", [("now", LONG)]),
    ("mistral", f"[TOOL_CALLS][{LOOKUP}, {NOW}]", "", BOTH),
    (
        "mistral",
        f"Wait. [TOOL_CALLS]lookup[ARGS]{A}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
        "Wait.",
        BOTH,
    ),
    ("mistral", f"[TOOL_CALLS]lookup{LONG}", "", [("lookup", LONG)]),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜>{DEEPSEEK.format('lookup', A)}\n{DEEPSEEK.format('now', '{}')}"
        "<｜tool▁calls▁end｜>",
        "",
        BOTH,
    ),
    (
        "deepseek",
        f"Wait.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>lookup<｜tool▁sep｜>{A}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Wait.",
        BOTH[:1],
    ),
    ("demo", " C417 unknown\n", "", [("lookup", '{"container": "C417"}')]),
    ("llama", LOOKUP, "", BOTH[:1]),
    ("llama", f'{{"type": "function", {LOOKUP[1:]}; {NOW}', "", BOTH),
    ("llama", f'<|python_tag|>{{"name": "other", "parameters": {A}}}', "", [("other", A)]),
    ("llama", "[lookup(id='C417'), now()]", "", BOTH),
    (
        "llama",
        "<|python_start|>[a.b(x=-1, y=[None, true], z={'k': 'it\\'s ]'})]<|python_end|>",
        "",
        [("a.b", '{"x": -1, "y": [null, true], "z": {"k": "it\'s ]"}}')],
    ),
    (
        "harmony",
        f"{HARMONY}{CALL}lookup <|constrain|>json<|message|>{A}<|call|>",
        "",
        BOTH[:1],
    ),
    (
        "harmony",
        f" to=functions.lookup<|channel|>commentary json<|message|>{A}",
        "",
        BOTH[:1],
    ),
    (
        "harmony",
        f"{HARMONY}<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{CALL}now"
        f"<|message|>{LONG}<|call|>",
        "Wait.",
        [("now", LONG)],
    ),
]


@pytest.mark.parametrize(("tools", "text", "content", "calls"), CALLS)
def test_calls_are_found_and_their_text_is_not_content(
    tools: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    reasoning = "harmony" if tools == "harmony" else "think"
    assert parse([text], tools, reasoning) == (
        content,
        "Look it up." if HARMONY in text else "",
        calls,
        True,
    )
    assert [json.loads(arguments) is not None for _, arguments in calls]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "<tool_call>{bad}</tool_call> and on"),
        ("hermes", '  <tool_call>{"name": "lookup", "arguments": {"id": "C4'),
        ("hermes", '<tool_call>{"name": "lookup", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("hermes", "<tool_call>" + '{"a":' * 5000),
        ("mistral", "[TOOL_CALLS] is the marker of calls"),
        ("mistral", '[TOOL_CALLS][{"name": "lookup", "arguments": {"id"'),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup\n{}"),
        ("demo", "C417 B42 red"),
        ("demo", "C417 unknown, I fear"),
        ("demo", "C417 unknow"),
        ("llama", '{"city": "Oslo", "name": "lookup"}'),
        ("llama", '{"name": "Ann", "parameters": {"age": 5}}'),
        ("llama", '{"name": "lookup", "parameters": {"id": "C417"'),
        ("llama", '["lookup", "now"]'),
        ("llama", "[lookup(__import__('os').system('true'))]"),
        ("llama", "[lookup(id=open('x'))]"),
        ("llama", "[lookup(id='C417'"),
        ("llama", "[lookup(id=1e999)]"),
        ("llama", r"[lookup(id='\ud800')]"),
        ("llama", "[" * 5000),
        ("harmony", "Plain text with <b> and to=functions.lookup"),
    ],
)
def test_what_is_no_valid_call_stays_text(tools: str, text: str) -> None:
    reasoning = "harmony" if tools == "harmony" else "none"
    assert parse([text], tools, reasoning) == (text, "", [], False)


def test_long_call_that_is_cut_off_keeps_what_has_come_and_is_not_complete() -> None:
    text = f"<tool_call>{LONG_NOW}"[:-200]
    content, _, calls, is_complete = parse([text], "hermes")
    assert (content, is_complete) == ("", False)
    assert calls == [("now", LONG[: len(calls[0][1])])]


def test_long_arguments_come_as_they_are_written() -> None:
    answer = ParsedAnswer(AnswerParsers(tools=HermesTools()), AnswerContext())
    text = f"<tool_call>{LONG_NOW}</tool_call>"
    pieces = [text[i : i + 50] for i in range(0, len(text), 50)]
    num_events = [len(answer.feed(piece)) for piece in pieces]
    assert sum(num_events) > 10


@pytest.mark.parametrize(
    ("text", "prompt_end", "content", "reasoning"),
    [
        ("<think>\nHm.\n</think>\n\nB42", "<|assistant|>", "B42", "Hm."),
        ("Hm.\n</think>\n\nB42", "<|assistant|><think>\n", "B42", "Hm."),
        ("<think>Hm.</think>B42", "<think>", "B42", "Hm."),
        ("B42", "<think>\n\n</think>\n\n", "B42", ""),
        ("B42 <think>no</think>", "", "B42 <think>no</think>", ""),
        ("<think>Hm. </thin", "", "", "Hm. </thin"),
        (" B42\n", "", " B42\n", ""),
    ],
)
def test_reasoning_is_between_the_tags_wherever_the_first_one_is(
    text: str, prompt_end: str, content: str, reasoning: str
) -> None:
    context = AnswerContext(prompt_end=prompt_end)
    assert parse([text], reasoning="think", context=context) == (content, reasoning, [], False)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"{HARMONY}<|channel|>final<|message|>B42<|return|>", "B42", "Look it up."),
        (f"{HARMONY}<|channel|>final<|message|>B4", "B4", "Look it up."),
        ("<|channel|>final<|message|>B42", "B42", ""),
        ("<|channel|>analysis<|message|>Look", "", "Look"),
        ("<|channel|>analysis to=browser.open<|message|>{}", "", "{}"),
        ("<|channel|>commentary to=functions.<|message|>{}", "{}", ""),
        ("<|channel|>final", "<|channel|>final", ""),
    ],
)
def test_channels_of_harmony_are_reasoning_and_content(
    text: str, content: str, reasoning: str
) -> None:
    for tools in ("none", "harmony"):
        assert parse([text], tools, "harmony") == (content, reasoning, [], False)


def test_calls_after_reasoning_are_found() -> None:
    text = f"<think>Hm.</think>\n<tool_call>{LOOKUP}</tool_call>"
    expected: Any = ("", "Hm.", [("lookup", A)], True)
    assert parse([text], "hermes", "think") == expected


def test_demo_model_calls_only_a_declared_function() -> None:
    text = "C417 unknown"
    assert parse([text], "demo", context=AnswerContext(frozenset({"now"})))[0] == text


def test_demo_model_s_other_answers_are_not_held_back() -> None:
    answer = ParsedAnswer(AnswerParsers(tools=DemoTools()), CONTEXT)
    assert [answer.feed(piece) for piece in ("C417", " B42", " red")] == [
        [],
        [Content("C417 B42")],
        [Content(" red")],
    ]


@pytest.mark.parametrize(
    ("tools", "marker"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")]
)
def test_an_answer_that_repeats_the_beginning_of_a_call_is_not_searched_again_and_again(
    tools: str, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[int] = []
    scan = JsonScanner.scan

    def counted(scanner: JsonScanner, text: str) -> bool:
        scanned.append(len(text))
        return scan(scanner, text)

    monkeypatch.setattr(JsonScanner, "scan", counted)
    text = f'{marker}{{"a":"' * 2000
    assert parse([text], tools) == (text, "", [], False)
    assert sum(length > MAX_HELD_CHARACTERS for length in scanned) <= 3 * MAX_MALFORMED
    few = f'{marker}{{"a":"' * 3 + f"{marker}{LOOKUP}"
    assert parse([few], tools)[2] == BOTH[:1]
