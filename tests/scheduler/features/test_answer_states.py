"""What requests leave when they end, and which requests begin with it."""

from typing import Any

import numpy as np
import pytest

from longshore.protocol.kv_cache_spec import KVCacheSpec
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import MultimodalFeature, PromptEmbeds
from longshore.scheduler.kv_cache.habits import CONSUMED, INSURANCE, StateKind, answer_kind
from longshore.scheduler.kv_cache.states import KeptStates
from tests.harness.driver import Driver
from tests.harness.kv_groups import full, state
from tests.harness.tokens import EOS, expected_output, prompt_of


def kept_states(driver: Driver) -> KeptStates:
    kept = driver.scheduler.kv_cache.kept_states
    assert kept is not None
    return kept


def kinds(driver: Driver) -> dict[int, StateKind | None]:
    """By the number of tokens, of all states that are kept; they are after different numbers."""
    return {link.num_tokens: link.kind for link in kept_states(driver).chains if link.pages}


def ask(
    driver: Driver, name: str, prompt: list[int], max_tokens: int = 3, **options: Any
) -> list[int]:
    """One turn. Returns the prompt and the answer."""
    key = driver.add(name, prompt, max_tokens=max_tokens, **options)
    driver.run()
    assert driver.received[key] == expected_output(name, max_tokens)
    return [*prompt, *driver.received[key]]


def began(driver: Driver) -> int:
    """After how many tokens the request began that was admitted last."""
    return [start.num_computed_tokens for plan in driver.plans for start in plan.added][-1]


@pytest.mark.parametrize("num_answer", range(1, 10))
@pytest.mark.parametrize("num_prompt", [5, 7, 8, 22])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_next_turn_begins_with_the_last_token_of_the_answer(
    steps: int, num_prompt: int, num_answer: int
) -> None:
    """Wherever that is in a block. The last token was sampled, and no step has computed it."""
    driver = Driver(full(), state(), max_steps_in_flight=steps, num_blocks=80, max_model_len=100)
    talk = ask(driver, "first", prompt_of(num_prompt), num_answer)
    for number in range(3):
        before = len(talk)
        talk = ask(driver, f"next{number}", [*talk, *[70 + number] * 5], num_answer)
        assert began(driver) == before - 1
    driver.check_blocks()


@pytest.mark.parametrize("specs", [[state()], [full(), full(8), state()]], ids=["alone", "sizes"])
def test_groups_of_other_sizes_do_the_same(specs: list[KVCacheSpec]) -> None:
    driver = Driver(*specs, num_blocks=400)
    for number in range(20):
        talk = ask(driver, f"first{number}", [50 + number, *prompt_of(20 + number)])
        ask(driver, f"next{number}", [*talk, *[70] * 9])
        assert began(driver) == len(talk) - 1


@pytest.mark.parametrize(("steps", "num_not_computed"), [(1, 1), (2, 0)])
def test_a_step_that_was_planned_ahead_has_computed_the_end_token_as_well(
    steps: int, num_not_computed: int
) -> None:
    driver = Driver(
        full(),
        state(),
        max_steps_in_flight=steps,
        sample=lambda name, position: EOS if position == 4 else 20 + position,
    )
    key = driver.add("first", prompt_of(22), max_tokens=30)
    driver.run()
    assert driver.reason(key) is FinishReason.STOPPED
    talk = [*prompt_of(22), *driver.received[key]]
    assert talk[-1] == EOS
    driver.add("next", [*talk, 70, 71], max_tokens=2)
    driver.run()
    assert began(driver) == len(talk) - num_not_computed


def test_several_requests_can_begin_with_one_end() -> None:
    driver = Driver(full(), state(), num_blocks=80)
    talk = ask(driver, "first", prompt_of(22))
    for name in ("a", "b"):
        driver.add(name, [*talk, *[70] * 3, ord(name) % 10], max_tokens=4)
    driver.plan()
    assert [start.num_computed_tokens for start in driver.plans[-1].added] == [24, 24]
    driver.run()
    ask(driver, "c", [*talk, 80, 81])
    assert began(driver) == 24


