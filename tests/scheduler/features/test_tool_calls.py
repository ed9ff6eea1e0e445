"""The names of tools in a model's output, and how long the KV of a turn is worth keeping."""

import logging
import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.scheduler.features.tool_calls import (
    DEFAULT_TTL_S,
    MAX_CALLS_OF_TOOL,
    MAX_JOBS,
    MAX_TOOLS,
    MIN_CALLS,
    ToolCallEstimator,
    choose_ttl,
    load_decoder,
    tool_name,
)


@pytest.mark.req("CTM-04")
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"name": "Oslo"}}\n</tool_call>',
            "get_weather",
        ),
        ('{"type": "function", "function": {"name":"search","arguments":"{}"}}', "search"),
        ("<function=edit_file>\n<parameter=path>a.py</parameter>", "edit_file"),
        ("<|start|>assistant to=functions.browse<|channel|>commentary", "browse"),
        ('<invoke name="search">\n<parameter name="q">', "search"),
        ("<tool_call>search\n<arg_key>q</arg_key>", "search"),
        ("<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{}", "search"),
        ("<|tool_call>call:search{q:1}", "search"),
        ("Look at it.\n```bash\ncd /repo && pytest -q tests\n```", "pytest"),
        ("```sh\nls -la\n```\nthen\n```bash\ngit diff\n```", "git"),
        ('{"name": "first", "arguments": {}} {"name": "second", "arguments": {}}', "second"),
        ("The answer is 42.", None),
        ('His "name": "Bob" is known.', None),
        pytest.param("```bash" + "\n" * 200_000 + "(", None, id="in linear time"),
    ],
)
def test_the_tool_is_the_last_one_that_the_output_calls(text: str, name: str | None) -> None:
    assert tool_name(text) == name


def learn(calls: ToolCallEstimator, gaps: list[float], tool: int = 1, job: str = "learns") -> None:
    for gap in gaps:
        calls.turn_ended(job, [tool], 100.0)
        calls.turn_arrived(job, 100.0 + gap)


def ttl_of(calls: ToolCallEstimator, tool: int, *, job: str = "new", saved_s: float = 1.0) -> float:
    calls.turn_ended(job, [tool], 200.0)
    return calls.predict(job, 200.0, saved_s=saved_s, share=0.01, max_ttl_s=60.0).seconds


def decode(ids: list[int]) -> str:
    return f"<function=tool{ids[-1]}>"


@pytest.mark.req("CTM-06")
def test_a_tool_of_which_nothing_is_known_gets_the_default() -> None:
    calls = ToolCallEstimator(decode)
    assert ttl_of(calls, 1) == DEFAULT_TTL_S == 10.0
    learn(calls, [2.0] * (MIN_CALLS - 1))
    assert ttl_of(calls, 1) == 10.0
    limited = calls.predict("new", 200.0, saved_s=1.0, share=0.01, max_ttl_s=4.0)
    assert limited.seconds == 4.0


def test_turns_that_ran_together_do_not_spoil_the_gaps_that_follow() -> None:
    calls = ToolCallEstimator(decode)
    for now in range(0, 300, 30):
        calls.turn_ended("job", [1], now)
        if now == 0:
            calls.turn_ended("job", [1], now)  # of a request with n = 2: one turn follows
        calls.turn_arrived("job", now + 1.0)
    calls.turn_ended("job", [1], 300.0)
    ttl = calls.predict("job", 300.0, saved_s=1.0, share=0.01, max_ttl_s=60.0)
    assert ttl == (1.25, 1.0)


@pytest.mark.req("CTM-04")
def test_an_arrival_ends_the_gap_of_the_newest_turn() -> None:
    calls = ToolCallEstimator(decode)
    for now in range(0, 300, 30):
        calls.turn_ended("job", [1], now)
        calls.turn_ended("job", [1], now + 20.0)
        calls.turn_arrived("job", now + 21.0)
    calls.turn_ended("job", [1], 300.0)
    ttl = calls.predict("job", 300.0, saved_s=1.0, share=0.01, max_ttl_s=60.0)
    assert ttl == (1.25, 1.0)


@pytest.mark.req("CTM-04")
def test_gaps_are_learned_by_tool_and_by_job() -> None:
    calls = ToolCallEstimator(decode)
    learn(calls, [2.0] * 20, tool=1)
    learn(calls, [40.0] * 20, tool=2)
    assert ttl_of(calls, 1) == pytest.approx(2.5)
    assert ttl_of(calls, 2) == pytest.approx(50.0)
    assert ttl_of(calls, 3) == pytest.approx(50.0)  # unknown: from all tools
    learn(calls, [8.0] * MIN_CALLS, tool=1, job="slow")
    assert ttl_of(calls, 1, job="slow", saved_s=0.1) == pytest.approx(10.0)
    learn(calls, [2.0] * 80, tool=1)
    assert ttl_of(calls, 1, saved_s=0.04) == pytest.approx(2.5)


