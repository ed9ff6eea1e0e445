"""A connector that misbehaves as far as its contract allows, and its own model of who may touch
which block.

`Transfers` knows each transfer from the moment the connector may begin it until every rank has
reported its end, and which blocks each unanswered plan computes on. It believes nothing the
scheduler says about ownership: a block that two of them want is an AssertionError.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.plan import SchedulerOutput

MatchRule = Callable[[RequestView, int], Match]


def prefixes_of(token_ids: Sequence[int] | Int32Array) -> list[int]:
    """What the KV of each position is: a number for the token and everything before it."""
    prefixes, prefix = [], 0
    for token_id in token_ids:
        prefix = zlib.crc32(int(token_id).to_bytes(4, "little"), prefix)
        prefixes.append(prefix)
    return prefixes


class Load(msgspec.Struct, frozen=True):
    """A command to the workers: write `prefixes`, the KV of positions from `first` on, into
    `block_ids[group]`, the first of which holds position `first`."""

    request_id: str
    is_async: bool
    first: int
    block_ids: tuple[list[int], ...]
    prefixes: list[int]

    @property
    def targets(self) -> set[int]:
        return {block_id for ids in self.block_ids for block_id in ids}


class Store(msgspec.Struct, frozen=True):
    """A command to the workers: read these blocks, whose names promise what they hold."""

    hold_id: int
    block_ids: list[int]
    names: list[bytes]


class Commands(msgspec.Struct, frozen=True):
    """Metadata of one plan."""

    loads: list[Load] = []
    stores: list[Store] = []


@dataclass
class Transfers:
    """Who may touch which block right now.

    loading:    asynchronous loads that some rank has not reported, by request id.
    syncing:    synchronous loads whose step is not answered.
    sending:    blocks of ended requests that are still read, by request id.
    holding:    blocks that stores read, by hold id.
    unanswered: blocks that each unanswered plan computes on, by step.
    """

    num_ranks: int
    loading: dict[str, Load] = field(default_factory=dict)
    syncing: list[Load] = field(default_factory=list)
    sending: dict[str, set[int]] = field(default_factory=dict)
    holding: dict[int, set[int]] = field(default_factory=dict)
    unanswered: dict[int, set[int]] = field(default_factory=dict)
    reported: dict[tuple[str, str], set[int]] = field(default_factory=dict)

    def owned(self) -> Iterator[tuple[str, set[int]]]:
        """(who, blocks) of all transfers outside the steps."""
        yield from ((f"load {id_}", load.targets) for id_, load in self.loading.items())
        yield from ((f"send {id_}", ids) for id_, ids in self.sending.items())
        yield from ((f"store {id_}", ids) for id_, ids in self.holding.items())

    def begin(self, load: Load) -> None:
        """The scheduler gave these blocks to a load."""
        for who, block_ids in self.owned():
            assert not load.targets & block_ids, f"{load} overwrites what {who} owns"
        for other in self.syncing:
            assert not load.targets & other.targets, f"{load} overwrites what {other} loads"
        for step, block_ids in self.unanswered.items():
            assert not load.targets & block_ids, f"{load} overwrites what step {step} names"
        if load.is_async:
            assert load.request_id not in self.loading, "two loads of one request id"
            self.loading[load.request_id] = load
        else:
            self.syncing.append(load)

    def check_plan(self, plan: SchedulerOutput, tables: dict[int, list[list[int]]]) -> None:
        """No row of this plan has a block that a background load may write."""
        used = {id_ for groups in tables.values() for ids in groups for id_ in ids}
        zeroed = set(plan.zero_block_ids.tolist())
        for load in self.loading.values():
            assert not load.targets & used, f"step {plan.step} computes on blocks of {load}"
            assert not load.targets & zeroed, f"step {plan.step} clears blocks of {load}"

    def report(self, kind: str, request_id: str, rank: int) -> bool:
        """A rank is done with its part; True for the last one."""
        ranks = self.reported.setdefault((kind, request_id), set())
        ranks.add(rank)
        if len(ranks) < self.num_ranks:
            return False
        del self.reported[kind, request_id]
        (self.loading if kind == "load" else self.sending).pop(request_id)
        return True

    @property
    def is_idle(self) -> bool:
        return not (self.loading or self.sending or self.holding)


class AdversarialConnector(SchedulerConnector):
    """Answers as told, and checks that it is asked as promised.

    match:  what there is to load for a request with so many local hits.
    depart: what becomes of the blocks of a request that ends.
    stores: whether named blocks of a plan are stored.
    calls:  names of all hooks called, in order; asked: matches asked per request id.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        block_size: int,
        match: MatchRule = lambda request, num_computed_tokens: Matched(0),
        depart: Callable[[RequestView], FinishAction] = lambda request: FinishAction(),
        stores: Callable[[], bool] = lambda: False,
    ) -> None:
        self.transfers = transfers
        self.calls: list[str] = []
        self.asked: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.loads_begun: list[Load] = []
        self.abandoned: list[str] = []
        self.outputs: list[ConnectorOutput] = []
        self.steps: list[StepView] = []
        self.epochs: list[int] = []
        self._block_size = block_size
        self._match = match
        self._depart = depart
        self._stores = stores
        self._holder: BlockHolds | None = None
        self._answers: dict[str, tuple[int, Matched]] = {}
        self._commands = Commands()
        self._pending_stores: list[tuple[int, Store]] = []

    def bind_blocks(self, holder: BlockHolds) -> None:
        assert not self.calls, "blocks are bound before everything else"
        self.calls.append("bind_blocks")
        self._holder = holder

    def on_new_request(self, request: RequestView) -> None:
        self.calls.append("on_new_request")
        self.begun[request.request_id] += 1
        assert self._is_live(request.request_id)

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
        begin, end = first // self._block_size, -(-last // self._block_size)
        load = Load(
            request.request_id,
            match.is_async,
            first,
            tuple(ids[begin:end].tolist() for ids in block_ids),
            prefixes_of(request.token_ids)[first:last],
        )
        assert all(len(ids) == end - begin for ids in load.block_ids), "too few blocks"
        self.transfers.begin(load)
        self.loads_begun.append(load)
        self._commands.loads.append(load)

    def build_connector_meta(self, step: StepView) -> bytes:
        self.calls.append("build_connector_meta")
        self.steps.append(step)
        uncached = set(step.uncached)
        for item in [item for item in self._pending_stores if uncached & set(item[1].block_ids)]:
            self._pending_stores.remove(item)
            self.release(item[1].hold_id)
        for item in [item for item in self._pending_stores if item[0] <= step.answered_step]:
            self._pending_stores.remove(item)
            self._commands.stores.append(item[1])
        for cached in step.cached:
            blocks = list(cached.block_ids)
            assert len(blocks) == len(cached.block_hashes)
            for load in self.transfers.loading.values():
                assert not load.targets & set(blocks), f"{load} is named before it has ended"
            if self._stores():
                assert self._holder is not None
                hold_id = self._holder.hold(blocks)
                self.transfers.holding[hold_id] = set(blocks)
                store = Store(hold_id, blocks, list(cached.block_hashes))
                self._pending_stores.append((step.step, store))
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    def release(self, hold_id: int) -> None:
        """A store has ended on all ranks, or never began."""
        assert self._holder is not None
        del self.transfers.holding[hold_id]
        self._holder.release(hold_id)

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.calls.append("update_connector_output")
        self.outputs.append(output)
        for request_id in output.finished_receiving:
            assert request_id not in self.transfers.loading, "not all ranks have reported"
        for request_id in output.finished_sending:
            assert request_id not in self.transfers.sending, "not all ranks have reported"

    @property
    def ended_transfers(self) -> list[str]:
        """Request ids whose load or send has ended, in the order in which it was told."""
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
            self.transfers.sending[request_id] = blocks
            return departure
        return FinishAction(params=departure.params)

    def load_abandoned(self, request_id: str) -> None:
        self.calls.append("load_abandoned")
        assert request_id in self.transfers.loading, f"{request_id} does not load"
        self.abandoned.append(request_id)

    @property
    def has_untold_loads(self) -> bool:
        """Loads have begun that no plan has told the workers of."""
        return bool(self._commands.loads)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._pending_stores)

    def on_new_epoch(self, epoch: int) -> None:
        self.calls.append("on_new_epoch")
        self.epochs.append(epoch)
        self.transfers.__init__(self.transfers.num_ranks)  # type: ignore[misc]
        self._answers.clear()
        self._commands = Commands()
        self._pending_stores.clear()

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def _is_live(self, request_id: str) -> bool:
        return self.begun[request_id] == self.ended[request_id] + 1


