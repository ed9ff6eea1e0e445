"""Which engines may come and go, their numbers and their GPUs."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from longshore.deploy.supervisor.engine_set import EngineRefused, EngineSet
from longshore.deploy.supervisor.replica import Replica, replicas
from longshore.protocol.commands import Role


def always(engine: Replica) -> bool:
    return True


def added(engines: EngineSet, role: Role | None = None) -> Replica:
    replica = engines.reserve(role)
    engines.use(replica.number)
    return replica


def removed(engines: EngineSet, number: int) -> None:
    engines.remove(number, always)
    engines.release(number)
    engines.remove_stopped(number, was_ready=True)


def test_a_number_is_never_used_again_and_gpus_are() -> None:
    engines = EngineSet(replicas(("unified",) * 2), num_gpu_groups=3)
    third = added(engines)
    assert (third.number, third.gpu(1, 2), third.scheduler) == (2, "cuda:5", "scheduler 2")
    with pytest.raises(EngineRefused, match="no GPU is left: 3 engines use all GPUs"):
        engines.reserve(None)
    removed(engines, 0)
    fourth = added(engines)
    assert (fourth.number, fourth.gpu(1, 2)) == (3, "cuda:1")
    assert [each.number for each in engines.used] == [1, 2, 3]


def test_the_only_engine_of_a_node_is_drained_if_another_node_has_its_role() -> None:
    only = [Replica(1, 3, "decode")]
    with pytest.raises(EngineRefused, match="the last decode engine that is ready"):
        EngineSet(only, elsewhere=["prefill"]).drain(1, always)
    engines = EngineSet(only, elsewhere=["prefill", "decode"])
    engines.drain(1, always)
    assert engines.states == {only[0]: "draining"}


def test_another_model_s_engine_is_no_successor() -> None:
    engines = EngineSet([Replica(0, 3), Replica(1, 3, model=1), Replica(2, 3, model=1)])
    with pytest.raises(EngineRefused, match="the last unified engine that is ready"):
        engines.drain(0, always)
    engines.drain(1, always)
    with pytest.raises(EngineRefused, match="the last unified engine"):
        engines.drain(2, always)


def test_an_engine_is_used_between_its_start_and_its_release() -> None:
    engines = EngineSet(replicas(("unified",)))
    replica = engines.reserve(None)
    assert [each.number for each in engines.used] == [0]
    assert engines.states[replica] == "starting"
    with pytest.raises(EngineRefused, match="it is starting"):
        engines.remove(replica.number, always)
    engines.use(replica.number)
    assert engines.used == engines.present
    engines.remove(0, always)
    with pytest.raises(EngineRefused, match="it is removing"):
        engines.drain(0, always)
    assert [each.number for each in engines.used] == [0, 1]  # it finishes its requests
    engines.release(0)
    assert [each.number for each in engines.used] == [1]
    engines.remove_stopped(0, was_ready=True)
    assert sorted(engines.states.values()) == ["ready", "removed"]
    with pytest.raises(EngineRefused, match="does not exist"):
        engines.remove(0, always)


def test_an_engine_that_could_not_be_stopped_is_removed_again_and_not_drained() -> None:
    engines = EngineSet(replicas(("unified",) * 2))
    engines.remove(0, always)
    engines.release(0)
    engines.keep(0)
    engines.resume(0)  # which no gateway would use
    assert engines.states[engines.present[0]] == "not stopped"
    with pytest.raises(EngineRefused, match="it could not be removed; remove it again"):
        engines.drain(0, always)
    engines.remove(0, always)
    engines.remove_stopped(0, was_ready=True)
    assert [each.number for each in engines.present] == [1]


@pytest.mark.parametrize(
    ("roles", "number"),
    [
        (("unified",), 0),
        (("prefill", "decode"), 0),
        (("prefill", "decode"), 1),
        (("prefill", "prefill", "decode"), 2),
    ],
)
def test_the_last_engine_for_a_part_of_requests_stays(roles: tuple[Role, ...], number: int) -> None:
    engines = EngineSet(replicas(roles))
    for change in (engines.drain, engines.remove):
        with pytest.raises(EngineRefused, match=f"it is the last {roles[number]} engine"):
            change(number, always)
    assert set(engines.states.values()) == {"ready"}


def test_an_engine_that_is_drained_or_does_not_run_does_not_count() -> None:
    engines = EngineSet(replicas(("unified",) * 2))
    engines.drain(0, always)
    with pytest.raises(EngineRefused, match="it is the last unified engine"):
        engines.remove(1, always)
    engines.resume(0)
    with pytest.raises(EngineRefused, match="it is the last unified engine"):
        engines.remove(1, lambda engine: engine.number != 0)
    engines.drain(0, always)
    removed(engines, 0)  # a drained one may be removed


def test_a_role_that_the_deployment_cannot_have_is_refused() -> None:
    with pytest.raises(EngineRefused, match="without the connector that split requests need"):
        EngineSet(replicas(("unified",))).reserve("decode")
    split = EngineSet(replicas(("prefill", "decode")))
    with pytest.raises(EngineRefused, match="role must be one of decode, prefill"):
        split.reserve(None)
    assert split.reserve("decode").role == "decode"
    with pytest.raises(EngineRefused, match="2 engines are the maximum"):
        EngineSet(replicas(("unified",) * 2), max_engines=2).reserve(None)


class Membership(RuleBasedStateMachine):
    """Whatever an operator does, every part of requests keeps an engine."""

    @initialize(roles=st.sampled_from([("unified",), ("prefill", "decode")]))
    def start(self, roles: tuple[Role, ...]) -> None:
        self.engines = EngineSet(replicas(roles), num_gpu_groups=5)
        self.numbers = set(range(len(roles)))
        self.needed = roles

    @rule(role=st.sampled_from([None, "unified", "prefill", "decode"]), starts=st.booleans())
    def add(self, role: Role | None, starts: bool) -> None:
        try:
            replica = self.engines.reserve(role)
        except EngineRefused:
            return
        assert replica.number not in self.numbers
        self.numbers.add(replica.number)
        if starts:
            self.engines.use(replica.number)
        else:
            self.engines.remove_stopped(replica.number, was_ready=False)

    @rule(place=st.integers(0, 20), ends=st.booleans())
    def drain_or_remove(self, place: int, ends: bool) -> None:
        number = place % len(self.numbers)
        try:
            if ends:
                removed(self.engines, number)
            else:
                self.engines.drain(number, always)
        except EngineRefused:
            pass

    @rule(place=st.integers(0, 20))
    def resume(self, place: int) -> None:
        self.engines.resume(place % len(self.numbers))

    @invariant()
    def every_part_has_an_engine(self) -> None:
        states = self.engines.states
        ready = {replica.role for replica, state in states.items() if state == "ready"}
        assert "unified" in ready or ready >= {*self.needed}

    @invariant()
    def no_gpu_is_shared(self) -> None:
        groups = [each.gpus_of for each in self.engines.present]
        assert len(set(groups)) == len(groups)
        assert all(group < 5 for group in groups)


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=60, stateful_step_count=30)
