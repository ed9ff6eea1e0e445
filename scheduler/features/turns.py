"""Turns of conversations, as far as a scheduler can see them, and what is learned from them.

A next turn is recognised by the blocks that its prompt begins with, also if they have been evicted.
What is learned is how likely and how soon a turn has a next one, by its number and by the last
tokens of its answer, which for instance tell a call of a tool from a text for a user; and whether
the next one repeats the answer: templates may drop its reasoning, and clients may not send it back.
"""

import zlib
from collections import OrderedDict
from typing import Final, NamedTuple

from longshore.scheduler.kv_cache.chains import ChainLink, Chains, EndName
from longshore.scheduler.kv_cache.ends import Ends
from longshore.scheduler.kv_cache.habits import (
    CONSUMED,
    INSURANCE,
    NUM_ENDINGS,
    StateKind,
    answer_kind,
    turn_kind,
)
from longshore.scheduler.request import Request

MAX_TURNS: Final = 32_768
"""Turns that are remembered, to learn from the next ones."""

ENDING_TOKENS: Final = 2


class _Turn(NamedTuple):
    """A turn that has ended: its number in the conversation, what it ended with, what it left after
    its answer, and when."""

    number: int
    kind: StateKind
    end: EndName | None
    ended_s: float


class Beginning(NamedTuple):
    """A turn that has not ended: its number in the conversation, and how many tokens of its prompt
    the next turn is expected to begin with; 0 if there is none, because the prompt is others'."""

    number: int
    end: int


class Turns:
    """ends: of answers; None: none is kept."""

    def __init__(self, chains: Chains, ends: Ends | None, tokens_per_hash: int) -> None:
        self._chains = chains
        self._ends = ends
        self._tokens_per_hash = tokens_per_hash
        self._beginnings: dict[Request, Beginning] = {}
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()  # by the block at the prompt's end

    def __contains__(self, request: Request) -> bool:
        return request in self._beginnings

    def __getitem__(self, request: Request) -> Beginning:
        """The turn of a request."""
        return self._beginnings[request]

    def begin(self, request: Request, end: int, junction: int) -> None:
        """The chances of the turn before are learned. A turn has one next turn: others that begin
        with its prompt only share what it begins with. So does a prompt of which others have
        computed all blocks. The same prompt again, perhaps with another text after the place where
        next turns are expected to depart, is a next turn.

        end: tokens of the prompt that the next turn is expected to begin with. junction: those of
        which others have computed the blocks.
        """
        number, is_own = 0, end > junction
        known = filter(self._turns.__contains__, reversed(request.block_hashes))
        if (block_hash := next(known, None)) is not None:
            before = self._turns.pop(block_hash)
            self._learn(before, request)
            number = before.number + 1
            is_own |= end > 0 and block_hash == self.hash_before(request, end)
        self._beginnings[request] = Beginning(number, end if is_own else 0)

    def _learn(self, before: _Turn, request: Request) -> None:
        habits = self._chains.habits
        habits.use(before.kind)
        habits.wait(before.kind, self._chains.now_s - before.ended_s)
        if before.end is not None and self._ends is not None:
            kind = answer_kind(before.kind.turn, before.kind.ending)
            habits.make(kind)
            if self._ends.is_prefix(before.end, request):
                habits.use(kind)

    def end(self, request: Request, now: float, answer: ChainLink | None) -> None:
        """The turn has ended, and its kind is known. answer: what it has left after its answer."""
        turn = self._beginnings.pop(request, None)
        if turn is None or not turn.end or not request.num_output_tokens:
            return
        if turn.end > len(request.block_hashes) * self._tokens_per_hash:
            return  # a session that was rewound
        kind = turn_kind(turn.number, _ending(request))
        self._chains.habits.make(kind)
        block_hash = self.hash_before(request, turn.end)
        end = None if answer is None else answer.end
        self._turns[block_hash] = _Turn(turn.number, kind, end, now)
        self._turns.move_to_end(block_hash)
        if len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)
        link = self._chains.get(block_hash)
        if answer is not None and self._is_repeated(kind, turn.end / answer.num_tokens):
            if answer.kind == INSURANCE or (answer.kind is not None and answer.kind.name == "end"):
                self._chains.place(answer, kind)
            kind = CONSUMED
        if link is not None and link.kind is not None and link.kind.name == "end":
            self._chains.place(link, kind)

    def _is_repeated(self, kind: StateKind, share: float) -> bool:
        """Whether more is saved after the answer than at the end of the prompt, the first `share`
        of it, where all next turns begin."""
        return self._chains.habits.probability(answer_kind(kind.turn, kind.ending)) >= share

    def hash_before(self, request: Request, num_tokens: int) -> bytes:
        """The hash of the block that ends after so many tokens."""
        return request.block_hashes[num_tokens // self._tokens_per_hash - 1]


def _ending(request: Request) -> int:
    """Equal for answers that end with the same tokens; otherwise mostly not."""
    return zlib.crc32(request.token_ids[-ENDING_TOKENS:].tobytes()) % NUM_ENDINGS
