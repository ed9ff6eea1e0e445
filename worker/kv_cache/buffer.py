"""The KV cache of one rank: one buffer of bytes, allocated once, in which a block is contiguous.

Any block can serve any KV cache group: each group has its own view of the blocks. The view uses the
first bytes of a block and leaves the rest as padding if the group's layers need less than the
largest group's. A transfer moves a block with one copy: it starts at `block_id * block_size_bytes`.
Paged as in PagedAttention (Kwon et al., 2023, section 4).

Layout of a block, by the kind of its group:

- keys and values: (num_kv_heads, num_layers, 2, block_size, head_dim). KV heads are outermost, so
  that any range of them, over all layers, is one run of bytes: a rank of an engine with another
  tensor parallel size takes its heads of a block with one copy.
- latents: (num_layers, block_size, head_size). There is one head, which every rank has.
- states: see `state_pages`.
- kinds of other packages: per layer, a page of `page_size_bytes`.

The scales of an fp8 cache are not in the blocks: there are two per layer, one for keys and one for
values, which are loaded with the weights and belong to the view (`PagedKV.fp8`).
"""

import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.arrays import Int32Array, Int64Array, UInt8Array
from longshore.protocol.errors import EngineDead
from longshore.protocol.kv_cache_spec import (
    FP8_E4M3,
    NULL_BLOCK,
    CustomSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLAAttentionSpec,
    StateSpec,
)
from longshore.worker.kernels import huge_pages
from longshore.worker.kv_cache.fp8 import (
    FP8,
    Fp8Layers,
    KVScales,
)
from longshore.worker.kv_cache.plan import block_bytes
from longshore.worker.kv_cache.state_pages import StatePages
from longshore.worker.process.device import available_bytes

logger = logging.getLogger(__name__)

DEFAULT_CPU_MEMORY_FRACTION: Final = 0.25
"""Share of the memory left after loading the weights. The rest is for activations and other
processes of the machine."""

MAX_DEFAULT_CPU_BYTES: Final = 4 << 30
"""Maximum default size of the KV cache of a CPU rank."""

POISON: Final = b"\x47"
"""In every dtype a number that is finite, because attention multiplies masked values by zero, and
unlike those of a model: 51,015 in float32, 50,944 in bfloat16, 7.3 in float16."""

_ALIGNMENT_BYTES: Final = 64  # of torch's own CPU memory
_STATE_DTYPES: Final = {4: torch.float32, 8: torch.float64}


class KVMemory(NamedTuple):
    """Memory that outlives the process, of a CPU rank.

    fd: its descriptor, of tmpfs.
    adopted_block_ids: (n,) int32, blocks that keep what a former process of this rank has written;
                       None: the memory is emptied.
    """

    fd: int
    adopted_block_ids: Int32Array | None

    def free(self) -> None:
        """Release the memory, which nothing may use any more."""
        os.ftruncate(self.fd, 0)

    def map(self, num_bytes: int) -> UInt8Array:
        """Raises EngineDead if blocks are adopted from memory of another size."""
        if self.adopted_block_ids is None:
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, num_bytes)
        elif (found := os.fstat(self.fd).st_size) != num_bytes:
            raise EngineDead(
                f"the KV cache that this rank adopts has {found} bytes, but needs {num_bytes}"
            )
        memory = mmap.mmap(self.fd, num_bytes)
        huge_pages.advise(memory)
        return np.frombuffer(memory, np.uint8)


@dataclass(frozen=True, eq=False)
class PagedKV:
    """Keys and values of a group's layers.

    planes: (num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim). Blocks may be further
            apart than the layers need, so the first two dimensions cannot be flattened.
    fp8:    dtype and scales of the layers if `planes` are fp8.
    """

    planes: Tensor
    fp8: Fp8Layers | None = None

    @property
    def num_blocks(self) -> int:
        return self.planes.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.planes.shape[1]

    @property
    def num_layers(self) -> int:
        return self.planes.shape[2]

    @property
    def block_size(self) -> int:
        return self.planes.shape[4]

    @property
    def head_dim(self) -> int:
        return self.planes.shape[5]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of attention's inputs and outputs."""
        return self.planes.dtype if self.fp8 is None else self.fp8.dtype

    @property
    def device(self) -> torch.device:
        return self.planes.device

    def zero_after(self, num_tokens: Tensor) -> None:
        """Zero block i after its first `num_tokens[i]` tokens; (num_blocks,) int64."""
        is_after = _positions(self.block_size, num_tokens) >= num_tokens[:, None]
        planes = self.planes.view(torch.uint8) if self.planes.dtype == FP8 else self.planes
        planes.masked_fill_(is_after[:, None, None, None, :, None], 0)


