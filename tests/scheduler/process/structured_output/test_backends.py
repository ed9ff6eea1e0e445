"""The backends: what each compiles, and that its masks allow exactly that."""

import json
import random
from typing import Any

import numpy as np
import pytest

from longshore.protocol.requests import CONSTRAINT_TOO_COMPLEX, StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output import backends
from longshore.scheduler.process.structured_output.backends import (
    Backend,
    Backends,
    LLGuidance,
    XGrammar,
)
from tests.harness.vocabularies import allowed_ids, sampled_text, small_vocabulary

VOCABULARY = small_vocabulary()
END = VOCABULARY.eos_token_ids[0]


@pytest.fixture(
    params=[LLGuidance, pytest.param(XGrammar, marks=pytest.mark.services)], scope="module"
)
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param(VOCABULARY)
    return backend


def fits(backend: Backend, spec: StructuredOutput, text: str) -> bool:
    """Whether the text, token by token, is an output that the masks allow."""
    matcher = backend.compile(spec).matcher()
    for token_id in [*text.encode(), END]:
        if token_id not in allowed_ids(matcher, len(VOCABULARY.tokens)):
            return False
        assert matcher.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("choice", '["yes", "no"]', ["yes", "no"], ["", "yes!", "y", "maybe"]),
        ("choice", '["a\\"b", "x|y", "é\\n", "(.)"]', ['a"b', "x|y", "é\n", "(.)"], ["x", "(a)"]),
        ("regex", "[a-c]{2}\\d+", ["ab1", "cc99"], ["ab", "abc1", "ab1x", "ab\u0661"]),
        ("regex", "^a$", ["a"], ["", "^a$", "aa"]),
        ("regex", "a|b", ["a", "b"], ["ab"]),
        ("grammar", 'root ::= "a" | "b" root', ["a", "bba"], ["b", "ab"]),
        ("grammar", 'start: "a" | "b" start', ["a", "bba"], ["b", "ab"]),
        ("json_schema", '{"type": "object"}', ["{}", '{"a": [1, null]}'], ["[]", "{", "1"]),
        (
            "json_schema",
            '{"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}},'
            ' "required": ["n"], "additionalProperties": false}',
            ['{"n": 3}', '{"n": 12}'],
            ["{}", '{"n": 2}', '{"n": 3, "m": 1}', '{"n": "3"}'],
        ),
    ],
)
def test_masks_allow_exactly_what_is_asked_for(
    backend: Backend, kind: Any, text: str, good: list[str], bad: list[str]
) -> None:
    spec = StructuredOutput(kind, text)
    assert [one for one in good if not fits(backend, spec, one)] == []
    assert [one for one in bad if fits(backend, spec, one)] == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(("),
        ("grammar", "root ::= missing"),
        ("grammar", "start: missing"),
        ("choice", "[]"),
        ("choice", '[""]'),
        ("choice", '"yes"'),
        ("choice", "[" * 100_000),
        ("json_schema", '{"type": "nothing"}'),
    ],
)
def test_what_cannot_be_compiled_is_an_error(backend: Backend, kind: Any, text: str) -> None:
    with pytest.raises(GrammarError):
        backend.compile(StructuredOutput(kind, text))


def test_after_the_end_only_the_end_is_allowed(backend: Backend) -> None:
    matcher = backend.compile(StructuredOutput("choice", '["a"]')).matcher()
    for token_id in (ord("a"), END, END):
        assert allowed_ids(matcher, len(VOCABULARY.tokens)) == [token_id]
        assert matcher.accept(token_id)
    assert not matcher.accept(ord("a"))


def test_a_rollback_restores_the_mask(backend: Backend) -> None:
    matcher = backend.compile(StructuredOutput("regex", "abc|xyz")).matcher()
    before = allowed_ids(matcher, len(VOCABULARY.tokens))
    assert matcher.accept(ord("x"))
    assert matcher.accept(ord("y"))
    matcher.rollback(2)
    assert allowed_ids(matcher, len(VOCABULARY.tokens)) == before


def test_a_token_that_is_not_allowed_changes_nothing(backend: Backend) -> None:
    matcher = backend.compile(StructuredOutput("regex", "abc|abd")).matcher()
    assert matcher.accept(ord("a"))
    assert not matcher.accept(ord("x"))
    assert allowed_ids(matcher, len(VOCABULARY.tokens)) == [ord("b")]
    assert matcher.accept(ord("b"))
    matcher.rollback(1)
    assert allowed_ids(matcher, len(VOCABULARY.tokens)) == [ord("b")]


