"""Grammars of calls: what each format's grammar allows is what its parser reads as a call."""

import json
from typing import Any

import pytest

from longshore.deploy.parsers.call_grammar import closed
from longshore.deploy.parsers.parser import AnswerContext, CallForm, NotExpressible, ToolParser
from longshore.deploy.parsers.registry import load_tool_parser
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.backends import Backends
from longshore.scheduler.process.structured_output.vocabulary import Vocabulary
from tests.deploy.parsers.answers import parse
from tests.deploy.parsers.test_formats import KIMI

SPECIAL = (
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "</arg_value>", "[ARGS]"),
    *("<|channel|>", "<|constrain|>", "<|message|>", '<|"|>', "<|python_tag|>"),
)
TOKENS = (*(bytes([byte]) for byte in range(256)), *map(str.encode, SPECIAL), b"<end>")
END = len(TOKENS) - 1
VOCABULARY = Vocabulary(
    TOKENS, tuple(range(256, END + 1)), (END,), lambda text: list(text.encode())
)
SPECIAL_IDS = {text: 256 + index for index, text in enumerate(SPECIAL)}
BACKENDS = Backends(("llguidance",), VOCABULARY)

LOOKUP = closed(
    {
        "properties": {
            "id": {"type": "string"},
            "n": {"$ref": "#/$defs/n"},
            "unit": {"enum": ["m", "ft"]},
        },
        "required": ["id"],
        "$defs": {"n": {"type": "integer"}},
    }
)
FORMS = {"lookup": CallForm(LOOKUP), "now": CallForm()}
CONTEXT = AnswerContext(frozenset(FORMS), schemas={"lookup": LOOKUP})
GOOD = ('{"id": "C4"}', '{"id": "<b>\n", "n": 12, "unit": "ft"}')
BAD = ('{"n": 1}', '{"id": "C4", "n": "x"}', '{"id": "C4", "unit": "km"}', '{"id": "C4", "o": 1}')


def written(tools: str, name: str, arguments: str) -> str:
    """A call in the format, without the marker."""
    values = json.loads(arguments, strict=False)
    texts = {key: one if isinstance(one, str) else json.dumps(one) for key, one in values.items()}
    arguments = json.dumps(values)
    match tools:
        case "hermes":
            return f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        case "nemotron":
            return f'[{{"name": "{name}", "arguments": {arguments}}}]</TOOLCALL>'
        case "mistral":
            return f"{name}[ARGS]{arguments}"
        case "kimi_k2":
            return KIMI.format(name, 0, arguments).removeprefix("<|tool_call_begin|>")
        case "harmony":
            return f".{name}<|channel|>commentary <|constrain|>json<|message|>{arguments}"
        case "deepseek":
            return f"{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        case "llama":
            return f'{{"name": "{name}", "parameters": {arguments}}}'
        case "pythonic":
            keywords = (f"{key}={json.dumps(one)}" for key, one in values.items())
            return f"[{name}({', '.join(keywords)})]"
        case "gemma4":
            quoted = {
                key: f'<|"|>{one}<|"|>' if isinstance(one, str) else one
                for key, one in values.items()
            }
            members = (f"{key}:{one}" for key, one in quoted.items())
            return f"call:{name}{{{','.join(members)}}}<tool_call|>"
        case "qwen3_coder":
            body = "".join(
                f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in texts.items()
            )
            return f"\n<function={name}>\n{body}</function>\n</tool_call>"
        case "minimax_m2":
            body = "".join(
                f'<parameter name="{key}">{one}</parameter>\n' for key, one in texts.items()
            )
            return f'\n<invoke name="{name}">\n{body}</invoke>\n</minimax:tool_call>'
        case _:
            body = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n"
                for key, one in texts.items()
            )
            return f"{name}\n{body}</tool_call>"


def ids_of(text: str) -> list[int]:
    for special, token_id in SPECIAL_IDS.items():
        before, found, after = text.partition(special)
        if found:
            return [*ids_of(before), token_id, *ids_of(after)]
    return list(text.encode())


def allows(grammar: str, text: str) -> bool:
    matcher = BACKENDS.compile(StructuredOutput("tool_calls", grammar)).matcher()
    return all(map(matcher.accept, ids_of(text))) and matcher.accept(END)


def parser_of(tools: str) -> ToolParser:
    parser = load_tool_parser(tools)
    assert parser is not None
    return parser


FORMATS = (
    *("hermes", "nemotron", "mistral", "kimi_k2", "deepseek", "harmony"),
    *("qwen3_coder", "minimax_m2", "glm45", "gemma4", "llama", "pythonic"),
)


