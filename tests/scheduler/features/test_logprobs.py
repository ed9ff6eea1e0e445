"""Log probabilities: whose they are, what is delivered of them, and what asking for them costs."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.connectors.base import ConnectorOutput, FinishAction, RequestView
from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.outputs import EngineOutputs, FinishReason, ModelRunnerOutput, TokenLogprobs
from longshore.protocol.requests import PromptEmbeds
from longshore.scheduler.step.output_validator import InvalidOutput
from tests.harness.connector import AdversarialConnector, has_stored
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import EOS, expected_output, prompt_of
from tests.harness.worker_rows import token_logprobs

Key = tuple[int, int]


def positions(driver: Driver, key: Key) -> list[int]:
    return [position for position, _ in driver.scored[key]]


def check_scores(
    driver: Driver, key: Key, prompt: list[int], listed: tuple[int | None, int | None]
) -> None:
    """The client has an entry for every token that it asked for, as of (prompt, output) in
    `listed`, and none for another."""
    tokens = prompt + driver.received[key]
    wanted = [listed[0]] * len(prompt) + [listed[1]] * len(driver.received[key])
    expected = {
        position: [tokens[position], *range(position, position + more)]
        for position, more in enumerate(wanted)
        if more is not None and position > 0
    }
    assert dict(driver.scored[key]) == expected
    outputs = [position for position in positions(driver, key) if position >= len(prompt)]
    assert outputs == sorted(set(outputs)), "an output token is sampled once"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_prompt_and_output_tokens_are_scored_as_their_request_asks(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight, max_num_batched_tokens=7)
    asked: list[dict[str, Any]] = [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"logprobs": 0},
        {},
    ]
    prompts = [prompt_of(9, 30 * index) for index in range(4)]
    keys = [
        driver.add(f"r{index}", prompts[index], client=index % 2, max_tokens=5, sampling=each)
        for index, each in enumerate(asked)
    ]
    driver.run()
    for key, prompt, each in zip(keys, prompts, asked, strict=True):
        check_scores(driver, key, prompt, (each.get("prompt_logprobs"), each.get("logprobs")))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), steps_in_flight=st.sampled_from([1, 2]))
def test_every_token_is_scored_through_chunks_preemptions_and_drafts(
    data: st.DataObject, steps_in_flight: int
) -> None:
    driver = pressed(
        max_steps_in_flight=steps_in_flight,
        max_num_batched_tokens=data.draw(st.sampled_from([5, 64])),
        num_speculative_tokens=data.draw(st.integers(0, 2)),
        draft=lambda name, position: [*expected_output(name, position + 1)[-1:], 5],
        cache={"preempt_threshold": 1.0, "watermark": 0.0},
    )
    counts = st.none() | st.integers(0, 2)
    keys = {}
    for index in range(data.draw(st.integers(1, 5))):
        # Equal prompts, so that those who do not need theirs scored find them.
        prompt = prompt_of(data.draw(st.integers(1, 16)))
        listed = data.draw(counts), data.draw(counts)
        sampling = {"prompt_logprobs": listed[0], "logprobs": listed[1]}
        key = driver.add(f"r{index}", prompt, client=index % 2, max_tokens=12, sampling=sampling)
        keys[key] = prompt, listed
        driver.steps(data.draw(st.integers(0, 3)))
    driver.run()
    for key, (prompt, listed) in keys.items():
        check_scores(driver, key, prompt, listed)


def test_a_request_whose_prompt_is_scored_finds_nothing_until_all_of_it_was_delivered() -> None:
    driver = pressed(cache={"preempt_threshold": 1.0, "watermark": 0.0})
    driver.add("same", prompt_of(13), max_tokens=1)
    driver.run()
    driver.add("old", prompt_of(13, 50), max_tokens=15)
    key = driver.add("young", prompt_of(13), max_tokens=15, sampling={"prompt_logprobs": 0})
    driver.run()
    starts = [start for plan in driver.plans for start in plan.added if start.request_id == "young"]
    assert len(starts) > 1, "it was preempted"
    assert starts[0].num_computed_tokens == 0
    assert starts[1].num_computed_tokens > 0
    assert driver.finished[key].num_cached_tokens == 0
    assert positions(driver, key)[:12] == list(range(1, 13))


def test_a_request_preempted_amid_its_scored_prompt_computes_all_of_it_again() -> None:
    driver = Driver(
        num_blocks=9,
        max_model_len=32,
        max_num_batched_tokens=9,
        cache={"preempt_threshold": 1.0, "watermark": 0.0},
    )
    driver.add("old", prompt_of(4, 50), max_tokens=20)
    driver.step()
    key = driver.add("young", prompt_of(30), max_tokens=2, sampling={"prompt_logprobs": 0})
    driver.run()
    starts = [
        start.num_computed_tokens
        for plan in driver.plans
        for start in plan.added
        if start.request_id == "young"
    ]
    assert len(starts) > 1
    assert set(starts) == {0}
    check_scores(driver, key, prompt_of(30), (0, None))


def test_no_connector_is_asked_for_a_prompt_that_is_to_be_scored() -> None:
    driver = Driver(connector=AdversarialConnector(match=has_stored({"scored": 8})))
    key = driver.add("scored", prompt_of(13), sampling={"prompt_logprobs": 0})
    driver.run()
    assert driver.plans[0].added[0].num_computed_tokens == 0
    check_scores(driver, key, prompt_of(13), (0, None))


def test_a_session_scores_each_output_and_its_new_prompt() -> None:
    driver = Driver()
    key = driver.add("s", prompt_of(6), max_tokens=3, resumable=True, sampling={"logprobs": 0})
    driver.steps(8)
    driver.continue_session(key, prompt_of(4, 40), max_tokens=2, resumable=False)
    driver.run()
    assert positions(driver, key) == [6, 7, 8]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_entries_of_a_preempted_request_are_delivered_and_of_an_aborted_one_dropped(
    steps_in_flight: int,
) -> None:
    driver = pressed(
        max_steps_in_flight=steps_in_flight, cache={"preempt_threshold": 1.0, "watermark": 0.0}
    )
    old = driver.add("old", prompt_of(13), max_tokens=15, sampling={"logprobs": 1})
    young = driver.add("young", prompt_of(9, 50), max_tokens=15, sampling={"logprobs": 1})
    gone = driver.add("gone", prompt_of(3, 80), sampling={"logprobs": 1, "prompt_logprobs": 1})
    driver.plan()
    assert driver.scheduled.keys() == {"old", "young", "gone"}
    driver.abort(gone)
    driver.run()
    assert driver.finished[young].num_preemptions > 0
    assert driver.scored[gone] == []
    check_scores(driver, old, prompt_of(13), (None, 1))
    check_scores(driver, young, prompt_of(9, 50), (None, 1))


def test_entries_of_a_plan_that_a_rewound_row_left_are_dropped() -> None:
    driver = Driver(max_steps_in_flight=2)
    bad = driver.add("bad", prompt_of(9), max_tokens=9)
    driver.plan()
    key = driver.add("hit", prompt_of(13), max_tokens=5, sampling={"logprobs": 0})
    driver.plan()
    driver.answer(nan_rows=[driver.requests["bad"].row])
    driver.run()
    assert driver.scheduler.make_stats().num_rewinds == 1
    assert driver.reason(bad) is FinishReason.ERROR
    check_scores(driver, key, prompt_of(13), (None, 0))


def test_tokens_after_the_one_that_stops_are_cut() -> None:
    stop_at = 3
    driver = Driver(
        num_speculative_tokens=3,
        sample=lambda name, position: EOS if position == stop_at else 11,
        draft=lambda name, position: [EOS if position + i == stop_at else 11 for i in range(3)],
    )
    key = driver.add("r", prompt_of(5), sampling={"logprobs": 0})
    driver.run()
    assert driver.received[key] == [11, 11, 11, EOS]
    check_scores(driver, key, prompt_of(5), (None, 0))


def one(**columns: list[int]) -> TokenLogprobs:
    """One good entry for the first answer of the test below, with some columns replaced."""
    good = token_logprobs([(0, 5, 20, 1)])
    return msgspec.structs.replace(
        good, **{name: int32_array(values) for name, values in columns.items()}
    )


@pytest.mark.parametrize(
    ("entries", "flaw"),
    [
        (one(positions=[5, 6]), "differ in length"),
        (one(token_ids=[20]), "differ in length"),
        (one(owners=[1]), "of a row that requested none"),
        (one(owners=[7]), "of a row that requested none"),
        (one(owners=[-1]), "of a row that requested none"),
        (one(token_ids=[20, 100]), r"outside 0\.\.99"),
        (one(token_ids=[-1, 3]), r"outside 0\.\.99"),
        (token_logprobs([(0, 5, 20, 2)]), "more or fewer tokens"),
        (token_logprobs([(0, 4, 20, 1)]), "more or fewer tokens"),  # no prompt token was asked for
        (token_logprobs([(0, 6, 20, 1)]), "of positions that it did not compute"),
    ],
)
def test_malformed_entries_fit_no_plan_and_change_nothing(
    entries: TokenLogprobs, flaw: str
) -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5), sampling={"logprobs": 1})
    driver.add("plain", prompt_of(5, 40))
    driver.plan()
    answer = ModelRunnerOutput(1, 1, int32_array([9, 9]), logprobs=entries)
    with pytest.raises(InvalidOutput, match=flaw):
        driver.scheduler.update_from_output(answer, driver.now)
    driver.run()
    check_scores(driver, key, prompt_of(5), (None, 1))


def test_entries_that_no_request_asked_for_fit_no_plan() -> None:
    driver = Driver()
    driver.add("r", prompt_of(5))
    driver.plan()
    answer = ModelRunnerOutput(1, 1, int32_array([9]), logprobs=token_logprobs([(0, 5, 9, 0)]))
    with pytest.raises(InvalidOutput, match="of rows that requested none"):
        driver.scheduler.update_from_output(answer, driver.now)


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        ({"logit_bias": {5: 1.0, 100: 1.0}}, "logit_bias"),
        ({"bad_words_token_ids": ((5,), (7, 100))}, "bad_words_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_rejected_with_the_name_of_their_setting(
    sampling: dict[str, Any], name: str
) -> None:
    driver = Driver()
    key = driver.add("r", prompt_of(5), sampling=sampling)
    assert driver.reason(key) is FinishReason.ERROR
    assert driver.finished[key].message == f"a token id in {name} is outside 0..99"


def test_an_embedded_prompt_has_no_tokens_to_score() -> None:
    driver = Driver()
    embeds = PromptEmbeds(np.zeros(5 * 4, np.uint8), 1, "float32")
    key = driver.add("r", prompt_of(5), prompt_embeds=embeds, sampling={"prompt_logprobs": 0})
    assert "prompt_logprobs" in (driver.finished[key].message or "")


class WatchingConnector(AdversarialConnector):
    """Takes what the clients would get at each hook of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[int], EngineOutputs | None]] = []

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        super().request_finished(request, block_ids)
        outputs = dict(self.driver.scheduler.take_outputs())
        self.seen.append((request.request_id, request.token_ids.tolist(), outputs.get(0)))
        return FinishAction()

    def update_connector_output(self, output: ConnectorOutput) -> None:
        super().update_connector_output(output)
        outputs = dict(self.driver.scheduler.take_outputs())
        self.seen.append(("connector", [], outputs.get(0)))


