"""The text of one answer as its tokens arrive, up to the stop string that ends it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from longshore.deploy.gateway.text.detokenizer import IncrementalDetokenizer, TokenDecoder


@dataclass(frozen=True)
class StopStrings:
    """The strings that end an answer; one object for all answers to a request.

    texts:      the stop strings, none of them empty.
    is_shown:   the answer includes the stop string that ends it.
    min_tokens: stop strings in the first `min_tokens` tokens are ignored.
    """

    texts: tuple[str, ...] = ()
    is_shown: bool = False
    min_tokens: int = 0

    @cached_property
    def patterns(self) -> "tuple[StopPattern, ...]":
        """What finds each of the texts."""
        return tuple(map(StopPattern, self.texts))

    @cached_property
    def first_characters(self) -> frozenset[str]:
        return frozenset(text[0] for text in self.texts)


NO_STOP_STRINGS = StopStrings()


class AnswerText:
    """Returns text as soon as no stop string can begin in it.

    num_tokens: tokens of the answer, including those of its stop string but none after it.
    is_stopped: a stop string was found; if several end at the same character, the longest counts.
    stop_string: the one that was found.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_token_ids: Sequence[int] = (),
        stops: StopStrings = NO_STOP_STRINGS,
        *,
        shows_special: bool = False,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_token_ids, shows_special=shows_special
        )
        self._stops = stops
        self._num_matched = [0] * len(stops.texts)
        self._held = ""  # text held back: a prefix of a stop string, the longest that matches
        self.num_tokens = 0
        self.is_stopped = False
        self.stop_string: str | None = None

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown after these tokens; empty once stopped."""
        if not self._num_matched:
            self.num_tokens += len(token_ids)
            return self._detokenizer.append(token_ids)
        shown = ""
        for token_id in token_ids:  # one by one, to find the token that ends the answer
            if self.is_stopped:
                break
            self.num_tokens += 1
            shown += self._watch(self._detokenizer.append([token_id]))
        return shown

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if self.is_stopped:
            return ""
        shown = self._watch(self._detokenizer.finish()) + self._held
        self._held = ""
        return shown

    def _watch(self, text: str) -> str:
        """The part of the held text and `text` after it that can be shown."""
        stops, matched = self._stops, self._num_matched
        if not matched:
            return text
        if self.num_tokens <= stops.min_tokens:
            return text
        if not self._held and stops.first_characters.isdisjoint(text):
            return text
        for index, character in enumerate(text):
            for number, pattern in enumerate(stops.patterns):
                matched[number] = pattern.advance(matched[number], character)
            ends = [
                stop for stop, count in zip(stops.texts, matched, strict=True) if count == len(stop)
            ]
            if ends:
                self.is_stopped = True
                self.stop_string = max(ends, key=len)
                whole, self._held = self._held + text[: index + 1], ""
                if stops.is_shown:
                    return whole
                return whole[: len(whole) - len(self.stop_string)]
        whole = self._held + text
        border = len(whole) - max(matched)
        self._held = whole[border:]
        return whole[:border]


def whole_text(
    tokenizer: TokenDecoder | None,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    shows_special: bool = False,
) -> str:
    """The text of an answer that is complete; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    text = AnswerText(tokenizer, prompt_token_ids, shows_special=shows_special)
    return text.append(token_ids) + text.finish()


class StopPattern:
    """Finds one string in a text that is read character by character, in linear time (Knuth, Morris
    and Pratt, 1977). The state, which each reader has itself, is the length of the longest prefix
    of the string that ends the text read so far."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._shorter = [0] * len(text)  # by number matched - 1: the next shorter prefix
        num_matched = 0
        for end in range(1, len(text)):
            num_matched = self.advance(num_matched, text[end])
            self._shorter[end] = num_matched

    def advance(self, num_matched: int, character: str) -> int:
        """The state after one more character, given that before it, which is not the whole
        string."""
        text = self._text
        while num_matched and text[num_matched] != character:
            num_matched = self._shorter[num_matched - 1]
        return num_matched + (text[num_matched] == character)
