"""Settings of all families, read from config.json alone, in the spelling of any writer."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.families import ARCHITECTURES, read_model_config
from longshore.worker.models.rope_config import DefaultRope, LongRope
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import Checkpoint
from tests.worker.models.paged_model import PagedModel

CheckpointOf = Callable[[Case], Checkpoint]
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write_config(folder: Path, architecture: str, **settings: Any) -> Path:
    config = {"architectures": [f"{architecture}ForCausalLM"], **SHAPE, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_written_by_version_4(config: dict[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope_parameters"])
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old["torch_dtype"] = config["dtype"]
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "original_max_position_embeddings" in config:
        rope.pop("original_max_position_embeddings", None)
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope["type"] == "default" else rope
    old.pop("layer_types", None)
    return old


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_spelling_of_version_4_means_the_same(
    case: Case, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    folder = checkpoint_of(case).path
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(as_written_by_version_4(config)))
    assert read_model_config(tmp_path) == read_model_config(folder)


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_a_family_is_also_found_by_its_model_type(
    family: str, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    folder = checkpoint_of(next(case for case in CASES if case.family == family)).path
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path) == read_model_config(folder)


def test_every_family_is_checked_against_transformers() -> None:
    assert {f"{case.family}ForCausalLM" for case in CASES} == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Mistral", {"sliding_window": 128}),
        ("Mistral", {"max_position_embeddings": 8192}),  # does not say: 4,096
        ("Phi3", {"sliding_window": 128}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}),
        ("Qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_sliding_window_is_refused_by_name(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=r"sliding_(window|attention)"):
        read_model_config(write_config(tmp_path, architecture, **settings))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 256}),  # no request is longer
        ("Phi3", {"sliding_window": 262_144}),
        ("Phi3", {}),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4}),
    ],
)
def test_a_window_that_hides_nothing_is_accepted(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert read_model_config(write_config(tmp_path, architecture, **settings)).num_layers == 4


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi_3_s_names_for_longrope_mean_it(name: str, tmp_path: Path) -> None:
    settings = {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": name, **LONGROPE},
    }
    rope = read_model_config(write_config(tmp_path, "Phi3", **settings)).rope
    assert isinstance(rope, LongRope)
    assert (rope.factor, rope.original_max_position_embeddings) == (4.0, 64)


@pytest.mark.parametrize(
    ("architecture", "settings", "named"),
    [
        ("Phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 must be a part of"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be a part of"),
        ("Qwen3", {"head_dim": 15}, "head_dim=15"),
        (
            "Phi3",
            {"rope_scaling": {"type": "su", **LONGROPE, "long_factor": [2.0] * 7},
             "original_max_position_embeddings": 64},
            "long_factor=.* must be a list of 8 numbers",
        ),
        ("Phi3", {"rope_scaling": {"type": "su", **LONGROPE}}, "original_max_position_embeddings"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_key_and_value(
    architecture: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(BrokenCheckpoint, match=named):
        read_model_config(write_config(tmp_path, architecture, **settings))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Qwen2", {"partial_rotary_factor": 0.5}),
        ("Mistral", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}),
        ("Qwen3", {"num_experts": 8}),
        ("Olmo2", {"hidden_act": "gelu"}),
        ("Llama", {"logit_scale": 0.5}),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    key = list(settings)[-1].replace("rope_scaling", "partial_rotary_factor")
    with pytest.raises(UnsupportedModel, match=key):
        read_model_config(write_config(tmp_path, architecture, **settings))


def test_longrope_says_which_factors_it_chose(
    checkpoint_of: CheckpointOf, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint_of(next(c for c in CASES if c.name == "Phi-3, long factors")).path
    for max_model_len, chosen in ((64, "short"), (65, "long")):
        with caplog.at_level("INFO", logger="longshore.worker.layers.rotary"):
            PagedModel(folder, max_model_len=max_model_len)
        assert f"up to {max_model_len} tokens use the {chosen} factors" in caplog.messages[-1]


def test_settings_are_read_without_a_tensor_library(tmp_path: Path) -> None:
    folders = []
    for name in ("Llama", "Mistral", "Olmo2", "Phi3", "Qwen2", "Qwen3"):
        (tmp_path / name).mkdir()
        folders.append(str(write_config(tmp_path / name, name)))
    code = (
        "import sys; from pathlib import Path\n"
        "from longshore.deploy.model_folder import read_model_folder\n"
        f"[read_model_folder(Path(folder)) for folder in {folders}]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_what_a_config_does_not_say_is_what_transformers_takes_it_for(
    family: str, tmp_path: Path
) -> None:
    said = {key: value for key, value in SHAPE.items() if key != "max_position_embeddings"}
    said["sliding_window"] = None
    config = {"architectures": [f"{family}ForCausalLM"], **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = read_model_config(tmp_path)
    theirs = getattr(importlib.import_module("transformers"), f"{family}Config")(**said)
    rope = theirs.rope_parameters
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert ours.rope == DefaultRope(rope["rope_theta"])
    assert rope["rope_type"] == "default"