def test_a_request_that_differs_in_the_last_token_begins_with_the_prompt() -> None:
    driver = Driver(full(), state())
    talk = ask(driver, "first", prompt_of(22))
    ask(driver, "other", [*talk[:23], talk[23] + 1, *[70] * 5])
    assert began(driver) == 20
    ask(driver, "shorter", talk[:24])
    assert began(driver) == 20, "a token is computed to sample from"


def test_a_next_turn_waits_until_the_step_that_was_planned_ahead_is_answered() -> None:
    """It may still fail."""
    driver = Driver(
        full(),
        state(),
        max_steps_in_flight=2,
        sample=lambda name, position: EOS if position == 2 else 20 + position,
    )
    driver.add("first", prompt_of(22), max_tokens=30)
    driver.plan()
    driver.plan()
    driver.answer()
    driver.plan()
    driver.answer()
    driver.plan()
    driver.answer()
    talk = [*prompt_of(22), 20, 21, EOS]
    driver.add("next", [*talk, 70], max_tokens=2)
    driver.plan()
    assert [start.request_id for plan in driver.plans for start in plan.added] == ["first"]
    driver.run()
    assert began(driver) == 25


@pytest.mark.parametrize("option", [{"no_store": True}, {"cache_salt": "s"}])
def test_what_others_must_not_find_they_do_not_find(option: dict[str, Any]) -> None:
    driver = Driver(full(), state())
    talk = ask(driver, "first", prompt_of(22), **option)
    ask(driver, "next", [*talk, 70])
    assert began(driver) == 0


def test_what_lies_in_the_last_block_beside_tokens_is_part_of_the_name() -> None:
    """An image there, or embeddings in place of tokens."""
    limits = {"max_num_encoder_input_tokens": 64, "encoder_cache_size": 64}
    driver = Driver(full(), state(), num_blocks=80, max_model_len=100, **limits)

    def image(name: str) -> dict[str, Any]:
        data = np.zeros(8, np.uint8)
        return {"multimodal": (MultimodalFeature(name, 20, 2, "image", data=data),)}

    talk = ask(driver, "a", prompt_of(22), 1, **image("a"))
    ask(driver, "b", [*talk, 70], **image("b"))
    assert began(driver) == 20
    ask(driver, "a again", [*talk, 70], **image("a"))
    assert began(driver) == 22

    def embeds(last: float) -> dict[str, Any]:
        values = np.ones((18, 2), np.float32)
        values[16:] = last
        return {"prompt_embeds": PromptEmbeds(values.view(np.uint8).ravel(), 2, "float32")}

    answer = ask(driver, "c", [0] * 18, 2, **embeds(1.0))[18:]
    for name, last, expected in (("d", 2.0, 16), ("e", 1.0, 19)):
        driver.add(name, [0] * 18, outputs=[*answer, 7], max_tokens=8, **embeds(last))
        driver.run()
        assert began(driver) == expected


def test_a_reset_that_is_refused_proves_nothing() -> None:
    """The plan in flight fails, and what begins with its state must not."""
    driver = Driver(
        full(),
        state(),
        num_blocks=100,
        max_steps_in_flight=2,
        sample=lambda name, position: EOS if (name, position) == ("first", 2) else 20 + position,
    )
    driver.add("busy", prompt_of(9, 40), max_tokens=30)
    driver.add("first", prompt_of(22), max_tokens=30)
    driver.plan()
    for _ in range(3):
        driver.plan()
        driver.answer()
    assert not driver.scheduler.reset_prefix_cache()
    driver.add("next", [*prompt_of(22), 20, 21, EOS, 70], max_tokens=4)
    driver.plan()
    driver.answer(nan_rows=[1])
    driver.run()
    assert began(driver) <= 20
    assert not driver.invalid_ids & {"next"}


@pytest.mark.parametrize("num_blocks", [14, 15])
def test_where_the_end_and_its_copies_do_not_fit_a_request_starts_without_it(
    num_blocks: int,
) -> None:
    driver = Driver(full(), state(), num_blocks=num_blocks, max_model_len=40)
    talk = ask(driver, "first", prompt_of(22))
    ask(driver, "next", [*talk, *[70] * 11], 2)


