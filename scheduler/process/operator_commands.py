"""Carries out an operator's commands in the loop of the scheduler process."""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, Protocol, assert_never

import msgspec

from longshore.protocol.commands import (
    DRAINED,
    DRAINING,
    CommandAnswer,
    DescribeState,
    DrainEngine,
    EngineCommand,
    Pause,
    PauseMode,
    ResetCache,
    Resume,
    Sleep,
    Wake,
    WriteKVSnapshot,
)
from longshore.scheduler.process.kv_event_publisher import EventPublisher
from longshore.scheduler.scheduler import Scheduler
from longshore.scheduler.step.planner import PauseState

POLL_S: Final = 0.02
"""How often a command that waits for running requests looks at them."""

WORK_PER_TURN: Final = 256
"""Requests that are aborted, or messages of clients that are read, in one turn of the engine's
loop. Other sockets, steps and the sign of life come in between."""

PAUSED: Final = "paused by the operator"
ASLEEP: Final = "put to sleep"


class Sleeper(Protocol):
    """The workers of an engine. They are neither awake nor asleep while they change, or start."""

    @property
    def is_awake(self) -> bool: ...

    @property
    def is_asleep(self) -> bool: ...

    def fall_asleep(self) -> None:
        """Free the workers' memory. Call it only if they are awake and all plans are answered."""

    def wake(self) -> None:
        """Have the workers allocate their memory again. Call it only if they are asleep."""


