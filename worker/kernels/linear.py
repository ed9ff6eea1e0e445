"""y = x W^T + b in bfloat16, from a matrix that was packed for it once."""

import torch
from torch import Tensor

from longshore.worker.kernels.native import LINEAR, empty, native, num_threads

PANEL = 32  # outputs that are computed at once, as in native/linear.h


def supports(weight: Tensor) -> bool:
    """Whether the kernel computes with such a matrix, and nothing here is faster: a processor with
    tiles (AMX) is left to oneDNN."""
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
    """For matrices in float32, or of an even number of columns in bfloat16: (panels, depth, PANEL,
    columns / depth), words of four bytes, all zeros."""
    word = 4 // dtype.itemsize
    return torch.zeros((-(-num_rows // PANEL), num_columns // word, PANEL, word), dtype=dtype)


def fill_panels(panels: Tensor, weight: Tensor) -> None:
    """weight: (rows, columns); of the last panel, what is behind them is left as it is."""
    # Panel by panel, or packing a large matrix would take its memory once more.
    for panel, rows in zip(panels, weight.split(PANEL), strict=True):
        panel[:, : len(rows)] = rows.unflatten(1, (-1, panels.shape[-1])).transpose(0, 1)


class PackedMatrix:
    """A copy of `weight`, (rows, columns), in panels."""

    def __init__(self, weight: Tensor) -> None:
        self._num_rows, self._num_columns = weight.shape
        self._panels = empty_panels(self._num_rows, self._num_columns, weight.dtype)
        fill_panels(self._panels, weight)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (n, columns), bias: (rows,) -> x M^T + bias, (n, rows). Raises ValueError for what
        does not fit."""
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
        assert kernels is not None, "a matrix was packed for kernels that are gone"
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
