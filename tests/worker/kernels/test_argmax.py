"""The lowest index of the largest logit, in every variant."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.gpu import argmax as gpu_argmax
from tests.worker.kernels.variants import TRITON, every_variant_and_triton, using

LOGITS = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 2.0, 2.5, math.inf])


@every_variant_and_triton
@given(
    lines=st.integers(1, 50).flatmap(
        lambda size: st.lists(st.lists(LOGITS, min_size=size, max_size=size), max_size=5)
    ),
    num_threads=st.sampled_from([1, 3]),
)
def test_the_lowest_index_of_equal_largest_values_is_found(
    variant: str, lines: list[list[float]], num_threads: int
) -> None:
    logits = torch.tensor(lines).view(len(lines), -1) if lines else torch.empty(0, 4)
    with using(variant, num_threads=num_threads):
        best, num_non_finite = argmax(logits)
    assert best.tolist() == [line.index(max(line)) for line in lines]
    assert num_non_finite.tolist() == [sum(map(math.isinf, line)) for line in lines]


@every_variant_and_triton
def test_lines_of_a_vocabulary_and_parts_of_wider_ones_equal_torchs(variant: str) -> None:
    wide = torch.randn(9, 5003)
    with using(variant, num_threads=2):
        assert torch.equal(argmax(wide)[0], wide.argmax(-1))
        assert torch.equal(argmax(wide[:, 100:4100])[0], wide[:, 100:4100].argmax(-1))


@pytest.mark.parametrize("num_programs", [1, 4, 1056])
def test_a_program_computes_several_spans_of_a_line(
    num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among equal logits of different spans and programs, the first one is found."""
    monkeypatch.setattr(gpu_argmax, "NUM_PROGRAMS", num_programs)
    logits = torch.randn(2, 3 * gpu_argmax.BLOCK + 5)
    logits[0, [2 * gpu_argmax.BLOCK - 1, 2 * gpu_argmax.BLOCK, -1]] = 9.0
    logits[1, [7, gpu_argmax.BLOCK + 7, -2]] = math.nan
    with using(TRITON):
        best, num_non_finite = argmax(logits)
    assert best[0] == 2 * gpu_argmax.BLOCK - 1
    assert best[1] == logits[1].nan_to_num(-9.0).argmax()
    assert num_non_finite.tolist() == [0, 3]


@every_variant_and_triton
def test_a_line_with_nan_gets_a_valid_index(variant: str) -> None:
    logits = torch.randn(3, 37)
    logits[0, 5] = math.nan
    logits[2] = math.nan
    with using(variant):
        found, num_non_finite = argmax(logits)
    assert ((found >= 0) & (found < 37)).all()
    assert found[1] == logits[1].argmax()
    assert num_non_finite.tolist() == [1, 0, 37]


@every_variant_and_triton
def test_large_values_whose_sum_is_infinite_are_finite(variant: str) -> None:
    with using(variant):
        assert argmax(torch.full((2, 9), 3e38))[1].tolist() == [0, 0]


def test_logits_of_a_wrong_shape_or_dtype_are_rejected() -> None:
    for wrong in (
        torch.zeros(3),
        torch.zeros(2, 3).half(),
        torch.zeros(2, 0),
        torch.zeros(3, 2).t(),
    ):
        with pytest.raises(ValueError, match="must be"):
            argmax(wrong)