def test_the_end_of_the_same_answer_again_is_kept_once() -> None:
    driver = Driver(full(), state(), num_blocks=80)
    talk = ask(driver, "first", prompt_of(22))
    num_kept = kept_states(driver).num_kept
    (end,) = kept_states(driver).chains.ends.values()
    driver.add("again", prompt_of(22), outputs=talk[22:24], max_tokens=3)
    driver.run()
    assert kept_states(driver).num_kept == num_kept
    assert kept_states(driver).chains.ends == {next(iter(kept_states(driver).chains.ends)): end}


def test_an_answer_that_is_aborted_or_wrong_leaves_nothing() -> None:
    driver = Driver(full(), state(), max_steps_in_flight=2)
    key = driver.add("aborted", prompt_of(22), max_tokens=20)
    driver.steps(6)
    driver.abort(key)
    driver.run()
    assert not kept_states(driver).chains.ends
    wrong = driver.add("wrong", prompt_of(22, 40), max_tokens=20)
    driver.plan()
    driver.plan()
    driver.answer(nan_rows=[0])
    driver.run()
    assert driver.reason(wrong) is FinishReason.ERROR
    assert not kept_states(driver).chains.ends


def test_where_answers_are_repeated_their_ends_take_the_place_of_the_prompts() -> None:
    driver = Driver(full(), state(), num_blocks=3000, max_model_len=64)
    for number in range(40):
        talk = ask(driver, f"first{number}", [50 + number, *prompt_of(14)])
        ask(driver, f"next{number}", [*talk, 70, 71])
    driver.scheduler.reset_prefix_cache()
    assert kept_states(driver).chains.habits.probability(answer_kind(0)) > 0.8
    ask(driver, "r", prompt_of(14))
    last = kinds(driver)
    assert last[12] == CONSUMED
    assert last[16] is not None
    assert last[16].name == "end"


def test_where_answers_are_not_repeated_their_ends_go_first() -> None:
    driver = Driver(full(), state(), num_blocks=3000, max_model_len=64)
    for number in range(10):
        talk = ask(driver, f"first{number}", [50 + number, *prompt_of(14)])
        ask(driver, f"next{number}", [*talk[:-3], 70, 71, 72, 73])
        assert began(driver) == 12
    driver.scheduler.reset_prefix_cache()
    assert kept_states(driver).chains.habits.probability(answer_kind(0)) < 0.2
    ask(driver, "r", prompt_of(14))
    last = kinds(driver)
    assert last[16] == INSURANCE
    assert last[12] is not None
    assert last[12].name == "end"


def test_what_is_known_of_ends_goes_with_them() -> None:
    driver = Driver(full(), state(), num_blocks=60)
    for number in range(30):
        ask(driver, f"r{number}", [60 + number, *prompt_of(20 + number % 5)])
    chains = kept_states(driver).chains
    assert 0 < sum(map(len, chains.ends.values())) <= chains.num_states
    assert driver.scheduler.reset_prefix_cache()
    assert not chains.ends


def test_an_end_survives_new_workers_that_keep_the_memory() -> None:
    driver = Driver(full(), state())
    talk = ask(driver, "first", prompt_of(22))
    driver.restart_workers(keeps_kv=True)
    ask(driver, "next", [*talk, 70])
    assert began(driver) == 24
    driver.restart_workers()
    ask(driver, "later", [*talk, 71])
    assert began(driver) == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_a_block_that_the_last_step_fills_is_cached_as_others_are(steps: int) -> None:
    """A conversation is found from its beginning, too, by a request that departs before its end."""
    driver = Driver(full(), state(), num_blocks=200, max_model_len=100, max_steps_in_flight=steps)
    for num_prompt in range(20, 30):
        start = [50 + num_prompt, *prompt_of(num_prompt)]
        talk = ask(driver, f"first{num_prompt}", start)
        for number in range(3):
            before = len(talk)
            talk = ask(driver, f"next{num_prompt}.{number}", [*talk, *[70 + number] * 5])
            assert began(driver) == before - 1
        hits, num_hits = driver.scheduler.kv_cache._coordinator.find_longest_hit(
            driver.requests[f"next{num_prompt}.2"].block_hashes, len(talk)
        )
        assert num_hits == (len(talk) - 1) // 4 * 4
        assert len(hits[0]) == num_hits // 4