@dataclass(frozen=True, eq=False)
class PagedLatents:
    """Latent vectors of a group's layers.

    latents: (num_blocks, num_layers, block_size, head_size); blocks may be further apart.
    """

    latents: Tensor

    @property
    def num_blocks(self) -> int:
        return self.latents.shape[0]

    @property
    def num_layers(self) -> int:
        return self.latents.shape[1]

    @property
    def block_size(self) -> int:
        return self.latents.shape[2]

    @property
    def head_size(self) -> int:
        return self.latents.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.latents.dtype

    @property
    def device(self) -> torch.device:
        return self.latents.device

    def zero_after(self, num_tokens: Tensor) -> None:
        """Zero block i after its first `num_tokens[i]` tokens; (num_blocks,) int64."""
        is_after = _positions(self.block_size, num_tokens) >= num_tokens[:, None]
        self.latents.masked_fill_(is_after[:, None, :, None], 0)


@dataclass(frozen=True, eq=False)
class PagedBytes:
    """What layers of a kind from another package store.

    pages: (num_blocks, num_layers, page_size_bytes) uint8; blocks may be further apart.
    """

    pages: Tensor
    block_size: int

    def zero_after(self, num_tokens: Tensor) -> None:
        """Does nothing: the layout of a page is unknown."""


BlockView: TypeAlias = PagedKV | PagedLatents | StatePages | PagedBytes


