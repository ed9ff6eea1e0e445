"""Which states are kept for later requests, and what is learned from turns about them."""

from itertools import chain

import pytest

from longshore.scheduler.features.kept_states import MIN_INSURANCE, PromptStates
from longshore.scheduler.kv_cache.habits import CONSUMED, Habits, StateKind, turn_kind, used_kind
from tests.harness.driver import Driver
from tests.harness.kv_groups import full, state
from tests.harness.tokens import expected_output, prompt_of


def kinds(driver: Driver) -> dict[int, StateKind | None]:
    """By the number of tokens, of all states that are kept; they are after different numbers."""
    kept = driver.scheduler.kv_cache.kept_states
    assert kept is not None
    return {link.num_tokens: link.kind for link in kept.chains if link.pages}


def habits(driver: Driver) -> Habits:
    assert driver.scheduler.kv_cache.kept_states is not None
    return driver.scheduler.kv_cache.kept_states.chains.habits


def kept(driver: Driver) -> list[int]:
    return [state.num_tokens for plan in driver.plans for state in plan.kept_states]


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 3) -> list[int]:
    """One turn. Returns the prompt and the answer."""
    key = driver.add(name, prompt, max_tokens=max_tokens)
    driver.run()
    assert driver.received[key] == expected_output(name, max_tokens)
    return [*prompt, *driver.received[key]]


def num_cached(driver: Driver) -> int:
    return list(driver.finished.values())[-1].num_cached_tokens


def test_the_end_of_a_turn_is_consumed_by_the_next_one() -> None:
    driver = Driver(full(), state())
    first = ask(driver, "first", prompt_of(22))
    kind = kinds(driver)[20]
    assert kind is not None
    assert (kind.name, kind.turn) == ("end", 0)
    assert kind.ending >= 0, "the answer is known"
    second = ask(driver, "second", [*first[:-2], *[70] * 12])
    assert num_cached(driver) == 20
    assert kinds(driver)[20] == CONSUMED
    ends = {end: kind for end, kind in kinds(driver).items() if kind and kind.name == "end"}
    assert [(end, kind.turn) for end, kind in ends.items()] == [(32, 1)]
    ask(driver, "third", [*second, *[71] * 10])
    assert max(kind.turn for kind in kinds(driver).values() if kind and kind.name == "end") == 2


def test_chance_and_time_of_a_next_turn_are_learned_although_the_state_is_gone() -> None:
    driver = Driver(full(), state())
    first = ask(driver, "first", prompt_of(22))
    assert driver.scheduler.reset_prefix_cache()
    assert not kinds(driver)
    before = habits(driver).probability(turn_kind(0)), habits(driver).gap_s(turn_kind(0))
    driver.now += 500.0
    ask(driver, "second", [*first, *[70] * 10])
    assert num_cached(driver) == 0
    assert habits(driver).probability(turn_kind(0)) > before[0]
    assert before[1] == pytest.approx(Habits.FIRST_GUESS_S)
    assert 2 * Habits.FIRST_GUESS_S < habits(driver).gap_s(turn_kind(0)) < 501.0


def test_the_same_prompt_again_is_a_next_turn() -> None:
    driver = Driver(full(), state())
    ask(driver, "first", prompt_of(22))
    probability = habits(driver).probability(turn_kind(0))
    ask(driver, "again", prompt_of(22))
    assert num_cached(driver) == 20
    assert habits(driver).probability(turn_kind(0)) > probability
    kind = kinds(driver)[20]
    assert kind is not None
    assert (kind.name, kind.turn) == ("end", 1)


def test_a_prompt_of_which_others_have_computed_all_blocks_is_no_turn() -> None:
    driver = Driver(full(), state())
    ask(driver, "long", prompt_of(40))
    ask(driver, "short", prompt_of(21))
    assert kinds(driver)[20] == used_kind(0)
    ask(driver, "other", [*prompt_of(20), *[70] * 20])
    assert num_cached(driver) == 20
    assert kinds(driver)[20] == used_kind(1), "others depart here"
    assert all(
        kind is None or kind.turn == 0 for kind in kinds(driver).values() if kind != used_kind(1)
    )


def test_answers_that_end_alike_are_of_one_kind() -> None:
    driver = Driver(full(), state(), num_blocks=2000, max_model_len=200)
    for number in range(40):
        ask(driver, f"r{number}", [90 + number % 7, *prompt_of(12 + 4 * number)])
    endings = {kind.ending for kind in kinds(driver).values() if kind and kind.name == "end"}
    assert len(endings) > 4, "expected outputs end with different tokens"


