"""Which tokens requests have, and which KV belongs to each position.

A token depends on its request and its output position alone, so the whole output of a request is
known in advance, however it is scheduled. The KV of a position is one number that stands for the
token there, everything before it, and what else changes the KV: cache salt, adapter, items.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, TypeAlias

from longshore.protocol.arrays import Int32Array
from longshore.protocol.requests import MultimodalFeature

VOCAB_SIZE: Final = 100
EOS: Final = 2
GARBAGE: Final = 5
"""What a row samples that read invalid KV; no `steady_token`, but grammars allow it."""

Sample: TypeAlias = Callable[[str, int], int]
Draft: TypeAlias = Callable[[str, int], list[int]]


def sample_token(token_key: str, position: int, vocab_size: int) -> int:
    """The output token of a request at an output position (0 is the first). The key is the
    request's id, or another one for each further output of a session."""
    digest = blake2b(f"{token_key}/{position}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab_size


def propose_token(token_key: str, position: int, vocab_size: int) -> int:
    """The draft for an output position: right three times in four, or by luck."""
    token = sample_token(token_key, position, vocab_size)
    is_wrong = zlib.crc32(f"{token_key}?{position}".encode()) % 4 == 0
    return (token + 1) % vocab_size if is_wrong else token


def steady_token(request_id: str, position: int) -> int:
    """A `sample_token` that never ends its request."""
    return 10 + sample_token(request_id, position, VOCAB_SIZE - 10)


def expected_output(request_id: str, count: int) -> list[int]:
    """The first `count` tokens that `steady_token` gives a request."""
    return [steady_token(request_id, position) for position in range(count)]


def no_drafts(request_id: str, position: int) -> list[int]:
    """A worker without speculation."""
    return []


def prompt_of(length: int, start: int = 10) -> list[int]:
    """Token ids that count up; prompts of equal `start` share their beginning."""
    return [10 + (start + index) % (VOCAB_SIZE - 10) for index in range(length)]


@dataclass(frozen=True)
class Content:
    """What the KV of a request depends on beside its tokens. root: cache salt and adapter."""

    root: str = ""
    items: tuple[MultimodalFeature, ...] = ()

    def item_at(self, position: int) -> str:
        """Hash of the multimodal item at a position; empty between items."""
        for item in self.items:
            if item.offset <= position < item.offset + item.num_tokens:
                return item.hash
        return ""


@dataclass
class Prefixes:
    """The KV of a request's positions, computed as far as it is asked for."""

    content: Content = field(default_factory=Content)
    known: list[int] = field(default_factory=list)

    def up_to(self, end: int, token_ids: Sequence[int]) -> list[int]:
        """`end` positions (or more) of a request whose ids begin with `token_ids`."""
        for position in range(len(self.known), end):
            before = self.known[-1] if self.known else zlib.crc32(self.content.root.encode())
            token = int(token_ids[position]).to_bytes(4, "little")
            item = self.content.item_at(position)
            self.known.append(zlib.crc32(token + item.encode(), before))
        return self.known

    def cut(self, num_tokens: int) -> None:
        """Tokens from this position on are replaced by others."""
        del self.known[num_tokens:]


def prefixes_of(token_ids: Iterable[int] | Int32Array, content: Content | None = None) -> list[int]:
    """The KV of each position."""
    ids = [int(token) for token in token_ids]
    return Prefixes(content or Content()).up_to(len(ids), ids)
