"""Several engines used as one: which engine gets which request, and what happens if one dies."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from longshore.deploy.gateway.engines.engines import Engines
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.gateway.settings import SplitSettings
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.protocol.commands import DRAINING
from longshore.protocol.errors import EngineDead
from longshore.protocol.handshake import ClientHello
from longshore.protocol.outputs import (
    AdmissionChanged,
    EngineContinues,
    EngineOutputs,
    EnginePaused,
    FinishedRequest,
    FinishReason,
)
from longshore.protocol.requests import RequestOptions
from longshore.protocol.sampling import SamplingParams
from tests.deploy.gateway.fake_engine import (
    IDENTITY,
    REPORT,
    STATS,
    FakeEngine,
    never_answer,
    tokens_of,
)
from tests.harness.sockets import sending


@asynccontextmanager
async def running(count: int, **settings: Any) -> AsyncIterator[tuple[Engines, list[FakeEngine]]]:
    """Engines that send messages only on request."""
    runtime_dir = RuntimeDir()
    endpoints = [runtime_dir.endpoint(f"clients-{number}") for number in range(count)]
    fakes = [FakeEngine(endpoint, never_answer) for endpoint in endpoints]
    hello = ClientHello("test", IDENTITY.model_fingerprint)
    settings.setdefault("on_stats", lambda engine, stats: None)
    engines = Engines(endpoints, hello, **settings)
    try:
        await engines.wait_until_ready()
        yield engines, fakes
    finally:
        engines.close()
        for fake in fakes:
            fake.close()
        runtime_dir.remove()


def submit(engines: Engines, *, prompt: Sequence[int] = (1, 2, 3), **settings: Any) -> LiveRequest:
    settings.setdefault("sampling", SamplingParams())
    return engines.submit("r", prompt, on_change=lambda: None, **settings)


def engines_of(lives: Sequence[LiveRequest]) -> list[int]:
    return [live.engine for live in lives]


async def test_prompts_are_shared_out_and_forks_stay_with_what_they_fork() -> None:
    async with running(2) as (engines, fakes):
        prompts = [submit(engines) for _ in range(4)]
        assert engines_of(prompts) == [0, 1, 0, 1]
        forks = [submit(engines, fork_of=live) for live in (prompts[1], prompts[1], prompts[0])]
        assert engines_of(forks) == [1, 1, 0]
        await fakes[1].wait_for(lambda: len(fakes[1].requests) == 4)
        await fakes[0].wait_for(lambda: len(fakes[0].requests) == 3)
        assert [request.fork_of for request in fakes[1].requests[2:]] == [prompts[1].handle] * 2
        assert engines.num_own_requests == engines.num_live_requests == 7
        assert submit(engines).engine == 0  # which has one request less


async def test_each_engine_is_told_of_its_own_ends() -> None:
    async with running(2) as (engines, fakes):
        lives = [submit(engines) for _ in range(4)]
        engines.stop(lives[2], 1)
        engines.abort([lives[1], lives[0]])
        for engine, fake in enumerate(fakes):
            await fake.wait_for(lambda fake=fake: bool(fake.aborted))
            assert fake.aborted == [lives[engine].handle]
        assert [len(fake.stopped) for fake in fakes] == [1, 0]
        assert engines.num_own_requests == 2


async def test_a_prompt_without_an_answer_yet_weighs_until_it_has_one_or_is_given_up() -> None:
    async with running(2) as (engines, fakes):
        long = [submit(engines, prompt=[1] * 5000) for _ in range(2)]
        short = [submit(engines) for _ in range(4)]
        assert engines_of([*long, *short]) == [0, 1, 0, 1, 0, 1]
        engines.abort([long[1]])
        assert engines_of([submit(engines) for _ in range(3)]) == [1, 1, 1]
        await fakes[0].wait_for(lambda: len(fakes[0].requests) == 3)
        fakes[0].send_tokens(fakes[0].requests[0], [7])
        fakes[0].send_tokens(fakes[0].requests[1], [7])
        await engines.describe(5, 0)  # which arrives after the tokens
        assert long[0].take_token_ids() == short[0].take_token_ids() == [7]
        assert engines_of([submit(engines) for _ in range(2)]) == [0, 0]


async def test_what_is_given_up_before_its_first_token_is_forgotten() -> None:
    async with running(1) as (engines, _):
        given_up = submit(engines)
        engines.abort([given_up])
        forgotten = weakref.ref(given_up)
        del given_up
        gc.collect()
        assert forgotten() is None


async def test_what_has_ended_with_a_report_is_not_taken_for_one_s_own() -> None:
    async with running(1, router=Router(1, num_gateways=2)) as (engines, (fake,)):
        ending, _ = submit(engines), submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 2)
        end = FinishedRequest(ending.handle, FinishReason.STOPPED, 0)
        fake.send(EngineOutputs(finished=(end,), stats=STATS))
        await engines.describe(5)
        num_there = STATS.num_running + STATS.num_waiting
        assert engines.num_live_requests == num_there  # one of them is from this client
        assert engines.num_own_requests == 1


async def test_requests_of_a_lost_engine_go_on_at_another_one() -> None:
    async with running(2) as (engines, fakes):
        first, second = submit(engines), submit(engines)
        sampling = SamplingParams(prompt_logprobs=1, logprobs=1, seed=5)
        third = submit(engines, prompt=[1, 2, 3, 4], sampling=sampling)
        await fakes[0].wait_for(lambda: len(fakes[0].requests) == 2)
        fakes[0].send_tokens(fakes[0].requests[1], [7, 8])
        fakes[0].fail("worker 0.0 was lost")
        with pytest.raises(EngineDead, match=r"worker 0\.0 was lost"):
            await engines.describe(5, 0)  # whose answer would arrive after it
        assert engines_of([first, second, third]) == [1, 1, 1]
        await fakes[1].wait_for(lambda: len(fakes[1].requests) == 3)
        resumed = {request.handle: request for request in fakes[1].requests}
        assert len(resumed) == 3
        assert resumed[first.handle].output_token_ids.tolist() == []
        again = resumed[third.handle]
        assert again.prompt_token_ids.tolist() == [1, 2, 3, 4]
        assert again.output_token_ids.tolist() == [7, 8]
        assert again.sampling == msgspec.structs.replace(sampling, prompt_logprobs=None)
        assert again.age_s > 0
        fakes[1].send_tokens(again, [9])
        await engines.describe(5, 1)
        assert third.take_token_ids() == [7, 8, 9]
        assert engines_of([submit(engines) for _ in range(3)]) == [1, 1, 1]
        fork = submit(engines, fork_of=first)
        await fakes[1].wait_for(lambda: len(fakes[1].requests) == 7)
        assert fakes[1].requests[-1].fork_of == first.handle
        assert fork.engine == 1


async def test_one_engine_can_serve_while_another_is_down_and_joins_later() -> None:
    runtime_dir = RuntimeDir()
    endpoints = [runtime_dir.endpoint(f"clients-{number}") for number in range(2)]
    hello = ClientHello("test", IDENTITY.model_fingerprint)
    engines = Engines(endpoints, hello, on_stats=lambda engine, stats: None)
    fakes = [FakeEngine(endpoints[1], never_answer)]
    try:
        ready = await engines.wait_until_ready(awaits_all=False)
        assert ready.identity == IDENTITY
        assert engines.not_ready_reason is None
        assert engines_of([submit(engines) for _ in range(2)]) == [1, 1]
        fakes.append(FakeEngine(endpoints[0], never_answer))
        await engines.wait_until_ready()
        assert submit(engines).engine == 0
    finally:
        engines.close()
        for fake in fakes:
            fake.close()
        runtime_dir.remove()


@pytest.mark.parametrize("follows", [True, False])
async def test_requests_go_on_after_a_lost_message_of_the_engine(follows: bool) -> None:
    """Whether another message follows it, or none."""
    async with running(1) as (engines, (fake,)):
        live, other = submit(engines), submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 2)
        fake.send_tokens(fake.requests[0], [7])
        fake.lose(tokens_of(fake.requests[0], [8]))
        if follows:
            fake.send_tokens(fake.requests[0], [9])
        await fake.wait_for(lambda: len(fake.requests) == 4)
        assert [r.output_token_ids.tolist() for r in fake.requests[2:]] == [[7], []]
        fake.send_tokens(fake.requests[2], [8, 9])
        await engines.describe(5)
        assert live.take_token_ids() == [7, 8, 9]
        assert other.is_live


async def test_a_request_that_does_not_arrive_is_sent_again() -> None:
    async with running(1) as (engines, (fake,)):
        first = submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 1)
        with sending(engines.clients[0]._channel, times=0):
            lost = submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 3)
        assert fake.num_lost == 1
        assert [r.handle for r in fake.requests[1:]] == [first.handle, lost.handle]


async def test_requests_wait_for_an_engine_that_returns() -> None:
    async with running(1) as (engines, (fake,)):
        running_one, given_up = submit(engines), submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 2)
        fake.fail("worker 0 was lost")
        with pytest.raises(EngineDead):
            await engines.describe(5)
        assert engines.not_ready_reason == "the engine is being restarted: worker 0 was lost"
        engines.abort([given_up])
        new = submit(engines)
        fork = submit(engines, fork_of=running_one)
        assert engines.num_own_requests == 3
        await fake.return_to_life()
        await fake.wait_for(lambda: len(fake.requests) == 5)
        assert [r.handle for r in fake.requests[2:]] == [
            live.handle for live in (running_one, new, fork)
        ]
        assert [request.fork_of for request in fake.requests[2:]] == [None] * 3
        assert engines.not_ready_reason is None


async def test_a_paused_engine_keeps_its_requests_and_gets_new_ones() -> None:
    async with running(1) as (engines, (fake,)):
        live, given_up = submit(engines), submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 2)
        fake.send(EnginePaused("worker 0 was killed"))
        await engines.describe(5)  # which arrives after it
        assert engines.not_ready_reason == "the engine is being restarted: worker 0 was killed"
        engines.abort([given_up])
        new = submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 3 and bool(fake.aborted))
        assert fake.aborted == [given_up.handle]
        engines.begin_drain()  # which waits for it
        assert live.is_live
        fake.send(EngineContinues("engine-0.2"))
        fake.send_tokens(fake.requests[0], [7])
        fake.send_tokens(fake.requests[2], [8])
        await engines.describe(5)
        assert engines.not_ready_reason is None
        assert (live.take_token_ids(), new.take_token_ids()) == ([7], [8])
        assert len(fake.requests) == 3, "none is sent again"


async def test_requests_of_a_paused_engine_go_on_at_another_one() -> None:
    async with running(2) as (engines, fakes):
        lives = [submit(engines) for _ in range(2)]
        await fakes[0].wait_for(lambda: len(fakes[0].requests) == 1)
        former = lives[0].handle
        fakes[0].send_tokens(fakes[0].requests[0], [7])
        fakes[0].send(EnginePaused("worker 0.0 was killed"))
        await engines.describe(5, 0)
        assert engines.not_ready_reason is None
        assert engines_of(lives) == [1, 1]
        await fakes[1].wait_for(lambda: len(fakes[1].requests) == 2)
        assert fakes[1].requests[-1].output_token_ids.tolist() == [7]
        await fakes[0].wait_for(lambda: bool(fakes[0].aborted))
        assert fakes[0].aborted == [former]
        assert submit(engines).engine == 1
        fakes[0].send(EngineContinues("engine-0.2"))
        await engines.describe(5, 0)
        assert submit(engines).engine == 0


async def test_a_request_that_no_worker_survives_is_given_up() -> None:
    async with running(1) as (engines, (fake,)):
        fatal, other = submit(engines), submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 2)
        for _ in range(3):
            assert fatal.is_live
            fake.send_tokens(fake.requests[1], [7])
            fake.send(EnginePaused("worker 0 was killed"))
            fake.send(EngineContinues("engine-0.2"))
            await engines.describe(5)
        assert str(fatal.failure) == (
            "the engine's workers have died 3 times while it had this request: worker 0 was killed"
        )
        await fake.wait_for(lambda: bool(fake.aborted))
        assert fake.aborted == [fatal.handle]
        assert other.is_live


async def test_a_sleeping_engine_is_no_loss_of_its_requests() -> None:
    async with running(1) as (engines, (fake,)):
        live = submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 1)
        for _ in range(5):
            fake.send(EnginePaused("put to sleep", is_asleep=True))
            await engines.describe(5)
            assert engines.not_ready_reason == "the engine is put to sleep; requests wait"
            fake.send(EngineContinues("engine-0.2"))
            await engines.describe(5)
        assert live.is_live
        assert engines.not_ready_reason is None


async def test_what_a_stop_string_has_ended_needs_no_engine() -> None:
    async with running(1) as (engines, (fake,)):
        live, other = submit(engines), submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 2)
        engines.stop(live, 1)
        await fake.wait_for(lambda: bool(fake.stopped))
        fake.fail("worker 0 was lost")
        with pytest.raises(EngineDead):
            await engines.describe(5)
        assert not live.is_live
        assert other.is_live


async def test_a_request_that_no_engine_survives_is_given_up() -> None:
    """The other one gets tokens in between, so it is not what the engines die of."""
    async with running(1) as (engines, (fake,)):
        fatal, other = submit(engines), submit(engines)
        for life in range(1, 4):
            await fake.wait_for(lambda life=life: len(fake.requests) == 2 * life)
            fake.send_tokens(fake.requests[-1], [7])
            assert fatal.is_live
            fake.fail("worker 0 was lost")
            with pytest.raises(EngineDead):
                await engines.describe(5)
            await fake.return_to_life()
        assert str(fatal.failure) == (
            "the engine has died 3 times while it had this request: worker 0 was lost"
        )
        await fake.wait_for(lambda: len(fake.requests) == 7)
        assert other.is_live
        assert other.take_token_ids() == [7, 7, 7]


async def test_without_an_engine_that_may_return_requests_fail() -> None:
    async with running(2) as (engines, fakes):
        live = submit(engines)
        engines.begin_drain()
        fakes[0].fail("worker 0.0 was lost")
        with pytest.raises(EngineDead):
            await engines.describe(5, 0)
        assert (live.is_live, live.engine) == (True, 1)
        fakes[1].fail("worker 1.0 was lost")
        with pytest.raises(EngineDead):
            await engines.describe(5, 1)
        assert str(live.failure) == "the engine has stopped: worker 1.0 was lost"
        with pytest.raises(EngineDead, match=r"the engine has stopped"):
            submit(engines)


async def test_what_other_gateways_have_at_an_engine_is_known_from_its_report() -> None:
    seen: list[tuple[str, int]] = []
    async with running(
        2,
        router=Router(2, num_gateways=2),
        on_stats=lambda engine, stats: seen.append((engine, stats.num_steps)),
    ) as (engines, fakes):
        submit(engines)
        submit(engines)
        fakes[1].send(EngineOutputs(stats=msgspec.structs.replace(STATS, num_steps=9)))
        fakes[1].report = REPORT
        await engines.describe(5, 1)  # which arrives after the statistics
        assert seen == [("1", 9)]
        assert engines.num_own_requests == 2
        assert engines.num_live_requests == 2 + 3  # of its four, one is from this client
        assert engines_of([submit(engines) for _ in range(3)]) == [0, 0, 1]  # half of them count


async def test_seeds_are_repeatable_and_each_gateway_s_own() -> None:
    async def seeds(number: int, count: int) -> list[int | None]:
        async with running(count, seed=7, number=number) as (engines, fakes):
            for index in range(4):
                live = submit(engines)
                fake = fakes[live.engine]
                await fake.wait_for(lambda fake=fake, n=index // count + 1: len(fake.requests) == n)
            placed = [fake.requests for fake in fakes]
            first = number % count
            return [placed[(first + i) % count][i // count].sampling.seed for i in range(4)]

    one = await seeds(0, 1)
    assert one == await seeds(0, 1) == await seeds(0, 2)  # on whichever engine
    assert not {*one} & {*await seeds(1, 2)}


async def test_new_requests_go_to_engines_that_admit_them_and_live_ones_stay() -> None:
    async with running(2) as (engines, fakes):
        lives = [submit(engines) for _ in range(2)]
        assert engines_of(lives) == [0, 1]
        await fakes[0].wait_for(lambda: bool(fakes[0].requests))
        fakes[0].send(AdmissionChanged("paused by the operator"))
        await until(lambda: engines.clients[0].closed_reason is not None)
        assert engines_of([submit(engines) for _ in range(4)]) == [1] * 4
        assert submit(engines, fork_of=lives[0]).engine == 1  # it needs no fork
        assert engines.not_ready_reason is None
        assert lives[0].engine == 0
        assert lives[0].is_live
        fakes[0].send(AdmissionChanged())
        await until(lambda: engines.clients[0].closed_reason is None)
        assert submit(engines).engine == 0


async def test_if_no_engine_admits_requests_they_wait_at_one_and_it_is_not_ready() -> None:
    async with running(2) as (engines, fakes):
        for fake in fakes:
            fake.send(AdmissionChanged("paused by the operator"))
        await until(lambda: engines.not_ready_reason is not None)
        assert engines.not_ready_reason == "the engine is paused by the operator; requests wait"
        assert sorted(engines_of([submit(engines) for _ in range(2)])) == [0, 1]
        for fake in fakes:
            await fake.wait_for(lambda fake=fake: bool(fake.requests))


@pytest.mark.parametrize("is_planned", [True, False])
async def test_a_planned_restart_is_no_warning_and_the_engine_is_named(
    caplog: pytest.LogCaptureFixture, is_planned: bool
) -> None:
    caplog.set_level("INFO")
    async with running(1) as (engines, (fake,)):
        if is_planned:
            fake.send(AdmissionChanged(DRAINING))
            await until(lambda: engines.not_ready_reason is not None)
        fake.fail("it is gone")
        await fake.return_to_life()
        await until(lambda: engines.not_ready_reason is None)
    lost, ready = (record for record in caplog.records if "engine" in record.getMessage())
    assert lost.getMessage().startswith("lost the engine")
    assert lost.levelname == ("INFO" if is_planned else "WARNING")
    assert lost.fields == ready.fields == {"engine": "engine-0"}  # type: ignore[attr-defined]


async def test_a_restarted_engine_admits_requests_again() -> None:
    async with running(1) as (engines, (fake,)):
        fake.send(AdmissionChanged("draining for a restart by the operator"))
        await until(lambda: engines.not_ready_reason is not None)
        waiting = submit(engines)
        await fake.wait_for(lambda: len(fake.requests) == 1)
        fake.fail("the engine is shutting down")
        await fake.return_to_life()
        await fake.wait_for(lambda: len(fake.requests) == 2)
        assert engines.not_ready_reason is None
        assert waiting.is_live


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_engine_is_added_and_its_successor_takes_the_requests_of_a_removed_one() -> None:
    runtime_dir, router = RuntimeDir(), Router(1)
    fake = FakeEngine(runtime_dir.endpoint("clients-7"), never_answer)
    try:
        async with running(1, router=router) as (engines, (first,)):
            live = submit(engines)
            await first.wait_for(lambda: bool(first.requests))
            first.send_tokens(first.requests[0], [5])
            await engines.describe(5, 0)
            router.add_engine(7)
            engines.add_engine(7, runtime_dir.endpoint("clients-7"))
            assert submit(engines).engine == 0  # the new one is not ready
            await engines.clients[7].wait_until_ready()
            assert engines_of([submit(engines), submit(engines)]) == [7, 7]
            ended = submit(engines)
            engines.abort([ended])
            router.remove_engine(0)
            engines.remove_engine(0)
            assert live.engine == 7
            await fake.wait_for(lambda: len(fake.requests) == 4)
            resumed = [each for each in fake.requests if len(each.output_token_ids)]
            assert [each.output_token_ids.tolist() for each in resumed] == [[5]]
            engines.stop(ended, 1)  # of an engine that is gone
            assert submit(engines, fork_of=ended).engine == 7
            assert engines.not_ready_reason is None
            assert len(engines) == 1
    finally:
        fake.close()
        runtime_dir.remove()


async def test_requests_that_wait_for_a_removed_engine_go_to_another_one() -> None:
    """It is removed without having been closed."""
    router = Router(3, roles=["prefill", "decode", "unified"])
    async with running(3, router=router) as (engines, fakes):
        prompt = list(range(3, 53))
        sampling = SamplingParams(max_tokens=10)
        lives = [submit(engines, prompt=prompt, sampling=sampling) for _ in range(9)]
        assert engines_of(lives) == [1] * 8 + [-1]
        router.remove_engine(1)
        engines.remove_engine(1)
        assert engines_of(lives) == [2] * 9
        await fakes[2].wait_for(lambda: len(fakes[2].requests) == 9)


async def test_requests_are_split_while_there_are_engines_of_both_roles() -> None:
    """Also by a gateway that was started without a prefill engine."""
    router = Router(2, roles=("decode", "unified"))
    config = SplitSettings(disaggregation_min_tokens=4)
    async with running(2, router=router, split_config=config) as (engines, _):
        assert submit(engines, prompt=range(9)).engine == 1  # the unified one
        runtime_dir = RuntimeDir()
        endpoint = runtime_dir.endpoint("clients-2")
        prefill = FakeEngine(endpoint, never_answer)
        try:
            router.add_engine(2, "prefill")
            engines.add_engine(2, endpoint)
            await engines.wait_until_ready()
            assert submit(engines, prompt=range(9)).engine == 2
        finally:
            prefill.close()
            runtime_dir.remove()


async def test_an_offer_waits_until_the_engine_is_ready() -> None:
    params = {"do_remote_prefill": True, "transfer_id": "t"}
    async with running(1) as (engines, (fake,)):
        fake.fail("its worker was lost")
        with pytest.raises(EngineDead):
            await engines.describe(5)
        submit(engines, options=RequestOptions(kv_transfer_params=params))
        for count, offered in enumerate((params, None), start=1):  # it can be pulled once
            await fake.return_to_life()
            await fake.wait_for(lambda count=count: len(fake.requests) == count)
            assert fake.requests[-1].options.kv_transfer_params == offered
            fake.fail("its worker was lost")
            with pytest.raises(EngineDead):
                await engines.describe(5)
