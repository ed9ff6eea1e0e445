"""Vocabularies for grammars, and outputs sampled through masks."""

import random
from functools import cache

import numpy as np

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.scheduler.process.structured_output.matcher import Matcher
from longshore.scheduler.process.structured_output.vocabulary import Vocabulary, load_vocabulary

PIECES = (b'{"', b'":', b'",', b"true", b"false", b"null", b"[]", b"{}", b"00", b"  ", b"-1", b"ab")


def small_vocabulary() -> Vocabulary:
    """A token per byte, some longer ones, an end and an id without a token."""
    tokens = (*(bytes([byte]) for byte in range(256)), *PIECES, b"<end>", b"")
    end = len(tokens) - 2
    return Vocabulary(tokens, (end, end + 1), (end,), lambda text: list(text.encode()))


@cache
def demo_vocabulary() -> Vocabulary:
    """Of the bundled demo model."""
    return load_vocabulary(DEMO_MODEL_DIR / "tokenizer.json", vocab_size=1600, eos_token_ids=(2,))


def allowed_ids(matcher: Matcher, vocab_size: int) -> list[int]:
    """What the next token may be."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any()
    ids: list[int] = np.flatnonzero(bits).tolist()
    return ids


def sampled_text(
    matcher: Matcher,
    vocabulary: Vocabulary,
    rng: random.Random,
    *,
    num_free: int = 0,
    max_tokens: int = 200,
) -> str | None:
    """An output that the masks allow, of random printable tokens. After `num_free` of them it ends
    as soon as it may. None if it does not end within `max_tokens`."""
    output = b""
    for index in range(max_tokens):
        ids = allowed_ids(matcher, len(vocabulary.tokens))
        assert ids, f"no token can follow {output!r}"
        ends = [token_id for token_id in ids if token_id in vocabulary.eos_token_ids]
        assert not set(ids) & set(vocabulary.special_ids) - set(ends)
        plain = [one for one in ids if one not in ends and vocabulary.tokens[one].isascii()]
        closing = [one for one in plain if vocabulary.tokens[one][:1] in b'"}],:0123456789tfn']
        if index < num_free and plain:
            token_id = rng.choice(plain)
        elif ends:
            token_id = ends[0]
        else:  # now and then another one: some texts do not end without
            token_id = rng.choice(closing if closing and rng.random() < 0.8 else plain or ids)
        assert matcher.accept(token_id)
        if token_id in ends:
            return output.decode()
        output += vocabulary.tokens[token_id]
    return None
