"""Mixtures of experts: a router chooses a few of many gated MLPs for each token (Shazeer et al.,
2017; `worker/layers/moe_router.py`).

Rows are sorted by expert, so that each matrix is used in one product with all tokens of its expert:
in one call of a kernel (`worker/kernels/experts.py`) if available, else in torch. Tensor parallel
ranks divide the width of every expert, so all ranks have equal work and one all-reduce is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels import experts as kernel
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.gate import SILU, Gate
from longshore.worker.kernels.linear import can_be_plain
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.mlp import ACTIVATIONS, UngatedActivation
from longshore.worker.layers.moe_matrices import ExpertMatrices
from longshore.worker.layers.moe_router import Routed, Router, Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors, whole


@dataclass(frozen=True)
class SplitExperts:
    """The checkpoint has one tensor per matrix: `experts.7.gate_proj.weight`."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class StackedExperts:
    """The checkpoint has two tensors for all experts: `experts.gate_up_proj`, gates first, and
    `experts.down_proj`.

    is_transposed: for x @ W: (num_experts, hidden_size, 2 * width) and (num_experts, width,
                   hidden_size). Otherwise as for other matrices, with the outputs first.
    """

    is_transposed: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertForm:
    """The form of a family's experts.

    stored:        their layout in the checkpoint.
    gate:          the activation between their two products.
    weighs_inputs: routing weights multiply the inputs of experts, not their outputs.
    """

    stored: SplitExperts | StackedExperts
    gate: Gate = SILU
    bias: bool = False
    weighs_inputs: bool = False


