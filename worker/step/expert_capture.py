"""Captures which experts the routers choose, for requests that return them (`--enable-return-
routed-experts`).

The routers leave their choice in fixed device memory, which costs no kernel and works in graphs.
After the layers, one kernel puts the step's choices together and one copy moves them to the host.
When the step is complete, its lines are written by slot into memory that the scheduler shares,
before the scheduler gets the step's output. Only one rank does this, because all choose equally.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from longshore.protocol.routed_experts import RoutedExpertsShape, SlotLines
from longshore.worker.errors import UnsupportedModel
from longshore.worker.layers.moe_router import Router
from longshore.worker.step.step_inputs import StepInputs
from longshore.worker.step.worker_rows import BlockCopies

STAGED: Final = "experts"
"""Name of the host memory of a step's experts in its staging set."""


def shape_of_experts(routers: Sequence[Router]) -> RoutedExpertsShape:
    """The shape of the experts of one token. All layers with experts have equally many. Raises
    UnsupportedModel if there are none."""
    if not routers:
        raise UnsupportedModel(
            "enable_return_routed_experts: this model has no mixture of experts. Remove "
            "enable_return_routed_experts"
        )
    routing = routers[0].routing
    return RoutedExpertsShape(len(routers), routing.top_k, routing.num_experts)


class ExpertCapture:
    """lines: the shared memory, by slot of the KV cache group `group`.

    staged: host memory that it needs in each staging set.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        shape: RoutedExpertsShape,
        lines: SlotLines,
        *,
        group: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._group = group
        self._shape = shape
        self._lines = lines
        self._by_slot = lines.reshape(-1, shape.token_bytes)
        device = routers[0].weight.device
        chosen_shape = (shape.num_layers, max_num_batched_tokens, shape.top_k)
        self._chosen = torch.zeros(chosen_shape, dtype=torch.int64, device=device)
        for router, chosen in zip(routers, self._chosen, strict=True):
            router.chosen = chosen
        dtype = torch.uint8 if shape.dtype == np.uint8 else torch.int16
        by_token = (max_num_batched_tokens, shape.num_layers, shape.top_k)
        self.staged = {STAGED: (by_token, dtype)}
        self._by_token = torch.empty(by_token, dtype=dtype, device=device)

    def receive(self, inputs: StepInputs) -> None:
        """Start copying the experts of the step's tokens to the host. On the compute queue, after
        the layers."""
        num_tokens = inputs.num_tokens
        by_token = self._by_token[:num_tokens]
        by_token.copy_(self._chosen[:, :num_tokens].transpose(0, 1))
        inputs.staging.tensors[STAGED][:num_tokens].copy_(by_token, non_blocking=True)

    def store(self, inputs: StepInputs, copies: BlockCopies) -> None:
        """Write the experts of a step that is complete, before its output is sent. In the order of
        the steps, and before the staging set is reused."""
        sources, targets, _ = copies.blocks.reshape(3, -1)
        self._lines[targets] = self._lines[sources]  # all are read before any is written
        if inputs.outcome.is_out_of_memory:
            return
        num_tokens = inputs.num_tokens
        slots = inputs.staging.arrays["ints"][inputs.slots[self._group]][:num_tokens]
        staged = inputs.staging.arrays[STAGED][:num_tokens]
        lines = staged.view(np.uint8).reshape(num_tokens, self._shape.token_bytes)
        is_new = slots.view(np.int64) >= 0  # others are computed once more
        self._by_slot[slots[is_new]] = lines[is_new]
