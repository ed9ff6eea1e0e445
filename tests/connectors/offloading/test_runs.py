"""Queues of runs against plain lists of keys."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from longshore.connectors.offloading.policies.policy import Protected, consume
from longshore.connectors.offloading.policies.runs import Index, RunQueue, parts_of, remove

NUM_QUEUES = 3
prefixes = st.builds(
    lambda first, length: [number.to_bytes(2, "big") for number in range(first, first + length)],
    st.integers(0, 20),
    st.integers(1, 8),
)
queues = st.integers(0, NUM_QUEUES - 1)


class QueuesAndLists(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index: Index = {}
        self.queues = [RunQueue(self.index) for _ in range(NUM_QUEUES)]
        self.lists: list[list[bytes]] = [[] for _ in range(NUM_QUEUES)]  # oldest first

    @rule(keys=prefixes, queue=queues)
    def move(self, keys: list[bytes], queue: int) -> None:
        self.queues[queue].move(parts_of(keys, self.index), 5, 7)
        self.take_out(keys)
        self.lists[queue] += keys[::-1]
        (run,) = {self.index[key] for key in keys}
        assert (run.cls, run.used_at) == (5, 7)

    @rule(keys=prefixes, queue=queues)
    def append(self, keys: list[bytes], queue: int) -> None:
        keys = [key for key in keys if key not in self.index]
        self.queues[queue].append(keys)
        self.lists[queue] += keys[::-1]

    @rule(num_keys=st.integers(0, 20), queue=queues, held=st.sets(st.integers(0, 28)))
    def pop(self, num_keys: int, queue: int, held: set[int]) -> None:
        protected = Protected({number.to_bytes(2, "big") for number in held})
        expected = list(protected.evictable(self.lists[queue]))[:num_keys]
        popped = self.queues[queue].pop(num_keys, protected)
        assert popped == expected
        consume(map(self.index.__delitem__, popped))
        self.take_out(popped)

    @rule(num_keys=st.integers(0, 20), queue=queues, held=st.sets(st.integers(0, 28)))
    def pop_to_the_next(self, num_keys: int, queue: int, held: set[int]) -> None:
        target = (queue + 1) % NUM_QUEUES
        protected = Protected({number.to_bytes(2, "big") for number in held})
        expected = list(protected.evictable(self.lists[queue]))[:num_keys]
        popped = self.queues[queue].pop(num_keys, protected, self.queues[target])
        assert popped == expected
        self.take_out(popped)
        self.lists[target] += popped

    @rule(keys=prefixes)
    def remove(self, keys: list[bytes]) -> None:
        keys = [key for key in keys if key in self.index]
        remove(keys, self.index)
        self.take_out(keys)

    def take_out(self, keys: list[bytes]) -> None:
        self.lists = [[key for key in each if key not in keys] for each in self.lists]

    @invariant()
    def queues_are_the_lists(self) -> None:
        for queue, expected in zip(self.queues, self.lists, strict=True):
            queue.check()
            assert list(queue) == expected
            assert len(queue) == len(expected)
        assert len(self.index) == sum(map(len, self.lists))


TestQueuesAndLists = QueuesAndLists.TestCase
TestQueuesAndLists.settings = settings(max_examples=150, stateful_step_count=40)


def test_memory_of_a_run_whose_keys_have_left_is_freed() -> None:
    index: Index = {}
    queue = RunQueue(index)
    prefix = [number.to_bytes(2, "big") for number in range(1000)]
    queue.append(prefix)
    for last in range(1, 1000):  # each use leaves a shorter rest
        queue.move(parts_of(prefix[:last], index))
        queue.check()
    assert sum(len(run.keys) for run in queue.runs) <= 2 * len(prefix)
    for _ in range(100):
        queue.move(parts_of(prefix, index))
    assert len(queue.runs) == 1
