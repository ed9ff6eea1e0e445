"""Prefix caches of hybrid models, at the level of their rules, for `hybrid_hits.py`.

All sizes are in tokens of the model's attention KV. A cache is given requests one after the other;
each is looked up, computed and finished before the next one, so that no memory is in use between
two requests, and the states that running requests work on are not counted.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from typing import Final

from hybrid_workloads import Request

BLOCK: Final = 16

Group = tuple[str, int, bool]
"""Of snapshots that are as likely to be used again: kind, turn or number of uses, awaits a tool."""


class Node:
    """A segment of a prompt, below the one before. A node stays when its tokens are evicted, so
    that it is known what has been seen.

    resident:   of its tokens, how many are cached, from the first one on.
    states:     snapshots at positions after its start, up to its end.
    had_states: the positions that ever had one.
    num_below:  snapshots in this node and below it.
    """

    __slots__ = (
        "children", "end", "had_states", "length", "num_below", "parent", "resident", "states",
    )  # fmt: skip

    def __init__(self, parent: "Node | None", length: int) -> None:
        self.parent = parent
        self.length = length
        self.end: int = length + (0 if parent is None else parent.end)
        self.children: dict[int, Node] = {}
        self.resident = 0
        self.states: dict[int, State] = {}
        self.had_states: set[int] = set()
        self.num_below = 0


class State:
    """A snapshot at a position of a node. touched: when it was made or last used."""

    __slots__ = ("group", "node", "position", "touched")

    def __init__(self, node: Node, position: int, touched: float = 0.0) -> None:
        self.node = node
        self.position = position
        self.touched = touched
        self.group: Group | None = None


def down(number: int, unit: int) -> int:
    return number // unit * unit


@dataclass(slots=True)
class Totals:
    """Prompt tokens of all requests, and what was found. The rest of what has been seen before, in
    blocks of 16, is lost: where a block is cut off, where a position was reached for the first time
    since it had been computed (first sharers), or since a snapshot was evicted."""

    prompt: int = 0
    seen: int = 0
    found: int = 0
    lost_at_block_ends: int = 0
    lost_by_first_sharers: int = 0
    lost_by_eviction: int = 0


class Cache(ABC):
    """A prefix cache. grid: its hits are multiples of this."""

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self.root = Node(None, 0)
        self.totals = Totals()

    def serve(self, request: Request) -> int:
        """Look up, compute and finish a request. Returns the number of tokens found."""
        nodes, seen = self._nodes(request)
        longest = min(seen, request.num_prompt - 1)
        had = self._had(nodes, longest)
        found = self._serve(request, nodes, seen)
        self._count(request, longest, had, found)
        return found

    @abstractmethod
    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int: ...

    def _nodes(self, request: Request) -> tuple[list[Node], int]:
        """The nodes of its path, and how many of its first tokens have been seen before."""
        node, nodes, seen = self.root, [], 0
        for key, length in request.path:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, length)
            else:
                seen = child.end
            nodes.append(child)
            node = child
        return nodes, seen

    def _had(self, nodes: Sequence[Node], longest: int) -> int:
        """The last position up to `longest` that could have been found if nothing were evicted."""
        for node in reversed(nodes):
            if node.had_states and node.end - node.length < longest:
                best = max((p for p in node.had_states if p <= longest), default=0)
                if best:
                    return best
        return 0

    def _count(self, request: Request, longest: int, had: int, found: int) -> None:
        totals = self.totals
        seen = down(longest, BLOCK)
        totals.prompt += request.num_prompt
        totals.seen += seen
        totals.found += found
        evicted = max(0, had - found)
        ends = min(seen - down(seen, self.grid), seen - found - evicted)
        totals.lost_by_eviction += evicted
        totals.lost_at_block_ends += ends
        totals.lost_by_first_sharers += seen - found - evicted - ends


def resident_tokens(nodes: Sequence[Node]) -> int:
    """Length of the leading run of cached tokens."""
    total = 0
    for node in nodes:
        total += node.resident
        if node.resident < node.length:
            break
    return total


def last_state(nodes: Sequence[Node], limit: int) -> State | None:
    """The last snapshot at a position up to `limit`."""
    for node in reversed(nodes):
        if node.states and node.end - node.length < limit:
            best = max((p for p in node.states if p <= limit), default=0)
            if best:
                return node.states[best]
    return None


def node_at(nodes: Sequence[Node], position: int) -> Node:
    """The node that has the token before this position."""
    for node in nodes:
        if position <= node.end:
            return node
    raise ValueError(f"position {position} is after the end of the path, {nodes[-1].end}")


class LruPool(Cache):
    """One pool of blocks in LRU order, which evicts the end of a prompt before its beginning.
    Without snapshots: full attention.
    """

    def __init__(self, capacity: float, grid: int = BLOCK) -> None:
        super().__init__(grid)
        self.capacity = capacity
        self.used = 0
        self.lru: OrderedDict[Node | State, None] = OrderedDict()

    def _had(self, nodes: Sequence[Node], longest: int) -> int:
        return down(longest, self.grid)

    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int:
        found = down(min(resident_tokens(nodes), request.num_prompt - 1), self.grid)
        self._keep(nodes)
        self._evict()
        return found

    def _keep(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            self.used += node.length - node.resident
            node.resident = node.length
            self.lru[node] = None
            self.lru.move_to_end(node)

    def _evict(self) -> None:
        while self.used > self.capacity:
            item = next(iter(self.lru))
            if isinstance(item, Node):
                count = int(min(self.used - self.capacity, item.resident)) or 1
                item.resident -= count
                self.used -= count
                if item.resident:
                    continue
            else:
                self._drop_state(item)
            del self.lru[item]

    def _drop_state(self, state: State) -> None:
        raise NotImplementedError


class Vllm(LruPool):
    """vLLM 0.30 in its "align" mode. Blocks have as many tokens as one layer's state needs. Of a
    prompt, the state at its replay boundary (the last block end before its last token) is kept, and
    the one at a junction: where the attention blocks that were found end. Attention blocks and
    states are in one LRU queue (vllm-project/vllm #37898, #47782, #52216)."""

    def __init__(self, capacity: float, block: int, state_tokens: int) -> None:
        super().__init__(capacity, block)
        self.state_tokens = state_tokens

    def _had(self, nodes: Sequence[Node], longest: int) -> int:
        return Cache._had(self, nodes, longest)

    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int:
        attention = down(min(resident_tokens(nodes), request.num_prompt - 1), self.grid)
        state = last_state(nodes, attention)
        found = 0 if state is None else state.position
        if state is not None:
            self.lru.move_to_end(state)
        for position in (attention, down(max(request.stable_end - 1, 0), self.grid)):
            if position > found:
                self._add(node_at(nodes, position), position)
        self._keep(nodes)
        self._evict()
        return found

    def _add(self, node: Node, position: int) -> None:
        if position in node.states:
            self.lru.move_to_end(node.states[position])
            return
        node.states[position] = state = State(node, position)
        node.had_states.add(position)
        self.lru[state] = None
        self.used += self.state_tokens

    def _drop_state(self, state: State) -> None:
        del state.node.states[state.position]
        self.used -= self.state_tokens


class Sglang(Cache):
    """SGLang's unified radix tree with extra buffers: two pools of fixed sizes. States are at the
    ends of chunks of prefill, at the end of the prompt (in multiples of 64), at the last multiple
    of 256 in the answer, and where a prompt departs from what is cached, instead of at the end of
    that chunk (sgl-project/sglang #31181). A hit refreshes the consumed state only (#31648) and all
    attention before. What is after the last state of a chain is not kept; the oldest leaf goes
    whole, and of an inner node only the state."""

    CHUNK: Final = 8_192
    UNIT: Final = 64
    INTERVAL: Final = 256
    RATIO: Final = 0.9

    def __init__(self, capacity: float, state_tokens: float) -> None:
        super().__init__(self.UNIT)
        share = self.RATIO / (1 + self.RATIO)
        self.max_states = inf if capacity == inf else int(capacity * share / state_tokens)
        self.max_tokens = capacity * (1 - share)
        self.num_tokens = 0
        self.states: OrderedDict[State, None] = OrderedDict()
        self.leaves: OrderedDict[State, None] = OrderedDict()  # by last use of their attention

    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int:
        limit = request.num_prompt - 1
        attention = down(min(resident_tokens(nodes), limit), self.UNIT)
        state = last_state(nodes, attention)
        found = 0 if state is None else state.position
        if state is not None:
            self.states.move_to_end(state)
        for position in self._positions(request, found, attention):
            self._add(node_at(nodes, position), position)
        self._refresh(nodes)
        self._evict()
        return found

    def _positions(self, request: Request, found: int, attention: int) -> list[int]:
        chunk, prompt_end = found, request.stable_end
        positions = []
        while chunk < prompt_end:
            end = min(chunk + self.CHUNK, prompt_end)
            is_branch = max(chunk, found) < attention < end
            positions.append(attention if is_branch else down(end, self.UNIT))
            chunk = end
        positions.append(down(request.num_tokens, self.INTERVAL))
        return [position for position in dict.fromkeys(positions) if position > found]

    def _add(self, node: Node, position: int) -> None:
        state = node.states.get(position)
        if state is None:
            node.states[position] = state = State(node, position)
            node.had_states.add(position)
            count_states(node, 1)
        self.states[state] = None
        self.states.move_to_end(state)

    def _refresh(self, nodes: Sequence[Node]) -> None:
        """Keep attention up to the last state of the path, and make it the newest."""
        for node in nodes:
            wanted = wanted_tokens(node)
            self.num_tokens += wanted - node.resident
            node.resident = wanted
        for node in nodes:
            for state in node.states.values():
                if state in self.leaves:
                    self.leaves.move_to_end(state)
        last = last_state(nodes, nodes[-1].end)
        if last is not None and is_leaf(last):
            self.leaves[last] = None
            self.leaves.move_to_end(last)

    def _evict(self) -> None:
        while len(self.states) > self.max_states:
            self._drop(next(iter(self.states)))
        while self.num_tokens > self.max_tokens and self.leaves:
            leaf = next(iter(self.leaves))
            if is_leaf(leaf):
                self._drop(leaf)
            else:
                del self.leaves[leaf]

    def _drop(self, state: State) -> None:
        del self.states[state]
        self.leaves.pop(state, None)
        self.num_tokens -= drop_state(state)
        above = state_above(state)
        if above is not None and is_leaf(above):
            self.leaves[above] = None  # at the newest end; its attention was used with the leaf's
            self.leaves.move_to_end(above, last=False)


def count_states(node: Node | None, change: int) -> None:
    while node is not None:
        node.num_below += change
        node = node.parent


def wanted_tokens(node: Node) -> int:
    """Tokens of a node up to its last snapshot; all, if there is one below it."""
    if node.num_below > len(node.states):
        return node.length
    return max(node.states, default=node.end - node.length) - (node.end - node.length)


def is_leaf(state: State) -> bool:
    """No snapshot is after this one on its chain."""
    node = state.node
    return node.num_below == len(node.states) and max(node.states) == state.position


def state_above(state: State) -> State | None:
    """The nearest snapshot before this one."""
    node: Node | None = state.node
    while node is not None:
        best = max((p for p in node.states if p < state.position), default=0)
        if best:
            return node.states[best]
        node = node.parent
    return None


def drop_state(state: State) -> int:
    """Remove a snapshot, and the attention that is after the last one of its chain now. Returns the
    number of tokens."""
    del state.node.states[state.position]
    count_states(state.node, -1)
    freed = 0
    node: Node | None = state.node
    while node is not None:
        wanted = wanted_tokens(node)
        if wanted >= node.resident:
            break
        freed += node.resident - wanted
        node.resident = wanted
        if wanted:
            break
        node = node.parent
    return freed


class Foresight(Cache):
    """An upper bound of what any rules can find: Belady's MIN on the attention alone, as if
    snapshots were free and at all positions. After each request, only what is used soonest stays.
    What is used next is never after what follows it in a prompt, so all hits are prefixes."""

    def __init__(self, capacity: float, requests: Sequence[Request]) -> None:
        super().__init__(BLOCK)
        self.capacity = capacity
        self.used = 0
        self.next_uses = self._all_next_uses(requests)
        self.next_use: dict[Node, float] = {}
        self.latest: list[tuple[float, int, int, Node]] = []
        self.number = 0

    @staticmethod
    def _all_next_uses(requests: Sequence[Request]) -> list[list[float]]:
        """Of each request and segment of its path, the number of the next request with it."""
        following: dict[int, int] = {}
        next_uses: list[list[float]] = []
        for number in range(len(requests) - 1, -1, -1):
            path = requests[number].path
            next_uses.append([following.get(key, inf) for key, _ in path])
            following.update(dict.fromkeys((key for key, _ in path), number))
        return next_uses[::-1]

    def _had(self, nodes: Sequence[Node], longest: int) -> int:
        return down(longest, self.grid)

    def _serve(self, request: Request, nodes: Sequence[Node], seen: int) -> int:
        found = down(min(resident_tokens(nodes), request.num_prompt - 1), self.grid)
        for node, use in zip(nodes, self.next_uses[self.number], strict=True):
            self.used += node.length - node.resident
            node.resident = node.length
            self.next_use[node] = use
            heappush(self.latest, (-use, -node.end, id(node), node))
        self.number += 1
        while self.latest and (self.used > self.capacity or self.latest[0][0] == -inf):
            use, _, _, node = self.latest[0]
            if self.next_use.get(node) != -use:
                heappop(self.latest)
                continue
            excess = node.resident if use == -inf else self.used - self.capacity
            count = min(node.resident, ceil(excess))
            node.resident -= count
            self.used -= count
            if not node.resident:
                del self.next_use[node]
                heappop(self.latest)
        return found
