"""`benchmarks/hybrid_hits.py`: its caches follow their rules and account for every token, its bound
is Belady's MIN, and it runs at a small size."""

import gzip
import json
from collections.abc import Sequence
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from eviction import most_hits, replay_one_by_one
from hybrid_caches import BLOCK, Cache, Foresight, LruPool, Node, Sglang, Vllm
from hybrid_hits import PLANS, main
from hybrid_rules import CONSUMED, TURN_START, Hybrid, Rules, end_group
from hybrid_workloads import Request, agents, read_trace

STATE_TOKENS = 96


def chat(*lengths: int, now: float = 0.0, first_key: int = 1, **more: Any) -> Request:
    """A prompt of segments with the keys 1, 2, …, the last of which is the answer."""
    path = tuple(zip(range(first_key, first_key + len(lengths)), lengths, strict=True))
    num_prompt = sum(lengths[:-1])
    fields = {"stable_end": num_prompt, "answer_end": sum(lengths), **more}
    return Request(now=now, path=path, num_prompt=num_prompt, **fields)


def random_requests(seed: int, number: int) -> list[Request]:
    """Conversations with two system prompts that go on, depart from earlier places, or begin."""
    random, keys = Random(seed), count(10)
    conversations: list[tuple[tuple[int, int], ...]] = []
    requests = []
    for now in range(number):
        before = random.choice(conversations) if conversations and random.random() < 0.7 else ()
        begin = before or ((random.choice((1, 2)), 100),)
        if random.random() < 0.2:
            begin = begin[: random.randrange(1, len(begin) + 1)]
        path = (
            *begin,
            (next(keys), random.randrange(1, 200)),
            (next(keys), random.randrange(1, 80)),
        )
        conversations = [*conversations[-8:], path]
        end = sum(length for _, length in path)
        prompt = end - path[-1][1]
        has_call = random.random() < 0.5
        requests.append(
            Request(
                now=float(now),
                path=path,
                num_prompt=prompt,
                stable_end=prompt,
                answer_end=end if has_call else None,
                turn_start=prompt if random.random() < 0.5 else None,
                system_end=100,
                turn=len(path) // 2 - 1,
                has_call=has_call,
                idle_s=float(random.randrange(1, 20)),
            )
        )
    return requests


def nodes_of(node: Node) -> list[Node]:
    return [node, *(each for child in node.children.values() for each in nodes_of(child))]


def caches(capacity: float, requests: Sequence[Request]) -> dict[str, Cache]:
    return {
        "full": LruPool(capacity),
        "vllm": Vllm(capacity, 32, STATE_TOKENS),
        "sglang": Sglang(capacity, STATE_TOKENS),
        "ours": Hybrid(capacity, STATE_TOKENS),
        "rules": Hybrid(capacity, STATE_TOKENS, Rules(seen_junctions=True, newest_first=True)),
        "oldest": Hybrid(capacity, STATE_TOKENS, Rules(by_rate=False, refreshes_path=True)),
        "bound": Foresight(capacity, requests),
    }


@pytest.mark.parametrize("capacity", [1_500, 4_000, inf])
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_token_that_was_seen_is_found_or_counted_as_lost(
    seed: int, capacity: float
) -> None:
    requests = random_requests(seed, 150)
    made = caches(capacity, requests)
    for name, cache in made.items():
        for request in requests:
            found = cache.serve(request)
            assert found % cache.grid == 0, name
            assert 0 <= found < request.num_prompt, name
        totals = cache.totals
        lost = totals.lost_at_block_ends + totals.lost_by_first_sharers + totals.lost_by_eviction
        assert totals.found + lost == totals.seen, name
        assert min(totals.lost_at_block_ends, totals.lost_by_first_sharers) >= 0, name
        if capacity == inf:
            assert totals.lost_by_eviction == 0, name
    best = max(cache.totals.found for cache in made.values())
    assert made["bound"].totals.found == best


