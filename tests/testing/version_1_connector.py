"""The example connector as it was written for version 1 of the contract: it holds the blocks that a
plan caches until the plan is answered."""

from collections import Counter
from typing import Any, ClassVar

import msgspec

from longshore.connectors.example.scheduler import Commands, ExampleConnector, Store
from longshore.connectors.example.worker import ExampleWorker


class Version1(ExampleConnector):
    contract_version: ClassVar[int] = 1
    worker_half: ClassVar[str] = "tests.testing.version_1_connector:Version1Worker"

    def _begin(self) -> None:
        super()._begin()
        self._num_done: Counter[int] = Counter()
        self._unproven: list[tuple[int, Store]] = []  # with the step that must be answered
        self._stores: list[Store] = []

    def build_connector_meta(self, step: Any) -> bytes:
        uncached = set(step.uncached)
        unproven, self._unproven = self._unproven, []
        for planned_step, store in unproven:
            if uncached.intersection(store.block_ids):
                self._holds.release(store.hold_id)
            elif planned_step <= step.answered_step:
                self._storing[store.hold_id] = store.block_hashes
                self._stores.append(store)
            else:
                self._unproven.append((planned_step, store))
        for cached in step.cached:
            new = {
                block_hash: block_id
                for block_id, block_hash in zip(cached.block_ids, cached.block_hashes, strict=True)
                if not self._is_stored(block_hash)
            }
            if new:
                hold_id = self._holds.hold(list(new.values()))
                self._unproven.append((step.step, Store(hold_id, list(new.values()), list(new))))
        if not (self._loads or self._stores):
            return b""
        commands = Commands(self._loads, self._stores)
        self._loads, self._stores = [], []
        return msgspec.msgpack.encode(commands)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._unproven or self._loads or self._stores)

    def _store_ended(self, hold_id: int, rank: int) -> None:
        self._add(self._storing[hold_id], rank)
        self._num_done[hold_id] += 1
        if self._num_done[hold_id] == self.config.num_ranks:
            del self._storing[hold_id], self._num_done[hold_id]
            self._holds.release(hold_id)


class Version1Worker(ExampleWorker):
    contract_version: ClassVar[int] = 1
