"""Blocks of GGUF files as quantised rows, against the `gguf` package."""

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from longshore.worker.kernels.device_matrix import line_bytes
from longshore.worker.kernels.packing import values_of
from longshore.worker.loading.gguf_blocks import PACKINGS, quantised_rows
from longshore.worker.loading.gguf_files import KEPT_BITS

_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip
"""Where a block has numbers in float16."""


def random_blocks(kind: str, num_rows: int, num_columns: int) -> np.ndarray:
    """Any bits, but scales of a usual size: (rows, bytes)."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(0)
    shape = num_rows, num_columns // block, block_bytes
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for place in _HALVES[kind]:
        scales = generator.normal(0, 0.01, (*shape[:2], 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = generator.integers(0, 250, shape[:2])
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", PACKINGS)
def test_values_are_those_of_the_package_to_the_last_bit(kind: str) -> None:
    stored = random_blocks(kind, 6, 1024)
    wanted = dequantize(stored, GGMLQuantizationType[kind])
    rows = quantised_rows(kind, torch.from_numpy(stored))
    assert rows.packing == PACKINGS[kind]
    assert torch.equal(values_of(rows), torch.from_numpy(wanted))


def test_memory_is_planned_with_the_bits_of_the_formats() -> None:
    for kind, form in PACKINGS.items():
        bits = form.record_bytes / form.span, line_bytes(form, form.span) / form.span
        assert KEPT_BITS[kind] == (8 * bits[0], 8 * bits[1])
    assert KEPT_BITS.keys() == PACKINGS.keys()