@pytest.mark.req("CTM-03", "ERR-35")
def test_a_gap_is_bridged_if_that_costs_less_than_the_turn_saves() -> None:
    gaps = [2.0] * 9 + [30.0]
    # The tenth turn saves 0.02 s or 0.04 s per turn. Waiting for it costs a hundredth of the engine
    # for another 27.5 s once in ten turns, which is 0.0275 s per turn.
    assert choose_ttl(gaps, saved_s=0.2, share=0.01, max_ttl_s=60).seconds == pytest.approx(2.5)
    assert choose_ttl(gaps, saved_s=0.4, share=0.01, max_ttl_s=60).seconds == pytest.approx(37.5)
    assert choose_ttl(gaps, saved_s=0.01, share=0.01, max_ttl_s=60).seconds == 0.0
    # No fixed limit of 2 s: long gaps are bridged, up to the configured limit.
    long = [9.0] * 10
    assert choose_ttl(long, saved_s=1.0, share=0.01, max_ttl_s=60).seconds == pytest.approx(11.25)
    assert choose_ttl(long, saved_s=1.0, share=0.01, max_ttl_s=5).seconds == 0.0


def test_the_chosen_time_is_the_best_of_all_candidates() -> None:
    gaps = [0.3, 0.4, 1.0, 1.1, 4.0, 9.0, 25.0, math.inf, math.inf]
    for saved_s in (0.05, 0.2, 1.0, 5.0):

        def gain(ttl_s: float, saved_s: float = saved_s) -> float:
            in_time = sum(gap <= ttl_s for gap in gaps) / len(gaps)
            held_s = sum(min(gap, ttl_s) for gap in gaps) / len(gaps)
            return in_time * saved_s - 0.05 * held_s

        chosen = choose_ttl(gaps, saved_s=saved_s, share=0.05, max_ttl_s=60)
        candidates = [0.0, *(gap * 1.25 for gap in gaps if gap < 60)]
        assert chosen.seconds == max(candidates, key=gain)
        assert chosen.probability == sum(gap <= chosen.seconds for gap in gaps) / len(gaps)


@pytest.mark.req("CTM-03")
def test_a_tool_that_always_takes_longer_than_the_limit_gets_no_time() -> None:
    calls = ToolCallEstimator(decode)
    learn(calls, [70.0] * 10)
    assert ttl_of(calls, 1, saved_s=1e9) == 0.0
    calls.turn_ended("new", [1], 200.0)
    assert calls.predict("new", 200.0, saved_s=None, share=0.01, max_ttl_s=60.0).seconds == 0.0


def test_turns_that_never_come_count_as_infinite_gaps() -> None:
    calls = ToolCallEstimator(decode)
    learn(calls, [2.0] * 10)
    for number in range(100):
        calls.turn_ended(f"gone {number}", [1], 100.0)
    assert ttl_of(calls, 1, saved_s=0.1) == 0.0
    calls = ToolCallEstimator(decode)
    learn(calls, [2.0] * 10)
    for number in range(100):
        calls.turn_ended(f"not yet back {number}", [1], 199.0)
    assert ttl_of(calls, 1, saved_s=0.1) == pytest.approx(2.5)


@pytest.mark.req("CTM-04")
def test_a_decoder_that_fails_is_reported_once_and_changes_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(ids: list[int]) -> str:
        raise RuntimeError("no tokenizer")

    calls = ToolCallEstimator(broken)
    with caplog.at_level(logging.WARNING):
        learn(calls, [3.0] * 10)
        assert ttl_of(calls, 5) == pytest.approx(3.75)
    assert len(caplog.records) == 1
    assert "could not be decoded" in caplog.text
    without = ToolCallEstimator(None)
    learn(without, [3.0] * 10)
    assert ttl_of(without, 5) == pytest.approx(3.75)


def test_the_size_of_the_estimator_is_bounded() -> None:
    calls = ToolCallEstimator(decode)
    for number in range(MAX_JOBS + 100):
        calls.turn_ended(f"job {number}", [number % (2 * MAX_TOOLS)], float(number))
    assert (len(calls._jobs), len(calls._tools)) == (MAX_JOBS, MAX_TOOLS)
    assert len(calls._calls) == MAX_CALLS_OF_TOOL


@pytest.mark.req("CTM-04")
def test_the_decoder_is_built_for_continuum_only_and_its_absence_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = DEMO_MODEL_DIR / "tokenizer.json"
    assert load_decoder("fcfs", str(file)) is None
    decode = load_decoder("continuum", str(file))
    assert decode is not None
    ids = Tokenizer.from_file(str(file)).encode("<function=search>", add_special_tokens=False).ids
    assert tool_name(decode(ids)) == "search"
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "missing.json"):
        caplog.clear()
        assert load_decoder("continuum", str(tmp_path / name)) is None
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert name in record.getMessage()
