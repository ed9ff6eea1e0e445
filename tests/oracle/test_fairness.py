"""Floods of several tenants: the scheduler and the textbook make the same plans, and a tenant that
waits, and holds less than its share, never falls behind the others by more than a constant."""

from collections import defaultdict
from random import Random

import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.requests import AddRequest, RequestOptions, Tenant
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.queue import shares
from tests.oracle import fairness
from tests.oracle.driver import Surroundings, drive
from tests.oracle.fairness import Fairness
from tests.oracle.request import TextbookRequest
from tests.oracle.test_equal_plans import compare
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import Submit, Workload

NUM_SEEDS = 10
NUM_LONG_SEEDS = 40
QUANTUM = 24  # small, so that many rounds pass
LONGEST = 96
TENANTS = (Tenant("light"), Tenant("middle", 2), Tenant("heavy", 5))


def flood(seed: int) -> Workload:
    """Requests of three tenants, most of which wait; each tenant has sizes of its own. In some, one
    tenant is alone at first."""
    rng = Random(seed)
    max_num_seqs = rng.choice((2, 4, 12, 32, 32))
    block_size = rng.choice((2, 4, 8))
    sizes = {tenant.name: (rng.randrange(2, 60), rng.randrange(1, 24)) for tenant in TENANTS}
    num_alone = rng.choice((0, 60))
    operations = []
    turn = 0
    for number in range(120):
        turn += 0 if number < num_alone else rng.choice((0, 0, 0, 1, 3))
        tenant = TENANTS[0] if number < num_alone else rng.choice(TENANTS)
        num_prompt, num_outputs = (rng.randrange(1, size + 1) for size in sizes[tenant.name])
        request = AddRequest(
            request_id=f"request-{number}",
            handle=number,
            prompt_token_ids=int32_array(rng.choices(range(20), k=num_prompt)),
            sampling=SamplingParams(max_tokens=num_outputs),
            options=RequestOptions(priority=rng.choice((0, 0, 1)), tenant=tenant),
        )
        operations.append(Submit(turn, 0, request))
    num_blocks = 1 + LONGEST // block_size * rng.choice((1, 3, max_num_seqs, max_num_seqs))
    budget = rng.choice((16, 64, 256))
    return Workload(
        seed=seed,
        features=frozenset({"fair"}),
        scheduler=SchedulerConfig(
            max_model_len=LONGEST,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_scheduled_tokens=budget,
            policy="fair",
            max_steps_in_flight=rng.choice((1, 2)),
        ),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks),
        num_blocks=num_blocks,
        vocab_size=20,
        eos_token_ids=(),
        answer_share=rng.choice((0.3, 0.6)),
        operations=tuple(operations),
    )


class Watched(Fairness):
    """Compares, at each admission, what tenants were given while others waited.

    lags: for each pair of a tenant and one that waits, tokens per weight that the first was
          admitted with, less what the second was charged, since the second began to wait below its
          share; the largest over all windows that end now.
    """

    scheduler: TextbookScheduler
    num_windows = 0

    def __init__(self, *sizes: object) -> None:
        super().__init__(*sizes)  # type: ignore[arg-type]
        self.lags: defaultdict[tuple[str, str], float] = defaultdict(float)

    def admitted(self, request: TextbookRequest, num_computed: int) -> None:
        name = request.message.options.tenant.name
        waiting = {r.message.options.tenant.name for r in self.scheduler.queues.requests()} - {name}
        owed = {other for other in waiting if self.is_owed(other)}
        if not self.is_owed(name):
            assert not owed, f"{name} holds its share, and {owed} wait with less than theirs"
        before = dict(self.balances)
        super().admitted(request, num_computed)
        num_new = request.num_tokens - num_computed
        for other in before:
            pair = name, other
            if other in owed:
                self.lags[pair] = max(0.0, self.lags[pair] + num_new / self.weight(name))
                type(self).num_windows += 1
                # Two rounds; a request that takes all of them; and the debt of one more.
                bound = 2 * QUANTUM + 2 * LONGEST
                assert self.lags[pair] <= bound, f"{other} is behind {name}"
            else:
                self.lags[pair] = 0.0
        for other in before:
            if other != name:
                self.lags[other, name] = max(
                    0.0, self.lags[other, name] - num_new / self.weight(name)
                )

    def _pay(self, request: TextbookRequest) -> None:
        name, before = request.message.options.tenant.name, sum(self.balances.values())
        super()._pay(request)
        paid = before - sum(self.balances.values())
        for other in self.balances:
            self.lags[other, name] = max(0.0, self.lags[other, name] - paid / self.weight(name))


@pytest.fixture(autouse=True)
def many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shares, fairness):
        monkeypatch.setattr(module, "QUANTUM", QUANTUM)


def textbook(workload: Workload, around: Surroundings) -> TextbookScheduler:
    return TextbookScheduler(
        workload.scheduler,
        workload.cache,
        num_blocks=workload.num_blocks,
        connector=around.connector,
        grammars=around.grammars,
    )


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=() if seed < NUM_SEEDS else pytest.mark.long)
        for seed in range(NUM_LONG_SEEDS)
    ],
)
def test_plans_of_floods_equal_the_textbook(seed: int) -> None:
    compare(flood(seed))


@pytest.mark.slow
def test_who_waits_with_less_than_its_share_falls_behind_by_no_more_than_a_constant() -> None:
    Watched.num_windows = 0
    for seed in range(NUM_SEEDS):
        workload = flood(seed)
        around = Surroundings.of(workload)
        scheduler = textbook(workload, around)
        assert scheduler.fairness is not None
        scheduler.fairness.__class__ = Watched
        scheduler.fairness.lags = defaultdict(float)  # type: ignore[attr-defined]
        scheduler.fairness.scheduler = scheduler  # type: ignore[attr-defined]
        for _ in drive(scheduler, workload, around, check_every=1000):
            pass
    assert Watched.num_windows > 300
