"""Linear layers. Projections of the same input are one matrix, so that one product computes them.

Tensor parallel as in Megatron-LM (Shoeybi et al., 2019): projections into a layer's width are
divided by output columns, those out of it by input rows, followed by one all-reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from longshore.worker.layers.matrix import Matrix
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors


@dataclass(frozen=True)
class Columns:
    """The outputs of a linear map, and the slice that this rank computes."""

    size: int
    local: slice

    @classmethod
    def of_heads(cls, heads: slice, num_heads: int, head_dim: int) -> "Columns":
        """heads: this rank's."""
        return cls(num_heads * head_dim, slice(heads.start * head_dim, heads.stop * head_dim))

    @property
    def num_local(self) -> int:
        return self.local.stop - self.local.start


def stacked(local: Tensor, columns: Sequence[Columns]) -> StoredTensor:
    """A stored tensor with the rows of several maps, one after the other.

    local: (local outputs of all maps, ...), a view of the memory to fill.
    """
    parts, start = [], 0
    targets = local.split([column.num_local for column in columns])
    for target, column in zip(targets, columns, strict=True):
        parts.append((target, (slice(start + column.local.start, start + column.local.stop),)))
        start += column.size
    return StoredTensor((start, *local.shape[1:]), parts)


def _reorder(tensor: Tensor, order: Tensor) -> None:
    tensor.copy_(tensor[order.to(tensor.device)])


class ColumnParallelLinear:
    """Several maps y = x W^T + b of one input, concatenated; each rank computes some outputs.

    weight: (local outputs of all maps, in_features); bias: (local outputs,) or None.
    """

    def __init__(
        self,
        in_features: int,
        columns: Sequence[Columns],
        *,
        bias: bool | Sequence[bool],
        placement: Placement,
    ) -> None:
        """bias: whether all maps, or each of them, have a bias. If only some do, the others get
        zeros."""
        num_local = sum(column.num_local for column in columns)
        self._columns, self._placement = columns, placement
        self._has_bias = [bias] * len(columns) if isinstance(bias, bool) else list(bias)
        self.weight = Matrix(num_local, in_features, placement)
        self.bias = placement.empty(num_local) if any(self._has_bias) else None
        if self.bias is not None and not all(self._has_bias):
            self.bias.zero_()

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, in_features) -> (n, local outputs)."""
        return self.weight.product(x, self.bias)

    def reorder(self, order: Tensor) -> None:
        """Output i is output order[i] of what is stored. order: (local outputs,) int64."""
        self.weight.reorder(order)
        if self.bias is not None:
            self._placement.when_loaded(partial(_reorder, self.bias, order))

    def checkpoint_tensors(self, names: Sequence[str]) -> StoredTensors:
        """names: one per map, or a single one if the checkpoint stacks them too."""
        tensors = self._stored(self.weight.stored, [f"{name}.weight" for name in names])
        if self.bias is not None:
            biases = self._stored(self.bias, [f"{name}.bias" for name in names])
            # Maps that the checkpoint stacks either all have a bias or have none.
            tensors |= {
                name: stored
                for (name, stored), is_there in zip(biases.items(), self._has_bias, strict=False)
                if is_there
            }
        return tensors

    def _stored(self, local: Tensor, names: Sequence[str]) -> StoredTensors:
        columns, rest = self._columns, local.shape[1:]
        targets = local.split([column.num_local for column in columns])
        if len(names) == len(columns):
            return {
                name: StoredTensor((column.size, *rest), ((target, (column.local,)),))
                for name, target, column in zip(names, targets, columns, strict=True)
            }
        (name,) = names
        return {name: stacked(local, columns)}


class RowParallelLinear:
    """y = x W^T + b of an input that is divided among the ranks; every rank gets the whole result.

    weight: (out_features, local inputs); bias: (out_features,) or None. Only shard 0 adds it.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        self._parallel = placement.parallel
        self._in_features = in_features
        self._local = placement.parallel.share(in_features)
        self._has_bias = bias
        self._out_features = out_features
        num_local = self._local.stop - self._local.start
        self.weight = Matrix(out_features, num_local, placement)
        self.bias = placement.empty(out_features) if bias and self._parallel.shard == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, local inputs) -> (n, out_features), summed over the shards."""
        return self._parallel.all_reduce(self.weight.product(x, self.bias))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        out_features = self._out_features
        part = (self.weight.stored, (slice(None), self._local))
        tensors = {f"{name}.weight": StoredTensor((out_features, self._in_features), (part,))}
        if self._has_bias:
            parts = () if self.bias is None else ((self.bias, (slice(None),)),)
            tensors[f"{name}.bias"] = StoredTensor((out_features,), parts)
        return tensors
