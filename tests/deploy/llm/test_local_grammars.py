"""Grammars of an in-process engine."""

import numpy as np
import pytest

from longshore.deploy.llm.local_grammars import LocalGrammar
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.process.structured_output.backends import LLGuidance
from tests.harness.vocabularies import small_vocabulary

VOCABULARY = small_vocabulary()
END = VOCABULARY.eos_token_ids[0]


@pytest.fixture
def grammar() -> LocalGrammar:
    compiled = LLGuidance(VOCABULARY).compile(StructuredOutput("regex", "ab+c"))
    return LocalGrammar(compiled.matcher(), len(VOCABULARY.tokens))


def allowed(grammar: LocalGrammar, drafts: str = "") -> list[list[int]]:
    """The tokens that are allowed next, and after each draft."""
    num_tokens = len(VOCABULARY.tokens)
    masks = np.zeros((1 + len(drafts), -(-num_tokens // 8)), np.uint8)
    assert grammar.fill_masks(list(drafts.encode()), masks)
    bits = np.unpackbits(masks, axis=1, bitorder="little")[:, :num_tokens]
    return [np.flatnonzero(row).tolist() for row in bits]


def test_masks_follow_the_tokens_and_the_drafts(grammar: LocalGrammar) -> None:
    a, b, c = b"abc"
    assert allowed(grammar) == [[a]]
    assert allowed(grammar, "ab") == [[a], [b], [b, c]]
    assert allowed(grammar) == [[a]]  # drafts are undone
    assert grammar.accept_tokens([a, b, c])
    assert allowed(grammar) == [[END]]


def test_tokens_that_are_not_allowed_change_nothing(grammar: LocalGrammar) -> None:
    a, b, c = b"abc"
    assert grammar.accept_tokens([a])
    assert not grammar.accept_tokens([b, a])
    assert allowed(grammar) == [[b]]
    assert grammar.accept_tokens([b, c, END])


def test_a_draft_that_is_not_allowed_makes_later_masks_void(grammar: LocalGrammar) -> None:
    first, second, *_ = allowed(grammar, "aaa")
    assert (first, second) == ([ord("a")], [ord("b")])
    assert allowed(grammar) == [[ord("a")]]