@pytest.mark.parametrize("tools", FORMATS)
def test_a_call_follows_the_schema_of_its_function(tools: str) -> None:
    grammar = parser_of(tools).call_grammar(FORMS, SPECIAL_IDS)
    assert grammar is not None
    begin = "" if grammar.is_answer else grammar.marker or grammar.phrases[0]
    for arguments in GOOD:
        text = written(tools, "lookup", arguments)
        assert allows(grammar.text, text)
        _, _, calls, is_complete = parse([begin + text], tools, context=CONTEXT)
        values = json.loads(arguments, strict=False)
        assert [(name, json.loads(given)) for name, given in calls] == [("lookup", values)]
        assert is_complete
    for arguments in BAD:
        assert not allows(grammar.text, written(tools, "lookup", arguments))
    assert allows(grammar.text, written(tools, "now", "{}"))
    assert allows(grammar.text, written(tools, "now", '{"any": "x"}'))
    assert not allows(grammar.text, written(tools, "other", "{}"))


@pytest.mark.parametrize("tools", FORMATS)
def test_the_input_of_a_custom_tool_follows_its_regular_expression(tools: str) -> None:
    form = CallForm(syntax="regex", definition="[a-c]+/")
    grammar = parser_of(tools).call_grammar({"patch": form}, SPECIAL_IDS)
    assert grammar is not None
    assert allows(grammar.text, written(tools, "patch", '{"input": "abc/"}'))
    assert not allows(grammar.text, written(tools, "patch", '{"input": "abd/"}'))


@pytest.mark.parametrize("tools", FORMATS)
def test_a_lark_grammar_is_possible_where_the_input_is_written_as_it_is(tools: str) -> None:
    form = CallForm(syntax="lark", definition='start: LINE+\nLINE: /[a-c]+/ "\\n"')
    parser = parser_of(tools)
    if tools not in ("qwen3_coder", "minimax_m2", "glm45", "gemma4"):
        with pytest.raises(NotExpressible, match="Lark"):
            parser.call_grammar({"patch": form}, SPECIAL_IDS)
        return
    grammar = parser.call_grammar({"patch": form}, SPECIAL_IDS)
    assert grammar is not None
    assert allows(grammar.text, written(tools, "patch", '{"input": "ab\\nc\\n"}'))
    assert not allows(grammar.text, written(tools, "patch", '{"input": "ab\\nd\\n"}'))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ({"anyOf": [{}]}, "anyOf"),
    ],
)
def test_what_a_format_with_tags_cannot_enforce_is_rejected(
    schema: dict[str, Any], keyword: str
) -> None:
    for tools in ("glm45", "gemma4"):
        with pytest.raises(NotExpressible, match=keyword):
            parser_of(tools).call_grammar({"f": CallForm(schema)}, {})


def test_what_no_backend_can_enforce_is_rejected() -> None:
    form = CallForm({"properties": {"a": {"type": "array", "uniqueItems": True}}})
    for tools in ("hermes", "glm45"):
        grammar = parser_of(tools).call_grammar({"f": form}, {})
        assert grammar is not None
        with pytest.raises(GrammarError, match="uniqueItems"):
            allows(grammar.text, "")


def test_the_demo_model_s_calls_have_no_grammar() -> None:
    assert parser_of("demo").call_grammar(FORMS, {}) is None


CALL = '{"name": "lookup", "parameters": {"id": "C4"}}'
TEXTS = (
    *("", "Container C4 (of 5) is here.", " \n[1] says (so)", "[link](of it)", "[1, 2]", "[lookup"),
    *('{"city": "Oslo"}', '[{"city": "Oslo"}]', '["lookup(", 2]', '{"nam', "\x1c{"),
    '{"n\\u0061me": "lookup"}',
)


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_of_llama_may_be_any_text_that_is_no_call(text: str) -> None:
    grammar = parser_of("llama").call_grammar(FORMS, SPECIAL_IDS)
    assert grammar is not None
    assert allows(grammar.text, text)
    assert allows(grammar.text, f"{text}<|python_tag|>{CALL}")
    assert not allows(grammar.text, f"{text}<|python_tag|>text")
    assert parse([text], "llama", context=CONTEXT)[0] == text


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"\n{CALL}; {CALL},{CALL}<|python_end|> ", 3),
        (f"[{CALL}, {CALL} ]", 2),
        ('{"type": "function", "name": "now", "parameters": {}}', 1),
        ('[now(), lookup(id="a\\n\\"é", unit="m"), now(a=[true, null])]', 3),
        (f'{CALL}<|python_tag|>[lookup(id="C4", n=-1)]', 2),
    ],
)
def test_an_answer_of_llama_may_have_several_calls(text: str, num_calls: int) -> None:
    grammar = parser_of("llama").call_grammar(FORMS, SPECIAL_IDS)
    assert grammar is not None
    assert allows(grammar.text, text)
    content, _, calls, _ = parse([text], "llama", context=CONTEXT)
    assert (content, len(calls)) == ("", num_calls)


