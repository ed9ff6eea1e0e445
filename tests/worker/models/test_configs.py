"""Settings of all families, read from config.json only, in every spelling."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longshore.worker.attention.reach import Reach
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.plan import CacheSizes
from longshore.worker.models.families import ARCHITECTURES, read_model_config
from longshore.worker.models.json_fields import JsonFields
from longshore.worker.models.rope_config import DefaultRope, LongRope, read_rope_config
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


def as_written_by_version_4(config: dict[str, Any], *, says_types: bool) -> dict[str, Any]:
    """says_types: the layer types do not follow from the other settings."""
    rope = dict(config.get("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}))
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    old["torch_dtype"] = config["dtype"]
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if "original_max_position_embeddings" in config:
        rope.pop("original_max_position_embeddings", None)
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope["type"] == "default" else rope
    if not says_types:
        old.pop("layer_types", None)
    return old


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_spelling_of_version_4_means_the_same(
    case: Case, checkpoint_of: CheckpointOf, tmp_path: Path
) -> None:
    folder = checkpoint_of(case).path
    config = json.loads((folder / "config.json").read_text())
    old = as_written_by_version_4(config, says_types="layer_types" in case.settings)
    (tmp_path / "config.json").write_text(json.dumps(old))
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
    with_images = {  # in test_gemma3.py and test_qwen3_next.py
        "Gemma3ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
    with_sound = {"WhisperForConditionalGeneration"}  # in test_whisper.py
    assert {
        f"{case.family}ForCausalLM" for case in CASES
    } | with_images | with_sound == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("architecture", "settings", "windows"),
    [
        ("Mistral", {"sliding_window": 128}, [128] * 4),
        ("Mistral", {"max_position_embeddings": 8192}, [4096] * 4),  # does not say
        ("Mistral", {"sliding_window": None}, [None] * 4),
        ("Phi3", {"sliding_window": 128}, [128] * 4),
        ("Phi3", {}, [None] * 4),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
            [None, None, 128, 128],
        ),
        (
            "Qwen2",
            {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 0},
            [None] * 4,
        ),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 100,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [100, None, 100, None],
        ),
        ("Gemma2", {"sliding_window": 128}, [128, None, 128, None]),
        ("Gemma3", {"sliding_window": 128}, [128] * 4),
        ("Gemma3", {"sliding_window": 128, "sliding_window_pattern": 3}, [128, 128, None, 128]),
    ],
)
def test_each_layer_has_the_window_that_the_file_gives_it(
    architecture: str, settings: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    config = read_model_config(write_config(tmp_path, architecture, **settings))
    sizes = CacheSizes(block_size=16, dtype_bytes=4)
    specs = config.cache_specs(sizes).values()
    assert [config.reach_of(layer).window for layer in range(4)] == windows
    assert [getattr(spec, "sliding_window", None) for spec in specs] == windows


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Mistral", {"sliding_window": 256}),  # no request is longer
        ("Phi3", {"sliding_window": 262_144}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4}),
        ("Gemma3", {"sliding_window": 256}),
    ],
)
def test_a_window_as_long_as_the_longest_request_has_no_effect(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = read_model_config(write_config(tmp_path, architecture, **settings))
    assert {config.reach_of(layer) for layer in range(4)} == {Reach()}


def test_a_window_shorter_than_the_stretched_positions_is_kept(tmp_path: Path) -> None:
    settings = {"sliding_window": 256, "rope_scaling": {"type": "linear", "factor": 4.0}}
    config = read_model_config(write_config(tmp_path, "Mistral", **settings))
    assert (config.max_supported_len, config.reach_of(0).window) == (1024, 256)


def test_gemma_3_supports_at_most_the_length_in_its_config(tmp_path: Path) -> None:
    settings = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    config = read_model_config(write_config(tmp_path, "Gemma3", **settings))
    assert config.max_supported_len == 256
    assert config.rope_of(5 - 2) == DefaultRope(10_000.0)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Llama", {"sliding_window": 128}),
        ("Llama", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("Olmo2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}),  # of a size that is not said
        ("Gemma2", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 64, "layer_types": ["full_attention"] * 4}),
        ("Qwen3", {"layer_types": ["chunked_attention"] * 4}),
        ("Gemma3", {"layer_types": ["linear_attention"] * 4}),
    ],
)
def test_layers_that_a_family_does_not_have_are_rejected_by_name(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=r"sliding_window|layer_types"):
        read_model_config(write_config(tmp_path, architecture, **settings))


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
        ("Phi3", {"partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 must be a factor"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5 must be a factor"),
        ("Qwen3", {"head_dim": 15}, "head_dim=15"),
        ("Qwen3", {"layer_types": ["full_attention"]}, "layer_types=.* must be a list of"),
        ("Gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping=0.0 must be above 0"),
        ("Gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be above 0"),
        (
            "Phi3",
            {"rope_scaling": {"type": "su", **LONGROPE, "long_factor": [2.0] * 7},
             "original_max_position_embeddings": 64},
            "long_factor=.* must be a list of 8 numbers",
        ),
        ("Phi3", {"rope_scaling": {"type": "su", **LONGROPE}}, "original_max_position_embeddings"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_rejected_by_key_and_value(
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
        ("Gemma2", {"hidden_activation": "relu"}),
        ("Gemma3", {"attn_logit_softcapping": 50.0}),
        ("Gemma3", {"use_bidirectional_attention": True}),
        ("Gemma3", {"partial_rotary_factor": 0.5}),
        ("Llama", {"logit_scale": 0.5}),
        ("Llama", {"is_causal": False}),
        ("Mamba2", {"is_causal": False}),
    ],
)
def test_what_a_family_does_not_compute_is_rejected_by_name(
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
        assert f"={max_model_len} all requests use the {chosen} factors" in caplog.messages[-1]


def test_settings_are_read_without_torch(tmp_path: Path) -> None:
    folders = []
    for name in ("Gemma2", "Gemma3", "Llama", "Mistral", "Olmo2", "Phi3", "Qwen2", "Qwen3"):
        (tmp_path / name).mkdir()
        folders.append(str(write_config(tmp_path / name, name)))
    code = (
        "import sys; from pathlib import Path\n"
        "from longshore.deploy.model.folder import read_model_folder\n"
        f"[read_model_folder(Path(folder)) for folder in {folders}]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "family", sorted({case.family for case in CASES} - {"Mamba2", "NemotronH"})
)
def test_defaults_of_a_config_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    said = {key: value for key, value in SHAPE.items() if key != "max_position_embeddings"}
    if family == "DeepseekV2":
        said["num_experts_per_tok"] = 6  # transformers has no default that it can compute
    config = {"architectures": [f"{family}ForCausalLM"], **said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = read_model_config(tmp_path)
    model_class = getattr(importlib.import_module("transformers"), f"{family}ForCausalLM")
    theirs = model_class.config_class(**said)
    rope = theirs.rope_parameters
    if "sliding_attention" in rope:
        assert ours.rope_of(0) == DefaultRope(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    eps = next(key for key in ("rms_norm_eps", "norm_eps") if hasattr(theirs, key))
    assert ours.rms_norm_eps == getattr(theirs, eps)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 4)
    assert ours.rope == read_rope_config(
        JsonFields({"rope_parameters": dict(rope)}, "theirs"),
        max_position_embeddings=theirs.max_position_embeddings,
        rotary_dim=ours.rotary_dim,
    )
    window = getattr(theirs, "sliding_window", None)
    same = "full_attention" if window is None else "sliding_attention"
    types = getattr(theirs, "layer_types", None) or [same] * 4
    windows = [window if kind == "sliding_attention" else None for kind in types]
    assert [ours.reach_of(layer).window for layer in range(4)] == windows
