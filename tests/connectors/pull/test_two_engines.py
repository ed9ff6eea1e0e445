"""A request's prompt is computed on one engine, and its output on another: the tokens are those of
one engine, and no block leaks, whatever happens between them."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.connectors.multi.scheduler import MultiConnector
from longshore.connectors.pull.layout import PullPlan, plan_pull
from longshore.connectors.pull.owner import Owner
from longshore.connectors.pull.reader import RENEWALS_PER_LEASE
from longshore.connectors.pull.scheduler import PullConnector
from longshore.connectors.pull.transport import ReadState, TransportError
from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AbortRequests
from longshore.testing.engines import settle
from longshore.worker.transfer.connector import HookFailed
from tests.connectors.conftest import KINDS
from tests.connectors.engine import Answer, Engine, prompts_of
from tests.connectors.pull.local import LocalTransport, Network, network
from tests.models import make_tiny_model

ModelOf = Callable[[str], tuple[Path, Any]]
LOCAL: Final = "tests.connectors.pull.local:LocalConnector"
LIMIT_S: Final = 60.0
MAX_TOKENS: Final = 12

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def fresh_network() -> Iterator[None]:
    network.__dict__.update(Network().__dict__)
    yield
    network.may_reset.set()


class Pair:
    """A prefill and a decode engine, and what a router does between them.

    prefill_model: None: that of the decode engine.
    """

    def __init__(
        self,
        model: Path,
        connector: str = LOCAL,
        options: Mapping[str, Any] | None = None,
        *,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
        prefill_model: Path | None = None,
    ) -> None:
        options = dict(options or {})
        self.prefill = Engine(prefill_model or model, connector, options, **(prefill or {}))
        self.decode = Engine(model, connector, options, **(decode or {}))

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.decode.engine.close()
        self.prefill.engine.close()

    def until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_over():
            assert time.monotonic() < deadline
            for engine in (self.prefill, self.decode):
                if engine.must_be_driven:
                    engine.receive()

    def begin(self, prompt: list[int], **fields: Any) -> Answer:
        """The first leg; returns its answer."""
        answer = self.prefill.add(
            prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **fields
        )
        self.until(lambda: answer.end is not None)
        return answer

    def go_on(
        self,
        prompt: list[int],
        first: Answer,
        *,
        params: dict[str, Any] | None = None,
        resends_token: bool = True,
        max_tokens: int = MAX_TOKENS,
        **fields: Any,
    ) -> Answer:
        """The second leg."""
        assert first.end is not None
        if resends_token:
            fields["output_token_ids"] = int32_array(first.token_ids)
        return self.decode.add(
            prompt,
            max_tokens=max_tokens,
            kv_transfer_params=first.end.kv_transfer_params if params is None else params,
            **fields,
        )

    def run(self, prompt: list[int], **settings: Any) -> list[int]:
        first = self.begin(prompt)
        answer = self.go_on(prompt, first, **settings)
        self.until(lambda: answer.end is not None)
        assert answer.end is not None
        assert answer.end.reason is FinishReason.LENGTH_CAPPED, answer.end.message
        is_resent = settings.get("resends_token", True)
        return [*(first.token_ids if is_resent else []), *answer.token_ids]

    def half(self, engine: Engine) -> PullConnector:
        half = engine.engine.connector_halves[0]  # type: ignore[union-attr]
        if isinstance(half, MultiConnector):
            half = half.children[0]
        assert isinstance(half, PullConnector)
        return half

    def settle(self) -> None:
        """All leases end, and every block of both engines is free."""
        self.until(lambda: not self.half(self.prefill)._leased)
        for engine in (self.prefill, self.decode):
            assert settle(engine.engine, lambda: 0) == 0

    @property
    def num_pulled(self) -> int:
        """Tokens."""
        return self.decode.stats.num_external_hit_tokens

    @property
    def num_failed(self) -> int:
        """Loads."""
        return self.decode.stats.num_failed_loads


def wanted(model: Path, *prompts: list[int], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    with Engine(model) as plain:
        return plain.run(*prompts, max_tokens=max_tokens)


PROMPTS: Final = prompts_of(100, 33, 64, 150)


@pytest.mark.req("CRG-06")
@pytest.mark.req("CON-12")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "resends_token",
    [pytest.param(True, id="token"), pytest.param(False, id="prompt", marks=pytest.mark.long)],
)
def test_tokens_are_those_of_one_engine(kind: str, resends_token: bool, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    with Pair(model) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert pair.run(prompt, resends_token=resends_token) == tokens
        pair.settle()
        if resends_token:
            assert pair.num_pulled == sum(map(len, PROMPTS))
            (moved,) = pair.decode.stats.transfers
            assert (moved.source, moved.destination) == ("REMOTE", "GPU")
            assert moved.num_bytes > 0
            assert moved.num_failed_blocks == 0
            assert pair.decode.num_computed == len(PROMPTS) * (MAX_TOKENS - 1)
        elif kind != "states":  # which cannot be resumed before their last token
            assert pair.num_pulled > 0
        assert pair.half(pair.prefill).num_expired_leases == 0


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize(
    "sizes", [(16, 32), (32, 16), pytest.param((8, 32), marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "states"])
def test_block_sizes_may_differ(kind: str, sizes: tuple[int, int], model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    prefill, decode = ({"block_size": size, "num_blocks": 120} for size in sizes)
    with Pair(model, prefill=prefill, decode=decode) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert pair.run(prompt) == tokens
        pair.settle()
        assert pair.num_pulled > 0
        if kind in ("full", "latents"):
            assert pair.num_failed == 0


def test_prompts_of_several_chunks_are_pulled(model_of: ModelOf) -> None:
    """Windows and states are freed while the prompt is computed."""
    for kind in ("windows", "chunks", "states"):
        model, _ = model_of(kind)
        expected = wanted(model, *PROMPTS)
        with Pair(model, prefill={"max_num_batched_tokens": 32}) as pair:
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                assert pair.run(prompt) == tokens
            pair.settle()
            assert pair.num_failed == 0
            assert pair.decode.num_computed == len(PROMPTS) * (MAX_TOKENS - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_the_reader_lacks_is_pulled(kind: str, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    prompt = PROMPTS[3]
    longer = prompt + PROMPTS[0][:40]
    (_, expected) = wanted(model, prompt, longer)
    with Pair(model) as pair:
        pair.run(prompt)
        before = pair.num_pulled
        assert pair.run(longer) == expected
        pair.settle()
        if kind == "states":  # whose last snapshot may be much earlier
            assert pair.num_pulled - before <= len(longer)
        else:
            assert 0 < pair.num_pulled - before <= 40 + 16


def test_many_requests_at_once_with_preemptions(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    prompts = prompts_of(100, 130, 60, 150, 95, 140, seed=3)
    expected = wanted(model, *prompts, max_tokens=60)
    decode = {"num_blocks": 30, "max_loading_blocks": 29}
    with Pair(model, prefill={"num_blocks": 120}, decode=decode) as pair:
        firsts = [pair.begin(prompt) for prompt in prompts]
        answers = [
            pair.go_on(prompt, first, max_tokens=60)
            for prompt, first in zip(prompts, firsts, strict=True)
        ]
        pair.until(lambda: all(answer.end is not None for answer in answers))
        found = [
            [*first.token_ids, *answer.token_ids]
            for first, answer in zip(firsts, answers, strict=True)
        ]
        assert found == expected
        pair.settle()
        assert pair.num_failed == 0
        assert pair.decode.stats.num_preemptions > 0


@pytest.mark.req("CON-10")
def test_preemptions_of_the_owner_touch_no_leased_block(model_of: ModelOf) -> None:
    """A request is leased; others on the same engine are preempted, and their blocks used again."""
    model, _ = model_of("full")
    prompt, *others = prompts_of(100, 100, 100, 100, seed=5)
    expected = wanted(model, prompt)[0]
    with Pair(model, options={"lease_s": 1000.0}, prefill={"num_blocks": 24}) as pair:
        first = pair.begin(prompt)
        for _ in range(2):
            pair.prefill.run(*others, is_together=True, max_tokens=80)
        assert pair.prefill.stats.num_preemptions > 0
        answer = pair.go_on(prompt, first)
        pair.until(lambda: answer.end is not None)
        assert [*first.token_ids, *answer.token_ids] == expected
        pair.settle()
        assert outcomes(pair) == {"complete": 1}


@pytest.mark.req("CRG-07")
@pytest.mark.parametrize("tier", [pytest.param("simple_cpu", marks=pytest.mark.long), "offloading"])
@pytest.mark.parametrize("kind", ["full", "windows"])
def test_multi_pulls_prompts_and_loads_evicted_ones_from_a_tier(
    kind: str, tier: str, model_of: ModelOf
) -> None:
    """On both engines, whose GPU blocks are too few for all prompts."""
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    children = [
        {"connector": LOCAL, "options": {"max_leased_share": 0.9}},
        {"connector": tier, "options": {"cpu_bytes_to_use": "16MiB"}},
    ]
    num_blocks = {"full": 18, "windows": 34}[kind]
    small = {
        "num_blocks": num_blocks,
        "max_loading_blocks": num_blocks - 1,
        "max_num_batched_tokens": 32,
    }
    with Pair(model, "multi", {"connectors": children}, prefill=small, decode=small) as pair:
        assert [pair.run(prompt) for prompt in PROMPTS] == expected
        pair.settle()
        assert outcomes(pair) == {"complete": len(PROMPTS)}
        num_pulled = sum(map(len, PROMPTS))
        assert pair.num_pulled == num_pulled
        # Without the other engine: from the tier, which has what was pulled.
        assert pair.decode.run(*PROMPTS, max_tokens=MAX_TOKENS) == expected
        assert pair.num_pulled > num_pulled
        assert outcomes(pair) == {"complete": len(PROMPTS)}
        # The owner offers what it has loaded from its tier.
        assert [pair.run(prompt) for prompt in PROMPTS] == expected
        assert pair.prefill.stats.num_external_hit_tokens > 0
        assert outcomes(pair) == {"complete": 2 * len(PROMPTS)}
        # A pull that fails is computed: no other child is asked.
        network.state = lambda number: ReadState.FAILED
        before = pair.decode.num_computed
        assert pair.run(PROMPTS[0]) == expected[0]
        assert pair.decode.num_computed - before > len(PROMPTS[0]) // 2
        assert (pair.num_failed, outcomes(pair)["failed"]) == (1, 1)
        pair.settle()
        ways = {(each.source, each.destination) for each in pair.decode.stats.transfers}
        assert ways == {("REMOTE", "GPU"), ("CPU", "GPU"), ("GPU", "CPU")}
        for engine in (pair.prefill, pair.decode):
            assert engine.stats.num_free_blocks == num_blocks - 1


# Faults


def outcomes(pair: Pair) -> dict[str, int]:
    """Those of the decode engine's pulls, as its metrics have them."""
    pulls = pair.decode.stats.pulls
    assert pulls is not None
    return {name: number for name, number in pulls.pulls_by_outcome.items() if number}


