"""Random changes of valid inputs: bytes, and JSON values."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5,
    1e308, float("nan"), float("inf"), "", "a", "\0", "\ud800", "é" * 100, "1",
    [], [None], [[]], [0] * 100, {}, {"a": {}}, {"": 0},
)  # fmt: skip
ODD_BYTES: Final = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"\r\n",
    b"\r\n\r\n",
    b"{",
    b"]",
    b'"',
    b"-",
    b"e9",
    b"\x80",
)


def mutated_bytes(seed: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits flipped; parts cut out, repeated, or replaced."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        begin = rng.randrange(len(data) + 1)
        end = min(len(data), begin + rng.choice((0, 1, 2, 8, 64)))
        match rng.randrange(5):
            case 0 if begin < len(data):
                data[begin] ^= 1 << rng.randrange(8)
            case 1:
                del data[begin:end]
            case 2:
                data[begin:begin] = data[begin:end] * rng.randint(1, 4)
            case 3:
                data[begin:end] = rng.choice(ODD_BYTES)
            case _:
                data[begin:end] = rng.randbytes(end - begin)
    return bytes(data)


def mutated_json(seed: Any, rng: random.Random) -> Any:
    """One to three changes: a value replaced or removed, a key renamed or added, at any depth."""
    value = copy.deepcopy(seed)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return rng.choice(ODD_VALUES)
        container, key = rng.choice(places)
        odd = copy.deepcopy(rng.choice(ODD_VALUES))
        match rng.randrange(6):
            case 0 if isinstance(container, dict):
                container[f"{key}_"] = container.pop(key)
            case 1:
                del container[key]
            case 2 if isinstance(container, list):
                container.insert(key, odd)
            case 3 if isinstance(container[key], int | float):
                container[key] = container[key] * rng.choice((-1, 0, 0.5, 3, 10**6))
            case _:
                container[key] = odd
    return value


def refusal(call: Callable[[], object], *expected: type[Exception]) -> Exception | None:
    """The error that the call raises, one of `expected`, or None."""
    try:
        call()
    except expected as error:
        return error
    return None


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, each in items:
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)
