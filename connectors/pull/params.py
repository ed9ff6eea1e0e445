"""`kv_transfer_params`: what an owner's answer and a reader's request contain. The keys are those
of vLLM's NIXL connector, and `transfer_id`, `lease_s` and `remote_num_tokens`.

A router passes on what it gets; it changes nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from longshore.connectors.base import RequestView
from longshore.connectors.pull.messages import (
    Name,
    Offer,
    Source,
    Tables,
    block_ids_of,
    digest_blocks,
    digest_input,
    tables_of,
)
from longshore.connectors.pull.options import PullOptions
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import LongshoreError

BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class BadTransferParams(LongshoreError):
    """`kv_transfer_params` are not valid, or not allowed."""


class RemotePrefill(msgspec.Struct, frozen=True):
    """The parameters of a request whose prompt another engine has computed. Other keys are allowed:
    routers add some."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
    remote_block_ids: tuple[tuple[BlockId, ...], ...]
    transfer_id: Name
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]

    def source(self, request: RequestView) -> Source:
        tables = tables_of([int32_array(table) for table in self.remote_block_ids])
        return Source(
            host=self.remote_host,
            port=self.remote_port,
            engine_id=self.remote_engine_id,
            transfer_id=self.transfer_id,
            request_id=self.remote_request_id,
            lease_s=self.lease_s,
            token_digest=digest_input(request, self.remote_num_tokens),
            blocks_digest=digest_blocks(tables),
        )


def read_params(params: Mapping[str, Any], num_tokens: int, options: PullOptions) -> RemotePrefill:
    """num_tokens: of the request. Raises BadTransferParams."""
    try:
        found = msgspec.convert(dict(params), RemotePrefill)
    except msgspec.ValidationError as error:
        raise BadTransferParams(f"kv_transfer_params: {error}") from None
    if found.remote_host not in options.remote_hosts:
        raise BadTransferParams(
            f"kv_transfer_params: remote_host {found.remote_host!r} is not one of the "
            "'remote_hosts' of --kv-connector-config"
        )
    if found.remote_num_tokens > num_tokens:
        raise BadTransferParams(
            f"kv_transfer_params: remote_num_tokens={found.remote_num_tokens}, but the request "
            f"has {num_tokens} tokens"
        )
    return found


def answer_params(
    offer: Offer, engine_id: str, options: PullOptions, port: int, num_ranks: int
) -> dict[str, Any]:
    """What a reader's request needs to pull what is offered."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": offer.request_id,
        "remote_host": options.host,
        "remote_port": port,
        "remote_num_tokens": offer.num_tokens,
        "remote_block_ids": _lists_of(offer.tables),
        "tp_size": num_ranks,
        "transfer_id": offer.transfer_id,
        "lease_s": options.lease_s,
    }


def _lists_of(tables: Tables) -> list[list[int]]:
    return [table.tolist() for table in block_ids_of(tables)]
