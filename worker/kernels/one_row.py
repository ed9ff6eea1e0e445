"""Products of one row with a matrix, as in the decode step of a single request."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x M^T + bias. x: (n, columns), weight: (rows, columns), bias: (rows,), all of one dtype ->
    (n, rows).

    On a GPU, one row in half precision is computed by a kernel that only has to read the matrix at
    the memory's bandwidth. The libraries of torch compute tiles of rows. From two rows on, they are
    faster.
    """
    if len(x) == 1 and x.dtype != torch.float32 and uses_triton(x):
        from longshore.worker.kernels.gpu import one_row as gpu

        if weight.stride(1) == 1 and x.stride(1) == 1:
            out: Tensor = gpu.one_row(x, weight, bias)
            return out
    return F.linear(x, weight, bias)
