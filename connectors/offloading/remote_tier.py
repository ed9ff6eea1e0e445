"""The remote tier in the scheduler: what the workers have said about a store that engines share.

Other engines write into the store, and it evicts by its own rules, so nothing is known in advance.
The workers are asked about the blocks of each request when it is looked up first, and until they
have answered, the blocks are neither there nor absent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeAlias

import msgspec

from longshore.connectors.offloading.ledger import LedgerEvent, PreparedStore
from longshore.connectors.offloading.tiers import LowerTier, TierFaults
from longshore.protocol.errors import LongshoreError
from longshore.protocol.events import Locality, Medium

MAX_QUERY_KEYS: Final = 16_384

MAX_KNOWN: Final = 200_000
"""Answers that are kept. More are only needed if the blocks of all waiting requests are more."""


class RemoteQuery(msgspec.Struct, frozen=True, array_like=True):
    """Which of these blocks does the store have? With `is_prefix`, those after the first absent one
    are of no use without it, and need no answer."""

    query_id: int
    keys: list[bytes]
    is_prefix: bool


class RemoteAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One rank's answer about the first blocks of a query. present: a byte each, 1 or 0."""

    query_id: int
    present: bytes


class RemoteHealth(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How one rank's operations have gone since it started."""

    faults: TierFaults


RemoteMessage: TypeAlias = RemoteAnswer | RemoteHealth


@dataclass
class _Asked:
    """A query in progress, and the answers so far, by rank."""

    keys: list[bytes]
    answers: dict[int, bytes] = field(default_factory=dict)


class RemoteTier(LowerTier):
    """A block is there when all ranks have said so.

    An answer is of use to the requests that wait: it is forgotten when a later request is looked up
    first, or when one with these blocks has ended.
    """

    name = "remote"
    medium: Medium = "STORAGE"
    locality: Locality | None = "REMOTE"
    can_write = True

    def __init__(self, num_ranks: int, partial_groups: frozenset[int]) -> None:
        """partial_groups: numbers of the groups of which a hit does not need all blocks."""
        self._num_ranks = num_ranks
        self._partial_groups = partial_groups
        self._query_ids = count(1)
        self._faults: dict[int, TierFaults] = {}  # by rank
        self._former_faults = TierFaults()  # of earlier epochs
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._former_faults = msgspec.structs.replace(self.faults, num_open_breakers=0)
        self._faults.clear()
        self._known: dict[bytes, bool] = {}
        self._runs: list[dict[bytes, None]] = [{}]  # to ask, by request as far as it is known
        self._separate: dict[bytes, None] = {}  # to ask, of partial groups
        self._asked: dict[int, _Asked] = {}
        self._waits: set[bytes] = set()  # keys to ask and of queries in progress
        self._writing: set[bytes] = set()

    # Lookups

    def has(self, key: bytes) -> bool | None:
        found = self._known.get(key)
        if found is None and key not in self._waits:
            self._waits.add(key)
            self._runs[-1][key] = None
        return found

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if self._known.get(key) is False]

    def touch(self, keys: Sequence[bytes], position: int) -> None:
        self._forget(keys)
        if self._runs[-1]:
            self._runs.append({})
        if keys and keys[0][-1] in self._partial_groups:
            # One after the other would be looked up, from the end, in a step each.
            new = [key for key in keys if key not in self._waits]
            self._waits.update(new)
            self._separate.update(dict.fromkeys(new))

    def refresh(self, keys: Sequence[bytes]) -> None:
        self._forget(keys)

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._known.pop(key, None)

    @property
    def has_commands(self) -> bool:
        return bool(self._separate) or any(self._runs)

    def take_commands(self) -> list[bytes]:
        commands = [self._ask(list(run), is_prefix=True) for run in self._runs if run]
        if self._separate:
            commands.append(self._ask(list(self._separate), is_prefix=False))
        self._runs, self._separate = [{}], {}
        return commands

    def _ask(self, keys: list[bytes], *, is_prefix: bool) -> bytes:
        self._waits.difference_update(keys[MAX_QUERY_KEYS:])  # they will be looked up again
        query = RemoteQuery(next(self._query_ids), keys[:MAX_QUERY_KEYS], is_prefix)
        self._asked[query.query_id] = _Asked(query.keys)
        return msgspec.msgpack.encode(query)

    def receive(self, rank: int, message: bytes) -> None:
        answer = msgspec.msgpack.decode(message, type=RemoteMessage)
        if isinstance(answer, RemoteHealth):
            self._faults[rank] = answer.faults
            return
        asked = self._asked.get(answer.query_id)
        if asked is None:
            return  # a repeated message
        asked.answers[rank] = answer.present
        if len(asked.answers) == self._num_ranks:
            self._end(answer.query_id, list(asked.answers.values()))

    def command_ended(self, command: bytes, *, is_failed: bool) -> None:
        query = msgspec.msgpack.decode(command, type=RemoteQuery)
        if is_failed and query.query_id in self._asked:
            self._end(query.query_id, [bytes(len(query.keys))])

    def _end(self, query_id: int, answers: Sequence[bytes]) -> None:
        """A block is there if all ranks have it, and absent if one has not; else it is unknown,
        because some ranks did not need to answer."""
        keys = self._asked.pop(query_id).keys
        self._waits.difference_update(keys)
        for index, key in enumerate(keys):
            said = [answer[index] for answer in answers if index < len(answer)]
            if not all(said) or len(said) == len(answers):
                self._known[key] = all(said)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    # Reads and writes

    def begin_reads(self, keys: Sequence[bytes]) -> list[int]:
        return [0] * len(keys)

    def end_reads(self, keys: Sequence[bytes], *, take: bool = False) -> None:
        """Do nothing: no memory was kept for these blocks."""

    @property
    def num_blocks(self) -> int:
        return sum(self._known.values())

    @property
    def capacity_blocks(self) -> int:
        return 0

    @property
    def faults(self) -> TierFaults:
        counts = map(msgspec.structs.astuple, [self._former_faults, *self._faults.values()])
        return TierFaults(*map(sum, zip(*counts, strict=True)))

    def begin_writes(self, keys: Sequence[bytes]) -> PreparedStore | None:
        new = [key for key in keys if not self._known.get(key) and key not in self._writing]
        self._writing.update(new)
        return PreparedStore(new, [0] * len(new), [])

    def end_writes(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        self._writing.difference_update(keys)
        for key in set(keys).difference(failed).intersection(self._known):
            self._known[key] = True

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._known.get(key):
                self._known[key] = False

    # All of them

    def take_events(self) -> list[LedgerEvent]:
        """None: other engines store and evict the same blocks."""
        return []

    def reset(self) -> None:
        """The store belongs to other engines, too, so its blocks stay."""
        self._known.clear()

    def check(self) -> None:
        asked = [key for asked in self._asked.values() for key in asked.keys]
        waits = [*asked, *self._separate, *(key for run in self._runs for key in run)]
        if len(waits) != len(self._waits) or set(waits) != self._waits:
            raise LongshoreError("the remote tier waits for answers to questions never asked")
        if self._asked or self._writing:
            raise LongshoreError("the remote tier has queries or writes in an idle engine")
