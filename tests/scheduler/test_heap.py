"""The heap from which any item can be removed, against a dictionary."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.scheduler.heap import MIN_REBUILD, KeyedHeap

KEYS = [f"k{number}" for number in range(12)]
operations = st.lists(
    st.tuples(st.sampled_from(["add", "pop", "remove"]), st.sampled_from(KEYS), st.integers(0, 3)),
    max_size=80,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(operations)
def test_it_has_the_items_of_a_dictionary_in_order(steps: list[tuple[str, str, int]]) -> None:
    heap: KeyedHeap[int, object] = KeyedHeap()
    model: dict[str, tuple[int, str, object]] = {}
    for name, key, order in steps:
        in_order = sorted(model.values(), key=lambda each: each[:2])
        match name:
            case "add":
                item = object()
                heap.add(key, order, item)
                model[key] = (order, key, item)
            case "pop" if in_order:
                assert heap.pop() is model.pop(in_order[0][1])[2]
            case "remove" if key in model:
                assert heap.remove(key) is model.pop(key)[2]
            case "pop":
                with pytest.raises(LookupError):
                    heap.pop()
            case _:
                with pytest.raises(LookupError):
                    heap.remove(key)
        in_order = sorted(model.values(), key=lambda each: each[:2])
        assert list(heap) == [each[2] for each in in_order]
        assert len(heap) == len(model)
        assert [key in heap for key in KEYS] == [key in model for key in KEYS]
        first = heap.first()
        assert first == ((in_order[0][0], in_order[0][2]) if in_order else None)


def test_removed_entries_are_at_most_as_many_as_the_others() -> None:
    heap: KeyedHeap[int, int] = KeyedHeap()
    for number in range(1000):
        heap.add(str(number), number, number)
    for number in reversed(range(10, 1000)):  # none of them is the first
        heap.remove(str(number))
        assert len(heap._heap) <= 2 * len(heap) + MIN_REBUILD
    assert list(heap) == list(range(10))


def test_items_of_equal_order_and_key_are_never_compared() -> None:
    heap: KeyedHeap[int, object] = KeyedHeap()
    heap.add("other", 0, object())
    for _ in range(3):  # replaces the one before, whose entry stays in the heap
        heap.add("key", 1, object())
    last = object()
    heap.add("key", 1, last)
    heap.remove("other")
    assert list(heap) == [last]
