"""The rules for the snapshots of a hybrid model that `hybrid_hits.py` measures and recommends."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Final

from hybrid_caches import (
    BLOCK,
    Cache,
    Group,
    Node,
    State,
    count_states,
    down,
    drop_state,
    is_leaf,
    last_state,
    node_at,
    resident_tokens,
    state_above,
    wanted_tokens,
)
from hybrid_workloads import Request

MAX_TURN: Final = 4
MAX_USES: Final = 3
INSURANCE: Final = ("insurance", 0, False)
CONSUMED: Final = ("consumed", 0, False)
TURN_START: Final = ("turn start", 0, False)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Where snapshots are taken, and which go first. The defaults are those that are recommended.

    system:     take one at the end of system prompt and tools.
    junctions:  take one where the prompt departs from the attention blocks that are cached.
    seen_junctions: also where it departs from what is not cached any more.
    turn_start: take one after a user's message, where the template drops reasoning later. It is for
        the user's next message, so that hits of a tool's results do not count: "until asked". Also
        "first to go", as those whose continuation has been computed, and "none".
    answer_end: take the last one at the end of the answer, where the next turn repeats the answer.
    prompt_end: take the last one at the end of the prompt; with `answer_end`, both.
    insurance:  distance from the prompt's end of the nearest insurance, in tokens; each further
        one is `insurance_factor` times as far. 0: none.
    consumed_first: one whose own continuation has been computed goes before all but insurance.
    refreshes_path: a hit makes all snapshots up to the used one new, not the used one only.
    by_rate:    the lowest expected rate of use goes first; else the oldest.
    by_turn:    chances of a next turn are learned by turn and by what it waits for; else all equal.
    gaps:       time to the next turn: "all": learned from all turns; "hits": from those that were
        still cached; "fixed": a minute.
    by_size:    the rate counts tokens to replay per token of memory.
    newest_first: of ends that are younger than the usual gap, the newest goes first.
    """

    system: bool = True
    junctions: bool = True
    seen_junctions: bool = False
    turn_start: str = "until asked"
    answer_end: bool = True
    prompt_end: bool = False
    insurance: int = 512
    insurance_factor: int = 2
    consumed_first: bool = True
    refreshes_path: bool = False
    by_rate: bool = True
    by_turn: bool = True
    gaps: str = "all"
    by_size: bool = True
    newest_first: bool = False


def end_group(turn: int, has_call: bool) -> Group:
    return "end", min(turn, MAX_TURN), has_call


class Habits:
    """How likely and how soon the snapshots of a group are used: four numbers per group."""

    FIRST_GUESS_S: Final = 60.0

    def __init__(self) -> None:
        self._counts: dict[Group, list[float]] = {}  # made, used, gaps, sum of their logarithms

    def _of(self, group: Group) -> list[float]:
        return self._counts.setdefault(group, [2.0, 1.0, 1.0, log(self.FIRST_GUESS_S)])

    def make(self, group: Group) -> None:
        self._of(group)[0] += 1

    def use(self, group: Group) -> None:
        self._of(group)[1] += 1

    def wait(self, group: Group, gap_s: float) -> None:
        counts = self._of(group)
        counts[2] += 1
        counts[3] += log(max(gap_s, 0.01))

    def probability(self, group: Group) -> float:
        made, used, _, _ = self._of(group)
        return min(1.0, used / made)

    def gap_s(self, group: Group) -> float:
        """Geometric mean of the times to the next use."""
        _, _, gaps, logarithms = self._of(group)
        return exp(logarithms / gaps)


