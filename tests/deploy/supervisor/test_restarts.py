"""When a group of processes is restarted, and when it is given up."""

from longshore.deploy.supervisor.restarts import MAX_DELAY_S, STABLE_S, Restarts


def test_the_first_restart_is_at_once_and_later_ones_wait_longer_and_longer() -> None:
    group = Restarts(max_in_a_row=20)
    delays = []
    for now_s in range(1000, 1020):
        assert group.died(now_s)
        assert group.next_start_s is not None
        assert group.due_s == group.next_start_s
        delays.append(group.next_start_s - now_s)
        group.started(deadline_s=now_s + 5.0)
        assert group.due_s == now_s + 5.0
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert delays == sorted(delays)
    assert delays[-1] == MAX_DELAY_S
    assert not group.died(1020)


def test_a_group_that_was_stable_begins_anew() -> None:
    group = Restarts(max_in_a_row=1)
    for start_s in (1000.0, 2000.0):
        assert group.died(start_s)
        group.started(deadline_s=start_s + 5)
        group.became_ready(start_s + 1)
        assert group.due_s == float("inf")
    assert not group.died(2001 + STABLE_S - 0.1)


def test_a_death_that_has_a_remedy_is_none_of_a_row() -> None:
    group = Restarts(max_in_a_row=1)
    for now_s in (1000.0, 1001.0, 1002.0):
        assert group.died(now_s, has_remedy=True)
        assert group.next_start_s == now_s
        group.started(deadline_s=now_s + 5)
        group.became_ready(now_s)
    assert group.died(1003.0)
    assert not group.died(1004.0)
    assert not Restarts(max_in_a_row=0).died(1000.0, has_remedy=True)


def test_a_group_that_never_became_ready_is_not_stable_however_long_it_took() -> None:
    group = Restarts(max_in_a_row=1)
    assert group.died(1000.0)
    group.started(deadline_s=1600.0)
    assert not group.died(1000.0 + 2 * STABLE_S)
