"""A graph keeps what is shared, and refuses everything that could run code."""

import struct
from collections import Counter, OrderedDict, deque
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.kv_cache.free_queue import FreeQueue
from longshore.scheduler.queue.policies import PriorityPolicy, PriorityQueue
from longshore.scheduler.recorder.graph import GraphError, decode_graph, encode_graph


def copy(value: Any) -> Any:
    return decode_graph(encode_graph(value))


def test_equal_objects_and_equal_bytes_come_out() -> None:
    values = {
        "plain": [None, True, 1, -(2**62), 0.5, "text", b"bytes"],
        "containers": (deque([1, [2]], maxlen=3), {3, 4}, frozenset({5}), Counter("aab")),
        "ordered": OrderedDict([("b", [1]), ("a", (2, [3]))]),
        "numpy": [np.int64(3), np.arange(12).reshape(3, 4), np.zeros(50_000, np.int32)],
        "message": AddRequest("one", 1, np.arange(3, dtype=np.int32), SamplingParams()),
    }
    again = copy(values)
    assert list(again["ordered"].items()) == list(values["ordered"].items())
    assert again["containers"] == values["containers"]
    assert again["plain"] == values["plain"]
    assert encode_graph(again) == encode_graph(values)
    assert again["ordered"].popitem(last=False) == ("b", [1])


def test_arrays_share_memory_as_before() -> None:
    table = np.arange(20, dtype=np.int64).reshape(4, 5)
    item, row, raw = memoryview(table), table[1], bytearray(8)
    again = copy([table, row, row[::2], item, raw, np.frombuffer(raw, np.uint8), EMPTY_INT32])
    again[0][1, 2] = 99
    assert again[1][2] == again[2][1] == again[3][1, 2] == 99
    again[4][3] = 7
    assert again[5][3] == 7
    assert again[6] is EMPTY_INT32


def test_a_large_array_takes_only_the_bytes_that_were_written() -> None:
    array = np.zeros((256, 100_000), np.int32)
    array[3, 70_000:70_010] = 5
    array[255, -1] = 6
    data = encode_graph(array)
    assert len(data) < 20_000
    assert np.array_equal(decode_graph(data), array)


def test_identity_cycles_and_methods_are_kept() -> None:
    policy = PriorityPolicy()
    queue: PriorityQueue[Any] = PriorityQueue(policy.order)
    loop: list[Any] = [policy, queue]
    loop.append(loop)
    again = copy(loop)
    assert again[2] is again
    assert again[1].order.__self__ is again[0]


def test_a_free_queue_goes_on_as_before() -> None:
    queue = FreeQueue(bytearray(12))
    queue.popleft_few(5)
    again = copy(queue)
    assert list(again) == list(queue)
    assert again.popleft_few(3) == queue.popleft_few(3)
    again.release_few([1, 2])
    assert again.position[1] == again.position_item[1]


@pytest.mark.parametrize(
    "value",
    [open, struct, lambda: None, object(), partial(print, 1), np.array([object()]), iter([])],
)
def test_what_is_not_state_of_a_scheduler_cannot_be_encoded(value: object) -> None:
    with pytest.raises(GraphError, match="cannot contain"):
        encode_graph([value])


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "builtins:eval",
        "subprocess:Popen",
        "longshore.scheduler.queue.outside_policies:load_policy",
        "longshore.scheduler.process.startup:serve",
        "longshore.scheduler.process.kv_event_publisher:EventPublisher",
        "longshore.protocol.arrays:np",
        "longshore.protocol.arrays:int32_array",
    ],
)
def test_nothing_that_could_run_code_can_be_named(path: str) -> None:
    named = msgspec.msgpack.encode([[], [["name", path]]])
    with pytest.raises(GraphError):
        decode_graph(named)
    with pytest.raises(GraphError):
        decode_graph(msgspec.msgpack.encode([[[path, ["x"]]], [["object", 0, [1]]]]))


@pytest.mark.parametrize(
    "nodes",
    [
        [["array", "<i8", [1 << 40], True, []]],
        [["array", "|O", [1], True, []]],
        [["array", "<i8", [2], True, [64, b"12345678"]]],
        [["view", [1], "<i8", [9], [8], 0, True], ["array", "<i8", [2], True, []]],
        [["method", [1], "__class__"], ["list", []]],
        [["logger", "root"]],
        [["tuple", [[0]]]],
        [["list", [[7]]]],
        [["given", "connector", 0, {}]],
        [["unknown"]],
        [7],
    ],
)
def test_a_node_that_is_not_valid_is_an_error(nodes: list[Any]) -> None:
    with pytest.raises(GraphError):
        decode_graph(msgspec.msgpack.encode([[], nodes]))
