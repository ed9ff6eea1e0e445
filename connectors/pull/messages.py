"""What the halves of a pull connector tell each other, and what reader and owner tell each other.

Block tables travel as bytes, int32 little-endian, one entry per KV cache group. Nothing is pickled;
a message with an unknown tag, an unknown field or a wrong type is rejected.
"""

import enum
import hashlib
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
import numpy as np

from longshore.connectors.base import ConnectorConfig, RequestView
from longshore.connectors.pull.layout import LayoutMismatch, RankLayout, check_kind
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.errors import ConfigError, shortened

SIDE_CHANNEL_VERSION: Final = 1
"""Increased by every change of a message between reader and owner."""

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Limit of a message between reader and owner: block tables of some million tokens."""

MAX_RANKS: Final = 1024
"""Limit of the ranks of an engine: routes between all of two engines are computed."""

MAX_TRANSFER_IDS: Final = 4096
"""Limit of the ids in one message."""

NOT_READY: Final = "the owner is not ready yet: not all of its ranks have reported"
GREET_FIRST: Final = "the owner has no handshake with this connection; it was restarted"
"""Reasons of a `Refused`. After the first, a reader greets again; after the second it connects
again, as soon as it has something to pull or a lease to renew."""

NOT_STORED: Final = "it has no such output"
"""Reason of a `Refused` that is a miss, not a failure."""

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
Tables: TypeAlias = tuple[bytes, ...]
TransferIds: TypeAlias = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_TRANSFER_IDS)]


def tables_of(block_ids: Sequence[Int32Array]) -> Tables:
    return tuple(ids.astype("<i4").tobytes() for ids in block_ids)


def block_ids_of(tables: Tables) -> tuple[Int32Array, ...]:
    """Raises ValueError for bytes that are no block table."""
    return tuple(int32_array(np.frombuffer(table, "<i4")) for table in tables)


def digest_input(request: RequestView, num_tokens: int) -> bytes:
    """Identifies what the KV of the first `num_tokens` tokens was computed from: tokens, adapter,
    and multimodal items. Prompts with different images have the same placeholder tokens."""
    items = sorted((item.offset, item.num_tokens, item.hash) for item in request.multimodal)
    others = request.lora_name, [item for item in items if item[0] < num_tokens]
    digest = hashlib.sha256(request.token_ids[:num_tokens].astype("<i4").tobytes())
    digest.update(msgspec.msgpack.encode(others))
    return digest.digest()


def digest_blocks(tables: Tables) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(tables)).digest()


class KVDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two engines must have in common, and their blocks (`ranks`), which may differ."""

    transport: Name
    model_fingerprint: Name
    dtype: Name
    kv_cache_dtype: Name
    kv_layout: Name
    kv_rotation: str
    ranks: Annotated[tuple[RankLayout, ...], msgspec.Meta(max_length=MAX_RANKS)]

    def difference(self, other: "KVDescription") -> str | None:
        """The first field in which the engines do not fit."""
        for name in self.__struct_fields__[:-1]:
            own, theirs = getattr(self, name), getattr(other, name)
            if own != theirs:
                return f"{name} is {own!r} on the reader and {shortened(theirs)!r} on the owner"
        return None


def describe(config: ConnectorConfig, transport: str) -> KVDescription:
    """What this engine stores, without its ranks. Raises ConfigError for what cannot be pulled."""
    identity = config.identity
    assert identity is not None
    if identity.decode_context_parallel_size > 1:
        raise ConfigError(
            f"--kv-connector {transport} does not support decode_context_parallel_size="
            f"{identity.decode_context_parallel_size}: a block is divided among ranks by tokens. "
            "Use 1."
        )
    for number, spec in enumerate(config.specs):
        try:
            check_kind(spec, f"KV cache group {number}")
        except LayoutMismatch as error:
            raise ConfigError(f"--kv-connector {transport}: {error}") from error
    return KVDescription(
        transport=transport,
        model_fingerprint=identity.model_fingerprint,
        dtype=identity.dtype,
        kv_cache_dtype=config.kv_dtype,
        kv_layout=config.kv_layout,
        kv_rotation=config.kv_rotation,
        ranks=(),
    )