class Hybrid(Cache):
    """Snapshots at planned positions, in one pool with the attention blocks. Only snapshots are
    chosen to be evicted; attention after the last one of a chain is free.

    state_tokens: pages of a snapshot, in tokens.
    """

    def __init__(self, capacity: float, state_tokens: int, rules: Rules | None = None) -> None:
        super().__init__(BLOCK)
        self.capacity = capacity
        self.state_tokens = state_tokens
        self.rules = rules or Rules()
        self.used = 0
        self.queues: dict[Group, OrderedDict[State, None]] = {}
        self.habits = Habits()

    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int:
        limit = request.num_prompt - 1
        if request.turn:
            before = end_group(request.turn - 1, not request.is_asked)
            self.habits.use(before)
            if self.rules.gaps == "all":
                self.habits.wait(before, request.idle_s)
        cached = min(resident_tokens(nodes), limit)
        used = last_state(nodes, cached)
        found = 0 if used is None else used.position
        departs = min(seen, limit) if self.rules.seen_junctions else cached
        plan = self._plan(request, found, departs)
        if self.rules.refreshes_path:
            self._refresh(nodes, found, request.now)
        if used is not None:
            is_continued = any(group[0] == "end" for group in plan.values())
            self._use(used, request, is_continued=is_continued)
        for position, group in plan.items():
            self._add(node_at(nodes, position), position, group, request.now)
        self.habits.make(end_group(request.turn, request.has_call))
        for node in nodes:
            wanted = wanted_tokens(node)
            self.used += wanted - node.resident
            node.resident = wanted
        while self.used > self.capacity:
            self._evict(request.now)
        return found

    def _plan(self, request: Request, found: int, departs: int) -> dict[int, Group]:
        """Positions after `found` where snapshots are taken, with their groups."""
        wanted = [(down(each, BLOCK), group) for each, group in self._wanted(request, departs)]
        return {position: group for position, group in wanted if position > found}

    def _wanted(self, request: Request, departs: int) -> Iterable[tuple[int, Group]]:
        """Where two are at one position, the later group counts."""
        rules = self.rules
        distance = rules.insurance
        while distance and distance < request.stable_end:
            yield request.stable_end - distance, INSURANCE
            distance *= rules.insurance_factor
        end = end_group(request.turn, request.has_call)
        answer_end = request.answer_end if rules.answer_end else None
        if rules.prompt_end or answer_end is None:
            yield request.stable_end, end
        if answer_end is not None:
            yield answer_end, end
        if rules.turn_start != "none" and request.turn_start == request.num_prompt:
            is_kept = rules.turn_start == "until asked"
            yield request.turn_start, TURN_START if is_kept else CONSUMED
        if rules.junctions:
            yield departs, ("used", 0, False)
        if rules.system:
            yield request.system_end, ("used", 0, False)

    def _add(self, node: Node, position: int, group: Group, now: float) -> None:
        if position not in node.states:
            node.states[position] = state = State(node, position)
            node.had_states.add(position)
            count_states(node, 1)
            self.used += self.state_tokens
            self._place(state, group, now)

    def _use(self, state: State, request: Request, *, is_continued: bool) -> None:
        """The first use of an end is by its own continuation. A later one, or one that made no
        later end, shows that others depart here."""
        assert state.group is not None
        kind, number, _ = state.group
        if state.group == TURN_START and not request.is_asked:
            return
        if kind != "end":
            self.habits.use(state.group)
        if kind != "end" or self.rules.gaps == "hits":
            self.habits.wait(state.group, request.now - state.touched)
        if kind == "end" and not is_continued:
            group = end_group(request.turn, request.has_call)
        elif state.group == TURN_START or (kind == "end" and self.rules.consumed_first):
            group = CONSUMED
        else:
            group = "used", min(number + 1, MAX_USES) if kind == "used" else 1, False
        self._place(state, group, request.now)

    def _refresh(self, nodes: Sequence[Node], found: int, now: float) -> None:
        for node in nodes:
            for position, state in node.states.items():
                if position < found and state.group is not None:
                    self._place(state, state.group, now)

    def _place(self, state: State, group: Group, now: float) -> None:
        if state.group is not None:
            del self.queues[state.group][state]
        state.touched, state.group = now, group
        self.queues.setdefault(group, OrderedDict())[state] = None
        if group[0] != "end":
            self.habits.make(group)

    def _evict(self, now: float) -> None:
        queue = self.queues.get(INSURANCE) or self.queues.get(CONSUMED)
        if queue:
            state = next(iter(queue))
        else:
            candidates = [self._candidate(each, now) for each in self.queues.values() if each]
            state = min(candidates, key=lambda each: self._value(each, now))
        assert state.group is not None
        del self.queues[state.group][state]
        self.used -= self.state_tokens + drop_state(state)

    def _candidate(self, queue: OrderedDict[State, None], now: float) -> State:
        oldest = next(iter(queue))
        if self.rules.newest_first and oldest.group is not None and oldest.group[0] == "end":
            is_young = now - oldest.touched < self.habits.gap_s(oldest.group)
            return next(reversed(queue)) if is_young else oldest
        return oldest

    def _value(self, state: State, now: float) -> float:
        rules, age = self.rules, now - state.touched
        assert state.group is not None
        if not rules.by_rate:
            return -age
        is_learned = rules.by_turn and rules.gaps != "fixed"
        gap_s = self.habits.gap_s(state.group) if is_learned else Habits.FIRST_GUESS_S
        value = 1 / (max(gap_s, age) if rules.newest_first else gap_s + age)
        if rules.by_turn:
            value *= self.habits.probability(state.group)
        if rules.by_size:
            above = state_above(state)
            replay = state.position - (0 if above is None else above.position)
            value *= replay / (self.state_tokens + (replay if is_leaf(state) else 0))
        return value
