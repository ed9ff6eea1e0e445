"""What follows the product with the output head: float32, a factor, a soft cap."""

import torch
from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def to_logits(x: Tensor, size: int, *, scale: float = 1.0, cap: float | None = None) -> Tensor:
    """x: (n, size or more), each line contiguous; the columns from `size` on are padding. May be
    overwritten. cap: c, if scaled logits are replaced by c * tanh(logit / c).

    Returns (n, size) float32.
    """
    is_unchanged = x.dtype == torch.float32 and scale == 1.0 and cap is None
    if uses_triton(x) and not is_unchanged:
        from longshore.worker.kernels.gpu import logits as gpu

        capped: Tensor = gpu.logits(x, size, scale, cap)
        return capped
    logits = x[:, :size].float()
    if scale != 1.0:
        logits.mul_(scale)
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
