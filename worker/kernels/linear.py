"""y = x W^T + b, with a matrix packed in advance: in x's dtype, or as a quantised file has it."""

import torch
from torch import Tensor

from longshore.worker.kernels import huge_pages
from longshore.worker.kernels.native import LINEAR, LOOK_UP, PANEL, empty, native, num_threads
from longshore.worker.kernels.packing import Packing, QuantisedRows, native_packing, pack


def supports(weight: Tensor) -> bool:
    """Whether the kernel supports this matrix and is the fastest choice."""
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and can_be_plain(weight)


def can_be_plain(weight: Tensor) -> bool:
    """Whether the kernel computes with plain panels of this matrix."""
    kernels = native()
    if kernels is None or weight.dtype != torch.bfloat16:
        return kernels is not None and weight.dtype == torch.float32
    return kernels.multiplies_bfloat16 and weight.shape[1] % 2 == 0


def empty_panels(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Zeroed panels for a matrix in float32, or in bfloat16 with an even number of columns:
    (panels, depth, PANEL, columns / depth), in words of four bytes."""
    word = 4 // dtype.itemsize
    return huge_pages.zeros((-(-num_rows // PANEL), num_columns // word, PANEL, word), dtype)


def fill_panels(panels: Tensor, weight: Tensor) -> None:
    """Copy weight, (rows, columns), into panels. Extra rows of the last panel are not changed."""
    # Panel by panel, so that packing needs no second copy of a large matrix.
    for panel, rows in zip(panels, weight.split(PANEL), strict=True):
        panel[:, : len(rows)] = rows.unflatten(1, (-1, panels.shape[-1])).transpose(0, 1)


class PackedMatrix:
    """A matrix in panels.

    packing:       None: of its dtype, float32 or a bfloat16 that `supports` accepts.
    num_rows:      (rows, columns) is its shape.
    dtype:         of x and of the results.
    rounds_inputs: see QuantisedProducts in config.py; only with a packing.
    """

    def __init__(
        self,
        panels: Tensor,
        packing: Packing | None,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        self.panels, self.packing, self.num_rows = panels, packing, num_rows
        self.num_columns, self.dtype, self.rounds_inputs = num_columns, dtype, rounds_inputs

    @classmethod
    def plain(cls, weight: Tensor) -> "PackedMatrix":
        """A copy of a weight, (rows, columns)."""
        num_rows, num_columns = weight.shape
        panels = empty_panels(num_rows, num_columns, weight.dtype)
        fill_panels(panels, weight)
        return cls(panels, None, num_rows, num_columns, weight.dtype)

    @classmethod
    def quantised(
        cls,
        packing: Packing,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        *,
        rounds_inputs: bool = False,
    ) -> "PackedMatrix":
        """A matrix to be filled."""
        num_panels = -(-num_rows // PANEL)
        num_bytes = packing.num_bytes(num_rows, num_columns)
        panels = huge_pages.zeros((num_panels, num_bytes // num_panels), torch.uint8)
        return cls(panels, packing, num_rows, num_columns, dtype, rounds_inputs=rounds_inputs)

    def fill(self, first: int, rows: QuantisedRows) -> None:
        """Pack rows of a quantised matrix. first: the place of the first one, a multiple of
        PANEL."""
        panels = pack(rows)
        begin = first // PANEL
        self.panels[begin : begin + len(panels)] = panels

    def product(
        self, x: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """x: (n, columns), bias: (rows,) -> x M^T + bias, (n, rows). out: memory for it, each line
        contiguous. Raises ValueError for arguments of a wrong shape or dtype."""
        dtype, num_columns = self.dtype, self.num_columns
        if x.dtype != dtype or x.shape[1:] != (num_columns,):
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}, the matrix needs {dtype} (n, {num_columns})"
            )
        if bias is not None and (bias.dtype != dtype or bias.shape != (self.num_rows,)):
            raise ValueError(
                f"the bias is {bias.dtype} {tuple(bias.shape)}, the matrix needs {dtype} "
                f"({self.num_rows},)"
            )
        if x.stride(1) != 1 or x.stride(0) % 2:
            x = x.contiguous()
        kernels = native()
        assert kernels is not None, "the matrix was packed for kernels that are no longer selected"
        num_rows = len(x)
        if out is None:
            out = empty((num_rows, self.num_rows), dtype)
        kernels.run(
            "linear",
            dtype,
            LINEAR.pack(
                x.data_ptr(),
                self.panels.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                num_rows,
                num_columns,
                self.num_rows,
                x.stride(0),
                out.stride(0),
                *native_packing(self.packing),
                self.rounds_inputs,
                num_threads(self.panels.nbytes),
            ),
        )
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """indices: (n,) int32 or int64, below the number of rows -> (n, columns). For quantised
        matrices."""
        assert self.packing is not None
        kernels = native()
        assert kernels is not None, "the matrix was packed for kernels that are no longer selected"
        indices = indices.long().contiguous()
        out = empty((len(indices), self.num_columns), self.dtype)
        kernels.run(
            "look_up",
            self.dtype,
            LOOK_UP.pack(
                indices.data_ptr(),
                self.panels.data_ptr(),
                out.data_ptr(),
                len(indices),
                self.num_columns,
                *native_packing(self.packing),
                num_threads(len(indices) * self.panels[0].nbytes),
            ),
        )
        return out