def test_ends_are_rolled_back_as_other_tokens(backend: Backend) -> None:
    matcher = backend.compile(StructuredOutput("choice", '["xy", "xyz"]')).matcher()
    for text in ("xy", "xyz"):
        for token_id in (*text.encode(), END, END):
            assert matcher.accept(token_id)
        matcher.rollback(2)
        ends_early = text == "xy"
        assert allowed_ids(matcher, len(VOCABULARY.tokens)) == [ord("z"), END][not ends_early :]
        matcher.rollback(len(text))
    assert allowed_ids(matcher, len(VOCABULARY.tokens)) == [ord("x")]


def test_a_large_number_of_optional_properties_is_possible() -> None:
    properties = {f"p{index}": {"type": "integer"} for index in range(600)}
    schema = json.dumps({"type": "object", "properties": properties})
    assert fits(LLGuidance(VOCABULARY), StructuredOutput("json_schema", schema), '{"p599": 1}')


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        ("json_schema", '{"allOf": [{"$ref": "#"}]}'),
        ("grammar", "root ::= root"),
    ],
)
@pytest.mark.parametrize(
    "name", ["llguidance", pytest.param("xgrammar", marks=pytest.mark.services)]
)
def test_what_has_no_output_cannot_be_compiled(name: Any, kind: Any, text: str) -> None:
    with pytest.raises(GrammarError, match=r"no output matches it|cannot enforce"):
        Backends((name,), VOCABULARY).compile(StructuredOutput(kind, text))


def test_matchers_of_one_grammar_are_independent(backend: Backend) -> None:
    grammar = backend.compile(StructuredOutput("regex", "ab"))
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(ord("a"))
    assert ord("a") in allowed_ids(second, len(VOCABULARY.tokens))


# The choice of the backend


@pytest.mark.services
def test_a_schema_that_one_backend_does_not_support_goes_to_the_other() -> None:
    backends = Backends(("xgrammar", "llguidance"), VOCABULARY)
    for schema, name in (
        ('{"type": "array", "items": {"type": "integer"}, "maxItems": 2}', "_XGGrammar"),
        ('{"type": "integer", "multipleOf": 7}', "_LLGrammar"),
    ):
        spec = StructuredOutput("json_schema", schema)
        assert type(backends.compile(spec)).__name__ == name


def test_a_schema_cannot_switch_off_what_it_asks_for() -> None:
    schema = '{"type": "object", "x-guidance": {"lenient": true}, "not": {}}'
    with pytest.raises(GrammarError, match="Unimplemented keys"):
        LLGuidance(VOCABULARY).compile(StructuredOutput("json_schema", schema))
    with pytest.raises(GrammarError, match="/x-guidance, /not"):
        Backends(("llguidance",), VOCABULARY).compile(StructuredOutput("json_schema", schema))


def test_without_a_library_the_error_says_what_to_install() -> None:
    with pytest.raises(GrammarError, match="pip install"):
        Backends((), VOCABULARY).compile(StructuredOutput("regex", "a"))


def test_sampled_outputs_end(backend: Backend) -> None:
    grammar = backend.compile(StructuredOutput("json_schema", '{"enum": [1, "two", null]}'))
    texts = {sampled_text(grammar.matcher(), VOCABULARY, random.Random(seed)) for seed in range(30)}
    assert texts == {"1", '"two"', "null"}


def test_masks_leave_out_ids_without_a_token(backend: Backend) -> None:
    matcher = backend.compile(StructuredOutput("regex", "(.|\\n)*")).matcher()
    mask = np.zeros(-(-len(VOCABULARY.tokens) // 32), np.int32)
    matcher.fill(mask)
    assert VOCABULARY.special_ids[-1] not in allowed_ids(matcher, len(VOCABULARY.tokens))


@pytest.mark.parametrize(
    ("limit", "spec"),
    [
        ("_MAX_LEXER_STATES", StructuredOutput("regex", "(a|b)*a(a|b){20}c")),
        ("_MAX_ROW_ITEMS", StructuredOutput("grammar", 'start: x\nx: x x | "a" | "b"')),
    ],
)
def test_a_constraint_that_exceeds_a_limit_while_it_is_enforced_is_called_too_complex(
    monkeypatch: pytest.MonkeyPatch, limit: str, spec: StructuredOutput
) -> None:
    monkeypatch.setattr(backends, limit, 40)
    matcher = LLGuidance(VOCABULARY).compile(spec).matcher()

    def generate() -> None:
        for number in range(100):
            allowed_ids(matcher, len(VOCABULARY.tokens))
            matcher.accept(ord("ab"[number % 3 // 2]))

    with pytest.raises(GrammarError, match=f"^{CONSTRAINT_TOO_COMPLEX}: "):
        generate()
