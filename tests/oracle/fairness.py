"""Whose turn it is among tenants: deficit round robin, and shares of rows and KV cache."""

from fractions import Fraction
from math import ceil, floor

from tests.oracle.request import TextbookRequest

QUANTUM = 256
RESERVED = 16


class Fairness:
    """What all live requests of each tenant have, and owe.

    num_rows, num_slots: of the engine: rows, and tokens that the KV cache holds.
    running:  the scheduler's own list.
    balances: of tenants with live requests.
    turns:    the order within a round; whoever has used up its turn goes to the end.
    paid:     tokens of a request when it was admitted last.
    """

    def __init__(self, num_rows: int, num_slots: int, running: list[TextbookRequest]) -> None:
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.running = running
        self.live: list[TextbookRequest] = []
        self.balances: dict[str, int] = {}
        self.turns: list[str] = []
        self.paid: dict[TextbookRequest, int] = {}

    def weight(self, name: str) -> int:
        """As the newest request of the tenant says."""
        return [
            r.message.options.tenant.weight
            for r in self.live
            if r.message.options.tenant.name == name
        ][-1]

    def share(self, name: str) -> Fraction:
        """Of everything, among the tenants that have live requests."""
        return Fraction(self.weight(name), sum(map(self.weight, self.balances)))

    def arrived(self, request: TextbookRequest) -> None:
        name = request.message.options.tenant.name
        self.live.append(request)
        if name not in self.balances:
            self.balances[name] = 0
            self.turns.append(name)

    def admitted(self, request: TextbookRequest, num_computed: int) -> None:
        """It pays for what it must compute, and for what it computed since the last time."""
        name = request.message.options.tenant.name
        num_rounds = self.num_rounds(name)
        if num_rounds:
            for each in self.balances:
                quantum = QUANTUM * self.weight(each)
                self.balances[each] = min(self.balances[each] + num_rounds * quantum, quantum)
        self._pay(request)
        self.paid[request] = request.num_tokens
        self.balances[name] -= request.num_tokens - num_computed
        if self.balances[name] <= 0:
            self.turns.remove(name)
            self.turns.append(name)

    def ended(self, request: TextbookRequest) -> None:
        name = request.message.options.tenant.name
        self._pay(request)
        self.live.remove(request)
        if not any(other.message.options.tenant.name == name for other in self.live):
            del self.balances[name]
            self.turns.remove(name)

    def _pay(self, request: TextbookRequest) -> None:
        if request in self.paid:
            name = request.message.options.tenant.name
            self.balances[name] -= request.num_tokens - self.paid.pop(request)

    def num_rounds(self, name: str) -> int:
        """Until its balance is above 0, a round at a time."""
        balance, num_rounds = self.balances[name], 0
        while balance <= 0:
            balance += QUANTUM * self.weight(name)
            num_rounds += 1
        return num_rounds

    def is_over(self, name: str) -> bool:
        """It holds its share of the rows or of the KV cache, or more, and others are there."""
        if len(self.balances) == 1:
            return False
        mine = [r for r in self.running if r.message.options.tenant.name == name]
        num_held = sum(request.num_computed for request in mine)
        share = self.share(name)
        return len(mine) >= ceil(self.num_rows * share) or num_held >= self.num_slots * share

    def is_owed(self, name: str) -> bool:
        return len(self.balances) > 1 and not self.is_over(name)

    def may_have_a_row(self, request: TextbookRequest) -> bool:
        """The last rows are for those who are owed."""
        num_free = self.num_rows - len(self.running)
        is_owed = self.is_owed(request.message.options.tenant.name)
        return is_owed or num_free > self.num_rows // RESERVED

    def urgency(self, request: TextbookRequest) -> tuple[bool, int, int, int, float, str]:
        """The smallest is the most urgent: first by tenant, then within the tenant."""
        name = request.message.options.tenant.name
        return (
            self.is_over(name),
            self.num_rounds(name),
            self.turns.index(name),
            request.message.options.priority,
            request.arrival_time,
            request.request_id,
        )

    def victim(self, running: list[TextbookRequest]) -> TextbookRequest:
        """The least urgent of those whose tenant has more than its share of the running ones."""
        names = [request.message.options.tenant.name for request in running]
        total = sum(self.weight(name) for name in set(names))
        over = [
            request
            for request, name in zip(running, names, strict=True)
            if names.count(name) > ceil(Fraction(len(running) * self.weight(name), total))
        ]
        return max(
            over or running,
            key=lambda r: (r.message.options.priority, r.arrival_time, r.request_id),
        )

    def chunk_limit(self, budget: int) -> int:
        """Of a running request, while one that is owed a row waits for one that is free."""
        waits = {r.message.options.tenant.name for r in self.live if r not in self.running}
        if len(self.running) == self.num_rows or not any(map(self.is_owed, waits)):
            return budget
        return max(1, floor(Fraction(budget - len(self.running), len(self.balances))))
