"""Commands of an operator, with a scheduler in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from longshore.protocol.commands import CommandAnswer, DrainEngine, Pause
from longshore.scheduler.process.operator_commands import DRAINED, DRAINING, OperatorCommands
from tests.harness.driver import Driver

TIMEOUT_S = 60.0


class Operator:
    """Sends commands to an engine. answers: in the order in which they came."""

    def __init__(self, driver: Driver) -> None:
        self.answers: list[CommandAnswer] = []
        self.has_answer = asyncio.Event()
        self.commands = OperatorCommands(
            driver.scheduler,
            None,
            clients=(),
            answer=self.note,
            announce=lambda: None,
            advance=lambda: None,
        )

    def note(self, answer: CommandAnswer) -> None:
        self.answers.append(answer)
        self.has_answer.set()

    async def answer(self) -> CommandAnswer:
        await asyncio.wait_for(self.has_answer.wait(), TIMEOUT_S)
        (answer,) = self.answers
        return answer


@asynccontextmanager
async def operator_of(driver: Driver) -> AsyncIterator[Operator]:
    operator = Operator(driver)
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
