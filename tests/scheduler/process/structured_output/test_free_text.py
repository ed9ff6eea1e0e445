"""Grammars of a part of the output: what is free, and from where on the grammar holds."""

import random

import pytest

from longshore.protocol.requests import FreeText, StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.backends import Backends
from longshore.scheduler.process.structured_output.matcher import Matcher
from tests.harness.vocabularies import PIECES, allowed_ids, small_vocabulary

VOCABULARY = small_vocabulary()
SIZE = len(VOCABULARY.tokens)
END = VOCABULARY.eos_token_ids[0]
OPEN, CLOSE = 256 + PIECES.index(b"[]"), 256 + PIECES.index(b"{}")
FINAL = (*b"<f", CLOSE)
CALL = 'start: "f(" args ")"\nargs: %json {"type":"array","items":{"type":"integer"}}\n'
BACKENDS = Backends(("llguidance",), VOCABULARY)


def matcher_of(kind: str, text: str, free: FreeText) -> Matcher:
    return BACKENDS.compile(StructuredOutput(kind, text, free)).matcher()  # type: ignore[arg-type]


def accepts(matcher: Matcher, tokens: list[int]) -> bool:
    for token_id in tokens:
        if token_id not in allowed_ids(matcher, SIZE):
            assert not matcher.accept(token_id)
            return False
        assert matcher.accept(token_id)
    return True


@pytest.mark.parametrize(
    ("free", "tokens", "is_allowed"),
    [
        (FreeText(((CLOSE,),)), [*b"any text", CLOSE, *b"yes", END], True),
        (FreeText(((CLOSE,),)), [*b"yes", END], False),
        (FreeText(((CLOSE,),)), [CLOSE, *b"any"], False),
        (FreeText(((CLOSE,),), begin=OPEN), [OPEN, *b"any text", CLOSE, *b"yes", END], True),
        (FreeText(((CLOSE,),), begin=OPEN), [*b"yes", END], True),
        (FreeText(((CLOSE,),), begin=OPEN), [*b"any"], False),
        (FreeText(((CLOSE,),), begin=OPEN), [*b"ye", OPEN], False),
        (FreeText((FINAL, (OPEN,))), [CLOSE, *FINAL, *b"yes", END], True),
        (FreeText((FINAL, (OPEN,))), [*FINAL[1:], OPEN, *b"yes", END], True),
    ],
)
def test_a_grammar_holds_after_the_free_text(
    free: FreeText, tokens: list[int], is_allowed: bool
) -> None:
    assert accepts(matcher_of("choice", '["yes"]', free), tokens) is is_allowed


@pytest.mark.parametrize(
    ("tokens", "is_allowed"),
    [
        ([*b"no call", END], True),
        ([*b"one: ", OPEN, *b"f([1])", *b" and ", OPEN, *b"f([])", END], True),
        ([OPEN, *b"f([1", END], False),
        ([OPEN, *b"g"], False),
        ([OPEN, *b'f(["a'], False),
        ([OPEN, *b"f([1])", OPEN, *b"g"], False),
    ],
)
def test_calls_follow_the_grammar_and_text_between_them_is_free(
    tokens: list[int], is_allowed: bool
) -> None:
    matcher = matcher_of("tool_calls", CALL, FreeText(((OPEN,),), repeats=True))
    assert accepts(matcher, tokens) is is_allowed


@pytest.mark.parametrize("begin", [None, OPEN])
def test_marks_in_the_reasoning_begin_no_call(begin: int | None) -> None:
    reasoning = FreeText(((CLOSE,),), begin=begin)
    free = FreeText(((OPEN,),), repeats=True, reasoning=reasoning)
    opened = [] if begin is None else [begin]
    matcher = matcher_of("tool_calls", CALL, free)
    assert accepts(matcher, [*opened, *b"a ", OPEN, *b"g", CLOSE, OPEN, *b"f([1])", *b"c", END])
    matcher.rollback(len(opened) + 14)
    assert accepts(matcher, [*opened, *b"a ", OPEN, *b"g", CLOSE, OPEN])
    assert not matcher.accept(ord("g"))
    matcher.rollback(len(opened) + 6)
    assert accepts(matcher, [*opened, OPEN, *b"x", CLOSE, END])


def test_a_schema_of_a_call_that_cannot_be_enforced_is_rejected() -> None:
    grammar = 'start: "f" args\nargs: %json {"type":"array","uniqueItems":true}\n'
    with pytest.raises(GrammarError, match="/uniqueItems"):
        matcher_of("tool_calls", grammar, FreeText(((OPEN,),), repeats=True))


@pytest.mark.parametrize(
    ("free", "kind", "text", "output"),
    [
        (
            FreeText(((OPEN,),), repeats=True),
            "tool_calls",
            CALL,
            [*b"a ", OPEN, *b"f([12])", *b" b", OPEN, *b"f([])", *b"c", END],
        ),
        (
            FreeText(((CLOSE,),), begin=OPEN),
            "choice",
            '["yes"]',
            [OPEN, *b"a", CLOSE, *b"yes", END],
        ),
    ],
)
def test_rollback_restores_what_was_allowed(
    free: FreeText, kind: str, text: str, output: list[int]
) -> None:
    matcher = matcher_of(kind, text, free)
    masks = []
    for token_id in output:
        masks.append(allowed_ids(matcher, SIZE))
        assert matcher.accept(token_id)
    position, rng = len(output), random.Random(7)
    for _ in range(200):
        target = rng.randrange(position + 1)
        matcher.rollback(position - target)
        position = target
        assert position == len(output) or allowed_ids(matcher, SIZE) == masks[position]
        for token_id in output[position : (end := rng.randrange(position, len(output) + 1))]:
            assert matcher.accept(token_id)
        position = end