@pytest.mark.parametrize("capacity", [1_500, 4_000])
def test_the_pool_holds_what_is_counted_and_nothing_after_a_chains_last_snapshot(
    capacity: int,
) -> None:
    requests = random_requests(7, 150)
    cache = Hybrid(capacity, STATE_TOKENS)
    for request in requests:
        cache.serve(request)
        nodes = nodes_of(cache.root)
        snapshots = [state for node in nodes for state in node.states.values()]
        assert cache.used == sum(node.resident for node in nodes) + STATE_TOKENS * len(snapshots)
        assert cache.used <= capacity
        assert sum(map(len, cache.queues.values())) == len(snapshots)
        for node in nodes:
            last = max(node.states, default=0)
            begin = node.end - node.length
            below = any(child.num_below for child in node.children.values())
            assert node.resident == (node.length if below else max(0, last - begin))


def test_full_attention_and_the_bound_agree_with_the_eviction_benchmark() -> None:
    """Blocks of one size: the LRU pool finds what LRU does, and the bound what MIN does."""
    random = Random(3)
    prompts = [[n, *(10 * n + d for d in range(1, random.randrange(2, 7)))] for n in range(1, 9)]
    for capacity in (6, 12, 20):
        chosen = [random.choice(prompts) for _ in range(200)]
        keys = [[*map(str.encode, map(str, each))] for each in chosen]
        requests = [
            Request(
                now=0.0,
                path=tuple((key, BLOCK) for key in each),
                num_prompt=len(each) * BLOCK + 1,
                stable_end=len(each) * BLOCK,
            )
            for each in chosen
        ]
        lru, bound = LruPool(capacity * BLOCK), Foresight(capacity * BLOCK, requests)
        for request in requests:
            lru.serve(request)
            bound.serve(request)
        assert lru.totals.found == replay_one_by_one(keys, "lru", capacity) * BLOCK
        assert bound.totals.found == most_hits(keys, capacity) * BLOCK


def test_the_next_turn_finds_the_answers_end_in_blocks_of_16() -> None:
    cache = Hybrid(inf, STATE_TOKENS)
    assert cache.serve(chat(1_000, 505)) == 0
    assert cache.serve(chat(1_000, 505, 300, 50)) == 1_504


def test_a_template_that_drops_reasoning_lets_the_next_question_find_the_turn_start() -> None:
    cache = Hybrid(inf, STATE_TOKENS)
    cache.serve(chat(1_600, 320, turn_start=1_600, has_call=True))
    assert cache.serve(chat(1_600, 320, 80, 50, turn_start=1_600, answer_end=None)) == 1_920
    (kept,) = cache.queues[TURN_START]
    assert kept.position == 1_600
    question = Request(0.0, ((1, 1_600), (9, 100), (10, 50), (11, 20)), 1_750, 1_750, turn=2)
    assert cache.serve(question) == 1_600
    assert kept.group == CONSUMED  # the next question departs later


def test_a_tools_result_that_falls_back_to_the_turn_start_does_not_count_as_its_use() -> None:
    cache = Hybrid(inf, STATE_TOKENS)
    cache.serve(chat(1_600, 320, turn_start=1_600, has_call=True))
    (kept,) = cache.queues[TURN_START]
    other_answer = ((1, 1_600), (9, 100), (10, 50), (11, 20))
    result = Request(5.0, other_answer, 1_750, 1_750, turn=1, is_asked=False)
    assert cache.serve(result) == 1_600
    assert (kept.group, kept.touched) == (TURN_START, 0.0)


def test_a_junction_is_found_from_its_second_sharer_on_and_the_systems_end_from_the_first() -> None:
    def request(key: int, system_end: int) -> Request:
        path = ((1, 800), (key, 3_200), (key + 1, 10))
        return Request(0.0, path, 4_000, 4_000, system_end=system_end)

    for system_end, expected in ((0, [0, 0, 800]), (800, [0, 800, 800])):
        cache = Hybrid(inf, STATE_TOKENS, Rules(insurance=0))
        assert [cache.serve(request(key, system_end)) for key in (10, 20, 30)] == expected
        assert cache.totals.lost_by_first_sharers == (800 if system_end == 0 else 0)
    insured = Hybrid(inf, STATE_TOKENS, Rules(junctions=False))
    first, second = (insured.serve(request(key, 0)) for key in (10, 20))
    assert (first, second) == (0, 0)  # insurance is at 512, 1,024 and 2,048 from the end