class OperatorCommands:
    """Executes commands of one engine. Not thread-safe: use it in the engine's loop.

    sleeper:   the workers.
    paused, is_drained, is_asleep: see SchedulerProcessConfig.
    is_to_sleep: an operator wants the engine to sleep.
    closed_reason: why new requests are not admitted, for clients; None: they are.
    answer:    sends an answer to the supervisor.
    announce:  called when `closed_reason` has changed.
    advance:   plans and sends what a command has made possible.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        events: EventPublisher | None,
        *,
        clients: Iterable[int],
        answer: Callable[[CommandAnswer], None],
        announce: Callable[[], None],
        advance: Callable[[], None],
        sleeper: Sleeper,
        paused: PauseMode | None = None,
        is_drained: bool = False,
        is_asleep: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._events = events
        self._clients = clients
        self._answer = answer
        self._announce = announce
        self._advance = advance
        self._waiting: set[asyncio.Task[None]] = set()
        self._is_draining = False
        self._sleeper = sleeper
        self.is_to_sleep = is_asleep
        self._pause_state = PauseState.UNPAUSED  # what holds beside a sleep
        self._closed_reason: str | None = DRAINED if is_drained else None
        if paused is not None:
            self._set_pause(_state_of(paused))
            self._closed_reason = PAUSED

    def execute(self, number: int, command: EngineCommand) -> None:
        """Carry out a command, or begin to; it is answered when it has been carried out."""
        answer = partial(self._send, number)
        match command:
            case DescribeState():
                answer(True, "")
            case Pause():
                self._pause(command, answer)
            case Resume():
                self._resume(answer)
            case Sleep(timeout_s):
                self._sleep(timeout_s, answer)
            case Wake():
                self._wake(answer)
            case DrainEngine():
                self._drain(command, answer)
            case ResetCache():
                self._reset(command, answer)
            case WriteKVSnapshot(path):
                self._begin(self._write_snapshot(path, answer))
            case _:
                assert_never(command)

    def close(self) -> None:
        """Commands that have not been carried out are not any more."""
        for task in self._waiting:
            task.cancel()

    def _send(self, number: int, ok: bool, message: str, **values: str | int) -> None:
        scheduler = self._scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        counts: dict[str, str | int | float | bool] = {
            "state": self.closed_reason or "admits requests",
            "pause": scheduler.pause.value,
            "running": num_running,
            "waiting": num_waiting,
            "kv_usage": round(scheduler.kv_cache.usage, 4),
            "is_sleeping": self.is_to_sleep,
            "epoch": scheduler.epoch,
        }
        if not message:
            message = f"{counts['state']}; {num_running} requests run, {num_waiting} wait"
        self._answer(CommandAnswer(number, ok, message, {**counts, **values}))

    def _begin(self, task: Any) -> None:
        running = asyncio.get_running_loop().create_task(task)
        self._waiting.add(running)
        running.add_done_callback(self._waiting.discard)

    @property
    def closed_reason(self) -> str | None:
        return ASLEEP if self.is_to_sleep else self._closed_reason

    def _close_admission(self, reason: str | None) -> None:
        if reason != self._closed_reason:
            self._closed_reason = reason
            self._announce()

    def _set_pause(self, state: PauseState) -> None:
        self._pause_state = state
        if self.is_to_sleep and state is PauseState.UNPAUSED:
            state = PauseState.PAUSED_NEW
        self._scheduler.set_pause(state, time.monotonic())

    def _pause(self, command: Pause, answer: Callable[..., None]) -> None:
        if self._is_draining:
            answer(True, "the engine is being restarted, and will be paused")
            return
        self._close_admission(PAUSED)
        self._set_pause(_state_of(command.mode))
        if command.mode == "wait":
            self._advance()
            self._begin(self._answer_when_idle(command.timeout_s, True, answer))
            return
        if command.mode == "abort":
            self._begin(self._abort_all(answer))
            return
        self._advance()
        answer(True, "")

    async def _abort_all(self, answer: Callable[..., None]) -> None:
        """Abort all requests, and answer; other work runs between two parts."""
        for client in self._clients:
            while self._scheduler.abort_client(client, time.monotonic(), WORK_PER_TURN):
                self._advance()
                await asyncio.sleep(0)
        self._advance()
        answer(True, "")

    def _resume(self, answer: Callable[..., None]) -> None:
        if self._is_draining:
            answer(True, "the engine is being restarted, and will not be paused")
            return
        self._set_pause(PauseState.UNPAUSED)
        self._close_admission(None)
        self._advance()
        answer(True, "")

    def _sleep(self, timeout_s: float, answer: Callable[..., None]) -> None:
        if self._is_draining:
            answer(True, "the engine is being restarted, and will sleep")
            return
        self._change_sleep(True)
        self._begin(self._fall_asleep(timeout_s, answer))

    def _wake(self, answer: Callable[..., None]) -> None:
        if self._is_draining:
            answer(True, "the engine is being restarted, and will not sleep")
            return
        self._change_sleep(False)
        self._begin(self._wake_up(answer))

    def _change_sleep(self, is_to_sleep: bool) -> None:
        if is_to_sleep != self.is_to_sleep:
            self.is_to_sleep = is_to_sleep
            self._set_pause(self._pause_state)
            self._announce()
            self._advance()

    async def _fall_asleep(self, timeout_s: float, answer: Callable[..., None]) -> None:
        """Answer when the workers sleep, or another command ends the sleep. Requests and
        transfers that have not ended after `timeout_s` are interrupted."""
        scheduler, sleeper = self._scheduler, self._sleeper
        deadline_s = time.monotonic() + timeout_s
        while self.is_to_sleep and not sleeper.is_asleep:
            is_over = not self._is_busy(only_running=True) and not scheduler.has_transfers()
            if sleeper.is_awake and (is_over or time.monotonic() >= deadline_s):
                scheduler.set_pause(PauseState.PAUSED_ALL)
                if not scheduler.num_steps_in_flight:
                    sleeper.fall_asleep()
            await asyncio.sleep(POLL_S)
        answer(self.is_to_sleep, "" if self.is_to_sleep else "woken before it slept")

    async def _wake_up(self, answer: Callable[..., None]) -> None:
        """Answer when the workers are ready, or another command begins a sleep."""
        while not self.is_to_sleep and not self._sleeper.is_awake:
            if self._sleeper.is_asleep:
                self._sleeper.wake()
            await asyncio.sleep(POLL_S)
        answer(not self.is_to_sleep, "put to sleep before it was awake" if self.is_to_sleep else "")

    def _drain(self, command: DrainEngine, answer: Callable[..., None]) -> None:
        self._is_draining = self._is_draining or command.is_final
        self._close_admission(DRAINING if self._is_draining else DRAINED)
        if command.holds_new and self._scheduler.pause is PauseState.UNPAUSED:
            self._set_pause(PauseState.PAUSED_NEW)
            self._advance()
        is_paused = self._scheduler.pause is not PauseState.UNPAUSED
        self._begin(
            self._answer_when_idle(command.timeout_s, is_paused, answer, awaits_transfers=True)
        )

    async def _answer_when_idle(
        self,
        timeout_s: float,
        only_running: bool,
        answer: Callable[..., None],
        *,
        awaits_transfers: bool = False,
    ) -> None:
        """Answer when no request runs, or none runs or waits; not ok after `timeout_s`.

        awaits_transfers: and no blocks are transferred, or held for other engines.
        """
        scheduler = self._scheduler
        deadline_s = time.monotonic() + timeout_s
        while self._is_busy(only_running) or (awaits_transfers and scheduler.has_transfers()):
            if time.monotonic() >= deadline_s:
                num_running, num_waiting = scheduler.get_request_counts()
                left = f"{num_running} requests run and {num_waiting} wait"
                if awaits_transfers and scheduler.num_transfers:
                    left += f", {scheduler.num_transfers} transfers have not ended"
                answer(False, f"{self.closed_reason or 'resumed'}; {left} after {timeout_s:g} s")
                return
            await asyncio.sleep(POLL_S)
        answer(True, "")

    def _is_busy(self, only_running: bool) -> bool:
        if only_running:
            return self._scheduler.get_request_counts()[0] > 0
        return self._scheduler.is_waited_for()

    def _reset(self, command: ResetCache, answer: Callable[..., None]) -> None:
        scheduler = self._scheduler
        match command.cache:
            case "prefix":
                done = scheduler.reset_prefix_cache(
                    time.monotonic(), reset_running_requests=command.preempts
                )
                why = "requests or transfers hold blocks"
            case "encoder":
                done, why = scheduler.reset_encoder_cache(), "a request needs an encoder output"
            case "connector":
                done = scheduler.reset_connector_cache()
                why = "there is no connector, or it cannot drop its KV now"
            case _:
                assert_never(command.cache)
        self._advance()
        what = f"the {command.cache} cache"
        answer(done, f"{what} is empty" if done else f"{what} was not reset: {why}")

    async def _write_snapshot(self, path: str, answer: Callable[..., None]) -> None:
        if self._events is None:
            answer(False, "KV events are disabled; start with --enable-kv-cache-events")
            return
        num_lines = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                for part in self._events.snapshot_lines():
                    file.writelines(msgspec.json.encode(line) + b"\n" for line in part)
                    num_lines += len(part)
                    await asyncio.sleep(0)  # other work runs between two parts
        except OSError as error:
            answer(False, f"the snapshot cannot be written: {error}")
            return
        answer(True, f"{num_lines} lines", path=path, num_lines=num_lines)


def _state_of(mode: PauseMode) -> PauseState:
    return PauseState.PAUSED_NEW if mode == "wait" else PauseState.PAUSED_ALL
