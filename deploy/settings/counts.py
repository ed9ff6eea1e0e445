"""Counts as people write them on the command line: 32k is 32,000, and 32K is 32,768."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from cyclopts import Token

_COUNT: Final = re.compile(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)")
_FACTORS: Final = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
}


def read_count(kind: object, tokens: Sequence[Token]) -> int:
    """A converter of cyclopts. As in vLLM, a small letter is a power of 1000, a capital one of
    1024. Raises ValueError."""
    text = tokens[0].value.strip().replace("_", "")
    match = _COUNT.fullmatch(text)
    count = Decimal(match[1]) * _FACTORS[match[2]] if match else None
    if count is None or count != int(count):
        raise ValueError(
            f"{text!r} is not a whole number, such as 8192, 32k (32,000) or 32K (32,768)"
        )
    return int(count)
