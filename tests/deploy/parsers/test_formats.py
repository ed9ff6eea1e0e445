"""Tool calls and reasoning in the formats of model families: what the parsers find."""

import json
from typing import Any

import pytest

from longshore.deploy.parsers.answer import AnswerParsers, ParsedAnswer
from longshore.deploy.parsers.demo import DemoTools
from longshore.deploy.parsers.json_text import (
    MAX_HELD_CHARACTERS,
    MAX_MALFORMED,
    JsonScanner,
)
from longshore.deploy.parsers.kimi import KimiTools
from longshore.deploy.parsers.parser import AnswerContext, Content, ToolCall
from longshore.deploy.parsers.registry import load_tool_parser
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
LONG_TEXT = json.loads(LONG)["text"]
BOOKING = '{"seats": 2, "when": "12", "tags": ["a", 1], "paid": true}'
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

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
    (
        "qwen3_coder",
        "Wait.\n<tool_call>\n<function=lookup>\n<parameter=id>\nC417\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Wait.",
        BOTH,
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=book>\n<parameter=seats>\n2\n</parameter>\n<parameter=when>\n12\n"
        '</parameter>\n<parameter=tags>\n["a", 1]\n</parameter>\n<parameter=paid>\nTrue\n'
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("book", BOOKING)],
    ),
    (
        "qwen3_coder",
        f"<function=now>\n<parameter=text>\n{LONG_TEXT}\n</parameter>\n</function>",
        "",
        [("now", LONG)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=now>\n<parameter=text>\n<parameter>\n\n</parameter> or\n"
        "</function>\n\n</parameter>\n</function>",
        "",
        [("now", json.dumps({"text": "<parameter>\n\n</parameter> or\n</function>\n"}))],
    ),
    (
        "glm45",
        "Wait.\n<tool_call>lookup\n<arg_key>id</arg_key>\n<arg_value>C417</arg_value>\n</tool_call>"
        "\n<tool_call>now</tool_call>",
        "Wait.",
        BOTH,
    ),
    (
        "glm45",
        "<tool_call>book<arg_key>seats</arg_key><arg_value>2</arg_value><arg_key>when</arg_key>"
        '<arg_value>12</arg_value><arg_key>tags</arg_key><arg_value>["a", 1]</arg_value>'
        "<arg_key>paid</arg_key><arg_value>true</arg_value></tool_call>",
        "",
        [("book", BOOKING)],
    ),
    (
        "glm45",
        f"<tool_call>now<arg_key>text</arg_key><arg_value>{LONG_TEXT}</arg_value></tool_call>",
        "",
        [("now", LONG)],
    ),
    (
        "minimax_m2",
        'Wait.\n<minimax:tool_call>\n<invoke name="lookup">\n<parameter name="id">C417</parameter>'
        '\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "Wait.",
        BOTH,
    ),
    (
        "minimax_m2",
        f'<minimax:tool_call><invoke name="now"><parameter name="text">{LONG_TEXT}</parameter>'
        '</invoke>\n<invoke name="other"><parameter name="a">{"b": 1}</parameter>'
        '<parameter name="c">x</parameter></invoke></minimax:tool_call>',
        "",
        [("now", LONG), ("other", '{"a": {"b": 1}, "c": "x"}')],
    ),
    (
        "kimi_k2",
        f"Wait.<|tool_calls_section_begin|>{KIMI.format('lookup', 3, A)}"
        f"{KIMI.format('now', 4, '{}')}<|tool_calls_section_end|>",
        "Wait.",
        BOTH,
    ),
    ("kimi_k2", KIMI.format("now", 0, LONG), "", [("now", LONG)]),
    (
        "gemma4",
        'Wait.<|tool_call>call:lookup{id:<|"|>C417<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        "Wait.",
        BOTH,
    ),
    (
        "gemma4",
        '<|tool_call>call:book{seats:2,when:<|"|>a "b" {c}<|"|>,tags:[<|"|>a<|"|>,{x y:null}, '
        '-1.5],<|"|>paid<|"|>:true,to:New York}',
        "",
        [
            (
                "book",
                '{"seats": 2, "when": "a \\"b\\" {c}", "tags": ["a", {"x y": null}, -1.5], '
                '"paid": true, "to": "New York"}',
            )
        ],
    ),
    (
        "gemma4",
        f'<|tool_call>call:now{{text:<|"|>{LONG_TEXT}<|"|>}}<tool_call|>',
        "",
        [("now", LONG)],
    ),
    ("nemotron", f"Wait. <TOOLCALL>[{LOOKUP}, {NOW}]</TOOLCALL>", "Wait.", BOTH),
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
        ("qwen3_coder", "<tool_call>\n<function=lookup>\n<parameter=id>\nC4"),
        ("qwen3_coder", "<tool_call>\n<function=lookup>\ntext</function>"),
        ("qwen3_coder", "<function=other>\n</function>"),
        ("qwen3_coder", '<tool_call>{"name": "lookup"}</tool_call>'),
        ("glm45", "<tool_call> is the marker of calls"),
        ("glm45", "<tool_call>lookup<arg_key>id</arg_key>C417</tool_call>"),
        ("minimax_m2", '<invoke name="other"></invoke>'),
        ("minimax_m2", '<minimax:tool_call><invoke name="now"><parameter name="text">x</invoke>'),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{bad}"),
        ("gemma4", "<|tool_call>now{}"),
        ("gemma4", '<|tool_call>call:now{text:<|"|>x'),
        ("gemma4", "<|tool_call>call:now{text:]}"),
        ("gemma4", "<|tool_call>call:now" + "{a:" * 5000),
        ("nemotron", "<TOOLCALL>[1]</TOOLCALL>"),
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


@pytest.mark.parametrize(
    ("tools", "text", "name", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "lookup", "arguments": {"id": "C4', "lookup", '{"id": "C4'),
        ("hermes", '<tool_call>{"name": "lookup", "argu', "lookup", ""),
        ("mistral", '[TOOL_CALLS]lookup[ARGS]{"id": "C4', "lookup", '{"id": "C4'),
        ("harmony", CALL + 'lookup<|message|>{"id": "C4', "lookup", '{"id": "C4'),
        ("qwen3_coder", "<tool_call><function=lookup>", "lookup", ""),
        ("qwen3_coder", "<function=lookup><parameter=id>\nC4\n</para", "lookup", '{"id": "C4'),
        ("qwen3_coder", "<function=lookup><parameter=id>C4</parameter>", "lookup", '{"id": "C4'),
        ("glm45", "<tool_call>lookup<arg_key>id</arg_key><arg_value>C4", "lookup", '{"id": "C4'),
        ("minimax_m2", '<invoke name="lookup"><parameter name="id">C4', "lookup", '{"id": "C4'),
        (
            "kimi_k2",
            KIMI.format("lookup", 0, '{"id": "C4').partition("<|tool_call_end")[0],
            "lookup",
            '{"id": "C4',
        ),
        ("gemma4", '<|tool_call>call:lookup{id:<|"|>C4<|"', "lookup", '{"id": "C4'),
        (
            "nemotron",
            '<TOOLCALL>[{"name": "lookup", "arguments": {"id": "C4',
            "lookup",
            '{"id": "C4',
        ),
    ],
)
def test_a_call_that_is_cut_at_the_maximum_length_is_given_as_far_as_it_has_come(
    tools: str, text: str, name: str, arguments: str
) -> None:
    for pieces in ([text], list(text)):
        assert parse(pieces, tools, is_cut=True) == ("", "", [(name, arguments)], False)


def test_a_call_has_the_id_that_the_model_gives_it() -> None:
    answer = ParsedAnswer(AnswerParsers(tools=KimiTools()), CONTEXT)
    assert answer.feed(KIMI.format("now", 7, "{}")) == [ToolCall("now", "{}", "functions.now:7")]
    assert answer.feed(KIMI.format("now", 8, LONG))[0] == ToolCall("now", LONG, "functions.now:8")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "boolean"}, "False", False),
        ({"type": "null"}, "None", None),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/$defs/n"}]}, "3", 3),
        ({"const": "3"}, "3", "3"),
        ({"enum": [1, "a"]}, "1", 1),
        ({}, "[1]", [1]),
        ({}, " None", " None"),
        ({"$ref": "#/$defs/loop"}, "x", "x"),
    ],
)
def test_the_schema_says_what_a_value_in_a_tag_is(
    schema: dict[str, Any], text: str, value: object
) -> None:
    definitions = {"n": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}}
    parameters = {"properties": {"x": schema}, "$defs": definitions}
    context = AnswerContext(schemas={"f": parameters})
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    _, _, [(_, arguments)], _ = parse([text], "glm45", context=context)
    assert json.loads(arguments) == {"x": value}


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", f"<tool_call>{LONG_NOW}</tool_call>"),
        ("qwen3_coder", f"<tool_call><function=now><parameter=text>{LONG_TEXT}</parameter>"),
        ("gemma4", f'<|tool_call>call:now{{text:<|"|>{LONG_TEXT}<|"|>}}'),
    ],
)
def test_long_arguments_come_as_they_are_written(tools: str, text: str) -> None:
    answer = ParsedAnswer(AnswerParsers(tools=load_tool_parser(tools)), CONTEXT)
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


@pytest.mark.parametrize(
    ("text", "prompt_end", "content", "reasoning"),
    [
        ("<|channel>thought\nHm.\n<channel|>B42", "<|turn>model\n", "B42", "Hm."),
        ("Hm.\n<channel|>B42", "<|channel>thought\n", "B42", "Hm."),
        ("<|channel>thought\n<channel|>B42", "<|turn>model\n", "B42", ""),
    ],
)
def test_the_thought_channel_of_gemma_is_reasoning(
    text: str, prompt_end: str, content: str, reasoning: str
) -> None:
    context = AnswerContext(prompt_end=prompt_end)
    assert parse([text], "gemma4", "gemma4", context) == (content, reasoning, [], False)


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


@pytest.mark.parametrize("pieces", [("[", "1", "] says"), ("[look", "up ", "it up")])
def test_text_in_brackets_is_shown_once_it_can_be_no_list_of_calls(pieces: tuple[str, ...]) -> None:
    answer = ParsedAnswer(AnswerParsers(tools=load_tool_parser("llama")), CONTEXT)
    shown = [event for piece in pieces for event in answer.feed(piece)]
    assert "".join(event.text for event in shown if isinstance(event, Content)) == "".join(pieces)
