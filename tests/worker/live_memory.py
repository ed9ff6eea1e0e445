"""The exact number of bytes of live tensors, independent of allocators."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Meter(TorchDispatchMode):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}
        self._count(tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        self._count(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def _count(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))


def peak_bytes(action: Callable[[], object], *, beside: Sequence[Tensor] = ()) -> int:
    """The peak of live tensor bytes while `action` runs: tensors that it makes, and those of
    `beside` that it has not released."""
    meter = _Meter(beside)
    del beside
    with meter:
        action()
    return meter.peak
