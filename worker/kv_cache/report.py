"""The numbers of a KV cache plan that `longshore doctor --plan` and a rank's startup log show. Does
not import torch."""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    LongestRequest,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
    max_blocks,
    num_reserved_blocks,
    tokens_that_fit,
)
from longshore.worker.kv_cache.plan import block_bytes, expanded_bytes


class GroupReport(msgspec.Struct, frozen=True):
    """One KV cache group.

    kind:          description of its layers.
    block_tokens:  tokens that a block covers, over all ranks that split them.
    layer_bytes:   bytes of one layer in a block.
    padding_bytes: bytes of a block that the group does not use.
    max_blocks:    maximum number of blocks of the longest request.
    """

    kind: str
    num_layers: int
    block_tokens: int
    layer_bytes: int
    padding_bytes: int
    max_blocks: int


class CacheReport(msgspec.Struct, frozen=True):
    """One rank's cache.

    max_concurrency: requests of max_model_len tokens that fit.
    num_tokens:      tokens of these requests.
    padding_share:   padding as a share of the bytes that the longest request holds.
    num_blocks_in_flight: blocks of the longest request that it needs only because `num_steps` steps
                     with `max_tokens_in_flight` tokens may be in flight, instead of one token.
    expanded_bytes:  memory in addition to the cache, allocated when keys and values are first
                     expanded from latents; 0 with context parallelism, which never expands.
    """

    groups: tuple[GroupReport, ...]
    block_bytes: int
    num_blocks: int
    num_reserved_blocks: int
    max_model_len: int
    max_concurrency: float
    num_tokens: int
    padding_share: float
    num_steps: int
    max_tokens_in_flight: int
    num_blocks_in_flight: int
    expanded_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_bytes


def report_on(
    groups: Sequence[KVCacheGroup],
    num_blocks: int,
    longest: LongestRequest,
) -> CacheReport:
    """Make the report of a plan. `longest` has a number of tokens in flight."""
    context_parallel_size = longest.context_parallel_size
    size_bytes = block_bytes(groups)
    reports = tuple(
        GroupReport(
            kind=kind_of(group.spec),
            num_layers=len(group.layer_names),
            block_tokens=group.spec.block_size * context_parallel_size,
            layer_bytes=group.spec.page_size_bytes,
            padding_bytes=size_bytes - group.block_size_bytes,
            max_blocks=max_blocks([group], longest),
        )
        for group in groups
    )
    assert longest.num_in_flight is not None
    needed = sum(report.max_blocks for report in reports)
    padding_bytes = sum(report.max_blocks * report.padding_bytes for report in reports)
    num_reserved = num_reserved_blocks(groups)
    usable = max(0, num_blocks - num_reserved)
    return CacheReport(
        groups=reports,
        block_bytes=size_bytes,
        num_blocks=num_blocks,
        num_reserved_blocks=num_reserved,
        max_model_len=longest.num_tokens,
        max_concurrency=usable / needed,
        num_tokens=tokens_that_fit(groups, num_blocks, longest),
        padding_share=padding_bytes / (needed * size_bytes),
        num_steps=longest.num_steps,
        max_tokens_in_flight=longest.num_in_flight,
        num_blocks_in_flight=needed
        - max_blocks(groups, longest._replace(num_in_flight=1, num_steps=1)),
        expanded_bytes=expanded_bytes(groups) if context_parallel_size == 1 else 0,
    )


def kind_of(spec: KVCacheSpec) -> str:
    """A description for operators, such as `sliding window of 1,024`."""
    match spec:
        case SlidingWindowSpec():
            return f"sliding window of {spec.sliding_window:,}"
        case ChunkedLocalAttentionSpec():
            return f"chunks of {spec.attention_chunk_size:,}"
        case StateSpec():
            return "states"
        case MLAAttentionSpec():
            return "latents"
        case SinkFullAttentionSpec():
            return f"full attention, sink of {spec.sink_tokens:,}"
        case FullAttentionSpec():
            return "full attention"
        case CrossAttentionSpec():
            return f"cross attention to {spec.max_encoder_tokens:,}"
        case CustomSpec():
            return spec.manager
        case _:
            assert_never(spec)
