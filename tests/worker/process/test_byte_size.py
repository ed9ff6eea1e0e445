"""Human-readable byte sizes."""

import pytest

from longshore.worker.process.byte_size import byte_size


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.00 KiB"),
        (5_300_000, "5.05 MiB"),
        (3 << 30, "3.00 GiB"),
        (5 << 40, "5,120.00 GiB"),
    ],
)
def test_a_size_is_at_least_one_of_its_unit(num_bytes: int, words: str) -> None:
    assert byte_size(num_bytes) == words
