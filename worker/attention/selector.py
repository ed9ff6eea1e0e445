"""The choice of a backend for paged attention."""

from typing import TYPE_CHECKING, Final

import torch

from longshore.protocol.errors import ConfigError
from longshore.worker.attention.attention_probe import prefill_backend
from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.attention.triton_backend import MAX_HEAD_DIM, TritonAttention
from longshore.worker.config import AttentionBackendName
from longshore.worker.kernels import paged_attention
from longshore.worker.kernels.native import native
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kv_cache.buffer import PagedKV

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind


class _Selection:
    """Of this process."""

    name: AttentionBackendName = "auto"


_selection: Final = _Selection()


def select(name: AttentionBackendName, device: torch.device) -> None:
    """Use this backend for paged attention from now on; "auto" chooses by the device. Raises
    ConfigError if the device does not have it."""
    if name in ("triton", "flashinfer") and device.type != "cuda":
        raise ConfigError(
            f"attention_backend={name} needs a GPU, but the device is {device}. Use auto or torch."
        )
    _selection.name = name


def computes_in_torch() -> bool:
    """Whether plain torch was selected."""
    return _selection.name == "torch"


def make_attention(
    cache: PagedKV, kind: "PagedAttentionKind", *, may_probe: bool = True
) -> AttentionBackend:
    """Choose the Triton kernels on a GPU, for heads of up to MAX_HEAD_DIM, with FlashInfer for
    chunks if that is selected, or is installed and faster; on a CPU the compiled kernel if it was
    built and supports the cache's dtype and head size; otherwise torch.

    may_probe: False while requests are served: they would wait for the comparison with FlashInfer,
               which is not used then."""
    name = _selection.name
    if name == "torch":
        return TorchAttention(cache, kind)
    if uses_triton(cache.planes) and cache.head_dim <= MAX_HEAD_DIM:
        if name == "triton" or cache.device.type == "cpu" or not may_probe:
            return TritonAttention(cache, kind)
        return prefill_backend(cache, kind, is_wanted=name == "flashinfer")
    kernels = native()
    if kernels is None or not paged_attention.supports(cache):
        return TorchAttention(cache, kind)
    return NativeAttention(kernels, cache, kind)