def test_insurance_goes_first_then_what_its_continuation_has_used() -> None:
    cache = Hybrid(10_000, STATE_TOKENS, Rules())
    cache.serve(chat(2_000, 100))
    cache.serve(chat(2_000, 100, 500, 100, turn=1, now=1.0))
    groups = {group[0] for group, queue in cache.queues.items() if queue}
    assert groups == {"insurance", "consumed", "end"}
    cache.capacity = 2_950
    cache.serve(chat(16, 0, first_key=50, now=2.0))
    left = {group: len(queue) for group, queue in cache.queues.items() if queue}
    assert ("insurance", 0, False) not in left
    assert end_group(1, False) in left


def test_vllm_finds_the_last_block_before_the_prompts_last_token() -> None:
    cache = Vllm(inf, 528, 1_584)
    cache.serve(chat(2 * 528, 600))
    assert cache.serve(chat(2 * 528, 600, 100, 10)) == 528
    # A junction: the attention of the former answer is cached in blocks, and now has a snapshot.
    assert cache.serve(chat(2 * 528, 600, 100, 200, 10)) == down_528(2 * 528 + 600 + 100 - 1)


def down_528(number: int) -> int:
    return number // 528 * 528


def test_sglang_finds_chunks_of_64_and_keeps_nothing_after_a_chains_last_state() -> None:
    cache = Sglang(inf, 1_572)
    cache.serve(chat(1_000, 20))
    assert cache.num_tokens == 960
    assert cache.serve(chat(1_000, 20, 100, 10)) == 960


def test_plans_have_the_sizes_of_the_published_shapes() -> None:
    small, large = PLANS["9B"], PLANS["35B-A3B"]
    assert small.state_bytes / 2**20 == pytest.approx(49.1, abs=0.05)
    assert large.state_bytes / 2**20 == pytest.approx(61.4, abs=0.05)
    assert round(small.state_tokens) == 1_572
    assert (small.vllm_block, large.vllm_block) == (528, 1_056)
    assert small.paged_state_tokens == 1_584


def test_dropped_reasoning_changes_only_what_follows_the_last_question() -> None:
    kept = list(agents(3, 1.0, is_dropped=False))
    dropped = list(agents(3, 1.0, is_dropped=True))
    assert len(kept) == len(dropped)
    assert sum(r.num_prompt for r in dropped) < sum(r.num_prompt for r in kept)
    assert all(request.answer_end is not None for request in kept)
    for requests in (kept, dropped):
        cache = LruPool(inf)
        for request in requests:
            found = cache.serve(request)
            assert found >= (request.system_end // 16 * 16 if request.turn else 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "conversation_trace.jsonl.gz"
    lines = [
        {"timestamp": 0, "input_length": 1_300, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 4_000, "input_length": 2_000, "output_length": 9, "hash_ids": [1, 2, 4, 5]},
    ]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_a_turn_of_a_trace_continues_the_prompt_whose_full_blocks_it_begins_with(
    trace: Path,
) -> None:
    first, second = read_trace(trace)
    assert (first.stable_end, first.num_prompt, first.num_tokens) == (1_024, 1_300, 1_309)
    assert (first.turn, second.turn, second.idle_s) == (0, 1, 4.0)
    assert first.path[:2] == second.path[:2]
    assert first.path[2] != second.path[2]


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    path = tmp_path / "result.json"
    sizes = ("--requests", "60", "--jobs", "3", "--plans", "9B")
    monkeypatch.setattr("sys.argv", ["hybrid_hits.py", *sizes, *options, "--json", str(path)])
    main()
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_the_benchmark_has_a_row_per_workload_and_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = run(monkeypatch, tmp_path, "--memory", "0.2", "inf")
    names = ("conversation", "synthetic", "agents-keep", "agents-drop")
    assert [(row["workload"], row["memory"]) for row in rows] == [
        (name, memory) for name in names for memory in ("0.2", "inf")
    ]
    for row in rows:
        assert row["bound"] >= max(row[name] for name in ("full", "vllm", "sglang", "ours"))
        if row["memory"] == "inf":
            lost = row["block_ends"] + row["first_sharers"] + row["evicted"]
            assert row["full"] == pytest.approx(row["ours"] + lost)


def test_the_rules_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = ("--rules", "--memory", "0.2", "--workloads", "agents-drop")
    rows = run(monkeypatch, tmp_path, *options)
    assert rows[0]["rules"] == "recommended"
    assert len({row["rules"] for row in rows}) == len(rows) > 10
    assert all(0 <= row["found"] <= 1 for row in rows)
