"""An answer ends at the first end of a stop string in its text, and no part of the stop string is
returned."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.deploy.gateway.text.answer_text import AnswerText, StopStrings
from longshore.deploy.gateway.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from tests.deploy.tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZERS = {
    kind: ModelTokenizer(tokenizer, ChatTemplate(PLAIN_TEMPLATE, {}))
    for kind, tokenizer in (
        ("byte level", byte_level_tokenizer()),
        ("byte fallback", byte_fallback_tokenizer()),
    )
}
# Few letters, so that stop strings overlap; `the` is one token, `ship` four.
letters = st.sampled_from(["a", "b", "the", "🚢"])
texts = st.lists(letters, max_size=12).map("".join)
words = st.lists(letters, min_size=1, max_size=4).map("".join)
sizes_of_pieces = st.lists(st.integers(1, 5), min_size=1)


def cut(text: str, stops: StopStrings) -> tuple[str, bool]:
    """By the definition: the earliest end of a stop string, and the longest one that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops.texts if text[:end].endswith(stop)]
        if found:
            return text[: end if stops.is_shown else end - max(map(len, found))], True
    return text, False


def read(
    tokenizer: ModelTokenizer,
    token_ids: Sequence[int],
    stops: StopStrings,
    sizes: Sequence[int] = (1,),
) -> tuple[list[str], AnswerText]:
    answer, shown, start = AnswerText(tokenizer, (), stops), [], 0
    while start < len(token_ids):
        size = sizes[len(shown) % len(sizes)]
        shown.append(answer.append(token_ids[start : start + size]))
        start += size
    return [*shown, answer.finish()], answer


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    text=texts,
    stops=st.lists(words, min_size=1, max_size=3),
    is_shown=st.booleans(),
    sizes=sizes_of_pieces,
)
def test_text_ends_where_a_stop_first_ends_however_its_tokens_arrive(
    kind: str, text: str, stops: list[str], is_shown: bool, sizes: list[int]
) -> None:
    tokenizer = TOKENIZERS[kind]
    token_ids, wanted = tokenizer.encode(text), StopStrings(tuple(stops), is_shown)
    shown, answer = read(tokenizer, token_ids, wanted, sizes)
    assert ("".join(shown), answer.is_stopped) == cut(tokenizer.decode(token_ids), wanted)
    assert answer.append(tokenizer.encode("more")) == "" or not answer.is_stopped


@given(text=texts.map(lambda text: text.replace("🚢", "")), stop=words)
def test_no_text_is_held_that_cannot_begin_a_stop(text: str, stop: str) -> None:
    tokenizer = TOKENIZERS["byte level"]
    answer, shown, read_so_far = AnswerText(tokenizer, (), StopStrings((stop,))), "", ""
    for token_id in tokenizer.encode(text):
        shown += answer.append([token_id])
        read_so_far += tokenizer.decode([token_id])
        if answer.is_stopped:
            return
        held = read_so_far[len(shown) :]
        assert stop.startswith(held)
        most = min(len(stop), len(read_so_far) + 1)
        longer = (read_so_far[-n:] for n in range(len(held) + 1, most))
        assert not any(stop.startswith(beginning) for beginning in longer)


def test_of_stops_that_end_together_the_longest_is_cut() -> None:
    tokenizer = TOKENIZERS["byte level"]
    shown, _ = read(tokenizer, tokenizer.encode("baab"), StopStrings(("ab", "aab", "baba")))
    assert "".join(shown) == "b"


def test_tokens_after_the_one_that_ends_a_stop_do_not_count() -> None:
    tokenizer = TOKENIZERS["byte level"]
    _, answer = read(tokenizer, tokenizer.encode("a the b"), StopStrings((" th",)), sizes=(5,))
    assert answer.is_stopped
    assert answer.num_tokens == 2  # ` the` is one token: it contains the stop string


def test_what_the_first_min_tokens_say_is_not_looked_at() -> None:
    tokenizer = TOKENIZERS["byte level"]
    shown, answer = read(tokenizer, tokenizer.encode("ababab"), StopStrings(("ab",), min_tokens=3))
    assert "".join(shown) == "aba" + "b"  # the `a` of a stop string must come later itself
    assert answer.num_tokens == 6
