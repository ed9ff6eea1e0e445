"""Queues of keys in order of their last use, in runs: keys that were used together.

To move a run's keys to another place costs one dict entry per key. The run that they leave still
lists them, and looks into the index, which has the run of each key, to know which it still has.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice, repeat

from longshore.connectors.offloading.policies.policy import Protected, consume
from longshore.protocol.errors import LongshoreError


class Run:
    """Keys that were used together, in prefix order. `cls` and `used_at` are for the policy."""

    __slots__ = ("cls", "keys", "num_keys", "queue", "used_at")

    def __init__(self, keys: list[bytes], queue: "RunQueue", cls: int, used_at: int) -> None:
        self.keys = keys  # some may be in newer runs
        self.num_keys = len(keys)  # that are in this run
        self.queue = queue
        self.cls = cls
        self.used_at = used_at


Index = dict[bytes, Run]  # of all queues of one policy
Parts = list[tuple[Run | None, Sequence[bytes]]]


def parts_of(keys: Sequence[bytes], index: Index) -> Parts:
    """The parts of `keys` that are in the same run, or in none, and the runs."""
    runs = list(map(index.get, keys))
    if runs and runs.count(runs[0]) == len(runs):
        return [(runs[0], keys)]
    parts: Parts = []
    start = 0
    for run, same in groupby(runs):
        end = start + len(list(same))
        parts.append((run, keys[start:end]))
        start = end
    return parts


def remove(keys: Iterable[bytes], index: Index) -> None:
    """Remove keys from their queues and from the index. Raises KeyError if one is in no queue."""
    for run, same in groupby(map(index.pop, keys)):
        run.queue.shorten(run, len(list(same)))


class RunQueue:
    """The oldest key is the last one of the oldest run."""

    __slots__ = ("_index", "num_keys", "runs")

    def __init__(self, index: Index) -> None:
        self._index = index
        self.runs: OrderedDict[Run, None] = OrderedDict()  # oldest first, none without a key
        self.num_keys = 0

    def __len__(self) -> int:
        return self.num_keys

    def __iter__(self) -> Iterator[bytes]:
        """Oldest first."""
        for run in self.runs:
            for key in reversed(run.keys):
                if self._index.get(key) is run:
                    yield key

    def append(self, keys: Sequence[bytes], cls: int = 0, used_at: int = 0) -> None:
        """Make keys the newest run. They must be in no queue of the index."""
        if keys:
            run = Run(list(keys), self, cls, used_at)
            self.runs[run] = None
            self.num_keys += len(keys)
            self._index.update(zip(keys, repeat(run)))

    def move(self, parts: Parts, cls: int = 0, used_at: int = 0) -> None:
        """Make keys the newest run, wherever they are now."""
        if len(parts) == 1 and (run := parts[0][0]) is not None:
            keys = parts[0][1]
            if len(keys) == run.num_keys:  # the whole run
                del run.queue.runs[run]
                run.queue.num_keys -= len(keys)
                run.keys = list(keys)
                run.cls, run.used_at = cls, used_at
                self._take(run)
                return
        self.append([*chain.from_iterable(keys for _, keys in parts)], cls, used_at)
        for run, keys in parts:
            if run is not None:
                run.queue.shorten(run, len(keys))

    def pop(self, num_keys: int, protected: Protected, to: "RunQueue | None" = None) -> list[bytes]:
        """Remove the oldest keys, at most `num_keys`, and return them, oldest first. They become
        the newest ones of `to`; without it, they stay in the index, and the caller must append them
        to a queue or delete them there."""
        popped: list[bytes] = []
        if not num_keys:
            return popped
        emptied = []
        for run in self.runs:
            self._drop_moved(run)
            keys = run.keys
            oldest = list(islice(protected.evictable(reversed(keys)), num_keys - len(popped)))
            if not oldest:
                continue
            popped += oldest
            if len(oldest) == len(keys):
                emptied.append(run)
                if to is None:
                    run.keys, run.num_keys = [], 0
                else:
                    to._take(run)
            else:
                if oldest[-1] is keys[-len(oldest)]:
                    del keys[-len(oldest) :]
                else:
                    gone = set(oldest)
                    run.keys = [key for key in keys if key not in gone]
                run.num_keys -= len(oldest)
                if to is not None:
                    to.append(oldest[::-1])
            if len(popped) == num_keys:
                break
        consume(map(self.runs.__delitem__, emptied))
        self.num_keys -= len(popped)
        return popped

    def _take(self, run: Run) -> None:
        """Make a run of another queue the newest one. Its keys' entries in the index stay."""
        run.queue = self
        self.runs[run] = None
        self.num_keys += run.num_keys

    def shorten(self, run: Run, num_keys: int) -> None:
        """`num_keys` keys of the run have left it."""
        self.num_keys -= num_keys
        run.num_keys -= num_keys
        if not run.num_keys:
            run.keys = []
            del self.runs[run]
        elif len(run.keys) > 2 * run.num_keys:
            self._drop_moved(run)

    def check(self) -> None:
        """Raise LongshoreError if the numbers do not fit the index."""
        for run in self.runs:
            held = sum(self._index.get(key) is run for key in run.keys)
            if run.queue is not self or held != run.num_keys or not held:
                raise LongshoreError(f"a run has {held} keys and counts {run.num_keys}")
            if len(run.keys) > 2 * held:
                raise LongshoreError("a run lists mostly keys of newer runs")
        if self.num_keys != sum(run.num_keys for run in self.runs):
            raise LongshoreError(f"a queue counts {self.num_keys} keys, but has others")

    def _drop_moved(self, run: Run) -> None:
        if len(run.keys) > run.num_keys:
            index = self._index
            run.keys = [key for key in run.keys if index.get(key) is run]
