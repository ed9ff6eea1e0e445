"""y = x W^T + b in bfloat16, with a matrix packed in advance."""

import torch
from torch import Tensor

from longshore.worker.kernels.native import LINEAR, empty, native, num_threads

PANEL = 32  # outputs computed at once, as in native/linear.h


def supports(weight: Tensor) -> bool:
    """Whether the kernel supports this matrix and is the fastest choice: with AMX tiles, oneDNN
    is faster."""
    kernels = native()
    return (
        kernels is not None
        and kernels.multiplies_bfloat16
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % 2 == 0
        and not torch.cpu._is_amx_tile_supported()
    )


def empty_panels(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Zeroed panels for a matrix in float32, or in bfloat16 with an even number of columns:
    (panels, depth, PANEL, columns / depth), in words of four bytes."""
    word = 4 // dtype.itemsize
    return torch.zeros((-(-num_rows // PANEL), num_columns // word, PANEL, word), dtype=dtype)


def fill_panels(panels: Tensor, weight: Tensor) -> None:
    """Copy weight, (rows, columns), into panels. Extra rows of the last panel are not changed."""
    # Panel by panel, so that packing needs no second copy of a large matrix.
    for panel, rows in zip(panels, weight.split(PANEL), strict=True):
        panel[:, : len(rows)] = rows.unflatten(1, (-1, panels.shape[-1])).transpose(0, 1)


class PackedMatrix:
    """A copy of `weight`, (rows, columns), in panels."""

    def __init__(self, weight: Tensor) -> None:
        self._num_rows, self._num_columns = weight.shape
        self._panels = empty_panels(self._num_rows, self._num_columns, weight.dtype)
        fill_panels(self._panels, weight)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (n, columns), bias: (rows,) -> x M^T + bias, (n, rows). Raises ValueError for
        arguments of a wrong shape or dtype."""
        num_columns = self._num_columns
        if x.dtype != torch.bfloat16 or x.shape[1:] != (num_columns,):
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}, the matrix needs torch.bfloat16 "
                f"(n, {num_columns})"
            )
        if bias is not None and (bias.dtype != x.dtype or bias.shape != (self._num_rows,)):
            raise ValueError(
                f"the bias is {bias.dtype} {tuple(bias.shape)}, the matrix needs torch.bfloat16 "
                f"({self._num_rows},)"
            )
        if x.stride(1) != 1 or x.stride(0) % 2:
            x = x.contiguous()
        kernels = native()
        assert kernels is not None, "the matrix was packed for kernels that are no longer selected"
        num_rows = len(x)
        out = empty((num_rows, self._num_rows), x.dtype)
        kernels.run(
            "linear",
            x.dtype,
            LINEAR.pack(
                x.data_ptr(),
                self._panels.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                num_rows,
                num_columns,
                self._num_rows,
                x.stride(0),
                num_threads(self._panels.nbytes),
            ),
        )
        return out