@pytest.mark.req("SCH-23")
def test_an_answer_brings_tokens_and_scores_then_ends_then_outputs_then_the_connectors_turn() -> (
    None
):
    connector, compiler = WatchingConnector(), FakeCompiler({"all"})
    driver = connector.driver = Driver(
        connector=connector,
        grammars=compiler,
        max_num_batched_tokens=14,
        num_speculative_tokens=2,
        sample=lambda name, position: (
            EOS if (name, position) == ("stops", 2) else expected_output(name, position + 1)[-1]
        ),
        draft=lambda name, position: (
            [expected_output(name, position + 1)[-1], EOS] if name == "stops" else [5]
        ),
    )
    stops = driver.add("stops", prompt_of(5), sampling={"logprobs": 0})
    masked = driver.add("masked", prompt_of(5, 40), structured_output=grammar_for("masked"))
    driver.plan()
    driver.answer(with_drafts=True)
    long = driver.add("long", prompt_of(30, 60), sampling={"prompt_logprobs": 0})
    driver.plan()
    connector.seen.clear()
    handles = {key: key[1] for key in (stops, masked, long)}
    driver.execute()
    step = driver.unanswered[0]
    step.output = msgspec.structs.replace(step.output, connector_metadata=b"from the worker half")
    driver.answer()
    (ended, tokens, before), (last, _, after) = connector.seen
    # Accept and reject, append, score: `stops` got two drafts accepted, of which the second ends
    # it, and the third token is cut; `masked` had its draft rejected; `long` is amid its prompt.
    first, second = expected_output("stops", 2)
    assert (ended, tokens) == ("stops", [*prompt_of(5), first, second, EOS])
    assert compiler.grammars["masked"].tokens == expected_output("masked", 2)
    assert before is not None
    assert before.logprobs is not None
    assert not before.finished
    by_handle = list(zip(before.handles.tolist(), before.tokens.tolist(), strict=True))
    assert [token for handle, token in by_handle if handle == handles[stops]] == [second, EOS]
    assert [token for handle, token in by_handle if handle == handles[masked]] == (
        expected_output("masked", 2)[1:]
    )
    scored = list(
        zip(before.logprobs.owners.tolist(), before.logprobs.positions.tolist(), strict=True)
    )
    assert [position for handle, position in scored if handle == handles[stops]] == [6, 7]
    chunk = driver.plans[-1].scheduled_tokens.tolist()[-1]
    assert [position for handle, position in scored if handle == handles[long]] == list(
        range(1, chunk + 1)
    )
    # Then the clients get the ends; the connector's hook comes last.
    assert last == "connector"
    assert after is not None
    assert [(end.handle, end.reason) for end in after.finished] == [
        (handles[stops], FinishReason.STOPPED)
    ]
