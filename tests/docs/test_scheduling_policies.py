"""The example of docs/scheduling_policies.md, installed as a reader would install it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore import LLM, SamplingParams
from longshore.scheduler.queue.outside_policies import CheckedPolicy, load_policy
from longshore.scheduler.queue.policies import POLICIES, OrderedPolicy, SchedulingPolicy
from tests.conftest import ROOT
from tests.docs.installing import installed_example
from tests.harness.driver import Driver
from tests.harness.tokens import prompt_of
from tests.models import make_tiny_llama

PAGE = ROOT / "docs" / "scheduling_policies.md"


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    with installed_example(PAGE, tmp_path) as folder:
        yield folder


def admission_order(driver: Driver) -> list[str]:
    return [start.request_id for plan in driver.plans for start in plan.added if not start.resumed]


def test_example_is_found_by_its_entry_point_and_by_its_path(installed: Path) -> None:
    for name in ("shortest-first", "shortest_first:ShortestFirst"):
        assert isinstance(load_policy(name), CheckedPolicy)
    module = sys.modules["shortest_first"]
    assert module.__file__ == str(installed / "shortest_first.py")
    assert issubclass(module.ShortestFirst, OrderedPolicy)


def aged_slowly(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """One request runs at a time, and a second of waiting is worth four tokens. A second passes
    with each new request and with each step."""
    driver = Driver(policy="shortest-first", max_num_seqs=1)
    monkeypatch.setattr(sys.modules["shortest_first"], "TOKENS_PER_SECOND", 4.0)
    return driver


def test_example_serves_short_prompts_first_and_lets_long_ones_age(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = aged_slowly(monkeypatch)
    for name, length in (("long", 40), ("middle", 30), ("short", 8), ("shorter", 2)):
        driver.add(name, prompt_of(length), max_tokens=1)
    driver.steps(2)
    driver.add("shorter than middle but late", prompt_of(20), max_tokens=1)
    driver.run()
    assert admission_order(driver) == [
        "shorter", "short", "middle", "long", "shorter than middle but late"
    ]  # fmt: skip


def test_no_long_prompt_starves_under_the_example(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = aged_slowly(monkeypatch)
    driver.add("long", prompt_of(60), max_tokens=1)
    for index in range(20):  # one more short prompt per step, as many as can be served
        driver.add(f"short {index}", prompt_of(2, index), max_tokens=1)
        driver.step()
    order = admission_order(driver)
    assert order.index("long") == 7  # 60 tokens are worth 15 seconds of waiting
    driver.run()


def test_example_preempts_and_all_requests_finish(installed: Path) -> None:
    driver = Driver(policy="shortest-first", num_blocks=9, max_model_len=32)
    for index, length in enumerate((14, 9, 4, 12, 6)):
        driver.add(f"r{index}", prompt_of(length, 20 * index), max_tokens=10)
    driver.run()
    assert len(driver.finished) == 5
    assert sum(end.num_preemptions for end in driver.finished.values()) > 0


def test_page_names_every_built_in_policy_and_everything_a_policy_may_have() -> None:
    page = PAGE.read_text()
    members = {name for name in vars(SchedulingPolicy) if not name.startswith("_")}
    assert {name for name in members if not re.search(rf"^\| `{name}\b", page, re.M)} == set()
    assert {name for name in POLICIES if f"| `{name}` |" not in page} == set()


def test_example_serves_in_a_scheduler_process_of_its_own(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model_dir = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(model_dir)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(
        model_dir, device="cpu", num_blocks=64, threads=1, scheduling_policy="shortest-first"
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": [7] * length} for length in (9, 4)], params, use_tqdm=False
        )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 2]
