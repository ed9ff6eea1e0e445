"""A CUDA device that computes nothing, for machines without one.

Its tensors have a shape, a dtype and the device cuda:0, but no memory (torch's FakeTensorMode). So
the worker runs as on a GPU: it pins its staging memory, chooses the Triton operators, of which only
the fakes run, and captures decode steps. Tensors of the host are real. What real CUDA would reject,
and what would make the host wait, raises:

- an operation on tensors of the host and of the device, other than a copy (MixedDevices);
- whatever reads the device: `.item()`, `.tolist()`, a shape that depends on values
  (WaitsForDevice);
- a copy between host and device that is not asynchronous, or whose memory on the host is not pinned
  (WaitsForDevice).

It cannot see what only the driver knows: kernels that fail, or memory that runs out.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longshore.connectors.base import QueueEvent
from longshore.worker import worker
from longshore.worker.attention.backend import LayerHooks
from longshore.worker.kernels.operators import NAMESPACE, num_launches
from longshore.worker.queues.compute_queue import Completion, complete
from longshore.worker.step import decode_graphs, step_launcher
from longshore.worker.step.decode_graphs import Decode, Decoded

CUDA: Final = torch.device("cuda", 0)
FREE_BYTES: Final = 64 << 30
TOTAL_BYTES: Final = 80 << 30

_aten: Final = torch.ops.aten
_INDEXING: Final = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_WITHOUT_KERNEL: Final = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten._unsafe_view,
)


class MixedDevices(RuntimeError):
    """An operation has tensors of the host and of the device."""


class WaitsForDevice(RuntimeError):
    """The host would wait for the device."""


@dataclass
class Counts:
    """What the device was asked to do.

    num_kernels: operations on the device that are not views, and the declared launches of our own.
                 An operation of torch counts once, although some launch several kernels.
    num_copies:  copies between host and device.
    peak_bytes:  the most bytes of device memory in use at once that were allocated meanwhile.
    """

    num_kernels: int = 0
    num_copies: int = 0
    peak_bytes: int = 0
    _alive: dict[StorageWeakRef, int] = field(default_factory=dict)

    def add(self, func: Any, tensors: list[Tensor], results: list[Tensor]) -> None:
        """Count an operation with these arguments."""
        if func.is_view or func.overloadpacket in _WITHOUT_KERNEL:
            pass
        elif func.namespace == NAMESPACE:
            self.num_kernels += num_launches(func.overloadpacket.__name__)
        elif any(result.numel() for result in results):
            self.num_kernels += 1
        given = {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}
        for result in results:
            storage = result.untyped_storage()
            if (made := StorageWeakRef(storage)) not in given:
                self._alive[made] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))


class FakeDevice(TorchDispatchMode):
    """Sees every operation of this thread. `fake_device` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[int, Tensor] = {}  # by address; kept, so that no other has the address
        self._may_wait = False
        self._is_capturing = False
        self._counting: list[Counts] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its compiler to switch it off here."""
        return False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within the block the host may wait for the device, which answers with zeros."""
        before, self._may_wait = self._may_wait, True
        try:
            yield
        finally:
            self._may_wait = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within the block a graph is captured, so nothing may be copied from or to the host."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count what happens within the block. Blocks may be nested."""
        counts = Counts()
        self._counting.append(counts)
        try:
            yield counts
        finally:
            self._counting.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a property
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        if len(on_host) == len(tensors) and CUDA.type not in _device_types(leaves):
            return self._run_on_host(func, args, kwargs)
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if func.namespace == NAMESPACE and func.overloadpacket.__name__ == "copy_arrays":
            return self._copy_arrays(*args)
        if func is _aten.copy_.default and on_host:
            return self._copy(*args, **kwargs)
        if func is _aten._to_copy.default and (on_host or "cpu" in _device_types(leaves)):
            return self._moved(func, args[0], kwargs)
        return self._run(func, args, kwargs, tensors)

    def _run_on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            if func.overloadpacket in (_aten.pin_memory, _aten._pin_memory):
                return self._pin(args[0].clone())
            if func is _aten.is_pinned.default:
                return self._is_pinned(args[0])
            if not kwargs.get("pin_memory"):
                return func(*args, **kwargs)
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Run an operation on the device."""
        if any(tensor.dim() and not isinstance(tensor, FakeTensor) for tensor in tensors):
            devices = [f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors]
            raise MixedDevices(f"{func} has tensors {', '.join(devices)}")
        if func.overloadpacket in _INDEXING and _has_mask(args):
            self.wait(f"the number of elements that the mask of {func} chooses")
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.wait(f"the result of {func}", error)
            return _answer(func, args[0])
        if self._counting:
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for counts in self._counting:
                counts.add(func, tensors, results)
        return result

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """copy_ between host and device."""
        is_to_device = isinstance(target, FakeTensor)
        self._check_copy(source if is_to_device else target, "copy_", non_blocking)
        if is_to_device:
            return _aten.copy_.default(target, source, non_blocking)
        with unset_fake_temporarily():
            return target.zero_()

    def _moved(self, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A copy of `source` on the other side."""
        non_blocking = kwargs.get("non_blocking", False)
        if isinstance(source, FakeTensor):  # torch pins the result of an asynchronous copy
            self._check_copy(None, "a copy to the host", non_blocking)
            with unset_fake_temporarily():
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        self._check_copy(source, "a copy to the device", non_blocking)
        return func(source, **kwargs)

    def _copy_arrays(self, *arrays: Tensor) -> None:
        """Our kernel, the only one that reads and writes the host's memory: it must be pinned."""
        on_host = [x for x in arrays if not isinstance(x, FakeTensor) and x.numel()]
        for memory in on_host:
            self._check_host_memory(memory, "copy_arrays")
        for counts in self._counting:
            counts.num_kernels += num_launches("copy_arrays")
        with unset_fake_temporarily():
            for target in arrays[::2]:
                if not isinstance(target, FakeTensor):
                    target.zero_()

    def _check_copy(self, on_host: Tensor | None, name: str, non_blocking: bool) -> None:
        """on_host: the memory on the host that is read or written; None: it is pinned."""
        if on_host is not None and not on_host.numel():
            return
        if not non_blocking:
            self.wait(f"{name} without non_blocking=True")
        self._check_host_memory(on_host, name)
        for counts in self._counting:
            counts.num_copies += 1

    def _check_host_memory(self, on_host: Tensor | None, name: str) -> None:
        if self._is_capturing:
            raise WaitsForDevice(f"{name} is captured in a graph, which would repeat it")
        if on_host is not None and not self._is_pinned(on_host):
            self.wait(f"{name}, because its memory on the host is not pinned")

    def wait(self, what: str, cause: Exception | None = None) -> None:
        """Raises WaitsForDevice, unless the host may wait."""
        if not self._may_wait:
            raise WaitsForDevice(f"the host waits for {what}") from cause

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


