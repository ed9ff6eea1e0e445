"""Outputs of the multimodal encoder: which the workers have, and which the step computes.

An item must be encoded before the language model computes the first of its positions. Encoding has
a budget of tokens per step, and its outputs have a capacity in tokens. If an item does not fit yet,
its request's chunk ends just before it. After vLLM's encoder cache manager.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

from longshore.connectors.base import CacheLookup, EncoderConnector
from longshore.protocol.errors import ConfigError, LongshoreError
from longshore.protocol.kv_cache_spec import KVCacheConfig, max_encoder_tokens
from longshore.scheduler.config import SchedulerConfig
from longshore.scheduler.request import Request


class EncoderCache:
    """Outputs by the hash of their item. Outputs without a reference are kept until their capacity
    is needed, and are evicted oldest first.

    capacity: tokens of output that fit.
    budget:   tokens encoded per step.
    lookahead: positions that a drafter reads beyond those of a step. An output is held until the
              drafter has passed it too, or until its request cannot advance in a step: it may wait
              for the capacity that it holds.
    """

    def __init__(self, *, capacity: int, budget: int, lookahead: int = 0) -> None:
        self.capacity = capacity
        self._lookahead = lookahead
        self._budget = budget
        self._budget_left = budget
        self._sizes: dict[str, int] = {}
        # hash -> (request id, index of the item) -> request
        self._holders: dict[str, dict[tuple[str, int], Request]] = {}
        self._unheld: OrderedDict[str, None] = OrderedDict()
        self._encoded_now: dict[str, None] = {}
        self._freed: list[str] = []
        # Requests with items that the model or a drafter has not passed, by id.
        self.pending: dict[str, Request] = {}
        self.num_encoded_items = 0

    @property
    def usage(self) -> float:
        """Share of the capacity in use."""
        return sum(self._sizes.values()) / self.capacity if self.capacity else 0.0

    def is_cached(self, item_hash: str) -> bool:
        return item_hash in self._sizes

    def begin_step(self) -> None:
        """Reset the budget."""
        self._budget_left = self._budget
        self._encoded_now = {}

    def limit(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens can be computed with the items that are encoded
        or can be in this step. Takes budget, capacity and references for these items. Items with
        the same hash but different sizes differ: one waits until the other's output is evicted."""
        num_allowed, wanted = self._look_ahead(request, num_computed, num_tokens)
        if num_tokens and not num_allowed and self.release_passed(request, num_computed):
            num_allowed, wanted = self._look_ahead(request, num_computed, num_tokens)
        for index, victims in wanted.items():
            item = request.options.multimodal[index]
            if victims is None:
                self._unheld.pop(item.hash, None)
            else:
                self._evict(victims)
                self._sizes[item.hash] = item.num_tokens
                self._budget_left -= item.num_tokens
                self._encoded_now[item.hash] = None
            self._holders.setdefault(item.hash, {})[request.request_id, index] = request
        return num_allowed

    def admit(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """The request was admitted and computes its next `num_tokens` tokens, all of which
        `would_limit` allows."""
        self.limit(request, num_computed, num_tokens)
        self.pending[request.request_id] = request

    def rewound(self, request: Request) -> None:
        """A row was rewound: items that it had passed may have to be encoded again."""
        self.pending[request.request_id] = request

    def would_limit(self, request: Request, num_computed: int, num_tokens: int) -> int:
        """What `limit` would return, without taking anything."""
        return self._look_ahead(request, num_computed, num_tokens)[0]

    def _look_ahead(
        self, request: Request, num_computed: int, num_tokens: int
    ) -> tuple[int, dict[int, list[str] | None]]:
        """How many tokens can be computed, and the items needed by index: None for an encoded item,
        otherwise the outputs to evict for it."""
        wanted: dict[int, list[str] | None] = {}
        if not num_tokens:
            return 0, wanted
        sizes, budget = dict(self._sizes), self._budget_left
        unheld = list(self._unheld)
        num_free = self.capacity - sum(sizes.values())
        for index, item in enumerate(request.options.multimodal):
            if item.offset >= num_computed + num_tokens:
                break
            if item.offset + item.num_tokens <= num_computed:
                continue
            size = sizes.get(item.hash)
            if item.hash in unheld:
                unheld.remove(item.hash)
                if size != item.num_tokens:  # different content: evict it first
                    unheld.insert(0, item.hash)
            if size == item.num_tokens:
                wanted[index] = None
                continue
            victims: list[str] = []
            while unheld and (item.num_tokens > num_free or item.hash == unheld[0]):
                victims.append(unheld.pop(0))
                num_free += sizes.pop(victims[-1])
            if item.hash in sizes or item.num_tokens > min(budget, num_free):
                return max(item.offset - num_computed, 0), wanted
            wanted[index] = victims
            sizes[item.hash] = item.num_tokens
            budget -= item.num_tokens
            num_free -= item.num_tokens
        return num_tokens, wanted

    def release_passed(self, request: Request, num_computed: int) -> bool:
        """The request cannot advance in this step: release what it holds for a drafter alone. False
        if there is nothing."""
        passed = [
            index
            for index, item in enumerate(request.options.multimodal if self._lookahead else ())
            if item.offset + item.num_tokens <= num_computed
            and (request.request_id, index) in self._holders.get(item.hash, ())
        ]
        for index in passed:
            self._release_one(request, index)
        return bool(passed)

    def release(self, request: Request) -> None:
        """The request has lost its row: release its references, and do not encode items that only
        it needs."""
        self.pending.pop(request.request_id, None)
        for index in range(len(request.options.multimodal)):
            self._release_one(request, index)

    def advanced(self, request: Request, num_computed: int) -> None:
        """The first `num_computed` tokens of the request are planned: release its references to the
        items that end within them and that a drafter does not read any more."""
        self.pending[request.request_id] = request
        for index, item in enumerate(request.options.multimodal):
            if item.offset + item.num_tokens + self._lookahead > num_computed:
                return
            self._release_one(request, index)
        del self.pending[request.request_id]

    def take_encoder_inputs(self) -> tuple[tuple[int, int], ...]:
        """(row, index of the item) to encode in the step whose plan is being built."""
        inputs = []
        for item_hash in self._encoded_now:
            (_, index), request = next(iter(self._holders[item_hash].items()))
            inputs.append((request.row, index))
        self._encoded_now = {}
        self.num_encoded_items += len(inputs)
        return tuple(inputs)

    def take_freed(self) -> tuple[str, ...]:
        """Hashes of outputs evicted since the last call, for the workers."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def waits_for(self, request: Request) -> str | None:
        """Why the encoder cannot take the item of a waiting request, if known."""
        return None

    def is_loading(self, request: Request) -> bool:
        """Whether the output of its item may come from another engine, so that the request must
        wait. Begins to load it."""
        return False

    def counts(self) -> dict[str, Any]:
        """Fields of SchedulerStats."""
        return {"encoder_cache_usage": self.usage, "num_encoded_items": self.num_encoded_items}

    def checkpoint(self) -> "EncoderCache":
        """A copy to `restore` from."""
        copy = EncoderCache(capacity=self.capacity, budget=self._budget, lookahead=self._lookahead)
        copy.restore(self)
        return copy

    def restore(self, other: "EncoderCache") -> None:
        """Copy the state of `other`."""
        self._budget_left = other._budget_left
        self._sizes = dict(other._sizes)
        self._holders = {key: dict(holders) for key, holders in other._holders.items()}
        self._unheld = OrderedDict(other._unheld)
        self._encoded_now = dict(other._encoded_now)
        self._freed = list(other._freed)
        self.pending = dict(other.pending)

    def check(self, running: Collection[Request]) -> None:
        """Raise LongshoreError unless each output is held by `running` requests or by none, and
        all outputs fit."""
        requests = [request for holders in self._holders.values() for request in holders.values()]
        if not {*requests, *self.pending.values()} <= set(running):
            raise LongshoreError("a request without a row needs an encoder output")
        outputs = [*self._holders, *self._unheld]
        if sorted(outputs) != sorted(self._sizes) or not all(self._holders.values()):
            raise LongshoreError(
                f"{len(self._sizes)} encoder outputs are cached, but {len(self._holders)} are held "
                f"and {len(self._unheld)} are not"
            )
        if sum(self._sizes.values()) > self.capacity:
            raise LongshoreError("the encoder outputs exceed their capacity")

    def reset(self) -> bool:
        """Evict all outputs; False while a request refers to one."""
        if self._holders:
            return False
        self._evict(list(self._unheld))
        return True

    def clear(self) -> None:
        """The workers are new and have no outputs."""
        self.restore(EncoderCache(capacity=self.capacity, budget=self._budget))

    def _release_one(self, request: Request, index: int) -> None:
        item_hash = request.options.multimodal[index].hash
        holders = self._holders.get(item_hash)
        if holders is None or holders.pop((request.request_id, index), None) is None or holders:
            return
        del self._holders[item_hash]
        if item_hash in self._encoded_now:  # no request needs it in this step any more
            del self._encoded_now[item_hash]
            self._budget_left += self._sizes.pop(item_hash)
        else:
            self._unheld[item_hash] = None

    def _evict(self, item_hashes: Iterable[str]) -> None:
        for item_hash in item_hashes:
            del self._unheld[item_hash], self._sizes[item_hash]
            self._freed.append(item_hash)


class RowEncoder(EncoderCache):
    """For models with cross attention: manages only the budget of a step, and caches nothing.

    A request has one item, which takes no positions of its prompt. It is encoded in each step that
    admits the request, directly into the row's blocks of the cross-attention group. So its output
    is neither kept elsewhere nor shared, and a rewound row still has it.

    With an encoder connector, it may be loaded instead, which takes no budget.

    budget: tokens encoded per step.
    """

    def __init__(self, *, budget: int, connector: EncoderConnector | None = None) -> None:
        super().__init__(capacity=0, budget=budget)
        self._new_rows: list[int] = []
        self.connector = connector
        self._num_loaded = 0

    def begin_step(self) -> None:
        super().begin_step()
        self._new_rows = []

    def would_limit(self, request: Request, num_computed: int, num_tokens: int) -> int:
        is_in_budget = request.num_encoder_tokens <= self._budget_left
        return num_tokens if is_in_budget or self._is_loadable(request) else 0

    def admit(self, request: Request, num_computed: int, num_tokens: int) -> None:
        if self._is_loadable(request):
            self._num_loaded += 1
        else:
            self._budget_left -= request.num_encoder_tokens
            self.num_encoded_items += 1
        if self.connector is not None:
            self.connector.update_state_after_alloc(request.options.multimodal[0], request.row)
        self._new_rows.append(request.row)

    def is_loading(self, request: Request) -> bool:
        return self._lookup(request) is CacheLookup.PENDING

    def _is_loadable(self, request: Request) -> bool:
        return self._lookup(request) is CacheLookup.LOADABLE

    def _lookup(self, request: Request) -> CacheLookup:
        if self.connector is None:
            return CacheLookup.MISSING
        return self.connector.has_caches(request.options.multimodal[0])

    def rewound(self, request: Request) -> None:
        """Nothing to do: its blocks still hold the encoder output."""

    def waits_for(self, request: Request) -> str | None:
        if request.num_encoder_tokens <= self._budget_left:
            return None
        return (
            f"the encoder: a step encodes max_num_encoder_input_tokens={self._budget} "
            f"tokens, the last step had {self._budget_left} left, and the request needs "
            f"{request.num_encoder_tokens}"
        )

    def take_encoder_inputs(self) -> tuple[tuple[int, int], ...]:
        inputs, self._new_rows = tuple([(row, 0) for row in self._new_rows]), []
        return inputs

    def reset(self) -> bool:
        return self.connector is None or self.connector.reset_cache()

    def clear(self) -> None:
        super().clear()
        self._new_rows = []
        if self.connector is not None:
            self.connector.on_new_epoch()

    def counts(self) -> dict[str, Any]:
        num_missed = 0 if self.connector is None else self.connector.num_missed
        return super().counts() | {
            "num_loaded_encoder_outputs": self._num_loaded,
            "num_missed_encoder_outputs": num_missed,
        }


def make_encoder(
    config: SchedulerConfig, kv_cache: KVCacheConfig, connector: EncoderConnector | None = None
) -> EncoderCache | None:
    """The encoder cache for a model with these groups; None if requests cannot have items. Raises
    ConfigError for a connector without an encoder."""
    budget = config.max_num_encoder_input_tokens
    if max_encoder_tokens(kv_cache.groups) is not None:
        return RowEncoder(budget=budget, connector=connector)
    if connector is not None:
        raise ConfigError(
            "this model has no encoder, so there are no encoder outputs to hand over. Remove "
            "ec_connector"
        )
    if not budget:
        return None
    # A drafter that writes KV computes a position from the token after it.
    lookahead = min(config.num_lookahead_tokens, 1)
    return EncoderCache(capacity=config.encoder_capacity, budget=budget, lookahead=lookahead)


def check_encoder(config: SchedulerConfig, kv_cache: KVCacheConfig, *, has_connector: bool) -> None:
    """Raise ConfigError for settings that a model with cross attention does not support."""
    num_tokens = max_encoder_tokens(kv_cache.groups)
    if num_tokens is None:
        return
    if config.max_num_encoder_input_tokens < num_tokens:
        raise ConfigError(
            f"max_num_encoder_input_tokens={config.max_num_encoder_input_tokens} is less than the "
            f"{num_tokens} tokens that this model's encoder makes of one request, so no request "
            f"could ever be admitted; set it to {num_tokens} or more"
        )
    if has_connector:
        raise ConfigError(
            "this model has cross attention and cannot run with kv_connector: connectors find KV "
            "by its tokens, but this model's KV also depends on the encoder's input"
        )
