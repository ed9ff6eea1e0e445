"""What the ranks do beside the steps: they write what background loads bring, read what sends and
stores take, and report the ends. When they do it, the test says."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import ModelRunnerOutput, TransferReport
from tests.harness.kv_cache import FakeKVCache
from tests.harness.memory import JUNK
from tests.harness.transfers import OF_STATES, Store, SwapCopy, Transfers


class RankTransfers:
    """All ranks of one epoch.

    invalid_ids: gets the requests whose load fails.
    stored:  content of each block that was stored, by KV cache group and block hash.
    send:    takes a report to the scheduler; release: ends a hold of the connector.
    stores, swaps: those that have begun.
    written: blocks that failed, by (request id, rank) of loads that were written.
    """

    def __init__(
        self,
        transfers: Transfers,
        kv_cache: FakeKVCache,
        *,
        epoch: int,
        invalid_ids: set[str],
        stored: dict[tuple[int, bytes], tuple[int, ...]],
        send: Callable[[TransferReport], None],
        release: Callable[[int], None],
    ) -> None:
        self.stores: list[Store] = []
        self.swaps: list[SwapCopy] = []
        self.written: dict[tuple[str, int], set[int]] = {}
        self._transfers = transfers
        self._kv_cache = kv_cache
        self._epoch = epoch
        self._invalid_ids = invalid_ids
        self._stored = stored
        self._send = send
        self._release = release

    def write(
        self, request_id: str, rank: int, failing: Iterable[int] = (), junk: bool = True
    ) -> None:
        """A rank writes what a background load brings; a second time changes nothing."""
        if (request_id, rank) not in self.written:
            load = self._transfers.loading[request_id]
            failed = set(failing) & load.targets
            memory = self._kv_cache.memory[rank]
            memory.write_load(load, self._kv_cache.block_sizes, failed, JUNK if junk else None)
            self.written[request_id, rank] = failed

    def end_load(
        self, request_id: str, rank: int | None = None, failing: Iterable[int] = ()
    ) -> None:
        """A rank (all of them) has ended a background load, and says so."""
        for each in self._ranks(rank):
            self.write(request_id, each, failing)
            failed = self.written.pop((request_id, each))
            self._invalid_ids |= {request_id} if failed else set()
            self._transfers.report("load", request_id, each)
            self.report(each, receiving=[request_id], failed=sorted(failed))

    def end_send(self, request_id: str, rank: int | None = None) -> None:
        """A rank (all of them) has read an ended request's blocks, and says so."""
        for each in self._ranks(rank):
            self._transfers.report("send", request_id, each)
            self.report(each, sending=[request_id])

    def end_store(self, store: Store) -> None:
        """All ranks have read the blocks, and the connector releases them."""
        size = self._kv_cache.block_sizes[store.group]
        size = 1 if size == OF_STATES else size
        for memory in self._kv_cache.memory:
            for block_id, block_hash in zip(store.block_ids, store.block_hashes, strict=True):
                content = memory.block(block_id, size)
                before = self._stored.setdefault((store.group, block_hash), content)
                assert before == content, "two contents have one block hash"
        self.stores.remove(store)
        self._release(store.hold_id)

    def end_swap(self, swap: SwapCopy) -> None:
        """All ranks have read the KV of a swapped request, and the connector releases its blocks.
        They must still hold it."""
        for memory in self._kv_cache.memory:
            for block_id, offset, prefix in swap.slots(self._kv_cache.block_sizes):
                found = memory.read(block_id, offset)
                assert found == prefix, f"block {block_id} of {swap.request_id} was overwritten"
        self.swaps.remove(swap)
        self._release(swap.hold_id)

    def end_all(self) -> None:
        """Everything that has not ended ends well."""
        for request_id in list(self._transfers.loading):
            for rank in self._transfers.ranks_left("load", request_id):
                self.end_load(request_id, rank)
        for request_id in list(self._transfers.sending):
            for rank in self._transfers.ranks_left("send", request_id):
                self.end_send(request_id, rank)
        for store in list(self.stores):
            self.end_store(store)
        for swap in list(self.swaps):
            self.end_swap(swap)

    def report(
        self,
        rank: int,
        *,
        receiving: Sequence[str] = (),
        sending: Sequence[str] = (),
        failed: Sequence[int] = (),
        epoch: int | None = None,
        metadata: bytes = b"",
    ) -> None:
        """A rank sends a report, true or not."""
        self._send(
            TransferReport(
                self._epoch if epoch is None else epoch,
                rank,
                finished_sending=tuple(sending),
                finished_receiving=tuple(receiving),
                failed_block_ids=int32_array(list(failed)),
                connector_metadata=metadata,
            )
        )

    def _ranks(self, rank: int | None) -> Sequence[int]:
        return range(len(self._kv_cache.memory)) if rank is None else [rank]


def split_by_rank(
    output: ModelRunnerOutput, num_ranks: int
) -> tuple[ModelRunnerOutput, list[TransferReport]]:
    """The output of rank 0 with the failed blocks of its own loads, and the reports of the others.
    Each block fails on one of the ranks."""
    failed = output.failed_block_ids
    parts = [int32_array(failed[failed % num_ranks == rank]) for rank in range(num_ranks)]
    reports = [
        TransferReport(output.epoch, rank, output.step, failed_block_ids=parts[rank])
        for rank in range(1, num_ranks)
    ]
    return msgspec.structs.replace(output, failed_block_ids=parts[0]), reports
