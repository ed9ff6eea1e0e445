"""What a connector is created with, and what the scheduler half sees and returns."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.events import Medium
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheSpec
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import (
    NO_TENANT,
    CacheHint,
    MultimodalFeature,
    PromptEmbeds,
    Tenant,
)
from longshore.protocol.statistics import PullStats, TierStats

CONTRACT_VERSION: Final = 2
"""Version of this contract, increased by every change that breaks a connector. A connector states
the version that it was written for as `contract_version`."""

SUPPORTED_VERSIONS: Final = (1, CONTRACT_VERSION)
"""Connectors of other versions are rejected by name; see `version_1.py` for those of version 1."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Configuration of a connector, the same for both halves.

    options:    from `--kv-connector-config`; the connector defines their keys.
    block_size: tokens per block of each KV cache group.
    specs:      of each KV cache group; `block_size` is the tokens per block, also where several
                ranks share a block (context parallelism).
    hash_block_size: tokens per entry of `RequestView.block_hashes`; 0 in a worker.
    num_ranks:  number of workers; a transfer has ended when all of them have reported it.
    rank_block_bytes: bytes that a block of the largest group needs on each rank.
    engine_id:  identifies the engine and its epoch.
    model_name: for messages; empty in the scheduler.
    identity, kv_dtype, kv_layout, kv_rotation: of the engine and its KV cache.
    namespace:  digest of everything that stored KV depends on besides its block hash: model, dtype,
                layout and hash seed. KV that was stored in another namespace must not be loaded.
    publishes_events: whether `take_events` is called. If not, keep no events.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    block_size: int = 16
    num_blocks: int = 0
    num_groups: int = 1
    specs: tuple[KVCacheSpec, ...] = ()
    hash_block_size: int = 0
    num_ranks: int = 1
    rank_block_bytes: tuple[int, ...] = ()
    engine_id: str = ""
    model_name: str = ""
    identity: EngineIdentity | None = None
    kv_dtype: str = ""
    kv_layout: str = ""
    kv_rotation: str = ""
    namespace: str = ""
    publishes_events: bool = False


@dataclass(frozen=True, slots=True)
class RequestView:
    """A connector's view of one request.

    token_ids:    (num_tokens,) prompt and output so far; read-only.
    block_hashes: hashes of its full blocks known so far, one per `ConnectorConfig.hash_block_size`
                  tokens. Do not keep it: it grows. Empty if the request's KV must not be stored.
    waiting_s:    in a lookup, time since the request arrived.
    max_wait_s:   in a lookup, how long the request still waits after AskLater; with 0, AskLater
                  counts as a miss, so match what is known. In `update_state_after_alloc`, how long
                  it waits for this load: what is not loaded by then is computed, so a load that
                  ends in time with some of its blocks failed is better than a whole one that is
                  late.
    finish_reason: in `request_finished`, why it ends.
    finished_s:    in `request_finished`, the time by the scheduler's clock.
    cache_hint, tenant: how long its KV is worth keeping once it has ended, and whose share of a
                  tier that takes.
    multimodal, prompt_embeds: what the KV was computed from in addition to the tokens, or in place
                  of them.
    """

    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    lora_name: str | None = None
    job_id: str | None = None
    waiting_s: float = 0.0
    max_wait_s: float = math.inf
    finish_reason: FinishReason | None = None
    finished_s: float = 0.0
    cache_hint: CacheHint | None = None
    tenant: Tenant = NO_TENANT
    multimodal: Sequence[MultimodalFeature] = ()
    prompt_embeds: PromptEmbeds | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Matched:
    """`num_tokens` tokens after the local ones can be loaded: within the step, before it computes,
    or in the background while the request waits (`is_async`)."""

    num_tokens: int
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class AskLater:
    """The number is not known yet. The request is skipped in this step, and the connector is asked
    again in a later one: in the next, unless many requests wait; or, with `names_answers`, when the
    connector has named the request. It is until `RequestView.max_wait_s` is over: then the tokens
    are computed."""


Match: TypeAlias = Matched | AskLater


@dataclass(frozen=True, slots=True)
class SwapSize:
    """What it takes to swap a request out and to load it again; bytes are those of one rank.

    store_bytes:  to copy out; what is stored already needs no copy.
    load_bytes:   to load when the request continues.
    queued_store_bytes, queued_load_bytes: of other transfers that come first.
    num_found_tokens, found_bytes: what could be loaded if the request were preempted without a
                  swap, because it is stored already.
    """

    store_bytes: int
    load_bytes: int
    queued_store_bytes: int = 0
    queued_load_bytes: int = 0
    num_found_tokens: int = 0
    found_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FinishAction:
    """What to do with the blocks of a request that ends.

    delay_free: free them only when the workers report the request in `finished_sending`.
    params:     `kv_transfer_params` for the client, which passes them to the engine that continues
                the request.
    """

    delay_free: bool = False
    params: dict[str, Any] | None = None


