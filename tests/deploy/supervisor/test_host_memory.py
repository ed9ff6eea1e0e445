"""Weights that do not fit the free memory are rejected before a worker starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from longshore.deploy.cli.options import EngineOptions
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.supervisor.engine_config import EnginePlan, plan_engine
from longshore.deploy.supervisor.host_memory import check_host_memory, weight_file_bytes
from longshore.protocol.errors import ConfigError

SIZE = (DEMO_MODEL_DIR / "model.safetensors").stat().st_size


@pytest.fixture
def plan(tmp_path: Path) -> EnginePlan:
    options = EngineOptions(device="cpu", state_dir=tmp_path / "state")
    return plan_engine(options, read_model_folder(DEMO_MODEL_DIR))


def test_as_many_copies_as_fit_are_accepted(plan: EnginePlan) -> None:
    check_host_memory(plan, 3, lambda: 3 * SIZE)
    with pytest.raises(ConfigError, match=r"3 copies of the weights of demo_model in .* need"):
        check_host_memory(plan, 3, lambda: 3 * SIZE - 1)
    check_host_memory(replace(plan, device="cuda"), 3, lambda: 0)


def test_the_weights_count_in_the_dtype_in_which_they_are_computed(plan: EnginePlan) -> None:
    stored = msgspec.structs.replace(plan.model, checkpoint_dtype="bfloat16")
    identity = msgspec.structs.replace(plan.identity, dtype="float32")
    plan = replace(plan, model=stored, identity=identity)
    check_host_memory(plan, 1, lambda: 2 * SIZE)
    with pytest.raises(ConfigError, match="in float32 need"):
        check_host_memory(plan, 1, lambda: 2 * SIZE - 1)


def test_shards_are_added_up_and_files_that_no_index_names_are_not(tmp_path: Path) -> None:
    for name, size in (("a", 3), ("b", 4), ("other", 100)):
        (tmp_path / f"{name}.safetensors").write_bytes(b"x" * size)
    names = {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert weight_file_bytes(tmp_path) == 7
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "model.safetensors")
    assert weight_file_bytes(tmp_path) == 3
    index.write_text("[]")
    (tmp_path / "model.safetensors").unlink()
    assert weight_file_bytes(tmp_path) == 0
