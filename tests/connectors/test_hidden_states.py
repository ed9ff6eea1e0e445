"""hidden_states: what the files contain, beside transformers, and what the answers say."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from longshore import LLM, SamplingParams
from longshore.connectors.base import (
    AskLater,
    ConnectorConfig,
    ConnectorOutput,
    Matched,
    RequestView,
    StepView,
)
from longshore.connectors.hidden_states import worker as hidden_states
from longshore.connectors.hidden_states.scheduler import Begin, Commands, HiddenStatesConnector
from longshore.connectors.registry import load_scheduler_connector
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from tests.connectors.engine import Answer, Engine, prompts_of

PROMPTS = prompts_of(100, 37, 1, 150, 33)
HIDDEN_SIZE = 64

ModelOf = Callable[[str], tuple[Path, Any]]


def engine_of(model: Path, folder: Path, **settings: Any) -> Engine:
    options = {"path": str(folder)} | settings.pop("options", {})
    return Engine(model, "hidden_states", options, **settings)


def reference(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """(num_tokens, hidden_size) of transformers: what its final norm gets."""
    states: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: states.append(args[0][0]))
    with torch.inference_mode():
        model(torch.tensor([list(token_ids)]))
    hook.remove()
    return states[0]


def params_of(answer: Answer) -> dict[str, Any]:
    assert answer.end is not None
    return answer.end.kv_transfer_params or {}


def check_file(
    engine: Engine, answer: Answer, model: Any, token_ids: Sequence[int], path: Path
) -> None:
    """The answer names the file, which appears soon, with the states of these tokens."""
    params = params_of(answer)
    assert params == {
        "hidden_states_path": str(path),
        "hidden_states_shape": [len(token_ids), HIDDEN_SIZE],
    }
    engine.until(path.exists)
    saved = load_file(path)
    assert saved["token_ids"].tolist() == list(token_ids)
    torch.testing.assert_close(
        saved["hidden_states"], reference(model, token_ids), rtol=1e-4, atol=1e-3
    )


@pytest.mark.req("CRG-02")
@pytest.mark.parametrize("kind", ["full", "windows"])
def test_files_have_the_states_of_transformers(
    kind: str, model_of: ModelOf, tmp_path: Path
) -> None:
    """Prompts in several chunks, also of a prompt that is cached."""
    path, model = model_of(kind)
    folder = tmp_path / "states"
    ask = {"save_hidden_states": True}
    with Engine(path) as plain:
        wanted = plain.run(*PROMPTS)
    with engine_of(path, folder, max_num_batched_tokens=32) as engine:
        unsaved = engine.run(PROMPTS[0])
        assert unsaved == wanted[:1]
        answers = [engine.add(prompt, kv_transfer_params=ask) for prompt in PROMPTS]
        engine.wait(*answers)
        assert [answer.token_ids for answer in answers] == wanted
        for index, (answer, prompt) in enumerate(zip(answers, PROMPTS, strict=True), 1):
            assert answer.end is not None
            assert answer.end.num_cached_tokens == 0
            check_file(engine, answer, model, prompt, folder / f"r{index}.safetensors")
        assert engine.stats.num_free_blocks == engine.stats.num_blocks - 1
    assert len(list(folder.iterdir())) == len(PROMPTS)


@pytest.mark.req("CRG-02")
def test_output_tokens_are_saved_on_request_and_under_a_name(
    model_of: ModelOf, tmp_path: Path
) -> None:
    path, model = model_of("full")
    asks = [
        {"save_hidden_states": "../first", "include_output_tokens": True},
        {"save_hidden_states": "second/é", "include_output_tokens": True},
    ]
    names = ["..%2Ffirst.safetensors", "second%2F%C3%A9.safetensors"]
    with engine_of(path, tmp_path) as engine:
        answers = [
            engine.add(prompt, kv_transfer_params=ask, max_tokens=20)
            for prompt, ask in zip(PROMPTS, asks, strict=False)
        ]
        engine.wait(*answers)
        for answer, prompt, name in zip(answers, PROMPTS, names, strict=False):
            token_ids = prompt + answer.token_ids[:-1]
            check_file(engine, answer, model, token_ids, tmp_path / name)


def test_llm_gives_the_answer_and_closes_when_files_are_written(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "num_blocks": 100}
    options = json.dumps({"path": str(tmp_path), "requests": "all"})
    with LLM(
        DEMO_MODEL_DIR,
        in_process=True,
        kv_connector="hidden_states",
        kv_connector_config=options,
        **settings,
    ) as llm:
        (output,) = llm.generate("What?", SamplingParams(max_tokens=2), use_tqdm=False)
    params = output.kv_transfer_params
    assert params is not None
    states = load_file(params["hidden_states_path"])["hidden_states"]
    assert list(states.shape) == params["hidden_states_shape"]
    assert len(states) == len(output.prompt_token_ids)


def test_preempted_requests_are_saved_whole(model_of: ModelOf, tmp_path: Path) -> None:
    path, model = model_of("full")
    prompts = prompts_of(100, 90, 70, 95)
    options = {"requests": "all"}
    output = {"include_output_tokens": True}
    with engine_of(path, tmp_path, options=options, num_blocks=24) as engine:
        answers = [
            engine.add(prompt, kv_transfer_params=output, max_tokens=60) for prompt in prompts
        ]
        engine.wait(*answers)
        assert engine.stats.num_preemptions > 0
        for index, (answer, prompt) in enumerate(zip(answers, prompts, strict=True)):
            token_ids = prompt + answer.token_ids[:-1]
            check_file(engine, answer, model, token_ids, tmp_path / f"r{index}.safetensors")


def test_only_requests_that_ask_are_saved_and_they_can_decline(
    model_of: ModelOf, tmp_path: Path
) -> None:
    path, _ = model_of("full")
    with engine_of(path, tmp_path) as engine:
        answer = engine.add(PROMPTS[0])
        engine.wait(answer)
        assert params_of(answer) == {}
    with engine_of(path, tmp_path, options={"requests": "all"}) as engine:
        declined = engine.add(PROMPTS[0], kv_transfer_params={"save_hidden_states": False})
        taken = engine.add(PROMPTS[1])
        engine.wait(declined, taken)
        assert params_of(declined) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["r1.safetensors"]


def test_requests_that_cannot_be_saved_are_told_why(model_of: ModelOf, tmp_path: Path) -> None:
    path, _ = model_of("full")
    asks: list[tuple[dict[str, Any], str]] = [
        ({"save_hidden_states": 3}, "save_hidden_states=3 is neither true nor a name"),
        ({"save_hidden_states": ""}, "neither true nor a name"),
        ({"save_hidden_states": "x" * 201}, "the name has more than 200 bytes"),
        ({"save_hidden_states": True}, "100 tokens are more than max_tokens=50"),
    ]
    with engine_of(path, tmp_path, options={"max_tokens": 50}) as engine:
        for ask, message in asks:
            answer = engine.add(PROMPTS[0], kv_transfer_params=ask)
            engine.wait(answer)
            assert message in params_of(answer)["hidden_states_error"]
        too_long = {"save_hidden_states": True, "include_output_tokens": True}
        answer = engine.add(PROMPTS[1], max_tokens=15, kv_transfer_params=too_long)
        engine.wait(answer)
        assert "51 tokens are more than" in params_of(answer)["hidden_states_error"]
        aborted = engine.add(PROMPTS[1], kv_transfer_params=asks[3][0])
        engine.abort(aborted)
        engine.wait(engine.add(PROMPTS[1]))
        assert engine.stats.num_free_blocks == engine.stats.num_blocks - 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    model_of: ModelOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = model_of("full")
    folder = tmp_path / "states"
    with engine_of(path, folder, options={"requests": "all"}) as engine:
        (folder / "r0.safetensors").mkdir()  # a file cannot replace it
        engine.wait(engine.add(PROMPTS[0]))
    assert "hidden states of request r0 are lost" in caplog.text
    assert [each.name for each in folder.iterdir()] == ["r0.safetensors"]


def test_states_without_host_memory_are_lost_and_the_request_is_answered(
    model_of: ModelOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def lack(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError("no byte is left")

    path, _ = model_of("full")
    with Engine(path) as plain:
        (wanted,) = plain.run(PROMPTS[0])
    with engine_of(path, tmp_path / "states", options={"requests": "all"}) as engine:
        without = SimpleNamespace(empty=lack, from_numpy=torch.from_numpy)
        monkeypatch.setattr(hidden_states, "torch", without)
        answer = engine.add(PROMPTS[0])
        engine.wait(answer)
    assert answer.token_ids == wanted
    assert "hidden states of 100 tokens are lost: no memory: no byte is left" in caplog.text
    assert not list((tmp_path / "states").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.req("CRG-02")
def test_one_of_several_ranks_writes(model_of: ModelOf, tmp_path: Path) -> None:
    path, model = model_of("full")
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "in_process": False}
    with engine_of(path, tmp_path, **ranks) as engine:
        answers = [
            engine.add(prompt, kv_transfer_params={"save_hidden_states": True})
            for prompt in PROMPTS
        ]
        engine.wait(*answers)
        for index, (answer, prompt) in enumerate(zip(answers, PROMPTS, strict=True)):
            check_file(engine, answer, model, prompt, tmp_path / f"r{index}.safetensors")
    assert len(list(tmp_path.iterdir())) == len(PROMPTS)


# The scheduler half


def view(num_tokens: int, *, num_prompt: int = 5, **fields: Any) -> RequestView:
    params = {"save_hidden_states": True, "include_output_tokens": True}
    tokens = int32_array(list(range(num_tokens)))
    return RequestView("r", tokens, num_prompt, (), kv_transfer_params=params, **fields)


def test_a_request_waits_until_a_worker_has_named_the_size_and_begins_again_with_new_workers(
    tmp_path: Path,
) -> None:
    connector = load_scheduler_connector(
        "hidden_states", ConnectorConfig({"path": str(tmp_path), "max_tokens": 9})
    )
    assert isinstance(connector, HiddenStatesConnector)

    def commands() -> Commands:
        return msgspec.msgpack.decode(connector.build_connector_meta(StepView(1, 0)), type=Commands)

    assert connector.build_connector_meta(StepView(1, 0)) == b""
    for epoch in (1, 2):
        if epoch == 1:
            connector.on_new_request(view(5))
            assert connector.skips_prefix_cache(view(5))
        else:
            connector.on_new_epoch(epoch)
        assert connector.get_num_new_matched_tokens(view(5), 0) == AskLater()
        connector.update_connector_output(ConnectorOutput(metadata=(msgspec.msgpack.encode(64),)))
        assert connector.get_num_new_matched_tokens(view(5), 0) == Matched(0)
        assert commands() == Commands([Begin("r", 9)])
        assert commands() == Commands(), "the hooks of a step need metadata"
    action = connector.request_finished(view(8), ())
    assert action.params == {
        "hidden_states_path": str(tmp_path / "r.safetensors"),
        "hidden_states_shape": [7, 64],
    }
    assert connector.has_pending_work
    (save,) = commands().saves
    assert save.token_ids == bytes(view(7).token_ids)
    assert not connector.has_pending_work
    assert connector.build_connector_meta(StepView(1, 0)) == b""


@pytest.mark.parametrize("num_tokens", [5, 7], ids=["new", "resubmitted"])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_ends_before_it_is_computed_is_discarded(
    num_tokens: int, has_begun: bool, tmp_path: Path
) -> None:
    connector = load_scheduler_connector("hidden_states", ConnectorConfig({"path": str(tmp_path)}))
    connector.on_new_request(view(num_tokens))
    if has_begun:
        assert connector.build_connector_meta(StepView(1, 0))
    action = connector.request_finished(view(num_tokens if not has_begun else 5), ())
    message = "the request ended before its first output token"
    assert action.params == {"hidden_states_error": message}
    data = connector.build_connector_meta(StepView(1, 0))
    if has_begun:
        assert msgspec.msgpack.decode(data, type=Commands) == Commands(discarded=["r"])
    else:
        assert data == b""


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs 'path', a text such as '/var/tmp/states'; it is None"),
        ({"path": 3}, "needs 'path', a text such as"),
        ({"path": "x", "requests": "some"}, "needs 'requests' to be 'asking' or 'all'"),
        ({"path": "x", "max_tokens": 0}, "'max_tokens' to be a whole number of at least 1"),
        ({"path": "x", "pat": 1}, "hidden_states has no option 'pat'"),
    ],
)
def test_a_wrong_option_is_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_scheduler_connector("hidden_states", ConnectorConfig(options))