@pytest.mark.req("MET-05")
@pytest.mark.req("MET-07")
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_read_is_computed(kind: str, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    network.state = lambda number: ReadState.DONE if number % 2 else ReadState.FAILED
    with Pair(model, prefill={"num_blocks": 120}) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert pair.run(prompt) == tokens
        pair.settle()
        assert pair.num_failed == 2
        assert outcomes(pair) == {"complete": 2, "failed": 2}
        assert pair.half(pair.prefill).num_expired_leases == 0


@pytest.mark.req("MET-05")
@pytest.mark.parametrize("kind", KINDS)
def test_with_the_policy_fail_a_failed_read_ends_the_request(
    kind: str, model_of: ModelOf, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = model_of(kind)
    network.state = lambda number: ReadState.FAILED
    with Pair(model, decode={"load_failure_policy": "fail"}) as pair:
        prompt = PROMPTS[0]
        answer = pair.go_on(prompt, pair.begin(prompt), request_id="the-request")
        pair.until(lambda: answer.end is not None)
        assert answer.end is not None
        assert answer.end.reason is FinishReason.ERROR
        assert "could not be loaded" in (answer.end.message or "")
        pair.settle()
        (record,) = [each for each in caplog.records if "reading from its owner" in each.message]
        assert record.fields == {"request_id": "the-request", "outcome": "failed"}  # type: ignore[attr-defined]


@pytest.mark.req("MET-05")
@pytest.mark.req("MET-06")
@pytest.mark.req("MET-07")
@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_group_lacks_rewinds_all_groups_to_where_each_has_kv(
    kind: str, policy: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each group in turn, a block in the middle is not filled, but written with junk."""
    model, _ = model_of(kind)
    prompt = prompts_of(150)[0]
    (expected,) = wanted(model, prompt)
    lacking: list[int] = []

    def without_one(
        group: int, routes: Any, owner_tables: Any, reader_tables: Any, **of_pull: Any
    ) -> PullPlan:
        plan = plan_pull(routes, owner_tables, reader_tables, **of_pull)
        table = reader_tables[group]
        present = table[table != 0].tolist()
        lacking.append(present[len(present) // 2])
        return PullPlan(plan.pieces, sorted({*plan.missing, lacking[-1]}))

    decode = {"load_failure_policy": policy}
    with Pair(model, decode=decode) as pair:
        num_groups = len(pair.decode.engine.scheduler.kv_cache.block_sizes)  # type: ignore[union-attr]
    for group in range(num_groups):
        lack = partial(without_one, group)
        monkeypatch.setattr("longshore.connectors.pull.reader.plan_pull", lack)
        with Pair(model, decode=decode) as pair:
            answer = pair.go_on(prompt, pair.begin(prompt))
            pair.until(lambda answer=answer: answer.end is not None)  # type: ignore[misc]
            assert answer.end is not None
            pair.settle()
            assert outcomes(pair) == {"partial": 1}
            if policy == "fail":
                assert answer.end.reason is FinishReason.ERROR
                continue
            assert answer.token_ids == expected[1:]
            num_computed = pair.decode.num_computed - (MAX_TOKENS - 2)
            if kind in ("full", "latents"):
                assert 0 < num_computed < len(prompt)
            # Another request finds no block of the failed pull.
            assert pair.run(prompt) == expected
            pair.settle()


@pytest.mark.req("MET-05")
def test_what_the_owner_has_freed_is_computed(model_of: ModelOf) -> None:
    """Its window begins within a block of the reader, whose first tokens it has no more."""
    model, _ = model_of("windows")
    prompt = prompts_of(129)[0]
    (expected,) = wanted(model, prompt)
    prefill = {"block_size": 8, "max_num_batched_tokens": 8, "num_blocks": 120}
    with Pair(model, prefill=prefill, decode={"block_size": 64}) as pair:
        assert pair.run(prompt) == expected
        pair.settle()
        assert pair.num_failed == 1


@pytest.mark.req("CON-08")
def test_an_owner_whose_leases_end_during_a_read_is_not_believed(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    (expected,) = wanted(model, prompt)
    ends_at: list[float] = []

    def until_the_lease_has_ended(number: int) -> ReadState:
        ends_at.append(time.monotonic())
        is_over = not pair.half(pair.prefill)._leased
        return ReadState.DONE if is_over else ReadState.IN_PROGRESS

    network.state = until_the_lease_has_ended
    with Pair(model, options={"lease_s": 1.0}) as pair:
        first = pair.begin(prompt)
        worker = pair.decode.engine.connector_halves[1]  # type: ignore[union-attr]
        worker._reader._renew = lambda now: None  # type: ignore[union-attr]  # it forgets to
        answer = pair.go_on(prompt, first)
        pair.until(lambda: answer.end is not None)
        assert [*first.token_ids, *answer.token_ids] == expected
        pair.settle()
        assert pair.num_failed == 1
        assert pair.half(pair.prefill).num_expired_leases == 1


def test_leases_are_renewed_while_a_request_waits(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    (expected,) = wanted(model, prompt)
    with Pair(model, options={"lease_s": 1.0}) as pair:
        first = pair.begin(prompt)
        started = time.monotonic()
        network.state = lambda number: (
            ReadState.IN_PROGRESS if time.monotonic() < started + 4.0 else ReadState.DONE
        )
        answer = pair.go_on(prompt, first)
        pair.until(lambda: answer.end is not None)
        assert [*first.token_ids, *answer.token_ids] == expected
        assert time.monotonic() > started + 4.0
        assert pair.num_failed == 0
        pair.settle()
        assert pair.half(pair.prefill).num_expired_leases == 0


@pytest.mark.req("CON-08")
def test_a_lease_has_the_blocks_that_a_window_still_needs_and_no_others(model_of: ModelOf) -> None:
    model, _ = model_of("windows")
    prefill = {"block_size": 8, "max_num_batched_tokens": 8, "num_blocks": 120}
    with Pair(model, options={"lease_s": 0.5}, prefill=prefill) as pair:
        pair.begin(prompts_of(129)[0])
        (lease,) = pair.half(pair.prefill)._leased.values()
        assert NULL_BLOCK not in lease.block_ids.tolist()
        pair.settle()


@pytest.mark.req("CON-08")
def test_leases_of_a_reader_that_never_comes_expire(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with Pair(model, options={"lease_s": 0.5}) as pair:
        first = pair.begin(PROMPTS[0])
        assert len(pair.half(pair.prefill)._leased) == 1
        pair.settle()
        assert pair.half(pair.prefill).num_expired_leases == 1
        late = pair.go_on(PROMPTS[0], first)  # a replay after the lease
        pair.until(lambda: late.end is not None)
        assert [*first.token_ids, *late.token_ids] == wanted(model, PROMPTS[0])[0]
        assert pair.num_failed == 1


@pytest.mark.req("CON-08")
@pytest.mark.parametrize("stage", ["between the legs", "reading"])
def test_the_owner_ends_a_lease_at_once_when_its_client_says_so(
    stage: str, model_of: ModelOf
) -> None:
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    with Pair(model, options={"lease_s": 1000.0}) as pair:
        first = pair.begin(prompt)
        assert first.end is not None
        assert first.end.kv_transfer_params is not None
        transfer_id = first.end.kv_transfer_params["transfer_id"]
        if stage == "reading":
            network.state = lambda number: ReadState.IN_PROGRESS
            answer = pair.go_on(prompt, first)
            pair.until(network.posted.is_set)
        message = AbortRequests(EMPTY_INT32, transfer_ids=(transfer_id, "unknown"))
        for _ in range(2):  # a repeated one has no effect
            pair.prefill.engine.send(message)
        pair.until(lambda: not pair.half(pair.prefill)._leased)
        assert pair.half(pair.prefill).num_expired_leases == 0
        network.state = lambda number: ReadState.DONE
        if stage != "reading":
            answer = pair.go_on(prompt, first)
        pair.until(lambda: answer.end is not None)
        assert [*first.token_ids, *answer.token_ids] == wanted(model, prompt)[0]
        pair.settle()
        outcome = "lease_ended" if stage == "reading" else "refused"
        assert outcomes(pair) == {outcome: 1}


def test_a_transfer_can_be_used_once(model_of: ModelOf, caplog: pytest.LogCaptureFixture) -> None:
    """Neither by two requests at once, nor by one after the other."""
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    (expected,) = wanted(model, prompt)
    with Pair(model, decode={"enable_prefix_caching": False}) as pair:
        first = pair.begin(prompt)
        network.state = lambda number: ReadState.IN_PROGRESS
        answers = [pair.go_on(prompt, first)]
        pair.until(network.posted.is_set)
        answers.append(pair.go_on(prompt, first))
        pair.until(lambda: answers[1].end is not None)
        assert "transfer_id is in use by another request" in caplog.text
        network.state = lambda number: ReadState.DONE
        pair.until(lambda: answers[0].end is not None)
        answers.append(pair.go_on(prompt, first))
        pair.until(lambda: answers[2].end is not None)
        assert all([*first.token_ids, *each.token_ids] == expected for each in answers)
        pair.settle()
        assert network.num_posted == 1
        assert outcomes(pair) == {"complete": 1, "refused": 1}


def test_a_lease_ends_when_its_request_needs_no_pull(model_of: ModelOf) -> None:
    """All of its prompt is in the prefix cache, and it decodes for long."""
    model, _ = model_of("full")
    prompt = PROMPTS[2]  # whole blocks
    with Pair(model) as pair:
        pair.run(prompt)
        answer = pair.go_on(prompt, pair.begin(prompt), max_tokens=100)
        pair.until(lambda: not pair.half(pair.prefill)._leased)
        assert answer.end is None
        pair.until(lambda: answer.end is not None)
        pair.settle()
        assert outcomes(pair) == {"complete": 1}


@pytest.mark.req("MET-08")
@pytest.mark.parametrize("stage", ["queued", "reading", "ended"])
def test_a_client_may_cancel_at_any_moment(stage: str, model_of: ModelOf) -> None:
    """Both sides are free within one renewal interval."""
    model, _ = model_of("full")
    lease_s = 90.0
    with Pair(model, options={"lease_s": lease_s}) as pair:
        prompt = PROMPTS[0]
        first = pair.begin(prompt)
        network.state = lambda number: ReadState.IN_PROGRESS
        answer = pair.go_on(prompt, first)
        if stage != "queued":
            pair.until(network.posted.is_set)
        if stage == "ended":
            network.state = lambda number: ReadState.DONE
            pair.until(lambda: len(answer.token_ids) > 2)
        aborted_at = time.monotonic()
        pair.decode.abort(answer)
        pair.until(lambda: answer.end is not None)
        pair.until(lambda: not pair.half(pair.prefill)._leased)  # at once, not by expiry
        assert pair.half(pair.prefill).num_expired_leases == 0
        network.state = lambda number: ReadState.DONE
        pair.settle()
        assert time.monotonic() - aborted_at < lease_s / RENEWALS_PER_LEASE
        assert pair.half(pair.decode)._remote == {}


@pytest.mark.req("CON-08")
def test_a_client_may_cancel_the_first_leg(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with Pair(model, prefill={"max_num_batched_tokens": 16}) as pair:
        answer = pair.prefill.add(
            PROMPTS[3], max_tokens=1, kv_transfer_params={"do_remote_decode": True}
        )
        pair.until(lambda: pair.prefill.num_computed > 0)
        pair.prefill.abort(answer)
        pair.until(lambda: answer.end is not None)
        assert answer.end is not None
        assert answer.end.kv_transfer_params is None
        pair.settle()


@pytest.mark.req("CON-09")
def test_a_late_read_is_ended_by_force(model_of: ModelOf) -> None:
    """Its blocks are in quarantine until the transport has confirmed it."""
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    (expected,) = wanted(model, prompt)
    network.state = lambda number: ReadState.IN_PROGRESS
    network.may_reset.clear()
    options = {"read_timeout_s": 0.5}
    with Pair(model, options=options, decode={"load_timeout_s": 0.1}) as pair:
        first = pair.begin(prompt)
        answer = pair.go_on(prompt, first)
        pair.until(lambda: answer.end is not None)  # computed instead
        assert [*first.token_ids, *answer.token_ids] == expected
        pair.until(lambda: network.num_resets == 1)
        # The thread that closes the connections is blocked, but polling is not.
        number = pair.decode.num_computed
        assert pair.decode.run(PROMPTS[1]) == [wanted(model, PROMPTS[1])[0][:8]]
        assert pair.decode.num_computed > number
        assert pair.decode.stats.num_quarantined_blocks > 0
        network.may_reset.set()
        network.state = lambda number: ReadState.DONE
        pair.settle()
        assert pair.run(PROMPTS[1]) == wanted(model, PROMPTS[1])[0]
        assert pair.num_failed == 1


def test_a_transport_that_does_not_confirm_ends_the_worker(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late read could write at any time; only a new process ends it."""
    monkeypatch.setattr("longshore.connectors.pull.worker.CONFIRM_TIMEOUT_S", 0.2)
    model, _ = model_of("full")
    network.state = lambda number: ReadState.IN_PROGRESS
    network.may_reset.clear()
    with Pair(model, options={"read_timeout_s": 0.2}) as pair:
        answer = pair.go_on(PROMPTS[0], pair.begin(PROMPTS[0]))
        with pytest.raises(HookFailed, match="did not close its connections within"):
            pair.until(lambda: answer.end is not None)
        network.may_reset.set()


def test_a_scheduler_that_dies_during_a_read_ends_the_worker(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next scheduler would use the blocks to which the read writes."""
    monkeypatch.setattr("longshore.connectors.pull.reader.CONFIRM_TIMEOUT_S", 0.2)
    model, _ = model_of("full")
    network.state = lambda number: ReadState.IN_PROGRESS
    with Pair(model, options={"read_timeout_s": 0.2}) as pair:
        network.may_reset.clear()
        pair.go_on(PROMPTS[0], pair.begin(PROMPTS[0]))
        pair.until(lambda: network.num_resets == 1)
        worker = pair.decode.engine.worker  # type: ignore[union-attr]
        with pytest.raises(HookFailed, match="a read may still write"):
            worker.end_epoch()
        network.may_reset.set()
        monkeypatch.setattr("longshore.connectors.pull.reader.CONFIRM_TIMEOUT_S", 30.0)
        assert worker.connector is not None
        worker.connector.connector._reader.close()  # type: ignore[attr-defined]
        worker.connector = None


def test_a_transport_that_cannot_be_closed_ends_the_worker(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(transport: LocalTransport) -> None:
        raise TransportError("1 reads cannot be ended")

    model, _ = model_of("full")
    with Pair(model) as pair, monkeypatch.context() as patch:
        patch.setattr(LocalTransport, "close", close)
        worker = pair.decode.engine.worker  # type: ignore[union-attr]
        with pytest.raises(HookFailed, match="1 reads cannot be ended"):
            worker.end_epoch()
        assert worker.connector is not None
        worker.connector.connector._reader._context.destroy()  # type: ignore[attr-defined]
        worker.connector = None


def test_an_owner_that_is_gone_is_not_waited_for(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.connectors.pull.reader.ANSWER_TIMEOUT_S", 0.5)
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    (expected,) = wanted(model, prompt)
    with Pair(model) as pair:
        first = pair.begin(prompt)
        pair.prefill.engine.close()
        answer = pair.go_on(prompt, first)
        pair.decode.wait(answer)
        assert [*first.token_ids, *answer.token_ids] == expected
        assert settle(pair.decode.engine) == 0


# Who may pull


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"transfer_id": "x" * 32}, "transfer_id is unknown"),
        ({"remote_request_id": "another"}, "belongs to another request"),
        ({"remote_engine_id": "in-process.7"}, "it was restarted"),
        ({"remote_block_ids": [[1, 2, 3]]}, "remote_block_ids are not those"),
        ({"remote_num_tokens": 99}, "the tokens of the request are not those"),
        ({"remote_host": "10.1.2.3"}, "'remote_hosts'"),
        ({"remote_num_tokens": 5000}, "the request has 101 tokens"),
        ({"remote_port": "80"}, "remote_port"),
        ({"lease_s": -1}, "lease_s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_params_that_were_changed_get_nothing(
    wrong: dict[str, Any],
    message: str,
    model_of: ModelOf,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("longshore.connectors.pull.owner.EARLY_CLAIM_S", 0.1)
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    with Pair(model, options={"lease_s": 1.0}) as pair:
        first = pair.begin(prompt)
        assert first.end is not None
        assert first.end.kv_transfer_params is not None
        answer = pair.go_on(prompt, first, params=first.end.kv_transfer_params | wrong)
        pair.until(lambda: answer.end is not None)
        assert [*first.token_ids, *answer.token_ids] == wanted(model, prompt)[0]
        assert pair.decode.num_computed >= len(prompt)
        assert network.num_posted == 0
        assert message in caplog.text
        pair.settle()


@pytest.mark.parametrize("side", ["owner", "reader"])
@pytest.mark.parametrize(
    ("name", "prefill"),
    [
        ("model_fingerprint", {}),
        ("dtype", {"dtype": "bfloat16"}),
        ("kv_cache_dtype", {"kv_cache_dtype": "fp8_e4m3"}),
    ],
    ids=["model", "dtype", "kv_cache_dtype"],
)
def test_engines_that_differ_do_not_pull_and_say_why(
    name: str,
    prefill: dict[str, Any],
    side: str,
    model_of: ModelOf,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner refuses the reader. If it does not, the reader does not use its blocks."""
    model, _ = model_of("full")
    prompt = PROMPTS[0]
    if name == "model_fingerprint":
        make_tiny_model("Llama", tmp_path, seed=7)
    if side == "reader":
        monkeypatch.setattr(Owner, "_objection", lambda owner, hello: None)
    other = tmp_path if name == "model_fingerprint" else model
    options = {"lease_s": 1.0}
    with Pair(model, options=options, prefill=prefill, prefill_model=other) as pair:
        first = pair.begin(prompt)
        answer = pair.go_on(prompt, first)
        pair.until(lambda: answer.end is not None)
        pair.settle()
        assert outcomes(pair) == {"refused": 1}
        assert pair.num_failed == 1
        assert network.num_posted == 0
        assert pair.decode.num_computed >= len(prompt)
    with Engine(model) as plain:
        same = plain.add(
            prompt, max_tokens=MAX_TOKENS, output_token_ids=int32_array(first.token_ids)
        )
        plain.wait(same)
    assert answer.token_ids == same.token_ids
    reason = rf": {name} is '\S+' on the reader and '\S+' on the owner"
    of_owner = f"the reader in-process@127.0.0.1 was refused{reason}"
    says = {
        "owner": "its owner refuses this engine",
        "reader": "it cannot be pulled from its owner",
    }
    assert bool(re.search(of_owner, caplog.text)) is (side == "owner")
    assert re.search(f"a pull from in-process.1 failed: {says[side]}{reason}", caplog.text)


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize("kind", ["full", "windows", "states"])
def test_the_longest_prompt_of_which_a_gateway_hears_is_offered(
    kind: str, model_of: ModelOf
) -> None:
    """Models with windows or states need more blocks per token than the block size says."""
    model, _ = model_of(kind)
    with Pair(model, options={"max_leased_share": 0.2}, prefill={"num_blocks": 60}) as pair:
        capacity = pair.prefill.scheduler.capacity
        assert capacity.num_leasable_blocks == 12
        longest = max(n for n in range(1, 240) if capacity.blocks_of(n) <= 12)
        assert (longest == 12 * 16) is (kind == "full")
        (prompt,) = prompts_of(longest)
        assert pair.begin(prompt).end.kv_transfer_params is not None  # type: ignore[union-attr]
        assert pair.half(pair.prefill).num_refused_leases == 0


def test_leased_blocks_are_bounded(model_of: ModelOf, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = model_of("full")
    with Pair(model, options={"max_leased_share": 0.2}, prefill={"num_blocks": 60}) as pair:
        assert pair.begin(PROMPTS[0]).end.kv_transfer_params is not None  # type: ignore[union-attr]
        same = pair.begin(PROMPTS[0])  # shares their blocks
        assert same.end.kv_transfer_params is not None  # type: ignore[union-attr]
        refused = pair.begin(PROMPTS[3])
        assert refused.end.kv_transfer_params is None  # type: ignore[union-attr]
        assert pair.half(pair.prefill).num_refused_leases == 1
        assert "max_leased_share=0.2 allows 12" in caplog.text