class Chunk(NamedTuple):
    """Consecutive blocks of a request. position: index of the first in its block table.
    block_hash: of the last."""

    position: int
    block_ids: list[int]
    block_hash: bytes


class StorableBlocks(msgspec.Struct, frozen=True):
    """Full blocks of one request and KV cache group that may be stored: the plan that computes them
    has been answered, and they are still cached. The request may have ended meanwhile.

    step:       the plan.
    block_hashes, positions: of each block, its hash and its index in the request's block table.
    request_hashes: see `RequestView.block_hashes`.
    earlier_ids: the blocks directly before them, back to the beginning of a chunk, see `chunks`.
    """

    step: int
    request_id: str
    group: int
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    positions: Sequence[int] = ()
    request_hashes: Sequence[bytes] = ()
    earlier_ids: Sequence[int] = ()

    def only(self, keep: Callable[[int, bytes], bool]) -> "StorableBlocks | None":
        """Those of these blocks that `keep` wants, which gets the id and hash of each; None if
        there are none."""
        blocks = zip(self.block_ids, self.block_hashes, self.positions, strict=True)
        kept = [block for block in blocks if keep(block[0], block[1])]
        if not kept:
            return None
        ids, hashes, positions = zip(*kept, strict=True)
        return StorableBlocks(
            self.step, self.request_id, self.group, ids, hashes, positions, self.request_hashes
        )

    def chunks(self, size: int) -> list[Chunk]:
        """The whole chunks of `size` blocks that these blocks complete. A chunk begins at a
        multiple of `size` in the block table."""
        first = self.positions[0] - len(self.earlier_ids)
        at = dict(enumerate(self.earlier_ids, first))
        at.update(zip(self.positions, self.block_ids, strict=True))
        chunks = []
        for position, block_hash in zip(self.positions, self.block_hashes, strict=True):
            begin = position + 1 - size
            block_ids = [at.get(index, NULL_BLOCK) for index in range(begin, position + 1)]
            if begin % size == 0 and NULL_BLOCK not in block_ids:
                chunks.append(Chunk(begin, block_ids, block_hash))
        return chunks


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that got a row. block_ids: its block table per KV cache group."""

    request_id: str
    block_ids: tuple[Int32Array, ...]


class StepView(msgspec.Struct, frozen=True):
    """A connector's view of one plan: only what changed since the previous one.

    answered_step: the latest answer that has been applied.
    admitted:  requests that got a row, in order.
    uncached:  blocks that were uncached because their content is wrong (failed load, logits not
               finite): do not begin to store them, if they were in an earlier plan's `storable`.
               Applies before `storable`.
    storable:  blocks that may be stored from now on, in the order in which they were cached. They
               can be allocated again when `build_connector_meta` has returned, so hold those that
               are stored.
    unanswered_step: the last plan whose blocks will be `storable` later; 0: there is none.
    preempted, finished: requests that lost their row since the previous plan.
    """

    step: int
    answered_step: int
    admitted: Sequence[AdmittedRequest] = ()
    uncached: Sequence[int] = ()
    storable: Sequence[StorableBlocks] = ()
    unanswered_step: int = 0
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """What workers reported with the answer to plan `step`, or what one worker reported in a
    transfer report (`step` 0).

    rank:     the worker that reported.
    finished_sending, finished_receiving: request ids whose transfer has ended on all ranks.
    metadata: opaque messages of the worker half, in order; empty if it sent none.
    """

    step: int = 0
    rank: int = 0
    finished_sending: Sequence[str] = ()
    finished_receiving: Sequence[str] = ()
    failed_block_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    metadata: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """What the scheduler half knows for operators.

    tiers:         those with the same medium are added up.
    queued_blocks: by (source, destination), offloaded blocks whose transfer is planned and has not
                   ended on all ranks.
    pulls:         KV that other engines pull from this one, or this one from others.
    """

    tiers: Sequence[TierStats] = ()
    queued_blocks: Mapping[tuple[Medium, Medium], int] = field(default_factory=dict)
    pulls: PullStats | None = None


class BlockHolds(Protocol):
    """Lets a connector hold blocks while it stores them, even if their request frees them."""

    def hold(self, block_ids: Sequence[int]) -> int:
        """Add a reference to each block; returns an id for `release`."""

    def release(self, hold_id: int) -> None:
        """End a hold, after all transfers from its blocks. Raises KeyError for an unknown id."""

    def release_rank(self, hold_id: int, rank: int) -> bool:
        """The transfer from the hold's blocks has ended on a rank. When it has on all of them, the
        hold ends, and this returns True. A repeated or unknown report is ignored."""