class KVCache:
    """The blocks of one rank. All start as zeros, except for adopted ones; the null block stays
    zero.

    groups: with the layers of this rank only; a pipeline stage may have none of a group's layers.
    dtype:  dtype that the model computes in; the stored dtype too, unless `config.dtype` is
            fp8_e4m3.
    scales: fp8 scales by layer; layers without an entry have scale 1.
    poison: fill blocks with POISON instead of clearing them.
    memory: where the blocks are; None: in memory of this process or device.
    buffer: (num_blocks, block_size_bytes) uint8.
    recorded: (num_blocks,) the checksums that BlockGuard has taken, or 0, in the same memory as the
            blocks.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        scales: Mapping[str, KVScales] | None = None,
        poison: bool = False,
        memory: KVMemory | None = None,
    ) -> None:
        self.num_blocks = config.num_blocks
        self.groups = config.groups
        self.dtype = dtype
        self.device = device
        self._stored_dtype = FP8 if config.dtype == FP8_E4M3 else dtype
        self._scales = scales or {}
        self.block_size_bytes = block_bytes(config.groups)
        shape = self.num_blocks, self.block_size_bytes
        if memory is None:
            self.buffer = _zeros(shape, device)
            self.recorded: Int64Array = np.zeros(self.num_blocks, np.int64)
        else:
            num_bytes = math.prod(shape)
            np.empty(num_bytes, np.uint8)  # raises MemoryError, as mapping tmpfs does not
            mapped = memory.map(num_bytes + self.num_blocks * np.dtype(np.int64).itemsize)
            self.buffer = torch.from_numpy(mapped[:num_bytes]).view(shape)
            self.recorded = mapped[num_bytes:].view(np.int64)
        self._words = self.buffer.view(torch.int64)
        self._clear_word = int.from_bytes(POISON * 8) if poison else 0
        self._weights: Tensor | None = None
        assert NULL_BLOCK == 0

    def view(self, group: int) -> BlockView:
        """The group's view of the blocks; the group must have layers on this rank."""
        planned = self.groups[group]
        view = view_blocks(self.buffer, planned, self._stored_dtype)
        if isinstance(view, PagedKV) and self._stored_dtype == FP8:
            scales = tuple(self._scales.get(name, KVScales()) for name in planned.layer_names)
            return replace(view, fp8=Fp8Layers(self.dtype, scales))
        return view

    def clear(self, block_ids: Tensor) -> None:
        """Zero whole blocks, or fill them with POISON. block_ids: (n,) int64, on the cache's
        device."""
        self._words.index_fill_(0, block_ids, self._clear_word)

    def checksums(self, block_ids: Tensor) -> Tensor:
        """(n,) int64, on the device: a checksum of the content of each block. block_ids: (n,)
        int64, on the cache's device."""
        if self._weights is None:
            count = self._words.shape[1]
            self._weights = 2 * torch.arange(count, device=self._words.device) + 1
        return (self._words.index_select(0, block_ids) * self._weights).sum(dim=1)

    def copy_blocks(
        self,
        source_ids: Tensor,
        target_ids: Tensor,
        num_tokens: Tensor,
        num_of_group: Sequence[int],
    ) -> None:
        """Copy the first `num_tokens[i]` tokens, all layers, of block `source_ids[i]` to
        `target_ids[i]`, and zero the rest of the target: attention would read, though mask, what
        the source's owner has written there. A state is copied whole. All sources are read before
        any target is written.

        (n,) int64 each, on the cache's device, group by group; targets are distinct.
        num_of_group: number of copies of each group.
        """
        blocks = self._words.index_select(0, source_ids)
        parts = zip(
            self.groups,
            blocks.view(torch.uint8).split(list(num_of_group)),
            num_tokens.split(list(num_of_group)),
            strict=True,
        )
        for group, copied, counts in parts:
            if len(counts) and group.layer_names:
                view_blocks(copied, group, self._stored_dtype).zero_after(counts)
        self._words.index_copy_(0, target_ids, blocks)

    def copy_pages(self, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy whole blocks, the pages of states. (n,) int64 each, on the cache's device."""
        self._words.index_copy_(0, target_ids, self._words.index_select(0, source_ids))


def view_blocks(buffer: Tensor, group: KVCacheGroup, dtype: torch.dtype) -> BlockView:
    """A group's view of `buffer`, (n, block bytes) uint8, contiguous. dtype: of all elements of its
    size; elements of another size, in states, are float32 or float64."""
    num_layers, spec = len(group.layer_names), group.spec
    used = buffer[:, : group.block_size_bytes]
    if isinstance(spec, CustomSpec):
        return PagedBytes(used.unflatten(1, (num_layers, -1)), spec.block_size)
    if isinstance(spec, StateSpec):
        dtypes = [dtype if n == dtype.itemsize else _STATE_DTYPES[n] for n in spec.dtype_bytes]
        return StatePages(buffer, spec, num_layers, tuple(dtypes))
    assert spec.dtype_bytes == dtype.itemsize
    elements = used.view(dtype)
    if isinstance(spec, MLAAttentionSpec):
        return PagedLatents(elements.unflatten(1, (num_layers, spec.block_size, spec.head_size)))
    assert spec.head_size_v in (None, spec.head_size)
    shape = (spec.num_kv_heads, num_layers, 2, spec.block_size, spec.head_size)
    return PagedKV(elements.unflatten(1, shape))


def measure_num_blocks(
    groups: Sequence[KVCacheGroup],
    *,
    device: torch.device,
    kv_cache_bytes: int | None,
    memory_fraction: float | None,
    max_useful_blocks: int,
    num_ranks_on_device: int = 1,
) -> int:
    """The number of blocks that fit into `kv_cache_bytes` or, if None, into a share of free memory:
    that of `memory_fraction` or, if None, the default of a CPU.

    num_ranks_on_device: ranks that measure the same memory; each takes an equal part.
    max_useful_blocks: maximum number of blocks that running requests can fill. By default a rank
                       takes no more.
    Call it after loading the weights, so that their memory is not counted as free.
    """
    block_size_bytes = block_bytes(groups)
    if kv_cache_bytes is not None:
        return kv_cache_bytes // block_size_bytes
    left_bytes = available_bytes(device) // num_ranks_on_device
    logger.debug("%.2f GiB of memory free on %s for this rank", left_bytes / 2**30, device)
    if memory_fraction is not None:
        return int(left_bytes * memory_fraction) // block_size_bytes
    default_bytes = min(int(left_bytes * DEFAULT_CPU_MEMORY_FRACTION), MAX_DEFAULT_CPU_BYTES)
    return min(default_bytes // block_size_bytes, max_useful_blocks)


def _positions(block_size: int, like: Tensor) -> Tensor:
    return torch.arange(block_size, device=like.device)


def _zeros(shape: tuple[int, int], device: torch.device) -> Tensor:
    """A zeroed buffer. On a CPU the kernel zeroes each page at first access, so a large cache does
    not delay startup; numpy asks for huge ones."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    size_bytes = math.prod(shape)
    memory = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + size_bytes]).view(shape)
