"""The text of one answer while its tokens come, up to the stop string that ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from longshore.deploy.gateway.text.detokenizer import IncrementalDetokenizer, TokenDecoder


@dataclass(frozen=True)
class Stops:
    """Which texts end an answer.

    texts:      none of them empty.
    is_shown:   the one that ends the answer is part of it.
    min_tokens: what this many tokens say is not looked at.
    """

    texts: tuple[str, ...] = ()
    is_shown: bool = False
    min_tokens: int = 0


NO_STOPS = Stops()


class AnswerText:
    """Text is given out as soon as no stop string can begin in it.

    num_tokens: that the answer has, those of its stop included; nothing counts behind it.
    is_stopped: a stop string has been found; where texts of several end together, the longest.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_token_ids: Sequence[int] = (),
        stops: Stops = NO_STOPS,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids)
        self._stops = stops
        self._matches = [_Match(text) for text in stops.texts]
        self._firsts = frozenset(text[0] for text in stops.texts)
        self._held = ""  # a beginning of a stop: as long as the longest match
        self.num_tokens = 0
        self.is_stopped = False

    def append(self, token_ids: Sequence[int]) -> str:
        """What these tokens let out. Once stopped: nothing."""
        if not self._matches:
            self.num_tokens += len(token_ids)
            return self._detokenizer.append(token_ids)
        shown = ""
        for token_id in token_ids:  # one by one, to know which of them ends the answer
            if self.is_stopped:
                break
            self.num_tokens += 1
            shown += self._watch(self._detokenizer.append([token_id]))
        return shown

    def finish(self) -> str:
        """What is left when the tokens have ended."""
        if self.is_stopped:
            return ""
        shown = self._watch(self._detokenizer.finish()) + self._held
        self._held = ""
        return shown

    def _watch(self, text: str) -> str:
        """What can be shown of the text that is held back and this one behind it."""
        if not self._matches:
            return text
        if self.num_tokens <= self._stops.min_tokens:
            return text
        if not self._held and self._firsts.isdisjoint(text):
            return text
        for index, character in enumerate(text):
            ends = [match.length for match in self._matches if match.advance(character)]
            if ends:
                self.is_stopped = True
                whole, self._held = self._held + text[: index + 1], ""
                return whole if self._stops.is_shown else whole[: len(whole) - max(ends)]
        whole = self._held + text
        border = len(whole) - max(match.num_matched for match in self._matches)
        self._held = whole[border:]
        return whole[:border]


class _Match:
    """How much of a text's beginning stands at the end of what was read (Knuth, Morris and Pratt,
    1977)."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.length = len(text)
        self.num_matched = 0
        self._shorter = [0] * len(text)  # by number matched - 1: the next shorter beginning
        for end in range(1, len(text)):
            self.advance(text[end])
            self._shorter[end] = self.num_matched
        self.num_matched = 0

    def advance(self, character: str) -> bool:
        """One more character; whether it completes the text."""
        while self.num_matched and self._text[self.num_matched] != character:
            self.num_matched = self._shorter[self.num_matched - 1]
        self.num_matched += self._text[self.num_matched] == character
        return self.num_matched == self.length
