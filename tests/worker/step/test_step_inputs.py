"""Packing: where arrays lie in a step's buffers."""

import itertools

import numpy as np
import pytest

from longshore.worker.step.step_inputs import ALIGNMENT_BYTES, Packer


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_every_array_begins_at_an_aligned_address(dtype: type[np.generic]) -> None:
    buffer = np.zeros(64, dtype)
    packer = Packer(buffer)
    arrays = [np.arange(1, size + 1).astype(dtype) for size in (1, 3, 0, 2, 5)]
    spans = [packer.put(array) for array in arrays]
    spans.append(packer.put(arrays[1], padded_to=7, padding=-1))
    assert all(span.start * buffer.itemsize % ALIGNMENT_BYTES == 0 for span in spans)
    for array, span in zip(arrays, spans, strict=False):
        assert np.array_equal(buffer[span], array)
    assert buffer[spans[-1]].tolist() == [1, 2, 3, -1, -1, -1, -1]
    assert packer.num_used == spans[-1].stop
    assert all(one.stop <= other.start for one, other in itertools.pairwise(spans))