class Experts:
    """The experts of a layer; this rank has a part of each expert's width.

    gate_up: (2 * local width, hidden_size) each; gate_up_bias: (num_experts, 2 * local width).
    down:    (hidden_size, local width) each; down_bias: (num_experts, hidden_size), on shard 0
             only.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        width: int,
        form: ExpertForm,
        placement: Placement,
    ) -> None:
        self._size, self._width, self._form = hidden_size, width, form
        self._share = placement.parallel.share(width)
        self._ids = torch.arange(num_experts, device=placement.device)
        num_local = self._share.stop - self._share.start
        self.gate_up = ExpertMatrices(
            num_experts,
            2 * num_local,
            hidden_size,
            placement,
            kernel.gate_order(num_local, form.gate),
        )
        self.down = ExpertMatrices(
            num_experts, hidden_size, num_local, placement, kernel.down_order(hidden_size)
        )
        self.gate_up_bias = placement.empty(num_experts, 2 * num_local) if form.bias else None
        adds_bias = form.bias and placement.parallel.shard == 0
        self.down_bias = placement.empty(num_experts, hidden_size) if adds_bias else None
        self._packed: kernel.PackedExperts | None = None
        placement.when_loaded(self._lay_out)

    def _lay_out(self) -> None:
        form, width = self._form, self._share.stop - self._share.start
        gate_up, down = self.gate_up.quantised, self.down.quantised
        if isinstance(gate_up, DeviceMatrix) or isinstance(down, DeviceMatrix):
            return
        if not self._is_for_kernel():
            self.gate_up.dequantise()
            self.down.dequantise()
            self.gate_up.pack()
            self.down.pack()
            return
        # Pack one after the other, so that never both are in memory twice.
        if gate_up is None:
            gate_up = kernel.pack_gate_up(self.gate_up.weights, form.gate)
            self.gate_up.release()
        if down is None:
            down = kernel.pack_down(self.down.weights)
            self.down.release()
        self._packed = kernel.PackedExperts(
            gate_up,
            down,
            form.gate,
            num_experts=len(self._ids),
            width=width,
            size=self._size,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            weighs_inputs=form.weighs_inputs,
        )

    def _is_for_kernel(self) -> bool:
        both = self.gate_up, self.down
        floats = [each.weights for each in both if each.quantised is None]
        if len(floats) < len(both):
            return all(can_be_plain(weight[0]) for weight in floats)
        return kernel.supports(*floats)

    def __call__(self, x: Tensor, routed: Routed, shared: Tensor | None = None) -> Tensor:
        """x: (n, hidden_size) -> the same shape: this shard's part of the sum over the chosen
        experts, plus `shared`, which has the same shape."""
        if self._packed is not None:
            return self._packed(x, *routed, shared)
        if uses_triton(x):
            return kernel.compute(
                x,
                *routed,
                shared,
                self.gate_up.on_device,
                self.down.on_device,
                self._form.gate,
                num_experts=len(self._ids),
                gate_up_bias=self.gate_up_bias,
                down_bias=self.down_bias,
                weighs_inputs=self._form.weighs_inputs,
            )
        out = self._in_torch(x, routed)
        return out if shared is None else out.add_(shared)

    def _in_torch(self, x: Tensor, routed: Routed) -> Tensor:
        rows, experts, order, ends = rows_by_expert(x, routed, self._ids)
        weights = routed.weights.to(x.dtype)
        if self._form.weighs_inputs:
            rows.mul_(weights.view(-1, 1).index_select(0, order))
        hidden = self.gate_up.product(rows, ends)
        if self.gate_up_bias is not None:
            hidden.add_(self.gate_up_bias.index_select(0, experts))
        out = self.down.product(self._form.gate(hidden), ends)
        if self.down_bias is not None:
            out.add_(self.down_bias.index_select(0, experts))
        return sum_by_token(out, order, weights, is_weighted=self._form.weighs_inputs)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the module, such as `model.layers.0.mlp.experts`."""
        match self._form.stored:
            case SplitExperts() as names:
                return dict(self._split(name, names))
            case StackedExperts(is_transposed=False):
                return self._stacked_by_outputs(name)
            case StackedExperts() if self._form.gate.is_interleaved:
                return self._stacked(name, [slice(2 * self._share.start, 2 * self._share.stop)])
            case StackedExperts():
                return self._stacked(name, self._halves)

    @property
    def _halves(self) -> list[slice]:
        """This shard's part of gates and of ups that are stored one after the other."""
        first, last, width = self._share.start, self._share.stop, self._width
        return [slice(first, last), slice(width + first, width + last)]

    def _split(self, name: str, names: SplitExperts) -> Iterator[tuple[str, StoredTensor]]:
        assert not self._form.bias, "no family has split experts with biases"
        into, back = (self._width, self._size), (self._size, self._width)
        for expert in range(len(self._ids)):
            gate, up = self.gate_up.stored(expert).chunk(2)
            down = (self.down.stored(expert), (slice(None), self._share))
            module = f"{name}.{expert}"
            yield f"{module}.{names.gate}.weight", StoredTensor(into, ((gate, (self._share,)),))
            yield f"{module}.{names.up}.weight", StoredTensor(into, ((up, (self._share,)),))
            yield f"{module}.{names.down}.weight", StoredTensor(back, (down,))

    def _stacked_by_outputs(self, name: str) -> StoredTensors:
        assert not self._form.bias, "no family has such experts with biases"
        num_experts, size, width = len(self._ids), self._size, self._width
        into, back = [], []
        for expert in range(num_experts):
            this = slice(expert, expert + 1)
            targets = self.gate_up.stored(expert).unsqueeze(0).chunk(2, dim=1)
            into += [(part, (this, rows)) for part, rows in zip(targets, self._halves, strict=True)]
            down = self.down.stored(expert).unsqueeze(0)
            back.append((down, (this, slice(None), self._share)))
        return {
            f"{name}.gate_up_proj": StoredTensor((num_experts, 2 * width, size), into),
            f"{name}.down_proj": StoredTensor((num_experts, size, width), back),
        }

    def _stacked(self, name: str, columns: list[slice]) -> StoredTensors:
        """columns: slices of the stored width for the parts of `gate_up`, in order."""
        num_experts, size, width = len(self._ids), self._size, self._width
        into, back = [], []
        for expert in range(num_experts):
            this = slice(expert, expert + 1)
            targets = self.gate_up.stored(expert).t().unsqueeze(0).chunk(len(columns), dim=2)
            into += [(p, (this, slice(None), c)) for p, c in zip(targets, columns, strict=True)]
            back.append((self.down.stored(expert).t().unsqueeze(0), (this, self._share)))
        tensors = {
            f"{name}.gate_up_proj": StoredTensor((num_experts, size, 2 * width), into),
            f"{name}.down_proj": StoredTensor((num_experts, width, size), back),
        }
        if self.gate_up_bias is not None:
            targets = self.gate_up_bias.chunk(len(columns), dim=1)
            parts = [(p, (slice(None), c)) for p, c in zip(targets, columns, strict=True)]
            tensors[f"{name}.gate_up_proj_bias"] = StoredTensor((num_experts, 2 * width), parts)
            rest = () if self.down_bias is None else ((self.down_bias, (slice(None),)),)
            tensors[f"{name}.down_proj_bias"] = StoredTensor((num_experts, size), rest)
        return tensors


