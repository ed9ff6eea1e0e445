"""Rows of quantised tensors as the kernels compute with them, without dequantising them."""

from dataclasses import replace

import torch
from torch import Tensor

from longshore.worker.kernels import packing
from longshore.worker.kernels.packing import QuantisedRows
from longshore.worker.loading.dequantise import StoredMatrix
from longshore.worker.loading.quantised_tensor import FP8_DTYPE, Blocks, QuantisedTensor
from longshore.worker.loading.stored_weights import QuantisedForm, ReadTensor


def form_of(tensor: QuantisedTensor, dtype: str, read: ReadTensor) -> QuantisedForm | None:
    """dtype: of the stored numbers. None: the kernels have no such format."""
    bits = tensor.kept_bits(dtype)
    if bits is None or _has_own_groups(tensor, read):
        return None
    column_dim = -1 if (tensor.inputs_dim == 1) != tensor.is_transposed else -2
    if tensor.numbers.coding == "fp4":
        return QuantisedForm(packing.MXFP4, column_dim)
    if dtype == FP8_DTYPE:
        return QuantisedForm(packing.FP8.grouped(tensor.fp8_span), column_dim)
    kept = packing.INT4 if bits == packing.INT4.bits else packing.INT8
    return QuantisedForm(kept.grouped(tensor.group), column_dim)


def quantised_rows(
    tensor: QuantisedTensor, form: QuantisedForm, rows: Tensor, columns: slice, read: ReadTensor
) -> QuantisedRows:
    """rows: (n,), those of all matrices of the tensor counted through."""
    num_outputs = tensor.numbers.shape[1 - tensor.inputs_dim]
    found = QuantisedRows.zeros(form.packing, len(rows), columns.stop - columns.start)
    matrices = rows // num_outputs
    for matrix in matrices.unique().tolist():
        places = (matrices == matrix).nonzero().flatten()
        outputs = rows[places] - matrix * num_outputs
        first, last = int(outputs.min()), int(outputs.max()) + 1
        part = _adjacent(tensor, form, matrix, slice(first, last), columns, read)
        found.put(places, part.rows(outputs - first))
    return found


def _has_own_groups(tensor: QuantisedTensor, read: ReadTensor) -> bool:
    """Whether the inputs of a group are not adjacent."""
    if tensor.groups is None or tensor.scales.numbers.shape[tensor.groups_dim] == 1:
        return False
    groups = read(tensor.groups, (slice(None),)).long()
    size = tensor.scales.block[tensor.groups_dim]
    is_unused = not groups.numel() or bool((groups == -1).all())
    return not is_unused and not torch.equal(groups, torch.arange(len(groups)) // size)


def _adjacent(
    tensor: QuantisedTensor,
    form: QuantisedForm,
    matrix: int,
    outputs: slice,
    columns: slice,
    read: ReadTensor,
) -> QuantisedRows:
    """Adjacent rows of one matrix."""
    inputs = tensor.inputs_dim
    leading = [slice(matrix, matrix + 1)] if tensor.leading else []
    stored = StoredMatrix(tensor, leading, read)

    def oriented(values: Tensor) -> Tensor:
        """(outputs, inputs)."""
        values = values.squeeze(0) if values.dim() > 2 else values  # one of a stack
        return values if inputs == 1 else values.T

    def of_groups(blocks: Blocks) -> Tensor:
        """(outputs, groups)."""
        group, height = blocks.block[inputs], blocks.block[1 - inputs]
        parts = [slice(0, 1), slice(0, 1)]
        if blocks.numbers.shape[inputs] > 1:
            parts[inputs] = slice(columns.start // group, columns.stop // group)
        begin = 0
        if blocks.numbers.shape[1 - inputs] > 1:
            begin = outputs.start // height
            parts[1 - inputs] = slice(begin, -(-outputs.stop // height))
        values = oriented(stored.numbers(blocks.numbers, *parts))
        if height > 1 and len(values) > 1:
            values = values.repeat_interleave(height, 0)
            first = outputs.start - begin * height
            values = values[first : first + outputs.stop - outputs.start]
        num_groups = (columns.stop - columns.start) // min(group, form.packing.span)
        return values.expand(outputs.stop - outputs.start, num_groups).unsqueeze(-1)

    parts = [columns, columns]
    parts[1 - inputs] = outputs
    if tensor.numbers.coding == "fp4":
        of_scales = replace(tensor.scales.numbers, coding="bytes")
        exponents = replace(tensor.scales, numbers=of_scales)
        codes = oriented(stored.numbers(replace(tensor.numbers, coding="fp4_codes"), *parts))
        return QuantisedRows(form.packing, codes, (of_groups(exponents),))
    if form.packing.name == packing.FP8.name:
        codes = oriented(stored.numbers(replace(tensor.numbers, coding="bytes"), *parts))
        return QuantisedRows(form.packing, codes, (stored.scaled(of_groups(tensor.scales)),))
    numbers = oriented(stored.numbers(tensor.numbers, *parts))
    zeros = torch.zeros(1) if tensor.zeros is None else of_groups(tensor.zeros)
    first = tensor.numbers.offset if tensor.numbers.coding == "integers" else -128
    scales = stored.scaled(of_groups(tensor.scales))
    zeros = (zeros - first).to(torch.uint8).expand_as(scales)
    return QuantisedRows(form.packing, (numbers - first).to(torch.uint8), (scales, zeros))
