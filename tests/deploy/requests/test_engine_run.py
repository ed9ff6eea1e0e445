"""The parts of a request run a limited number at a time, and advance in the order of changes."""

from collections.abc import Callable

import pytest

from longshore.deploy.requests.engine_run import EngineRun
from longshore.deploy.requests.errors import RequestFailed


class FakePart:
    """Is over after some advances, or fails at the first one."""

    def __init__(self, num_advances: int = 1, *, fails: bool = False) -> None:
        self.num_left = num_advances
        self.fails = fails
        self.change: Callable[[], None] = lambda: None

    @property
    def is_over(self) -> bool:
        return self.num_left == 0

    def start(self, on_change: Callable[[], None]) -> None:
        self.change = on_change

    def advance(self) -> bool:
        if self.fails:
            raise RequestFailed("the engine failed")
        self.num_left -= 1
        return True


def start_all(run: EngineRun[FakePart]) -> None:
    while run.can_start:
        run.start_next()


def test_a_part_starts_when_one_before_it_has_ended() -> None:
    parts = [FakePart(2), FakePart(), FakePart()]
    run = EngineRun(parts, max_live=2)
    start_all(run)
    assert run.started == parts[:2]
    run.advance(parts[0])
    assert not run.can_start
    run.advance(parts[0])
    start_all(run)
    assert run.started == parts
    run.advance(parts[1])
    assert not run.is_over
    run.advance(parts[2])
    assert run.is_over


def test_changed_parts_advance_in_the_order_of_their_first_changes() -> None:
    calls: list[int] = []
    parts = [FakePart(3), FakePart(3), FakePart()]
    run = EngineRun(parts, max_live=3, on_change=lambda: calls.append(1))
    start_all(run)
    for part in (parts[1], parts[2], parts[0], parts[1]):
        part.change()
    assert len(calls) == 4
    taken = []
    while (part := run.take_changed()) is not None:
        taken.append(part)
        run.advance(part)
    assert taken == [parts[1], parts[2], parts[0]]
    parts[2].change()
    assert run.take_changed() is None, "it has ended"


def test_a_part_that_fails_has_ended_and_the_others_go_on() -> None:
    parts = [FakePart(fails=True), FakePart()]
    run = EngineRun(parts, max_live=1)
    run.start_next()
    with pytest.raises(RequestFailed):
        run.advance(parts[0])
    run.start_next()
    run.advance(parts[1])
    assert run.is_over


def test_a_part_that_cannot_start_is_not_among_the_started_ones() -> None:
    def fail(_: object) -> None:
        raise RequestFailed("the engine is not there")

    part = FakePart()
    part.start = fail  # type: ignore[method-assign]
    run = EngineRun([part], max_live=1)
    with pytest.raises(RequestFailed):
        run.start_next()
    assert not run.started
