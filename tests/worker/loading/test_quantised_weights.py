"""Quantised checkpoints, written by the tools that publish them: `quantised/make.py`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kv_cache.kv_scales import read_kv_scales
from longshore.worker.loading import dequantise
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.models.families import check_weights, read_model_config
from tests.worker.models.served_model import ServedModel

FOLDERS: Final = sorted(
    path.parent for path in Path(__file__).parent.glob("quantised/*/config.json")
)
BOUND: Final = 2.0**-22
"""Relative: a product and a difference in float32. The scales themselves are exact."""

every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


SERVED: Final = (
    "auto_round_asym",
    "awq",
    "ct_int4_actorder",
    "ct_int4_asym",
    "ct_nvfp4",
    "fp8_block",
    "gptq_asym_actorder",
    "modelopt_nvfp4",
    "mxfp4",
)
"""Formats of which a model is served in every run."""


def served() -> list[Any]:
    return [
        pytest.param(
            folder,
            id=folder.name,
            marks=()
            if folder.name.endswith(SERVED) or not folder.name.startswith("llama")
            else pytest.mark.slow,
        )
        for folder in FOLDERS
    ]


def reference_of(folder: Path) -> dict[str, torch.Tensor]:
    with np.load(folder / "reference.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file}


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    weights = find_weights(folder)
    with weights.reader() as read:
        return {name: read(name, ()) for name in weights.tensors}


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest, relative to the largest value of the row or column."""
    assert found.shape == reference.shape
    return float((found.double() - reference).abs().max() / reference.abs().max())


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@every_folder
def test_tensors_are_those_of_the_tool_that_wrote_them(folder: Path) -> None:
    reference = reference_of(folder)
    found = read_all(folder)
    assert reference.keys() <= found.keys()
    for name, values in reference.items():
        assert distance(found[name], values) < BOUND, name


