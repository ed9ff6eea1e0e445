"""Finds clients whose long prompts always differ in their first blocks.

Nothing of such prompts is found in the prefix cache. Mostly a client has put the time or a random
number at their beginning.
"""

import logging
import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

import msgspec

from longshore.protocol.logs.records import fields

logger = logging.getLogger(__name__)

LONG_TOKENS: Final = 1024
"""A prompt that is shorter costs little without the cache."""
FIRST_TOKENS: Final = 256
NUM_PROMPTS: Final = 8
"""So many in a row have to differ."""
MAX_CLIENTS: Final = 256
MAX_NAME_CHARACTERS: Final = 80

_NOT_IN_A_NAME: Final = re.compile(r"[^ -~]")


class UncachedClient(msgspec.Struct, frozen=True):
    """user_agent: what the client calls itself, shortened. key: name of its API key.
    num_prompts: long prompts in a row that differ. first_difference: the first token at which the
    last two do."""

    user_agent: str
    key: str | None
    num_prompts: int
    first_difference: int


class UncachedClientList(msgspec.Struct, frozen=True):
    data: list[UncachedClient]


class UncachedClients:
    """Of one gateway. It knows the MAX_CLIENTS that sent long prompts last."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[str, str | None], _LastPrompts] = OrderedDict()

    def observe(self, user_agent: str | None, key: str | None, token_ids: Sequence[int]) -> None:
        """A client has sent this prompt. Logs the client once all its last ones differ."""
        if len(token_ids) < LONG_TOKENS:
            return
        name = _NOT_IN_A_NAME.sub("?", user_agent or "unknown")[:MAX_NAME_CHARACTERS]
        last = self._prompts.setdefault((name, key), _LastPrompts())
        self._prompts.move_to_end((name, key))
        if len(self._prompts) > MAX_CLIENTS:
            self._prompts.popitem(last=False)
        if last.add(tuple(token_ids[:FIRST_TOKENS])):
            logger.info(
                "the last %d prompts of the client %r all differ from token %d on, so nothing of "
                "them is cached. If it puts the time or a random value there, see prompt_nonces.",
                NUM_PROMPTS,
                name,
                last.first_difference,
                extra=fields(key=key),
            )

    def found(self) -> UncachedClientList:
        """Those whose last prompts differ now."""
        return UncachedClientList(
            [
                UncachedClient(name, key, last.num_different, last.first_difference)
                for (name, key), last in self._prompts.items()
                if last.num_different >= NUM_PROMPTS
            ]
        )


class _LastPrompts:
    """The beginnings of a client's last long prompts."""

    def __init__(self) -> None:
        self._beginnings: deque[tuple[int, ...]] = deque(maxlen=NUM_PROMPTS)
        self.num_different = 0
        self.first_difference = 0

    def add(self, beginning: tuple[int, ...]) -> bool:
        """Whether enough of them differ with this one, for the first time."""
        if beginning in self._beginnings:
            self.num_different = 0
            return False
        if self._beginnings:
            pairs = zip(beginning, self._beginnings[-1], strict=True)
            self.first_difference = next(i for i, (a, b) in enumerate(pairs) if a != b)
        self._beginnings.append(beginning)
        self.num_different += 1
        return self.num_different == NUM_PROMPTS
