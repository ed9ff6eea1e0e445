"""Memory in huge pages."""

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels import huge_pages
from longshore.worker.kernels.huge_pages import CHUNK, HUGE_PAGE


def test_tensors_are_zeroed_and_share_no_byte() -> None:
    shapes = [(3, 5), (1,), (1 << 20,), (2, CHUNK // 8), (7,), (CHUNK,), (9, 9)]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float32, torch.uint8, torch.uint8]
    tensors = [
        huge_pages.zeros(shape, dtype)
        for shape, dtype in zip(shapes, [*dtypes, torch.bfloat16], strict=True)
    ]
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shapes[number]
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))


def asks_for_huge_pages(tensor: Tensor) -> bool:
    """Whether the mapping with its first and last byte does."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
    for mapping in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        begin, end = (int(each, 16) for each in mapping.split(" ", 1)[0].split("-"))
        if begin <= first and last < end:
            return "hg" in mapping.rsplit("VmFlags:", 1)[1].split()
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_small_and_large_tensors_are_in_huge_pages() -> None:
    for num_bytes in (100, HUGE_PAGE // 8, 3 * HUGE_PAGE + 100, CHUNK):
        assert asks_for_huge_pages(huge_pages.zeros((num_bytes,), torch.uint8))
    # Not a tensor of torch's: numpy asks for huge pages in the memory that malloc gives to both.
    with mmap.mmap(-1, HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as others:
        assert not asks_for_huge_pages(torch.frombuffer(others, dtype=torch.uint8))