# Between a reader's rank (client) and the first rank of the owner (server)


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A rank of a reader wants to pull. Unknown fields are allowed, as the owner may be older."""

    version: int
    engine_id: Name
    kv: KVDescription


class Accepted(msgspec.Struct, tag="accepted", frozen=True, forbid_unknown_fields=True):
    """agents: by rank, what the transport needs to connect to it."""

    engine_id: Name
    kv: KVDescription
    agents: tuple[bytes, ...]


class Claim(msgspec.Struct, tag="claim", frozen=True, forbid_unknown_fields=True):
    """Ask for the blocks of a transfer; also renews its lease.

    engine_id:     of the owner, with its epoch.
    token_digest:  `digest_input` of the reader's request.
    blocks_digest: `digest_blocks` of the `remote_block_ids` that the reader was given.
    """

    transfer_id: Name
    engine_id: Name
    request_id: Name
    token_digest: Digest
    blocks_digest: Digest


class Granted(msgspec.Struct, tag="granted", frozen=True, forbid_unknown_fields=True):
    transfer_id: Name
    num_tokens: Count
    tables: Tables


class Renew(msgspec.Struct, tag="renew", frozen=True, forbid_unknown_fields=True):
    """Extend leases. After a read it also asks whether the lease still held. number: increases."""

    transfer_ids: TransferIds
    number: Count


class Held(msgspec.Struct, tag="held", frozen=True, forbid_unknown_fields=True):
    """Which of the leases of the `Renew` with this number hold, and which do not, or not for this
    reader."""

    transfer_ids: TransferIds
    ended: TransferIds
    number: Count


class Done(msgspec.Struct, tag="done", frozen=True, forbid_unknown_fields=True):
    """The reader needs these transfers no longer."""

    transfer_ids: TransferIds


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """transfer_id: of a `Claim`; empty: the `Hello` was refused."""

    transfer_id: str
    reason: str


ToOwner: TypeAlias = Hello | Claim | Renew | Done
ToReader: TypeAlias = Accepted | Granted | Held | Refused


# From the scheduler half to the worker halves, in plans


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A transfer that a reader was given, see `kv_transfer_params`."""

    host: str
    port: int
    engine_id: str
    transfer_id: str
    request_id: str
    lease_s: float
    token_digest: bytes
    blocks_digest: bytes


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The owner holds these blocks (`hold_id`) for the reader that knows `transfer_id`."""

    transfer_id: str
    request_id: str
    hold_id: int
    num_tokens: int
    token_digest: bytes
    tables: Tables


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Fill the blocks `tables` with the KV of the tokens [first_token, num_tokens) of a source."""

    request_id: str
    source: Source
    first_token: int
    num_tokens: int
    tables: Tables


class PullOutcome(enum.StrEnum):
    """How the pull of a rank has ended. If the ranks differ, the last one of these counts.

    PARTIAL:     the owner has freed some of what was needed.
    CANCELLED:   before it began to read.
    REFUSED:     by the owner, or because the engines do not fit each other.
    UNREACHABLE: the owner did not answer.
    LEASE_ENDED: during the read.
    LATE:        its read was ended by force.
    """

    COMPLETE = "complete"
    PARTIAL = "partial"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    LEASE_ENDED = "lease_ended"
    FAILED = "failed"
    LATE = "late"


class RankInfo(msgspec.Struct, frozen=True):
    """What a worker half reports when it is ready. port: where it answers readers; 0: another rank
    does."""

    layout: RankLayout
    agent: bytes
    port: int


class Commands(msgspec.Struct, frozen=True):
    """Metadata of a plan.

    ranks:   of this engine, once all have reported.
    offers:  for rank 0.
    keeps:   leases that rank 0 renews from now on.
    pulls:   for all ranks.
    cancels: request ids whose pull is not needed any more.
    drops:   leases of other engines that rank 0 ends.
    releases: transfer ids of own leases that rank 0 ends, because no reader will come.
    """

    ranks: tuple[RankInfo, ...] = ()
    offers: list[Offer] = []
    keeps: list[Source] = []
    pulls: list[Pull] = []
    cancels: list[str] = []
    drops: list[Source] = []
    releases: list[str] = []


class Report(msgspec.Struct, frozen=True):
    """Metadata of a report of one rank.

    info:    in the first report.
    ended:   hold ids of leases that the reader has ended, or that were released.
    expired: hold ids of leases that it has not renewed.
    pulls:   outcomes of the pulls that have ended, by request id.
    """

    info: RankInfo | None = None
    ended: list[int] = []
    expired: list[int] = []
    pulls: dict[str, PullOutcome] = {}
