"""Commands of an operator, with a scheduler in this process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from longshore.protocol.commands import CommandAnswer, DrainEngine, Pause, Resume, Sleep, Wake
from longshore.scheduler.process.operator_commands import (
    ASLEEP,
    DRAINED,
    DRAINING,
    PAUSED,
    OperatorCommands,
)
from longshore.scheduler.step.planner import PauseState
from tests.harness.driver import Driver

TIMEOUT_S = 60.0


class FakeSleeper:
    """Workers that fall asleep and wake only when the test says so."""

    def __init__(self) -> None:
        self.is_awake, self.is_asleep = True, False
        self.calls: list[str] = []

    def fall_asleep(self) -> None:
        assert self.is_awake
        self.is_awake = False
        self.calls.append("fall asleep")

    def wake(self) -> None:
        assert self.is_asleep
        self.is_asleep = False
        self.calls.append("wake")


class Operator:
    """Sends commands to an engine. answers: in the order in which they came."""

    def __init__(self, driver: Driver, **former: Any) -> None:
        self.sleeper = FakeSleeper()
        self.reasons: list[str | None] = []
        self.answers: list[CommandAnswer] = []
        self.has_answer = asyncio.Event()
        self.commands = OperatorCommands(
            driver.scheduler,
            None,
            clients=(),
            answer=self.note,
            announce=lambda: self.reasons.append(self.commands.closed_reason),
            advance=lambda: None,
            sleeper=self.sleeper,
            **former,
        )

    def note(self, answer: CommandAnswer) -> None:
        self.answers.append(answer)
        self.has_answer.set()

    async def answer(self) -> CommandAnswer:
        await asyncio.wait_for(self.has_answer.wait(), TIMEOUT_S)
        (answer,) = self.answers
        self.answers.clear()
        self.has_answer.clear()
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def operator_of(driver: Driver, **former: Any) -> AsyncIterator[Operator]:
    operator = Operator(driver, **former)
    yield operator
    operator.commands.close()


def driver_with_lease() -> tuple[Driver, int]:
    """An idle engine that keeps a block for another engine. Returns also what releases it."""
    driver = Driver(rules={})
    driver.add("r", [5] * 10)
    driver.run()
    return driver, driver.adversary.holder.hold([1])


@pytest.mark.parametrize("holds_new", [False, True])
@pytest.mark.parametrize("is_final", [False, True])
async def test_a_drain_ends_when_the_kv_kept_for_other_engines_is_released(
    holds_new: bool, is_final: bool
) -> None:
    driver, hold_id = driver_with_lease()
    async with operator_of(driver) as operator:
        operator.commands.execute(1, DrainEngine(TIMEOUT_S, holds_new, is_final))
        for _ in range(3):
            await asyncio.sleep(0.03)
        assert operator.answers == []
        driver.adversary.holder.release(hold_id)
        answer = await operator.answer()
        assert answer.ok
        assert answer.message.startswith(DRAINING if is_final else DRAINED)


async def test_a_drain_whose_leases_last_longer_says_so() -> None:
    driver, _ = driver_with_lease()
    async with operator_of(driver) as operator:
        operator.commands.execute(1, DrainEngine(0.05, is_final=False))
        answer = await operator.answer()
        assert not answer.ok
        assert answer.message == (
            f"{DRAINED}; 0 requests run and 0 wait, 1 transfers have not ended after 0.05 s"
        )


async def test_a_pause_does_not_wait_for_leases() -> None:
    """They end while the engine is paused, too."""
    driver, _ = driver_with_lease()
    async with operator_of(driver) as operator:
        operator.commands.execute(1, Pause("wait", TIMEOUT_S))
        assert (await operator.answer()).ok


async def test_an_engine_sleeps_when_no_request_runs_and_transfers_have_ended() -> None:
    driver, hold_id = driver_with_lease()
    async with operator_of(driver) as operator:
        sleeper = operator.sleeper
        operator.commands.execute(1, Sleep(TIMEOUT_S))
        assert operator.reasons == [ASLEEP]
        assert driver.scheduler.pause is PauseState.PAUSED_NEW
        await asyncio.sleep(0.06)
        assert sleeper.calls == []
        driver.adversary.holder.release(hold_id)
        await operator.until(lambda: sleeper.calls == ["fall asleep"])
        assert operator.answers == []
        sleeper.is_asleep = True
        answer = await operator.answer()
        assert answer.ok
        assert answer.message == f"{ASLEEP}; 0 requests run, 0 wait"
        assert answer.values["is_sleeping"] is True


async def test_requests_that_do_not_end_in_time_are_interrupted_by_a_sleep() -> None:
    driver = Driver(rules={})
    driver.add("r", [5] * 10)
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    async with operator_of(driver) as operator:
        operator.commands.execute(1, Sleep(0.0))
        await operator.until(lambda: driver.scheduler.pause is PauseState.PAUSED_ALL)
        await asyncio.sleep(0.06)
        assert operator.sleeper.calls == [], "a plan is not answered"


async def test_a_wake_during_the_wait_for_running_requests_ends_the_sleep() -> None:
    driver, _ = driver_with_lease()
    async with operator_of(driver) as operator:
        operator.commands.execute(1, Sleep(TIMEOUT_S))
        operator.commands.execute(2, Wake())
        await operator.until(lambda: len(operator.answers) == 2)
        answers = {answer.number: answer for answer in operator.answers}
        assert (answers[1].ok, answers[1].message) == (False, "woken before it slept")
        assert answers[2].ok
        assert operator.sleeper.calls == []
        assert operator.reasons == [ASLEEP, None]
        assert driver.scheduler.pause is PauseState.UNPAUSED


async def test_a_wake_while_workers_fall_asleep_waits_for_them() -> None:
    async with operator_of(Driver(rules={})) as operator:
        sleeper = operator.sleeper
        operator.commands.execute(1, Sleep(0.0))
        await operator.until(lambda: bool(sleeper.calls))
        operator.commands.execute(2, Wake())
        await asyncio.sleep(0.06)
        assert sleeper.calls == ["fall asleep"]
        sleeper.is_asleep = True
        await operator.until(lambda: sleeper.calls == ["fall asleep", "wake"])
        assert [answer.number for answer in operator.answers] == [1]
        sleeper.is_awake = True
        await operator.until(lambda: len(operator.answers) == 2)
        assert operator.answers[1].ok


async def test_a_second_sleep_and_a_second_wake_change_nothing() -> None:
    async with operator_of(Driver(rules={})) as operator:
        sleeper = operator.sleeper
        operator.commands.execute(1, Wake())
        assert (await operator.answer()).ok
        operator.commands.execute(2, Sleep(0.0))
        await operator.until(lambda: bool(sleeper.calls))
        sleeper.is_asleep = True
        assert (await operator.answer()).ok
        operator.commands.execute(3, Sleep(0.0))
        assert (await operator.answer()).ok
        assert sleeper.calls == ["fall asleep"]
        assert operator.reasons == [ASLEEP]


async def test_a_pause_holds_beside_a_sleep_and_after_it() -> None:
    driver = Driver(rules={})
    async with operator_of(driver, is_asleep=True) as operator:
        operator.sleeper.is_awake, operator.sleeper.is_asleep = False, True
        operator.commands.execute(1, Pause("keep"))
        assert (await operator.answer()).ok
        assert operator.commands.closed_reason == ASLEEP
        operator.commands.execute(2, Wake())
        await operator.until(lambda: operator.sleeper.calls == ["wake"])
        operator.sleeper.is_awake = True
        assert (await operator.answer()).message.startswith(PAUSED)
        assert driver.scheduler.pause is PauseState.PAUSED_ALL
        operator.commands.execute(3, Resume())
        assert (await operator.answer()).ok
        assert operator.commands.closed_reason is None
