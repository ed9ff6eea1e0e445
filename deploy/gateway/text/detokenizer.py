"""Incremental detokenization, in O(1) amortised per token.

A token's text depends on its neighbours: a character may be split over several byte tokens, and the
space before a word may be dropped at the start of a text. The text of new tokens is therefore the
difference between two decodings of a short window: the tokens whose text was returned last, with
and without the new ones. For byte-level tokenizers, whole characters need no window.
"""

from collections.abc import Sequence
from typing import Final, Protocol

REPLACEMENT: Final = "\ufffd"
# A character has at most 4 bytes, so an incomplete one spans at most 3 byte tokens.
MAX_INCOMPLETE_TOKENS: Final = 3
# Prompt tokens that show whether the first output token continues a word or a character.
NUM_CONTEXT_TOKENS: Final = range(4, 9)
# Tokens kept in the window if they have no text.
MAX_SILENT_TOKENS: Final = 16


class TokenDecoder(Protocol):
    """The part of a tokenizer that detokenizing needs.

    is_bytewise: a text is the concatenation of its tokens' bytes, independent of their neighbours.
    """

    special_token_ids: frozenset[int]
    is_bytewise: bool

    def decode(self, token_ids: Sequence[int]) -> str: ...


class ShowingDecoder:
    """A decoder that shows some of the special tokens, for texts whose markers are parsed."""

    def __init__(self, decoder: TokenDecoder, shown_token_ids: frozenset[int]) -> None:
        self.special_token_ids = decoder.special_token_ids - shown_token_ids
        self.is_bytewise = decoder.is_bytewise
        self.decode = decoder.decode


class IncrementalDetokenizer:
    """The text of one output, without special tokens unless `shows_special`.

    prompt_token_ids: the prompt; only its last tokens are used.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_token_ids: Sequence[int] = (),
        *,
        shows_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if shows_special else tokenizer.special_token_ids
        self._held: list[int] = []
        self._shown = self._context(prompt_token_ids)
        self._shown_text = tokenizer.decode(self._shown)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens, beginning with a whole character; else empty."""
        tail = self._visible(prompt_token_ids[-MAX_SILENT_TOKENS:])
        for num_tokens in NUM_CONTEXT_TOKENS:
            context = tail[-num_tokens:]
            if not self._tokenizer.decode(context).startswith(REPLACEMENT):
                return context
        return []

    def append(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` add, up to the last complete character."""
        visible = self._visible(token_ids)
        if self._tokenizer.is_bytewise and not self._held and self._is_whole(self._shown_text):
            text = self._tokenizer.decode(visible)
            if text and self._is_whole(text):
                self._shown, self._shown_text = visible, text
                return text
        self._held += visible
        if not self._held:
            return ""
        num_held = len(self._held)
        for num_shown in range(num_held, max(num_held - MAX_INCOMPLETE_TOKENS, 1) - 1, -1):
            text = self._decode_window(num_shown)
            if self._is_whole(text):
                return self._show(num_shown, text)
        if num_held <= MAX_INCOMPLETE_TOKENS:
            return ""
        # Bytes before the last three tokens can no longer become a character.
        num_shown = num_held - MAX_INCOMPLETE_TOKENS
        return self._show(num_shown, self._decode_window(num_shown))

    def finish(self) -> str:
        """The text still held back, without a final incomplete character (nor a replacement
        character that the model itself generated at the very end)."""
        num_held = len(self._held)
        return self._show(num_held, self._decode_window(num_held).rstrip(REPLACEMENT))

    def _decode_window(self, num_held: int) -> str:
        return self._tokenizer.decode(self._shown + self._held[:num_held])

    def _show(self, num_held: int, text: str) -> str:
        """Return what the first `num_held` held tokens add; they become the new window."""
        token_ids = self._held[:num_held]
        self._held = self._held[num_held:]
        if text.startswith(self._shown_text):
            added = text[len(self._shown_text) :]
        else:  # the new tokens changed the text before them, which has been returned already
            added = self._tokenizer.decode(token_ids).strip(REPLACEMENT)
        self._shown = token_ids if added else (self._shown + token_ids)[-MAX_SILENT_TOKENS:]
        self._shown_text = self._tokenizer.decode(self._shown)
        return added

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        if self._hidden.isdisjoint(token_ids):
            return list(token_ids)
        return [token_id for token_id in token_ids if token_id not in self._hidden]

    @staticmethod
    def _is_whole(text: str) -> bool:
        return not text.endswith(REPLACEMENT)
