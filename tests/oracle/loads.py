"""Transfers under way: who still has to report, and which blocks they own until then."""

from dataclasses import dataclass, field
from typing import TypeVar

from longshore.protocol.outputs import TransferReport
from tests.oracle.block_pool import Block


@dataclass(eq=False)
class Load:
    """An asynchronous load into the blocks of a request that waits.

    number:     counts loads in the order in which they began.
    num_tokens: computed if all of it comes, local hits included.
    deadline:   in seconds; the waiting ends then, the transfer perhaps not.
    ranks:      that have not reported it.
    """

    number: int
    request_id: str
    blocks: list[Block]
    num_tokens: int
    deadline: float
    ranks: set[int]
    failed_block_ids: set[int] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return not self.ranks

    def num_good_tokens(self, block_size: int) -> int:
        """Before the first block that failed."""
        for index, block in enumerate(self.blocks):
            if block.block_id in self.failed_block_ids:
                return min(index * block_size, self.num_tokens)
        return self.num_tokens


@dataclass(eq=False)
class Send:
    """Blocks of a request that ended, which stay until they have been read."""

    request_id: str
    blocks: list[Block]
    ranks: set[int]


@dataclass
class Transfers:
    """All transfers that have not ended.

    loads:      in the order in which they began; none is over.
    quarantine: those of `loads` whose request is gone or waits no more.
    sends:      in the order in which they began.
    """

    num_ranks: int
    num_loads: int = 0
    loads: list[Load] = field(default_factory=list)
    quarantine: list[Load] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)

    def begin_load(
        self, request_id: str, blocks: list[Block], num_tokens: int, deadline: float
    ) -> Load:
        self.num_loads += 1
        ranks = set(range(self.num_ranks))
        load = Load(self.num_loads, request_id, [*blocks], num_tokens, deadline, ranks)
        self.loads.append(load)
        return load

    def begin_send(self, request_id: str, blocks: list[Block]) -> None:
        self.sends.append(Send(request_id, blocks, set(range(self.num_ranks))))

    def is_under_way(self, request_id: str) -> bool:
        """Blocks are held under this id, by a request or without one."""
        transfers = (*self.loads, *self.sends)
        return any(transfer.request_id == request_id for transfer in transfers)

    def apply(self, report: TransferReport) -> tuple[list[Load], list[Block]]:
        """Loads that are over now and for which a request waits, and blocks that are not needed any
        more, in the order in which they are freed. Repeated and unknown ids change nothing."""
        failed = set(report.failed_block_ids.tolist())
        arrived: list[Load] = []
        freed: list[Block] = []
        for load in self.loads:
            load.failed_block_ids |= failed & {block.block_id for block in load.blocks}
        for request_id in report.finished_receiving:
            load = _find(self.loads, request_id, report.rank)
            if load is not None and load.is_over:
                self.loads.remove(load)
                if load in self.quarantine:
                    self.quarantine.remove(load)
                    freed += reversed(load.blocks)
                else:
                    arrived.append(load)
        for request_id in report.finished_sending:
            send = _find(self.sends, request_id, report.rank)
            if send is not None and not send.ranks:
                self.sends.remove(send)
                freed += reversed(send.blocks)
        return arrived, freed


Transfer = TypeVar("Transfer", Load, Send)


def _find(transfers: list[Transfer], request_id: str, rank: int) -> Transfer | None:
    """Of the transfers under this id, the oldest that the rank has not reported; it has now."""
    for transfer in transfers:
        if transfer.request_id == request_id and rank in transfer.ranks:
            transfer.ranks.remove(rank)
            return transfer
    return None
