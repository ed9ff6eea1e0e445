"""docs/coming_from_vllm.md says what the code does with each name of vLLM."""

import re
from collections.abc import Mapping
from dataclasses import fields

import pytest

import longshore
from longshore import AsyncEngineArgs, AsyncLLM
from longshore.deploy.gateway.api.requests import ChatRequest
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.llm import async_llm
from longshore.deploy.llm.llm import LLM, NOT_METHODS
from longshore.deploy.requests.refused import REFUSED
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.settings.vllm_names import (
    CONFIGS,
    REJECTED,
    RENAMED,
    RENAMED_VALUES,
    WITHOUT_EFFECT,
)
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "coming_from_vllm.md").read_text()


def rows_after(text: str) -> dict[str, str]:
    """The rows of the first table after `text`."""
    table = PAGE.split(text, 1)[1].split("|---|---|\n", 1)[1].split("\n\n", 1)[0]
    rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    return {name.strip("`"): meaning for name, meaning in rows}


def names_after(text: str) -> list[str]:
    paragraph = PAGE.split(text, 1)[1].strip().split("\n\n", 1)[0]
    return re.findall(r"`(\w+)`", paragraph)


@pytest.mark.parametrize(
    ("heading", "rows"),
    [
        ("These have another name.", {name: f"`{ours}`" for name, ours in RENAMED.items()}),
        (
            "So are these values:",
            {f"{name}={theirs}": f"`{name}={o}`" for (name, theirs), o in RENAMED_VALUES.items()},
        ),
        (
            "These objects are translated",
            {
                f"{name}.{field}": f"`{o}`"
                for name, of in CONFIGS.items()
                for field, o in of.items()
            },
        ),
        ("These are accepted with a warning", WITHOUT_EFFECT),
        ("These are rejected", {name: advice for name, (_, advice) in REJECTED.items()}),
        (
            "These settings of `SamplingParams` are rejected",
            {name: advice for name, (_, advice, _) in REFUSED["SamplingParams"].items()},
        ),
        (
            "These settings of `PoolingParams` are rejected",
            {name: advice for name, (_, advice, _) in REFUSED["PoolingParams"].items()},
        ),
        (
            "These settings of `BeamSearchParams` are rejected",
            {name: advice for name, (_, advice, _) in REFUSED["BeamSearchParams"].items()},
        ),
        ("These attributes of `LLM`", NOT_METHODS),
        ("These attributes of `AsyncLLM`", async_llm.NOT_METHODS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_table_has_the_names_and_answers_of_the_code(
    heading: str, rows: Mapping[str, str]
) -> None:
    assert rows_after(heading) == dict(rows)


def test_settings_of_the_same_name_exist() -> None:
    names = names_after("These settings have vLLM's name and meaning:")
    assert len(names) > 20
    assert set(names) <= {setting.name for setting in fields(ServeOptions)}


def test_settings_with_a_value_of_another_name_are_in_one_of_the_lists() -> None:
    named = {*names_after("These settings have vLLM's name and meaning:"), *RENAMED.values()}
    assert {name for name, _ in RENAMED_VALUES} <= named


def test_request_fields_of_the_same_name_exist() -> None:
    names = names_after("These fields beyond the OpenAI API have vLLM's name and meaning:")
    assert len(names) > 10
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert set(names) <= known


def test_names_to_import_exist() -> None:
    for names in re.findall(r"`from longshore import ([\w, ]+)`", PAGE):
        assert all(hasattr(longshore, name) for name in names.split(", "))


def test_methods_on_the_page_exist() -> None:
    for name in re.findall(r"`llm\.(\w+)", PAGE):
        assert callable(getattr(LLM, name))
    assert callable(AsyncLLM.from_engine_args)
    assert AsyncEngineArgs("model", seed=1).settings == {"seed": 1}