def test_as_long_as_memory_is_free_states_are_kept_at_doubling_distances_from_the_end() -> None:
    prompt = prompt_of(4 * MIN_INSURANCE + 102)
    end = len(prompt) - 1
    insured = [end - 4 * MIN_INSURANCE, end - 2 * MIN_INSURANCE, end - MIN_INSURANCE]
    driver = Driver(full(), state(), num_blocks=2000, max_model_len=3000)
    ask(driver, "r", prompt)
    assert kept(driver) == [each - each % 4 for each in (*insured, end)]
    ask(driver, "edited", [*prompt[: end - MIN_INSURANCE - 50], *[70] * 99])
    assert num_cached(driver) == kept(driver)[1]


def test_insurance_takes_no_memory_that_leads_to_other_states() -> None:
    prompts = [[60 + n, *prompt_of(MIN_INSURANCE + 100)] for n in range(3)]
    size = -(-(MIN_INSURANCE + 110) // 4)
    driver = Driver(full(), state(40), num_blocks=1 + 3 * (size + 40) + 60, max_model_len=700)
    for number, prompt in enumerate(prompts):
        ask(driver, f"r{number}", prompt)
    for number, prompt in enumerate(prompts[1:]):
        ask(driver, f"again{number}", [*prompt, *[70] * 8])
        assert num_cached(driver) == len(prompt) - 1 - (len(prompt) - 1) % 4


def test_the_state_of_a_conversation_that_goes_on_stays_and_the_others_go() -> None:
    """A conversation among many single requests finds its own prompt every time."""
    driver = Driver(full(), state(8), num_blocks=120, max_model_len=200)
    talk = ask(driver, "t0", [80, *prompt_of(20)])
    for number in range(1, 12):
        for other in range(6):
            ask(driver, f"o{number}.{other}", prompt_of(60, 6 * number + other))
        before = len(talk)
        talk = ask(driver, f"t{number}", [*talk, *[81] * 6])
        if number > 4:
            assert num_cached(driver) >= before - 3 - 4


def test_a_request_that_stores_nothing_keeps_no_states() -> None:
    driver = Driver(full(), state())
    driver.add("r", prompt_of(30), max_tokens=2, no_store=True)
    driver.run()
    assert kept(driver) == []


def counted(driver: Driver) -> tuple[int, int, int, int, int]:
    """States and blocks now; kept, found and evicted so far."""
    stats = driver.scheduler.make_stats()
    return (
        stats.num_kept_states,
        stats.num_kept_state_blocks,
        stats.num_states_kept,
        stats.num_states_found,
        stats.num_states_evicted,
    )


def test_states_are_counted_that_are_kept_found_and_evicted() -> None:
    driver = Driver(full(), state(3), num_blocks=40, max_model_len=100)
    assert counted(driver) == (0, 0, 0, 0, 0)
    first = ask(driver, "first", prompt_of(22))
    assert counted(driver) == (2, 6, 2, 0, 0), "after the prompt, and after the answer"
    second = ask(driver, "second", [*first, *[70] * 10])
    assert counted(driver) == (4, 12, 4, 1, 0)
    ask(driver, "third", [*second[:-2], *[71] * 10])
    assert counted(driver) == (7, 21, 7, 2, 0), "also a junction"
    for number in range(8):
        ask(driver, f"other{number}", [80 + number, *prompt_of(30)])
    now, blocks, num_kept, found, evicted = counted(driver)
    states = driver.scheduler.kv_cache.kept_states
    assert states is not None
    assert (now, found) == (len([link for link in states.chains if link.pages]), 2)
    assert (blocks, num_kept) == (3 * now, len(kept(driver)) + 11)
    assert evicted == num_kept - now > 0


def test_states_that_are_reset_are_not_evicted() -> None:
    driver = Driver(full(), state(3))
    ask(driver, "r", prompt_of(22))
    assert driver.scheduler.reset_prefix_cache()
    assert counted(driver) == (0, 0, 2, 0, 0)
    ask(driver, "again", prompt_of(22))
    driver.restart_workers()
    assert counted(driver) == (0, 0, 4, 0, 0)


def test_a_request_that_is_admitted_again_can_find_its_own_state() -> None:
    driver = Driver(full(), state(3))
    driver.add("r", prompt_of(22), max_tokens=9)
    driver.steps(3)
    assert counted(driver) == (1, 3, 1, 0, 0)
    driver.restart_workers(keeps_kv=True)
    driver.run()
    assert counted(driver)[3:] == (1, 0)


def test_models_without_states_count_none() -> None:
    driver = Driver(full())
    ask(driver, "r", prompt_of(22))
    ask(driver, "again", prompt_of(22))
    assert num_cached(driver) == 20
    assert counted(driver) == (0, 0, 0, 0, 0)


def test_what_is_remembered_of_turns_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.scheduler.features.turns.MAX_TURNS", 5)
    driver = Driver(full(), state())
    for number in range(12):
        ask(driver, f"r{number}", [60 + number, *prompt_of(20)])
    (feature,) = {
        each
        for each in chain(*vars(driver.scheduler._hooks).values())
        if isinstance(each, PromptStates)
    }
    assert len(feature._turns._turns) == 5
    assert not feature._turns._beginnings