@dataclass(frozen=True)
class Mischief:
    """How often the connector does what; each a chance between 0 and 1."""

    match: float = 0.7
    background: float = 0.6
    ask_later: float = 0.2
    delay_free: float = 0.3
    store: float = 0.3

    def rules(self, chance: random.Random) -> dict[str, Any]:
        """Arguments of an `AdversarialConnector` that draws from `chance`."""

        def match(request: RequestView, num_computed_tokens: int) -> Match:
            if chance.random() < self.ask_later:
                return AskLater()
            if chance.random() >= self.match:
                return Matched(0, chance.random() < self.background)
            # Sometimes more than the request has tokens.
            most = request.num_tokens - num_computed_tokens + 3
            return Matched(chance.randrange(most + 1), chance.random() < self.background)

        def depart(request: RequestView) -> FinishAction:
            return FinishAction(chance.random() < self.delay_free, {"of": request.request_id})

        return {
            "match": match,
            "depart": depart,
            "stores": lambda: chance.random() < self.store,
        }


def has_leading(num_tokens: int, *, is_async: bool) -> MatchRule:
    """Everything up to position `num_tokens` can be loaded."""

    def match(request: RequestView, num_computed_tokens: int) -> Match:
        last = min(num_tokens, request.num_tokens)
        return Matched(max(last - num_computed_tokens, 0), is_async)

    return match
