"""Weights that do not fit the free memory are rejected before a worker starts."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import msgspec
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.supervisor import engine_plan
from longshore.deploy.supervisor.engine_plan import EnginePlan, check_host, plan_engine
from longshore.deploy.supervisor.host_memory import check_host_memory
from longshore.protocol.errors import ConfigError
from longshore.worker.loading.checkpoint import find_weights
from tests.gguf.cases import FILES
from tests.gguf.writing import changed

SIZE = 2 * sum(each.num_elements for each in find_weights(DEMO_MODEL_DIR).tensors.values())
"""Bytes in bfloat16."""


@pytest.fixture
def plan(tmp_path: Path) -> EnginePlan:
    options = EngineOptions(device="cpu", state_dir=tmp_path / "state")
    return plan_engine(options, read_model_folder(DEMO_MODEL_DIR))


def test_as_many_copies_as_fit_are_accepted(plan: EnginePlan) -> None:
    check_host_memory([plan] * 3, lambda: 3 * SIZE)
    with pytest.raises(ConfigError, match=r"3 copies of the weights of demo_model in .* need"):
        check_host_memory([plan] * 3, lambda: 3 * SIZE - 1)
    check_host_memory([replace(plan, device="cuda")] * 3, lambda: 0)


def test_weights_of_several_models_must_fit_together(plan: EnginePlan) -> None:
    identity = msgspec.structs.replace(plan.identity, dtype="float32")
    other = replace(plan, identity=identity)
    check_host_memory([plan, other, plan], lambda: 4 * SIZE)
    needed = r"2 copies of the weights of demo_model in bfloat16 \(.*\) and the weights of .* need"
    with pytest.raises(ConfigError, match=needed):
        check_host_memory([plan, other, plan], lambda: 4 * SIZE - 1)


def test_the_headers_of_the_weights_are_read_once(
    plan: EnginePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=find_weights)
    monkeypatch.setattr(engine_plan, "find_weights", read)
    check_host(plan)
    check_host_memory([plan], lambda: SIZE)
    assert read.mock_calls == [call(DEMO_MODEL_DIR)]


def test_the_weights_count_in_the_dtype_in_which_they_are_computed(plan: EnginePlan) -> None:
    plan = replace(plan, identity=msgspec.structs.replace(plan.identity, dtype="float32"))
    check_host_memory([plan], lambda: 2 * SIZE)
    with pytest.raises(ConfigError, match="in float32 need"):
        check_host_memory([plan], lambda: 2 * SIZE - 1)


def test_quantised_weights_are_counted_as_they_are_in_memory(tmp_path: Path) -> None:
    file = changed(FILES / "qwen2.gguf", tmp_path / "small.gguf", quantise=True)
    model = read_model_folder(file, tmp_path / "state")
    plan = plan_engine(EngineOptions(device="cpu", state_dir=tmp_path / "state"), model)
    needed = plan.weight_bytes
    check_host_memory([plan], lambda: needed)
    options = replace(plan.options, quantised_weights="dequantised")
    for other, available in ((plan, needed - 1), (replace(plan, options=options), needed)):
        with pytest.raises(ConfigError, match="the weights of small in bfloat16 need"):
            check_host_memory([other], lambda available=available: available)
