"""Texts that must not appear in an answer, as token ids."""

from collections.abc import Sequence
from typing import Final

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.protocol.sampling import MAX_BAD_WORDS

MAX_BAD_WORD_CHARACTERS: Final = 8192
"""Limit of all bad words together, because they are tokenized on the event loop."""


def bad_word_token_ids(
    words: Sequence[str], tokenizer: ModelTokenizer
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each bad word, both within a word and at the start of one. Raises ValueError,
    beginning with `bad_words`, for words that are not allowed."""
    if len(words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words has {len(words)} texts; at most {MAX_BAD_WORDS} are allowed")
    num_characters = sum(map(len, words))
    if num_characters > MAX_BAD_WORD_CHARACTERS:
        raise ValueError(
            f"bad_words has {num_characters} characters; at most {MAX_BAD_WORD_CHARACTERS} in "
            "all its texts are allowed"
        )
    if not all(word.strip() for word in words):
        raise ValueError("bad_words has an empty text")
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(map(tuple, tokenizer.encode_each(spellings))))
