"""Context parallelism: ranks with the same KV heads split the tokens of every sequence among them.

Runs of `interleave` tokens are assigned to the ranks in turn. One block id of the scheduler covers
block_size tokens of each rank, and each rank stores its part under that id, so the same memory per
rank holds a longer context. Like decode context parallelism in vLLM. Does not import torch, so that
settings can be checked without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from longshore.worker.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

Numbers = TypeVar("Numbers", npt.NDArray[np.int64], "Tensor")


@dataclass(frozen=True)
class ContextShare:
    """The tokens that one rank stores: all of them if `size` is 1.

    rank, size: the position among the ranks that split the tokens, and their number.
    interleave: consecutive tokens that one rank stores; a divisor of the block size.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    @classmethod
    def of_ranks(
        cls,
        *,
        dcp_rank: int = 0,
        dcp_size: int = 1,
        pcp_rank: int = 0,
        pcp_size: int = 1,
        interleave: int = 1,
    ) -> "ContextShare":
        """The share of a decode (dcp) and prefill (pcp) context parallel rank."""
        return cls(pcp_rank * dcp_size + dcp_rank, pcp_size * dcp_size, interleave)

    def keeps(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether this rank stores each token. Every block starts with the first rank, so positions
        may also be offsets in a block of all ranks."""
        return positions // self.interleave % self.size == self.rank

    def offsets(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Convert offsets in a block of all ranks to offsets in the block of the storing rank."""
        return offsets // self._turn * self.interleave + offsets % self.interleave

    def num_kept(self, num_tokens: Numbers) -> Numbers:
        """How many of the first `num_tokens` tokens of a sequence, or of a block of all ranks, this
        rank stores. It stores them in order, so they are its first ones."""
        rest = num_tokens % self._turn - self.rank * self.interleave
        return num_tokens // self._turn * self.interleave + rest.clip(0, self.interleave)

    @property
    def _turn(self) -> int:
        """Number of tokens after which the assignment to ranks repeats."""
        return self.size * self.interleave


WHOLE_CONTEXT = ContextShare()


def check_context_parallel(
    specs: Mapping[str, KVCacheSpec],
    *,
    size: int,
    interleave: int,
    block_size: int,
    num_shards: int,
    num_kv_heads: int,
) -> None:
    """Raise ConfigError (UnsupportedModel) unless groups of `size` neighbouring shards can split
    the tokens of these layers.

    specs:        KV cache spec of every cached layer of the model, by name.
    block_size:   tokens of a block that one rank stores.
    num_shards:   tensor parallel ranks.
    num_kv_heads: KV heads of the model; 1 for latents.
    """
    if size == 1:
        return
    for name, spec in specs.items():
        frees_skipped = isinstance(spec, FullAttentionSpec) and (
            spec.sliding_window is not None or spec.attention_chunk_size is not None
        )
        if frees_skipped or not isinstance(spec, FullAttentionSpec | MLAAttentionSpec):
            raise UnsupportedModel(
                f"decode_context_parallel_size={size}: {name} of this model has a "
                f"{type(spec).__name__}, but only full attention and latents can be split by "
                "tokens. Remove decode_context_parallel_size."
            )
    num_copies = max(1, num_shards // num_kv_heads)
    if num_copies % size:
        raise UnsupportedModel(
            f"decode_context_parallel_size={size} does not divide the {num_copies} copies of each "
            f"of the {num_kv_heads} KV heads that tensor_parallel_size={num_shards} makes; only "
            "shards with the same KV heads can split tokens. Use a divisor of that number, or "
            "more shards."
        )
    if block_size % interleave:
        raise ConfigError(
            f"cp_kv_cache_interleave_size={interleave} does not divide block_size={block_size}: "
            "a block would end within a run of interleaved tokens. Use a divisor of the block size."
        )
