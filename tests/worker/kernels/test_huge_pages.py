"""Memory in huge pages."""

import re
from pathlib import Path

import pytest
import torch

from longshore.worker.kernels import huge_pages
from longshore.worker.kernels.huge_pages import CHUNK, HUGE_PAGE

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    return 1024 * int(
        re.findall(r"AnonHugePages: *(\d+)", Path("/proc/self/smaps_rollup").read_text())[0]
    )


def test_tensors_are_zeroed_and_share_no_byte() -> None:
    shapes = [(3, 5), (1,), (1 << 20,), (2, CHUNK // 8), (7,), (CHUNK,), (9, 9)]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float32, torch.uint8, torch.uint8]
    tensors = [
        huge_pages.zeros(s, d) for s, d in zip(shapes, [*dtypes, torch.bfloat16], strict=True)
    ]
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shapes[number]
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number + 1)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE, 3 * HUGE_PAGE + 1])
def test_a_mapping_begins_with_a_huge_page(num_bytes: int) -> None:
    memory = huge_pages.mapped(num_bytes)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert num_bytes <= len(memory) < num_bytes + HUGE_PAGE
    assert not memory.any()
    memory.fill_(1)


@pytest.mark.skipif(
    not SWITCH.exists() or "[never]" in SWITCH.read_text(), reason="the kernel has no huge pages"
)
def test_many_small_tensors_are_in_huge_pages() -> None:
    before = huge_bytes()
    tensors = [huge_pages.zeros((HUGE_PAGE // 8,), torch.uint8) for _ in range(64)]
    for tensor in tensors:
        tensor.fill_(1)
    assert huge_bytes() - before >= 6 * HUGE_PAGE
    del tensors
