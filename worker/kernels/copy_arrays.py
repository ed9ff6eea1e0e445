"""Copies of a step's small arrays between pinned host memory and the device."""

from torch import Tensor

from longshore.worker.kernels.operators import uses_triton


def copy_arrays(first: Tensor, from_first: Tensor, second: Tensor, from_second: Tensor) -> None:
    """Start copying `from_first` to `first` and `from_second` to `second`, arrays of one dimension,
    (n,) and (m,), and convert them to the types of these, which are contiguous. Those on the host
    are pinned.

    On a GPU, a kernel copies both: copies of the driver wait for the device's copy engines, which
    may be busy with blocks of KV.
    """
    if not any(uses_triton(x) for x in (first, from_first)):
        for target, source in ((first, from_first), (second, from_second)):
            target.copy_(source, non_blocking=True)
        return
    from longshore.worker.kernels.gpu import copy_arrays as gpu

    gpu.copy_arrays(first, from_first.contiguous(), second, from_second.contiguous())
