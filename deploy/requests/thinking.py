"""The thinking budget of a request, and where a constraint begins to hold, from the tags with which
the model reasons."""

from collections.abc import Sequence
from typing import Final

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.parsers.parser import ReasoningParser
from longshore.protocol.requests import FreeText
from longshore.protocol.sampling import ThinkingBudget

PROMPT_END_TOKENS: Final = 16
"""Of the prompt: what opens or ends the reasoning is among them."""


def thinking_budget(
    num_tokens: int,
    parser: ReasoningParser | None,
    tokenizer: ModelTokenizer | None,
    *,
    vocab_size: int,
) -> ThinkingBudget | None:
    """None: the model does not reason, or the end of its reasoning is no token of its own, which
    could be missed. Raises ValueError for a budget that is out of range."""
    if parser is None or tokenizer is None or not parser.end:
        return None
    begin, end, mark = map(tokenizer.encode_rendered, (parser.begin, parser.end, parser.mark))
    known = {*begin, *end, *mark}
    if not known or max(known) >= vocab_size:
        return None
    if not set(mark) <= set(tokenizer.added_tokens.values()):
        return None
    return ThinkingBudget(num_tokens, tuple(begin), tuple(end), tuple(mark))


def answer_marks(
    parser: ReasoningParser | None, tokenizer: ModelTokenizer | None, *, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The tokens after which answers begin. Empty: the model does not reason, or its tags are no
    tokens of their own, which could be missed: its answers begin with their first token."""
    if parser is None or tokenizer is None or not parser.begin or not parser.mark:
        return ()
    added = {token_id for token_id in tokenizer.added_tokens.values() if token_id < vocab_size}
    begin, *marks = (
        tuple(tokenizer.encode_rendered(tag))
        for tag in (parser.begin, *(parser.answers or (parser.mark,)))
    )
    if begin[0] not in added or not all(mark[-1] in added for mark in marks):
        return ()
    return tuple(marks)


def reasoning_before(
    parser: ReasoningParser | None,
    tokenizer: ModelTokenizer | None,
    prompt_token_ids: Sequence[int],
    *,
    vocab_size: int,
) -> FreeText | None:
    """The reasoning before an answer that has a constraint; None: there is none."""
    marks = answer_marks(parser, tokenizer, vocab_size=vocab_size)
    if not marks or parser is None or tokenizer is None:
        return None
    prompt_end = tokenizer.decode(prompt_token_ids[-PROMPT_END_TOKENS:]).rstrip()
    if parser.answers or prompt_end.endswith(parser.begin):
        return FreeText(marks)
    if prompt_end.endswith(parser.mark):
        return None
    return FreeText(marks, begin=tokenizer.encode_rendered(parser.begin)[0])
