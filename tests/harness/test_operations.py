"""Scans that execute no line of Python are counted, whatever they are written as."""

from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heapify, heappush
from typing import Any, Final

import pytest

from tests.harness.operations import count_operations, grows_at_most_n_log_n

SIZES: Final = (128, 256, 512)


class Queue:
    """One structure of each kind, with the same elements."""

    def __init__(self, num_elements: int) -> None:
        self.items = list(range(num_elements))
        self.ends = deque(self.items)
        self.by_id = dict.fromkeys(self.items)
        self.lists = {"all": list(self.items)}
        self.ordered = OrderedDict(self.by_id)


def growth(step: Callable[[Queue, int], Any]) -> dict[int, int]:
    """Operations of one step per element, by the number of elements."""
    counts = {}
    for size in SIZES:
        queue = Queue(size)

        def run(queue: Queue = queue, size: int = size) -> None:
            for number in range(size):
                step(queue, number)

        counts[size] = count_operations(run)
    return counts


def search(queue: Queue, number: int) -> None:
    assert -1 not in queue.items


def remove(queue: Queue, number: int) -> None:
    queue.items.remove(number)


def remove_from_deque(queue: Queue, number: int) -> None:
    queue.ends.remove(number)


def remove_from_one_of_several(queue: Queue, number: int) -> None:
    queue.lists["all"].remove(number)


def find_least(queue: Queue, number: int) -> None:
    min(queue.by_id)


def find_least_by_key(queue: Queue, number: int) -> None:
    min(queue.items, key=lambda item: -item)


def order(queue: Queue, number: int) -> None:
    sorted(queue.by_id.values(), key=str)


def make_heap(queue: Queue, number: int) -> None:
    heapify(queue.items)


def copy_all(queue: Queue, number: int) -> None:
    list(queue.by_id.values())


def unpack(queue: Queue, number: int) -> None:
    assert [*queue.items, number]


def merge(queue: Queue, number: int) -> None:
    assert queue.by_id | {-1: None}


def cut(queue: Queue, number: int) -> None:
    assert queue.items[1:]


def delete_first(queue: Queue, number: int) -> None:
    del queue.items[:1]


def filter_all(queue: Queue, number: int) -> None:
    assert [item for item in queue.items if item >= 0]


def sum_of_all(queue: Queue, number: int) -> None:
    sum(item for item in queue.items)


def loop(queue: Queue, number: int) -> None:
    for _ in queue.items:
        pass


@pytest.mark.parametrize(
    "step",
    [
        *(search, remove, remove_from_deque, remove_from_one_of_several, find_least),
        *(find_least_by_key, order, make_heap, copy_all, unpack, merge, cut, delete_first),
        *(filter_all, sum_of_all, loop),
    ],
)
def test_a_scan_of_all_elements_for_each_of_them_grows_too_fast(
    step: Callable[[Queue, int], None],
) -> None:
    assert not grows_at_most_n_log_n(growth(step))


def push_and_pop(queue: Queue, number: int) -> None:
    heappush(queue.items, number)
    queue.ends.append(queue.ends.popleft())


def look_up(queue: Queue, number: int) -> None:
    assert number in queue.by_id
    assert next(iter(queue.ordered)) == 0
    queue.ordered.move_to_end(number, last=False)
    queue.ordered.move_to_end(0, last=False)


def cut_little(queue: Queue, number: int) -> None:
    assert len([*queue.items[:2], *queue.items[-2:]]) == 4


def search_little(queue: Queue, number: int) -> None:
    assert [each for each in queue.items[:2] if each in (0, 1)] == [0, 1]


def delete_last(queue: Queue, number: int) -> None:
    del queue.items[-1:]


def scan_all_once(queue: Queue, number: int) -> None:
    if number == 0:
        queue.items = [item for item in sorted(queue.items) if item in queue.by_id]


@pytest.mark.parametrize(
    "step", [push_and_pop, look_up, cut_little, search_little, delete_last, scan_all_once]
)
def test_a_step_that_does_not_depend_on_the_number_of_elements_grows_with_it(
    step: Callable[[Queue, int], None],
) -> None:
    assert grows_at_most_n_log_n(growth(step))


def test_the_count_is_the_same_every_time() -> None:
    assert growth(find_least_by_key) == growth(find_least_by_key)


def test_a_share_of_quadratic_work_is_found_at_the_largest_sizes() -> None:
    def share(size: int) -> int:
        return 1000 * size + size**2 // 20

    assert grows_at_most_n_log_n({size: share(size) for size in (64, 128)})
    assert not grows_at_most_n_log_n({size: share(size) for size in (1024, 4096, 16384)})
