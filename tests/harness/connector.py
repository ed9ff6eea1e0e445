"""A connector that misbehaves as far as its contract allows, and checks that it is called as the
contract promises."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from longshore.connectors.base import (
    AskLater,
    BlockHolds,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
    SwapSize,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from tests.harness.tokens import Content, prefixes_of
from tests.harness.transfers import OF_STATES, Commands, Load, Store, SwapCopy, Transfers

MatchRule: TypeAlias = Callable[[RequestView, int], Match]


class AdversarialConnector(SchedulerConnector):
    """Does what its rules say. A driver binds it to its blocks and its `Transfers`.

    match:  what there is to load for a request after its local hits.
    depart: what happens to the blocks of a request that ends.
    stores: whether storable blocks are stored. None: it asks for none.
    swaps:  whether there is room for a request that is to be swapped out.
    restores: whether the KV of a swapped request can still be loaded.
    no_hits: ids of requests that must not begin with cached blocks.
    calls:  names of all hooks called, in order; asked: matches asked per request id.
    """

    supports_hma = True
    can_swap = True

    def __init__(
        self,
        *,
        match: MatchRule = lambda request, num_computed_tokens: Matched(0),
        depart: Callable[[RequestView], FinishAction] = lambda request: FinishAction(),
        stores: Callable[[], bool] | None = None,
        swaps: Callable[[], bool] = lambda: True,
        restores: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__()
        self.transfers = Transfers(num_ranks=1)
        self.calls: list[str] = []
        self.asked: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.loads_begun: list[Load] = []
        self.abandoned: list[str] = []
        self.outputs: list[ConnectorOutput] = []
        self.steps: list[StepView] = []
        self.epochs: list[int] = []
        self.no_hits: set[str] = set()
        self.match = match
        self._depart = depart
        self._stores = stores
        if stores is None:
            self.chunk_blocks = 0
        self._swaps = swaps
        self._restores = restores
        self.swapped: dict[str, SwapCopy] = {}
        self.swaps_begun: list[SwapCopy] = []
        self._block_sizes: Sequence[int] = ()
        self._contents: Mapping[str, Content] = {}
        self._holder: BlockHolds | None = None
        self._answers: dict[str, tuple[int, Matched]] = {}
        self._commands = Commands()

    def bind(
        self, transfers: Transfers, block_sizes: Sequence[int], contents: Mapping[str, Content]
    ) -> None:
        """contents: by request id, what the KV of each request depends on."""
        self.transfers, self._block_sizes, self._contents = transfers, block_sizes, contents

    def bind_blocks(self, holder: BlockHolds) -> None:
        assert not self.calls, "blocks are bound before everything else"
        self.calls.append("bind_blocks")
        self._holder = holder

    @property
    def holder(self) -> BlockHolds:
        assert self._holder is not None, "no blocks are bound"
        return self._holder

    def on_new_request(self, request: RequestView) -> None:
        self.calls.append("on_new_request")
        self.begun[request.request_id] += 1
        assert self._is_live(request.request_id)

    def skips_prefix_cache(self, request: RequestView) -> bool:
        assert self._is_live(request.request_id)
        return request.request_id in self.no_hits

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self.calls.append("get_num_new_matched_tokens")
        request_id = request.request_id
        assert self._is_live(request_id), f"{request_id} has ended, or never began"
        assert request_id not in self.transfers.loading, f"asked while {request_id} loads"
        assert 0 <= num_computed_tokens <= request.num_tokens
        self.asked[request_id] += 1
        answer = self._match(request, num_computed_tokens)
        if isinstance(answer, Matched):
            self._answers[request_id] = num_computed_tokens, answer
        return answer

    def _match(self, request: RequestView, num_computed_tokens: int) -> Match:
        copy = self.swapped.get(request.request_id)
        if copy is None:
            return self.match(request, num_computed_tokens)
        assert len(copy.prefixes) < request.num_tokens
        if copy.hold_id in self.transfers.holding:
            return AskLater()
        if not self._restores():
            return self.match(request, num_computed_tokens)
        return Matched(max(len(copy.prefixes) - num_computed_tokens, 0), is_async=True)

    def swap_size(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> SwapSize:
        self.calls.append("swap_size")
        return SwapSize(num_computed_tokens, num_computed_tokens)

    def swap_out(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> bool:
        self.calls.append("swap_out")
        request_id = request.request_id
        assert self._is_live(request_id)
        assert request_id not in self.swapped, "swapped out twice"
        assert request_id not in self.transfers.loading, "swapped out while it loads"
        assert 0 < num_computed_tokens < request.num_tokens
        if not self._swaps():
            return False
        sources = {block_id for ids in block_ids for block_id in ids.tolist()} - {NULL_BLOCK}
        hold_id = self.holder.hold(sorted(sources))
        self.transfers.holding[hold_id] = sources
        prefixes = prefixes_of(request.token_ids, self._contents.get(request_id))
        copy = SwapCopy(
            hold_id,
            request_id,
            tuple(ids.tolist() for ids in block_ids),
            prefixes[:num_computed_tokens],
        )
        self.swapped[request_id] = copy
        self.swaps_begun.append(copy)
        self._commands.swaps.append(copy)
        return True

    def release_swap(self, request_id: str) -> None:
        self.calls.append("release_swap")
        del self.swapped[request_id]

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        self.calls.append("update_state_after_alloc")
        if num_external_tokens == 0:
            return
        first, match = self._answers.pop(request.request_id)
        last = first + num_external_tokens
        assert num_external_tokens <= match.num_tokens
        assert last <= request.num_tokens
        prefixes = prefixes_of(request.token_ids, self._contents.get(request.request_id))
        ranges = [
            (0, len(ids)) if size == OF_STATES else (first // size, -(-last // size))
            for ids, size in zip(block_ids, self._block_sizes, strict=True)
        ]
        load = Load(
            request.request_id,
            match.is_async,
            first,
            tuple(
                ids[begin:end].tolist() for ids, (begin, end) in zip(block_ids, ranges, strict=True)
            ),
            prefixes[first:last],
        )
        for ids, (begin, end) in zip(load.block_ids, ranges, strict=True):
            assert len(ids) == end - begin, "too few blocks"
        rest = {
            block_id
            for ids, (begin, _) in zip(block_ids, ranges, strict=True)
            for block_id in ids[begin:].tolist()
        }
        self.transfers.begin(load, rest - {NULL_BLOCK})
        self.loads_begun.append(load)
        self._commands.loads.append(load)

    def build_connector_meta(self, step: StepView) -> bytes:
        self.calls.append("build_connector_meta")
        self.steps.append(step)
        for storable in step.storable:
            blocks = list(storable.block_ids)
            assert storable.step <= step.answered_step
            assert len(blocks) == len(storable.block_hashes) == len(storable.positions)
            assert NULL_BLOCK not in blocks
            for load in self.transfers.loading.values():
                assert not load.targets & set(blocks), f"{load} is storable before it has ended"
            assert self._stores is not None
            if self._stores():
                hold_id = self.holder.hold(blocks)
                self.transfers.holding[hold_id] = set(blocks)
                hashes = list(storable.block_hashes)
                self._commands.stores.append(Store(hold_id, storable.group, blocks, hashes))
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    def release(self, hold_id: int) -> None:
        """A store has ended on all ranks."""
        del self.transfers.holding[hold_id]
        self.holder.release(hold_id)

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.calls.append("update_connector_output")
        self.outputs.append(output)
        for request_id in output.finished_receiving:
            assert request_id not in self.transfers.loading, "not all ranks have reported"
        for request_id in output.finished_sending:
            assert request_id not in self.transfers.sending, "not all ranks have reported"

    @property
    def ended_transfers(self) -> list[str]:
        """Request ids whose load or send has ended, in the order of the reports."""
        return [
            request_id
            for output in self.outputs
            for request_id in (*output.finished_sending, *output.finished_receiving)
        ]

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self.calls.append("request_finished")
        request_id = request.request_id
        assert self._is_live(request_id), f"{request_id} ends twice"
        self.ended[request_id] += 1
        self._answers.pop(request_id, None)
        blocks = {block_id for ids in block_ids for block_id in ids.tolist()}
        departure = self._depart(request)
        if departure.delay_free and blocks and request_id not in self.transfers.sending:
            self.transfers.begin_send(request_id, blocks)
            return departure
        return FinishAction(params=departure.params)

    def load_abandoned(self, request_id: str) -> None:
        self.calls.append("load_abandoned")
        assert request_id in self.transfers.loading, f"{request_id} does not load"
        self.abandoned.append(request_id)

    @property
    def has_unsent_loads(self) -> bool:
        """Loads have begun that no plan has sent to the workers."""
        return bool(self._commands.loads)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._commands.swaps)

    def on_new_epoch(self, epoch: int) -> None:
        self.calls.append("on_new_epoch")
        self.epochs.append(epoch)
        self.transfers.clear()
        self._answers.clear()
        self._commands = Commands()
        self.swapped.clear()

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def _is_live(self, request_id: str) -> bool:
        return self.begun[request_id] == self.ended[request_id] + 1


@dataclass(frozen=True)
class Mischief:
    """How often the connector does what; each a chance between 0 and 1. is_exact: it has no more
    than the tokens after which the request can begin, as states need it."""

    match: float = 0.7
    background: float = 0.6
    ask_later: float = 0.2
    delay_free: float = 0.3
    store: float = 0.3
    swap: float = 0.8
    restore: float = 0.8
    is_exact: bool = False

    def rules(self, chance: random.Random) -> dict[str, Any]:
        """Arguments of an `AdversarialConnector` that draws from `chance`."""

        def match(request: RequestView, num_computed_tokens: int) -> Match:
            if chance.random() < self.ask_later:
                return AskLater()
            if chance.random() >= self.match:
                return Matched(0, chance.random() < self.background)
            # Sometimes more than the request has tokens.
            most = request.num_tokens - num_computed_tokens + 3
            if self.is_exact:
                most = max(request.num_tokens - 1 - num_computed_tokens, 0)
            return Matched(chance.randrange(most + 1), chance.random() < self.background)

        def depart(request: RequestView) -> FinishAction:
            return FinishAction(chance.random() < self.delay_free, {"of": request.request_id})

        return {
            "match": match,
            "depart": depart,
            "stores": lambda: chance.random() < self.store,
            "swaps": lambda: chance.random() < self.swap,
            "restores": lambda: chance.random() < self.restore,
        }


def has_leading(num_tokens: int, *, is_async: bool) -> MatchRule:
    """Everything up to position `num_tokens` can be loaded."""
    return has_stored({}, is_async=is_async, otherwise=num_tokens)


def has_stored(
    stored: Mapping[str, int | None], *, is_async: bool = True, otherwise: int = 0
) -> MatchRule:
    """By request id, how many leading tokens can be loaded; None: not known yet."""

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        num_tokens = stored.get(request.request_id, otherwise)
        if num_tokens is None:
            return AskLater()
        last = min(num_tokens, request.num_tokens)
        return Matched(max(last - num_computed_tokens, 0), is_async)

    return match
