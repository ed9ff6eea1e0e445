"""The encoder's outputs that the workers keep, and who needs them (FEA-03)."""

from dataclasses import dataclass, field

from tests.oracle.request import TextbookRequest

Use = tuple[TextbookRequest, int]
"""A request, and the index of the multimodal item for which it needs an output."""


@dataclass
class CachedOutput:
    """users: in the order in which they came."""

    num_tokens: int
    users: list[Use] = field(default_factory=list)


class EncoderCache:
    """Outputs by content hash. One without users stays until its room is needed.

    capacity: in tokens.
    lookahead: positions that a drafter reads behind those that a step computes. Until it has passed
              an item, its request uses it, unless that is stuck.
    unused:   outputs without a user, the longest unused first.
    evicted:  hashes the workers have not been told of.
    """

    def __init__(self, capacity: int, lookahead: int = 0) -> None:
        self.capacity = capacity
        self.lookahead = lookahead
        self.outputs: dict[str, CachedOutput] = {}
        self.unused: list[str] = []
        self.evicted: list[str] = []

    def copy(self) -> "EncoderCache":
        """To try something out on."""
        copy = EncoderCache(self.capacity, self.lookahead)
        copy.unused = [*self.unused]
        for hash_, output in self.outputs.items():
            copy.outputs[hash_] = CachedOutput(output.num_tokens, [*output.users])
        return copy

    @property
    def num_held_tokens(self) -> int:
        """Of outputs that somebody needs."""
        return sum(output.num_tokens for output in self.outputs.values() if output.users)

    def use(self, request: TextbookRequest, index: int, budget: int) -> int | None:
        """The request needs the output for its item `index`: tokens to encode for that (0 if it is
        there already), or None, with nothing changed, if they are over budget or find no room."""
        item = request.items[index]
        output = self.outputs.get(item.hash)
        if output is not None:
            if not output.users:
                self.unused.remove(item.hash)
            if (request, index) not in output.users:
                output.users.append((request, index))
            return 0
        if item.num_tokens > min(budget, self.capacity - self.num_held_tokens):
            return None
        while sum(output.num_tokens for output in self.outputs.values()) + item.num_tokens > (
            self.capacity
        ):
            oldest = self.unused.pop(0)
            del self.outputs[oldest]
            self.evicted.append(oldest)
        self.outputs[item.hash] = CachedOutput(item.num_tokens, [(request, index)])
        return item.num_tokens

    def drop(self, request: TextbookRequest, num_computed: int) -> None:
        """The request needs no item any more that ends within its computed tokens, and before
        those that a drafter reads."""
        for index, item in enumerate(request.items):
            output = self.outputs.get(item.hash)
            if output is None or (request, index) not in output.users:
                continue
            if item.offset + item.num_tokens + self.lookahead <= num_computed:
                output.users.remove((request, index))
                if not output.users:
                    self.unused.append(item.hash)

    def drop_all(self, request: TextbookRequest) -> None:
        """The request ends, or computes everything anew."""
        self.drop(request, len(request.prompt) + self.lookahead)

    def withdraw(self, request: TextbookRequest, index: int) -> Use | None:
        """The output of this item will not be made for this request. If others count on it, one of
        them is returned, who has it made instead; otherwise the output does not exist."""
        hash_ = request.items[index].hash
        others = [use for use in self.outputs[hash_].users if use[0] is not request]
        if others:
            return others[0]
        del self.outputs[hash_]
        if hash_ in self.unused:
            self.unused.remove(hash_)
        return None

    def check_invariants(self, running: list[TextbookRequest]) -> None:
        """Raise AssertionError unless outputs fit, and only running requests use them."""
        assert sum(output.num_tokens for output in self.outputs.values()) <= self.capacity
        assert sorted(self.unused) == sorted(
            hash_ for hash_, output in self.outputs.items() if not output.users
        )
        for output in self.outputs.values():
            assert {request for request, _ in output.users} <= set(running)


class RowEncoder(EncoderCache):
    """Of a model with cross attention (FEA-10): what is made of a request's item goes into the
    blocks of its row, in the step in which it gets one, and stays there as long as it has it."""

    def __init__(self) -> None:
        super().__init__(capacity=0)
        self.served: list[TextbookRequest] = []

    def copy(self) -> "RowEncoder":
        copy = RowEncoder()
        copy.served = [*self.served]
        return copy

    def use(self, request: TextbookRequest, index: int, budget: int) -> int | None:
        if request in self.served:
            return 0
        num_tokens = request.items[index].num_tokens
        if num_tokens > budget:
            return None
        self.served.append(request)
        return num_tokens

    def drop(self, request: TextbookRequest, num_computed: int) -> None:
        """It needs its item as long as it runs."""

    def drop_all(self, request: TextbookRequest) -> None:
        self.served.remove(request)

    def check_invariants(self, running: list[TextbookRequest]) -> None:
        """Raise AssertionError unless all running requests, and nobody else, have their item."""
        assert self.served == running


def plan_items(
    cache: EncoderCache, request: TextbookRequest, start: int, num_tokens: int, budget: int
) -> tuple[int, list[int]]:
    """How many of the tokens from position `start` on can be computed, and the indices of the
    items they need. The cache is only looked at."""
    indices: list[int] = []
    if not request.items:
        return num_tokens, indices
    trial = cache.copy()
    for index, item in enumerate(request.items):
        if item.offset >= start + num_tokens:
            break
        if item.offset + item.num_tokens <= start:
            continue
        num_encoded = trial.use(request, index, budget)
        if num_encoded is None:
            return max(item.offset - start, 0), indices
        budget -= num_encoded
        indices.append(index)
    return num_tokens, indices
