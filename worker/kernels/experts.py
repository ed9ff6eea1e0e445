"""All experts of a mixture in one call: on a CPU with matrices packed in advance (`PackedExperts`),
on a GPU with matrices as they are stored (`compute`)."""

from typing import TypeGuard

import torch
from torch import Tensor

from longshore.worker.kernels import linear
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.gate import Gate
from longshore.worker.kernels.linear import PackedMatrix, empty_panels, fill_panels
from longshore.worker.kernels.native import EXPERTS, PANEL, empty, native, num_threads
from longshore.worker.kernels.packing import native_packing


def compute(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    shared: Tensor | None,
    gate_up: Tensor | DeviceMatrix,
    down: Tensor | DeviceMatrix,
    gate: Gate,
    *,
    num_experts: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weighs_inputs: bool = False,
) -> Tensor:
    """Compute with the Triton kernels, which never wait for the device: the same as
    `PackedExperts`.

    x:             (n, size), float32, bfloat16 or float16; shared: None, or the same.
    weights:       (n, top_k) float32; chosen: (n, top_k) int64, below the number of experts.
    gate_up, down: (num_experts, 2 * width, size) and (num_experts, size, width), contiguous, or
                   quantised, those of all experts below each other; their biases as in
                   `PackedExperts`. All of x's dtype.
    Raises ValueError for arguments of a wrong shape or dtype.
    """
    from longshore.worker.kernels.gpu import experts as gpu

    size, width = (_shape(matrix, num_experts)[2] for matrix in (gate_up, down))
    shapes = _shape(gate_up, num_experts), _shape(down, num_experts)
    if shapes != ((num_experts, 2 * width, size), (num_experts, size, width)):
        raise ValueError(f"gate_up {shapes[0]} does not fit down {shapes[1]}")
    for tensor in (gate_up, down, gate_up_bias, down_bias):
        if tensor is not None and not (
            tensor.dtype == x.dtype and (isinstance(tensor, DeviceMatrix) or tensor.is_contiguous())
        ):
            raise ValueError(f"matrices and biases must be contiguous {x.dtype}, like x")
    _check(x, weights, chosen, shared, size, down.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    if shared is not None and shared.stride(1) != 1:
        shared = shared.contiguous()
    out: Tensor
    common = (
        gate_up_bias,
        down_bias,
        shared,
        num_experts,
        width,
        *gate.native,
        gate.is_interleaved,
        weighs_inputs,
    )
    if _rounds_inputs(gate_up) and _rounds_inputs(down):
        rounded = *gate_up.rounded(x), weights, chosen
        matrices = gate_up.codes, gate_up.scales, down.codes, down.scales
        out = gpu.experts_of_fp8(*rounded, *matrices, *common, x.dtype)
    else:
        out = gpu.experts(x, weights, chosen, *_parts(gate_up), *_parts(down), *common)
    return out


def _shape(matrix: Tensor | DeviceMatrix, num_experts: int) -> tuple[int, ...]:
    if isinstance(matrix, DeviceMatrix):
        return num_experts, matrix.num_rows // num_experts, matrix.num_columns
    return tuple(matrix.shape)


def _rounds_inputs(matrix: Tensor | DeviceMatrix) -> TypeGuard[DeviceMatrix]:
    return isinstance(matrix, DeviceMatrix) and matrix.rounds_inputs


def _parts(
    matrix: Tensor | DeviceMatrix,
) -> tuple[Tensor, Tensor | None, Tensor | None, int, int]:
    return matrix.parts if isinstance(matrix, DeviceMatrix) else (matrix, None, None, 0, -1)


def supports(gate_up: Tensor, down: Tensor) -> bool:
    """Whether the kernel supports these matrices: (num_experts, 2 * width, size) and (num_experts,
    size, width)."""
    if gate_up.dtype == torch.float32:
        kernels = native()
        return (
            kernels is not None
            and kernels.instruction_set != "generic"  # slower than torch
            and gate_up.device.type == "cpu"
        )
    return linear.supports(gate_up[0]) and linear.supports(down[0])


def pack_gate_up(gate_up: Tensor, gate: Gate) -> PackedMatrix:
    """A copy in panels of `PANEL` rows, in the order of `gate_order`. gate_up: see `supports`."""
    return _pack(gate_up, gate_order(gate_up.shape[1] // 2, gate))


def pack_down(down: Tensor) -> PackedMatrix:
    """A copy in panels of `PANEL` rows, padded with zeros. down: see `supports`."""
    return _pack(down, down_order(down.shape[1]))


class PackedExperts:
    """gate_up, down:        those of all experts below each other, as `pack_gate_up` and
                             `pack_down` make them, or quantised in the same orders of rows.
    num_experts, width, size: the shapes of the original matrices.
    gate_up_bias, down_bias: (num_experts, 2 * width), (num_experts, size); each may be None.
    gate:                    the activation, and the order of gate and up rows.
    weighs_inputs:           routing weights multiply the inputs of experts, not their outputs.
    """

    def __init__(
        self,
        gate_up: PackedMatrix,
        down: PackedMatrix,
        gate: Gate,
        *,
        num_experts: int,
        width: int,
        size: int,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        self._num_experts, self._size, self._width = num_experts, size, width
        self._dtype, self._gate, self._weighs_inputs = down.dtype, gate, weighs_inputs
        self._gate_up, self._down = gate_up, down
        self._rounds_inputs = gate_up.rounds_inputs or down.rounds_inputs
        order = gate_order(width, gate)
        self._gate_up_bias = None if gate_up_bias is None else _take(gate_up_bias.t(), order).t()
        self._down_bias = down_bias
        if self._gate_up_bias is not None:
            self._gate_up_bias = self._gate_up_bias.contiguous()

    def __call__(
        self, x: Tensor, weights: Tensor, chosen: Tensor, shared: Tensor | None = None
    ) -> Tensor:
        """x: (n, size) -> the same shape: the weighted sum of the chosen experts' outputs, plus
        `shared`, which has the same shape.

        weights: (n, top_k) float32; chosen: (n, top_k) int64, below the number of experts; both
        contiguous. Raises ValueError for arguments of a wrong shape or dtype.
        """
        _check(x, weights, chosen, shared, self._size, self._dtype)
        num_tokens, top_k = chosen.shape
        if x.stride(1) != 1:
            x = x.contiguous()
        if shared is not None:
            shared = shared.contiguous()
        kernels = native()
        assert kernels is not None, "experts were packed for kernels that are no longer selected"
        num_rows = num_tokens * top_k
        rows = empty((num_rows, self._size), x.dtype)
        hidden = empty((num_rows, self._width), x.dtype)
        is_sorted = empty((1 + 2 * self._num_experts + num_rows,), torch.int64)
        out = empty((num_tokens, self._size), x.dtype)
        expert_bytes = (self._gate_up.panels.nbytes + self._down.panels.nbytes) // self._num_experts
        groups, packings = zip(
            native_packing(self._gate_up.packing), native_packing(self._down.packing), strict=True
        )
        kernels.run(
            "experts",
            x.dtype,
            EXPERTS.pack(
                x.data_ptr(),
                weights.data_ptr(),
                chosen.data_ptr(),
                self._gate_up.panels.data_ptr(),
                self._down.panels.data_ptr(),
                0 if self._gate_up_bias is None else self._gate_up_bias.data_ptr(),
                0 if self._down_bias is None else self._down_bias.data_ptr(),
                0 if shared is None else shared.data_ptr(),
                rows.data_ptr(),
                hidden.data_ptr(),
                is_sorted.data_ptr(),
                out.data_ptr(),
                num_tokens,
                self._num_experts,
                top_k,
                self._size,
                self._width,
                x.stride(0),
                *groups,
                *packings,
                *self._gate.native,
                self._weighs_inputs,
                self._rounds_inputs,
                num_threads(num_rows * expert_bytes),
            ),
        )
        return out


def _check(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    shared: Tensor | None,
    size: int,
    dtype: torch.dtype,
) -> None:
    shape = (len(chosen), size)
    for name, given in (("x", x), ("shared", shared)):
        if given is not None and (given.shape != shape or given.dtype != dtype):
            raise ValueError(
                f"{name} is {given.dtype} {tuple(given.shape)}, but the experts need "
                f"{dtype} {shape}"
            )
    if weights.shape != chosen.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights are {weights.dtype} {tuple(weights.shape)}, but the experts need "
            f"torch.float32 {tuple(chosen.shape)}"
        )
    if chosen.dtype != torch.int64 or not (weights.is_contiguous() and chosen.is_contiguous()):
        raise ValueError("chosen must be torch.int64; chosen and weights must be contiguous")


def down_order(size: int) -> Tensor:
    """The row of an expert's `down` for each row of its panels; -1 is padding."""
    rows = torch.arange(-(-size // PANEL) * PANEL)
    return torch.where(rows < size, rows, -1)


def gate_order(width: int, gate: Gate) -> Tensor:
    """The same of its `gate_up`: in each panel the gate rows of PANEL / 2 outputs, then their up
    rows."""
    half = PANEL // 2
    columns = torch.arange(-(-width // half) * half).view(-1, 1, half)
    both = torch.tensor([0, 1]).view(2, 1)
    rows = 2 * columns + both if gate.is_interleaved else columns + width * both
    return torch.where(columns < width, rows, -1).flatten()


def _take(rows: Tensor, order: Tensor) -> Tensor:
    """The rows at `order`; zeros where it is negative. rows: (n, ...)."""
    taken = rows.index_select(0, order.clamp(min=0))
    taken[order < 0] = 0
    return taken


def _pack(matrices: Tensor, order: Tensor) -> PackedMatrix:
    """Pack matrices, (num_experts, rows, columns), below each other. Needs temporary memory for one
    expert at a time."""
    num_experts, _, num_columns = matrices.shape
    panels = empty_panels(num_experts * len(order), num_columns, matrices.dtype)
    for matrix, part in zip(matrices, panels.unflatten(0, (num_experts, -1)), strict=True):
        fill_panels(part, _take(matrix, order))
    return PackedMatrix(panels, None, num_experts * len(order), num_columns, matrices.dtype)