@every_folder
def test_a_part_of_a_tensor_is_the_same_as_in_the_whole(folder: Path) -> None:
    whole = read_all(folder)
    weights = find_weights(folder)
    with weights.reader() as read:
        for name in reference_of(folder):
            *leading, rows, columns = whole[name].shape
            rest = tuple(slice(1, size) for size in leading)
            # Halves, as of two ranks, and parts that begin and end within a group and a word.
            halves = [(0, 2), (1, 2)], [(3, 7), (5, 6)]
            for low, high in halves[0] + [(1, 7), (5, 11)]:
                row = slice(rows * low // high, rows * (low + 1) // high)
                column = slice(columns * low // high, columns * (low + 1) // high)
                for index in ((row, slice(None)), (slice(None), column), (row, column)):
                    part = read(name, (*rest, *index))
                    assert torch.equal(part, whole[name][(*rest, *index)]), (name, index)


def test_a_large_tensor_is_dequantised_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantise, "_CHUNK", 300)  # nine rows of 32, within groups and words
    for name in ("llama-awq", "llama-ct_int4_asym", "llama-gptq_asym_actorder", "gpt_oss-mxfp4"):
        found, reference = read_all(folder_of(name)), reference_of(folder_of(name))
        assert all(distance(found[key], reference[key]) < BOUND for key in reference)


@pytest.mark.parametrize("folder", served())
def test_tokens_are_those_of_the_same_values_without_quantisation(
    folder: Path, tmp_path: Path
) -> None:
    plain = copied(folder, tmp_path)
    values = {**read_all(folder), **reference_of(folder)}
    save_file(
        {name: each.float().contiguous() for name, each in values.items()},
        plain / "model.safetensors",
    )
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    assert greedy(folder) == greedy(plain)


def greedy(folder: Path) -> list[list[int]]:
    with ServedModel(folder, num_tokens=8, max_model_len=64, dtype="float32") as served:
        return served.answers([[5, 9, 3, 17, 4], [11, 30]])


CHANGED_PARTS: Final = [
    ("auto_round", "qweight"),
    ("auto_round_asym", "scales"),
    ("awq", "qweight"),
    ("awq", "qzeros"),
    ("awq", "scales"),
    ("ct_fp8_block", "weight_scale"),
    ("ct_fp8_channel", "weight_scale"),
    ("ct_fp8_tensor", "weight_scale"),
    ("ct_int4", "weight_scale"),
    ("ct_int4_actorder", "weight_g_idx"),
    ("ct_int4_asym", "weight_zero_point"),
    ("ct_int8_asym", "weight_zero_point"),
    ("ct_mxfp4", "weight_scale"),
    ("ct_nvfp4", "weight_global_scale"),
    ("ct_nvfp4", "weight_packed"),
    ("ct_nvfp4", "weight_scale"),
    ("fp8_block", "weight_scale_inv"),
    ("fp8_tensor", "weight_scale_inv"),
    ("gptq_2bit", "qzeros"),
    ("gptq_3bit", "qzeros"),
    ("gptq_asym_actorder", "g_idx"),
    ("gptq_v2", "scales"),
    ("modelopt_fp8", "weight_scale"),
    ("modelopt_fp8_rows", "weight_scale"),
    ("modelopt_mxfp8", "weight_scale"),
    ("modelopt_nvfp4", "weight_scale"),
    ("modelopt_nvfp4", "weight_scale_2"),
]


@pytest.mark.parametrize(("case", "part"), CHANGED_PARTS)
def test_a_changed_part_is_far_outside_the_bound(case: str, part: str, tmp_path: Path) -> None:
    """So the bound notices a wrong scale, zero point or order."""
    folder = copied(folder_of(f"llama-{case}"), tmp_path)

    def change(tensors: Tensors) -> None:
        name = f"{PROJECTION}.{part}"
        found = tensors[name]
        if found.numel() == 1:
            tensors[name] = (found.float() * 1.01).to(torch.float32)
        else:
            codes = found.view(torch.uint8) if found.dtype.is_floating_point else found
            tensors[name] = codes.flatten().roll(found.element_size()).view(codes.shape)
            tensors[name] = tensors[name].view(found.dtype)

    edit_tensors(folder, change)
    name = f"{PROJECTION}.weight"
    assert distance(read_all(folder)[name], reference_of(folder)[name]) > 1000 * BOUND


Tensors = dict[str, torch.Tensor]
PROJECTION: Final = "model.layers.0.mlp.up_proj"


def folder_of(name: str) -> Path:
    return next(folder for folder in FOLDERS if folder.name == name)


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def without(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{PROJECTION}.{part}")


def cut(part: str) -> Callable[[Tensors], object]:
    """Half of the rows."""
    name = f"{PROJECTION}.{part}"
    return lambda tensors: tensors.update({name: tensors[name][: len(tensors[name]) // 2].clone()})


def stored_as(part: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    name = f"{PROJECTION}.{part}"
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def filled(part: str, value: int) -> Callable[[Tensors], object]:
    name = f"{PROJECTION}.{part}"
    return lambda tensors: tensors[name].fill_(value)


BROKEN_PARTS: Final[list[tuple[str, Callable[[Tensors], object], str]]] = [
    ("awq", without("qzeros"), "lacks .*up_proj.qzeros"),
    ("awq", without("qweight"), "lacks .*up_proj.weight"),
    ("awq", cut("scales"), r"up_proj.scales is F16 in shape \(1, 64\), but must be .*\(2, 64\)"),
    ("awq", stored_as("qweight", torch.int64), "up_proj.qweight is I64"),
    ("ct_fp8_block", without("weight_scale"), "lacks .*up_proj.weight_scale"),
    ("ct_fp8_block", cut("weight_scale"), "up_proj.weight_scale is BF16|F32"),
    ("ct_int4", without("weight_shape"), "lacks .*up_proj.weight_shape"),
    ("ct_int4", filled("weight_shape", 40), r"weight_shape is \[40, 40\]"),
    ("ct_int4", stored_as("weight_packed", torch.int64), "up_proj.weight_packed is I64"),
    (
        "ct_int4_actorder",
        filled("weight_g_idx", 2),
        "groups from 2 to 2, but there are .* 2 groups",
    ),
    ("ct_int4_asym", without("weight_zero_point"), "lacks .*up_proj.weight_zero_point"),
    ("ct_int4_asym", cut("weight_zero_point"), "up_proj.weight_zero_point is I32"),
    ("ct_int8", stored_as("weight", torch.int16), "up_proj.weight is I16"),
    ("ct_nvfp4", without("weight_global_scale"), "up_proj.weight_scale is F8_E4M3"),
    ("ct_nvfp4", cut("weight_packed"), "up_proj.weight_scale is F8_E4M3"),
    ("fp8_block", without("weight_scale_inv"), "lacks .*up_proj.weight_scale_inv"),
    ("fp8_block", stored_as("weight_scale_inv", torch.int32), "up_proj.weight_scale_inv is I32"),
    ("fp8_block", stored_as("weight", torch.float8_e5m2), "up_proj.weight is F8_E5M2"),
    ("gptq", cut("qweight"), "up_proj.qzeros is I32"),
    ("gptq", cut("g_idx"), "up_proj.g_idx is I32"),
    ("gptq_asym_actorder", filled("g_idx", -2), "groups from -2 to -2"),
    ("modelopt_fp8", without("weight_scale"), "lacks .*up_proj.weight_scale"),
    ("modelopt_nvfp4", without("weight_scale_2"), "lacks .*up_proj.weight_scale_2"),
    ("modelopt_nvfp4", cut("weight_scale"), "up_proj.weight_scale is F8_E4M3"),
]


@pytest.mark.parametrize(("case", "edit", "message"), BROKEN_PARTS)
def test_a_part_that_does_not_fit_is_rejected_by_name(
    case: str, edit: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    folder = copied(folder_of(f"llama-{case}"), tmp_path)
    edit_tensors(folder, edit)
    with pytest.raises(BrokenCheckpoint, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def load(folder: Path) -> None:
    check_weights(read_model_config(folder), find_weights(folder))
    read_all(folder)


WEIGHTS: Final = {"num_bits": 4, "strategy": "group", "group_size": 16}


def of_group(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"a": {"targets": ["Linear"], "weights": {**WEIGHTS, **weights}}}}


OWN: Final = {
    ".*v_proj.*": {"bits": 8, "group_size": 32},
    ".*up_proj.*": {"bits": 2, "group_size": 32},
}


WRONG_SETTINGS: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("auto_round", {"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8' is not"),
    ("auto_round", {"packing_format": "auto_round:auto_awq"}, "bits=.* is not supported"),
    ("auto_round", {"extra_config": None}, "v_proj.qzeros is I32|up_proj.qzeros is I32"),
    ("auto_round", {"extra_config": {"v_proj(": {"bits": 8}}}, "must be valid patterns"),
    ("auto_round", {"extra_config": {**OWN, "q_proj$": {"bits": 16}}}, "ignores .*q_proj"),
    ("auto_round", {"extra_config": {"v_proj": 8}}, "v_proj=8 must be an object"),
    ("auto_round", {"act_bits": 8}, "act_bits=8 is not supported"),
    ("auto_round", {"bits": 5}, "bits=5 is not supported"),
    ("auto_round", {"data_type": "mx_fp"}, "data_type='mx_fp' is not supported"),
    ("auto_round", {"rotation_config": {"a": 1}}, "rotated weights are not supported"),
    ("awq", {"bits": 8}, "bits=8 is not supported"),
    ("awq", {"version": "gemv"}, "version='gemv' is not supported"),
    ("awq", {"backend": "llm-awq"}, "backend='llm-awq' is not supported"),
    ("awq", {"group_size": 32}, "_proj.qzeros is I32"),
    ("awq", {"group_size": 0}, "group_size=0 must be"),
    ("ct_int4", of_group(group_size=32), "weight_scale is"),
    ("ct_int4", of_group(num_bits=8), r"weight_shape is \["),
    ("ct_int4", of_group(num_bits=3), "num_bits=3 is not supported"),
    ("ct_int4", of_group(type="float"), "weight_packed is I32"),
    ("ct_int4", of_group(strategy="magic"), "strategy='magic' is not supported"),
    ("ct_int4", of_group(symmetric=False), "lacks .*weight_zero_point"),
    ("ct_int4", {"config_groups": {}}, "config_groups={} must be"),
    ("ct_int4", {"format": "marlin-24"}, "format='marlin-24' is not supported"),
    ("ct_int4", {"ignore": ["re:.*up_proj"]}, "ignores .*up_proj"),
    ("ct_int4", {"ignore": ["re:("]}, "must be valid patterns"),
    ("ct_int4", {"ignore": ["re:(.+)+$"]}, r"'\(\.\+\)\+\$' repeats a choice"),
    ("ct_int4", {"ignore": ["re:" + 5 * ".*" + "x"]}, "repeats too much"),
    (
        "ct_int4",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config: .*24.* is not supported",
    ),
    ("ct_int4", {"transform_config": {"config_groups": {"a": 1}}}, "transform_config: .* is not"),
    ("fp8_block", {"weight_block_size": [128, 128]}, "weight_scale_inv is"),
    ("fp8_block", {"weight_block_size": [0, 8]}, "must be a list of two sizes"),
    ("fp8_block", {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    ("gptq", {"bits": 8}, "_proj.qzeros is I32"),
    ("gptq", {"bits": 5}, "bits=5 is not supported"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    ("gptq", {"dynamic": {"+:.*up.*": {"bits": 8}}}, "up_proj.qzeros is I32"),
    ("gptq", {"dynamic": {"+:.*up.*": {"bits": 7}}}, "dynamic: bits=7 is not supported"),
    ("gptq", {"dynamic": {"+:.*up.*": {"format": "marlin"}}}, "dynamic: format='marlin' is not"),
    ("gptq", {"dynamic": {"+:(a|aa)+$": {}}}, r"dynamic=.* repeats a choice"),
    ("gptq", {"dynamic": {"-:.*up.*": {}}}, "ignores .*up_proj"),
    ("gptq_dynamic", {"dynamic": {}}, "_proj.qzeros is I32"),
    ("modelopt_fp8", {"quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ' is not supported"),
    ("gptq", {"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes' is not supported"),
    ("gptq", {"quant_method": None}, "quant_method|config_groups=None must be"),
    ("gptq", {"quant_method": "awq"}, "format='gptq' is not supported"),
]


@pytest.mark.parametrize(("case", "changes", "message"), WRONG_SETTINGS, ids=str)
def test_settings_that_are_not_supported_or_not_true_are_rejected(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = copied(folder_of(f"llama-{case}"), tmp_path)
    edit_config(folder, **changes)
    with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=message) as caught:
        check_weights(read_model_config(folder), find_weights(folder))
    assert str(folder) in str(caught.value)


def test_a_pattern_selects_the_scheme_of_a_module(tmp_path: Path) -> None:
    folder = copied(folder_of("llama-ct_int4"), tmp_path)
    groups = {
        "a": {"targets": ["Linear"], "weights": {**WEIGHTS, "group_size": 32}},
        "b": {"targets": ["re:.*mlp.*"], "weights": WEIGHTS},
        "c": {
            "targets": [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"],
            "weights": WEIGHTS,
        },
    }
    edit_config(folder, config_groups=groups)
    found, reference = read_all(folder), reference_of(folder)
    assert all(distance(found[name], reference[name]) < BOUND for name in reference)


def test_a_file_of_modelopt_itself_says_how_a_model_is_quantised(tmp_path: Path) -> None:
    folder = copied(folder_of("llama-modelopt_fp8"), tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    assert find_weights(folder).method == "modelopt"
    load(folder)


def test_a_name_of_a_module_that_is_too_long_is_rejected(tmp_path: Path) -> None:
    folder = copied(folder_of("llama-ct_int4"), tmp_path)
    name = f"{PROJECTION}{'x' * 110}.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(BrokenCheckpoint, match="has 136 characters"):
        find_weights(folder)


def test_scales_of_activations_are_no_unknown_tensors_and_those_of_the_cache_are_read(
    tmp_path: Path,
) -> None:
    folder = copied(folder_of("llama-fp8_block"), tmp_path)
    attention = "model.layers.0.self_attn"
    one = torch.tensor([0.5])
    added = {f"{PROJECTION}.input_scale": one, f"{attention}.k_proj.k_scale": one.clone()}
    edit_tensors(folder, lambda tensors: tensors.update(added))
    check_weights(read_model_config(folder), find_weights(folder))
    assert read_kv_scales(find_weights(folder), ["model.layers.0"])["model.layers.0"].keys == 0.5


def test_without_a_dtype_that_computes_the_model_is_in_bfloat16(tmp_path: Path) -> None:
    folder = copied(folder_of("llama-ct_int8"), tmp_path)
    path = folder / "config.json"
    for dtype in (None, "int8", "float16"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": dtype}))
        assert read_model_config(folder).dtype == (dtype if dtype == "float16" else "bfloat16")
