"""Arrays of messages."""

import numpy as np
import pytest

from longshore.protocol.arrays import EMPTY_INT32, int32_array


@pytest.mark.parametrize("values", [[], (), np.empty(0, np.int64), EMPTY_INT32])
def test_no_values_give_the_shared_empty_array(values: list[int]) -> None:
    assert int32_array(values) is EMPTY_INT32


def test_the_shared_empty_array_cannot_be_written() -> None:
    assert not EMPTY_INT32.flags.writeable
    assert len(EMPTY_INT32) == 0


def test_values_become_contiguous_int32() -> None:
    array = int32_array(np.arange(10)[::3])
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.tolist() == [0, 3, 6, 9]


def test_a_number_beyond_32_bits_is_rejected() -> None:
    with pytest.raises(OverflowError):
        int32_array([2**31])