class UngatedExperts:
    """Experts that are MLPs without a gate, down(activation(up(x))), computed in torch.

    up:   (local width, size) each.
    down: (size, local width) each.
    """

    def __init__(
        self,
        num_experts: int,
        size: int,
        width: int,
        activation: UngatedActivation,
        placement: Placement,
    ) -> None:
        self._size, self._width = size, width
        self._share = placement.parallel.share(width)
        self._activation = ACTIVATIONS[activation]
        self._ids = torch.arange(num_experts, device=placement.device)
        num_local = self._share.stop - self._share.start
        self.up = ExpertMatrices(num_experts, num_local, size, placement)
        self.down = ExpertMatrices(num_experts, size, num_local, placement)
        placement.when_loaded(self.up.pack)
        placement.when_loaded(self.down.pack)

    def __call__(self, x: Tensor, routed: Routed) -> Tensor:
        """x: (n, size) -> the same shape: this shard's part of the sum over the chosen experts."""
        rows, _, order, ends = rows_by_expert(x, routed, self._ids)
        out = self.down.product(self._activation(self.up.product(rows, ends)), ends)
        return sum_by_token(out, order, routed.weights.to(x.dtype))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the module."""
        tensors: StoredTensors = {}
        for expert in range(len(self._ids)):
            up = (self.up.stored(expert), (self._share,))
            down = (self.down.stored(expert), (slice(None), self._share))
            module = f"{name}.{expert}"
            tensors[f"{module}.up_proj.weight"] = StoredTensor((self._width, self._size), (up,))
            tensors[f"{module}.down_proj.weight"] = StoredTensor((self._size, self._width), (down,))
        return tensors


def rows_by_expert(x: Tensor, routed: Routed, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of x, (n, size), for each of their experts, sorted by expert: (n * top_k, size); of
    each row, its expert and its place in `routed`; and the end of each expert's rows. ids:
    (num_experts,), from 0 on."""
    experts, order = routed.experts.view(-1).sort(stable=True)
    ends = torch.searchsorted(experts, ids, right=True, out_int32=True)
    top_k = routed.experts.shape[1]
    rows = x.index_select(0, order.div(top_k, rounding_mode="floor"))
    return rows, experts, order, ends


def sum_by_token(
    out: Tensor, order: Tensor, weights: Tensor, *, is_weighted: bool = False
) -> Tensor:
    """The sum of each token's experts, (n, size). out, order: as `rows_by_expert` sorts them.
    weights: (n, top_k). is_weighted: whether `out` already has the weights."""
    by_token = torch.empty_like(out).index_copy_(0, order, out).view(*weights.shape, -1)
    if is_weighted:
        return by_token.sum(1)
    return torch.bmm(weights.unsqueeze(1), by_token).squeeze(1)


class SharedExpert:
    """A gated MLP that computes every token.

    gate: (1, hidden_size), the map to a token's factor on the result, before the sigmoid; None: the
          result has no factor.
    """

    def __init__(
        self, hidden_size: int, width: int, placement: Placement, *, has_gate: bool = False
    ) -> None:
        half = Columns(width, placement.parallel.share(width))
        self.gate_up = ColumnParallelLinear(
            hidden_size, (half, half), bias=False, placement=placement
        )
        self.down = RowParallelLinear(width, hidden_size, bias=False, placement=placement)
        self.gate = placement.empty(1, hidden_size) if has_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape, this shard's part of the sum."""
        out = self.down.weight.product(SILU(self.gate_up(x)))
        return out if self.gate is None else out.mul_(F.linear(x, self.gate).sigmoid_())

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        tensors = {
            **self.gate_up.checkpoint_tensors([f"{name}.gate_proj", f"{name}.up_proj"]),
            **self.down.checkpoint_tensors(f"{name}.down_proj"),
        }
        if self.gate is not None:
            tensors[f"{name}_gate.weight"] = whole(self.gate)
        return tensors


class MixtureOfExperts:
    """Replaces a layer's MLP.

    width:        width of one expert.
    router_name:  checkpoint name of the router.
    shared_width: width of the shared expert, which computes every token; 0 if there is none.
    shared_name:  checkpoint name of the shared expert.
    has_shared_gate: whether each token has a factor on the shared expert's result.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        routing: Routing,
        form: ExpertForm,
        placement: Placement,
        *,
        router_name: str = "gate",
        shared_width: int = 0,
        shared_name: str = "shared_experts",
        has_shared_gate: bool = False,
    ) -> None:
        self._parallel = placement.parallel
        self._router_name, self._shared_name = router_name, shared_name
        self.router = Router(hidden_size, routing, placement)
        self.experts = Experts(routing.num_experts, hidden_size, width, form, placement)
        self.shared: SharedExpert | None = None
        if shared_width:
            self.shared = SharedExpert(
                hidden_size, shared_width, placement, has_gate=has_shared_gate
            )

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape."""
        shared = None if self.shared is None else self.shared(x)
        out = self.experts(x, self.router(x), shared)
        return self._parallel.all_reduce(out)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the layer's MLP, such as `model.layers.0.mlp`."""
        tensors = {
            **self.router.checkpoint_tensors(f"{name}.{self._router_name}"),
            **self.experts.checkpoint_tensors(f"{name}.experts"),
        }
        if self.shared is not None:
            tensors |= self.shared.checkpoint_tensors(f"{name}.{self._shared_name}")
        return tensors