def _device_types(leaves: list[Any]) -> set[str]:
    """The types of the devices that are arguments of an operation."""
    return {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is nothing but others, which torch runs instead."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


def _has_mask(args: Any) -> bool:
    """Whether an operation reads or writes the elements that a mask chooses. A mask alone, and a
    number to write, is `masked_fill`, which needs no number of elements."""
    _, indices, *values = args
    masks = [index for index in indices if index is not None and index.dtype == torch.bool]
    is_fill = (
        len(indices) == 1 and values and values[0].dim() == 0 and values[0].device.type == "cpu"
    )
    return bool(masks) and not is_fill


def _answer(func: Any, tensor: Tensor) -> Any:
    """What a device with nothing but zeros answers."""
    if func is _aten._local_scalar_dense.default:
        with unset_fake_temporarily():
            return torch.zeros((), dtype=tensor.dtype).item()
    if func is _aten.equal.default:
        return True
    raise WaitsForDevice(f"the shape of the result of {func} depends on values")


class FakeQueue:
    """Runs each operation at once; its errors are raised by `submit`."""

    def __init__(self) -> None:
        self._last = Completion()
        self._last.finish()

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        completion = self._last = Completion(step_id)
        completion.begin()
        with torch.inference_mode():
            operation()
        failure = complete(on_done, completion)
        if failure is not None:
            raise failure
        return completion

    def computed(self) -> QueueEvent:
        return self._last

    def close(self) -> None:
        """Everything has been run."""


class FakeGraphMaker:
    """A replay runs the step again, and so does the one that follows a capture."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def capture(self, decode: Decode, *, has_layer_hooks: bool) -> "FakeGraph":
        return FakeGraph(self._device, decode)


class FakeGraph:
    def __init__(self, device: FakeDevice, decode: Decode) -> None:
        self._device = device
        self._decode = decode

    def replay(self, hooks: LayerHooks | None) -> Decoded:
        with self._device.capturing():
            return self._decode(hooks)


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Within the block this thread has the device, and workers use it. They may wait for it while
    they load a model, of which no tensor is filled."""
    device, load = FakeDevice(), worker.Worker.__init__

    def waiting_load(*args: Any, **settings: Any) -> None:
        with device.waiting():
            load(*args, **settings)

    replaced: dict[Any, dict[str, Callable[..., Any]]] = {
        torch.cuda: {
            "empty_cache": lambda: None,
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
            "memory_reserved": lambda device=None: 0,
            "synchronize": lambda _=None: device.wait("torch.cuda.synchronize"),
        },
        worker: {
            "fill_at_random": lambda model: model.loaded(),
            "open_compute_queue": lambda device, check: FakeQueue(),
            "open_device": lambda name: CUDA,
            "wait_for_device": lambda device: None,  # between loading and the first step
        },
        worker.Worker: {"__init__": waiting_load},
        step_launcher: {"graph_maker": lambda _: FakeGraphMaker(device)},
        decode_graphs: {"_has_equal_bits": lambda one, other: True},
    }
    with ExitStack() as entered:
        entered.enter_context(_cuda_guard())
        for owner, values in replaced.items():
            entered.enter_context(mock.patch.multiple(owner, **values))
        entered.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        entered.enter_context(device)
        yield device


@contextmanager
def _cuda_guard() -> Iterator[None]:
    """Let torch select a CUDA device, which without CUDA is an error even for operations that only
    compute shapes: the device guard of `meta`, which does nothing, takes the place of CUDA's."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"  # c10::impl::device_guard_impl_registry
    guards = (ctypes.c_void_p * 16).in_dll(library, name)
    cuda, meta = 1, 14  # of the enumeration c10::DeviceType
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before
