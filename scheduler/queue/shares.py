"""Shares of tenants: who is served next, and who holds more than its share.

Deficit round robin (Shreedhar and Varghese, 1995) in tokens. A round gives every tenant a quantum
times its weight. A tenant is served while its balance is positive, and pays for the tokens that it
computes: the input when a request is admitted, the output when it ends or is admitted again. As the
cost is known late, a balance can become negative; the rounds that the next tenant needs are counted
at once instead of one after the other.

Before that, a tenant that holds at least its share of rows or of the KV cache comes after all that
hold less. So it is admitted only while no such tenant waits.
"""

from collections import Counter
from collections.abc import Collection
from math import ceil
from typing import Final, Protocol, TypeAlias

import numpy as np

from longshore.protocol.arrays import Int64Array
from longshore.protocol.requests import RequestOptions, Tenant

QUANTUM: Final = 256
"""Tokens per round and weight: a few short prompts."""

RESERVED: Final = 16
"""One in so many rows and blocks is kept free for tenants that hold less than their share, so that
a request of a tenant that had none is admitted at once, although nobody is preempted for it."""

Rank: TypeAlias = tuple[bool, int, int]


class SharedRequest(Protocol):
    """The fields of a request that are read here."""

    @property
    def options(self) -> RequestOptions: ...
    @property
    def row(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


class Account:
    """One tenant that has live requests.

    number:    index of its counts.
    balance:   tokens that it may still compute in its turn; negative if it has computed more.
    turn:      position in the round; smaller is earlier.
    paid:      by live request, its tokens when it was admitted last; 0 if it never was.
    num_rows, num_held: rows that it holds, and tokens on them.
    """

    def __init__(self, number: int, turn: int) -> None:
        self.number = number
        self.weight = 1
        self.balance = 0
        self.turn = turn
        self.paid: dict[object, int] = {}
        self.num_rows = 0
        self.num_held = 0

    def num_rounds(self) -> int:
        """Rounds until its balance is positive."""
        return 0 if self.balance > 0 else -self.balance // (QUANTUM * self.weight) + 1


class Shares:
    """The accounts of all tenants with live requests. A tenant without one has no account, so it
    begins with neither credit nor debt.

    max_num_seqs: number of rows.
    num_slots:    tokens that the KV cache holds.
    """

    def __init__(self, max_num_seqs: int, num_slots: int) -> None:
        self._num_rows = max_num_seqs
        self._num_slots = num_slots
        self._accounts: dict[str, Account] = {}
        self._free_numbers: list[int] = []
        self._number_of_row: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._last_turn = 0
        self._total_weight = 0
        self._num_free_rows = max_num_seqs

    # Events

    def arrived(self, request: object, tenant: Tenant) -> None:
        """A request of a tenant is about to be queued; a session may be again. The tenant has this
        weight from now on."""
        account = self._accounts.get(tenant.name)
        if account is None:
            number = self._free_numbers.pop() if self._free_numbers else len(self._accounts)
            account = self._accounts[tenant.name] = Account(number, self._next_turn())
        else:
            self._total_weight -= account.weight
        account.weight = tenant.weight
        self._total_weight += tenant.weight
        account.paid.setdefault(request, 0)

    def admitted(self, request: SharedRequest, num_computed: int) -> None:
        """A request has got its row and must compute its tokens after the first `num_computed`."""
        account = self._accounts[request.options.tenant.name]
        num_rounds = account.num_rounds()
        if num_rounds:
            for each in self._accounts.values():
                quantum = QUANTUM * each.weight
                each.balance = min(each.balance + num_rounds * quantum, quantum)
        num_tokens = request.num_tokens
        self._pay(account, request, num_tokens)
        account.balance -= num_tokens - num_computed
        if account.balance <= 0:
            account.turn = self._next_turn()
        self._number_of_row[request.row] = account.number
        account.num_rows += 1
        account.num_held += num_computed
        self._num_free_rows -= 1

    def ended(self, request: SharedRequest) -> None:
        """A request has ended; it has no row any more."""
        account = self._accounts[request.options.tenant.name]
        self._pay(account, request, request.num_tokens)
        del account.paid[request]
        if not account.paid:
            del self._accounts[request.options.tenant.name]
            self._free_numbers.append(account.number)
            self._total_weight -= account.weight

    def _pay(self, account: Account, request: object, num_tokens: int) -> None:
        """Pay for the output since the request was admitted."""
        if num_before := account.paid[request]:
            account.balance -= num_tokens - num_before
        account.paid[request] = num_tokens

    def _next_turn(self) -> int:
        self._last_turn += 1
        return self._last_turn

    def begin_step(self, generation: Int64Array, num_computed: Int64Array) -> None:
        """Count rows and their tokens anew. Both arrays: (max_num_seqs,), see `RunningTable`."""
        rows = generation.nonzero()[0]
        numbers, length = self._number_of_row[rows], len(self._accounts) + len(self._free_numbers)
        num_rows = np.bincount(numbers, minlength=length).tolist()
        num_held = np.bincount(numbers, num_computed[rows], length).astype(np.int64).tolist()
        for account in self._accounts.values():
            account.num_rows = num_rows[account.number]
            account.num_held = num_held[account.number]
        self._num_free_rows = self._num_rows - len(rows)

    # Decisions

    def is_over(self, account: Account) -> bool:
        """Whether it holds at least its share of the rows or of the KV cache, while other tenants
        have live requests."""
        if len(self._accounts) == 1:
            return False
        weight, total = account.weight, self._total_weight
        return (
            account.num_rows >= ceil(self._num_rows * weight / total)
            or account.num_held * total >= self._num_slots * weight
        )

    def rank(self, name: str) -> Rank:
        """The smallest is served first; no two tenants have the same rank."""
        account = self._accounts[name]
        return self.is_over(account), account.num_rounds(), account.turn

    def is_owed(self, name: str) -> bool:
        """Whether other tenants have requests, and this one holds less than its share: it may use
        what is reserved."""
        account = self._accounts[name]
        return len(self._accounts) > 1 and not self.is_over(account)

    def first(self, names: Collection[str]) -> str | None:
        """The one of these tenants that is served next; None if what is left is reserved for
        others."""
        is_reserved = self._num_free_rows <= self._num_rows // RESERVED
        may_be = (name for name in names if not is_reserved or self.is_owed(name))
        return min(may_be, key=self.rank, default=None)

    def chunk_limit(self, budget: int) -> int | None:
        """Limit of the tokens that a running request computes in a step, so that one that is owed a
        row finds tokens left to start with. None: no such one waits."""
        if not self._num_free_rows or not any(
            len(each.paid) > each.num_rows and self.is_owed(name)
            for name, each in self._accounts.items()
        ):
            return None
        num_rows = self._num_rows - self._num_free_rows
        return max(1, (budget - num_rows) // len(self._accounts))

    def pick_over(self, names: list[str]) -> set[str]:
        """names: the tenants of running requests, one per request. Those that hold more than their
        share of these rows; all if none does."""
        num_rows = Counter(names)
        total = sum(self._accounts[name].weight for name in num_rows)
        over = {
            name
            for name, count in num_rows.items()
            if count > ceil(len(names) * self._accounts[name].weight / total)
        }
        return over or set(num_rows)