@pytest.mark.parametrize(
    "text",
    [
        *('{"name": "other"', '{"parameters"', '[ {"type": 1', '\x1c{\n"id"', "[other(", "[a.b ("),
        *(f"{CALL} text", f"{CALL}; {{", "[now()] text", "[lookup(n=1)]", "text <|python_start|>"),
    ],
)
def test_an_answer_of_llama_has_no_other_call_and_no_text_after_calls(text: str) -> None:
    grammar = parser_of("llama").call_grammar(FORMS, SPECIAL_IDS)
    assert grammar is not None
    assert not allows(grammar.text, text)


def test_arguments_that_python_cannot_write_are_json() -> None:
    """Names of arguments that are no identifiers, and schemas that combine sets of arguments."""
    schemas = ({"properties": {"from": {}}}, {"properties": {"a-b": {}}}, {"anyOf": [{}]})
    for schema in schemas:
        grammar = parser_of("llama").call_grammar({"f": CallForm(schema)}, {})
        assert grammar is not None
        assert allows(grammar.text, '{"name": "f", "parameters": {}}')
        assert not allows(grammar.text, "[f()]")


def of_gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(of_gemma, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{of_gemma(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"items": {"$ref": "#/$defs/tree"}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 2}, [2, 30], [1, "2", 2.5, None]),
        ({"type": ["string", "null"]}, ["{a},[b]<", "", None], [1, [], {}]),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, [True, "true"], [1, None]),
        ({"enum": ["m", 5, None, [1], {"a": "b"}]}, ["m", 5, None, [1], {"a": "b"}], ["k", 6, []]),
        ({"const": "x", "title": "X"}, ["x"], ["y"]),
        ({"type": "array", "items": {"type": "number"}}, [[], [1], [1, 2.5]], [["x"], 1]),
        ({"type": "array", "minItems": 2, "maxItems": 3}, [[1, "a"], [[], {}, 1]], [[1], [1] * 4]),
        ({"maxItems": 0}, [[]], [[1]]),
        ({"type": "object"}, [{}, {"a": {"b": ["c", None]}}], [[], "a"]),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "b"}]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        (
            {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
            [{"b": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": [{}]}],
            [{}, {"a": 1}, {"a": 1, "c": 1}, {"b": 1, "d": 1}],
        ),
        (
            {"$ref": "#/$defs/tree", "description": "of all"},
            [{"name": "a", "children": [{"name": "b", "children": []}, {"name": "c"}]}],
            [{"name": "a", "children": [{}]}, {"name": "a", "children": [{"name": 1}]}],
        ),
        (True, [1, "a", None, True, [{"a": 1}]], []),
    ],
)
def test_arguments_of_gemma_follow_nested_schemas(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    of_all = {"properties": {"it": schema}, "required": ["it"], "$defs": {"tree": TREE}}
    grammar = parser_of("gemma4").call_grammar({"f": CallForm(closed(of_all))}, SPECIAL_IDS)
    assert grammar is not None
    for value in good:
        text = f"call:f{of_gemma({'it': value})}<tool_call|>"
        assert allows(grammar.text, text), value
        _, _, [(_, arguments)], _ = parse([f"<|tool_call>{text}"], "gemma4")
        assert json.loads(arguments) == {"it": value}
    for value in bad:
        assert not allows(grammar.text, f"call:f{of_gemma({'it': value})}<tool_call|>"), value


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "pattern": "x"}, "enforce pattern"),
        ({"oneOf": [{}]}, "enforce oneOf"),
        ({"anyOf": [{}], "minimum": 1}, "enforce anyOf"),
        ({"type": "object", "properties": {"a:b": {}}}, "cannot write the argument 'a:b'"),
        ({"type": "object", "required": ["x"], "properties": {"a": {}}}, "'x' is required"),
        (False, "need a schema"),
        ({"$ref": "#/$defs/none"}, "need a schema"),
    ],
)
def test_what_arguments_of_gemma_cannot_enforce_is_rejected(schema: Any, problem: str) -> None:
    with pytest.raises(NotExpressible, match=problem):
        parser_of("gemma4").call_grammar({"f": CallForm({"properties": {"it": schema}})}, {})
