"""Context parallelism: ranks that hold the same KV heads share out the tokens of every sequence.

Runs of `interleave` tokens are dealt out in turn. A block id of the scheduler stands for so many
times the tokens as there are ranks, and each rank keeps its part of them under that id: the same
memory per rank holds a longer context. As decode context parallelism in vLLM. Loads no tensor
library, so that settings can be checked without one.
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
    """The tokens that one rank keeps; one of one keeps all of them.

    rank, size: among those that share.
    interleave: neighbouring tokens that one rank keeps; it divides the block size.
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
        """Of a place among decode (dcp) and prefill (pcp) context parallel ranks."""
        return cls(pcp_rank * dcp_size + dcp_rank, pcp_size * dcp_size, interleave)

    def keeps(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether this rank keeps each token. A block of all ranks begins a new turn, so positions
        may also be counted from one's start."""
        return positions // self.interleave % self.size == self.rank

    def offsets(self, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Within a block of all ranks -> within that of the rank that keeps the token."""
        return offsets // self._turn * self.interleave + offsets % self.interleave

    def num_kept(self, num_tokens: Numbers) -> Numbers:
        """How many of the first `num_tokens` tokens of a sequence, or of a block of all ranks, this
        rank keeps: they are the first ones there, in the same order."""
        rest = num_tokens % self._turn - self.rank * self.interleave
        return num_tokens // self._turn * self.interleave + rest.clip(0, self.interleave)

    @property
    def _turn(self) -> int:
        """Tokens after which the first rank is the next one again."""
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
    """Raise ConfigError (UnsupportedModel) unless groups of `size` neighbouring shards can share
    the tokens of such layers.

    specs:        of every layer of the model that keeps something, by name.
    block_size:   tokens of a block that one rank keeps.
    num_shards:   tensor parallel ranks.
    num_kv_heads: of the model; 1 for latents.
    """
    if size == 1:
        return
    for name, spec in specs.items():
        frees_skipped = isinstance(spec, FullAttentionSpec) and (
            spec.sliding_window is not None or spec.attention_chunk_size is not None
        )
        if frees_skipped or not isinstance(spec, FullAttentionSpec | MLAAttentionSpec):
            raise UnsupportedModel(
                f"decode_context_parallel_size={size}: {name} of this model keeps "
                f"{type(spec).__name__}, and only layers that attend to everything before "
                "(full attention, latents) can share tokens out. Leave "
                "decode_context_parallel_size out."
            )
    num_copies = max(1, num_shards // num_kv_heads)
    if num_copies % size:
        raise UnsupportedModel(
            f"decode_context_parallel_size={size} does not divide the {num_copies} copies of each "
            f"of the {num_kv_heads} KV heads that tensor_parallel_size={num_shards} makes; only "
            "shards that hold the same KV heads can share tokens out. Use a divisor of that "
            "number, or more shards."
        )
    if block_size % interleave:
        raise ConfigError(
            f"cp_kv_cache_interleave_size={interleave} does not divide block_size={block_size}: "
            "a rank's block would end within its turn. Use a divisor of the block size."
        )
