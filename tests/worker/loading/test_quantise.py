"""Checkpoints that `longshore quantize` writes."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from longshore.worker.errors import UnsupportedModel
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.quantise import Kind, Quantised, Scheme, quantise
from longshore.worker.models.families import read_model_config
from tests.models import make_tiny_llama
from tests.worker.models.paged_model import PagedModel, forward_logits
from tests.worker.models.served_model import ServedModel

KINDS: Final[tuple[Kind, ...]] = ("int8", "int4", "fp8")
every_kind = pytest.mark.parametrize("kind", KINDS)


def quantised(model: Path, out: Path, kind: Kind, group: int = 32) -> Quantised:
    out.mkdir()
    config = read_model_config(model)
    return quantise(model, config, Scheme(kind, group), out, show_progress=False)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    weights = find_weights(folder)
    with weights.reader() as read:
        return {name: read(name, ()) for name in weights.tensors}


def step_of(kind: Kind, weight: torch.Tensor) -> torch.Tensor:
    """The largest error of rounding a value."""
    if kind == "fp8":  # half of the last of four bits, or of the smallest step
        return weight.abs() / 16 + weight.abs().amax(1, keepdim=True) / 448 / 1000
    groups = weight.unflatten(1, (-1, 32)) if kind == "int4" else weight.unsqueeze(1)
    largest = groups.abs().amax(-1, keepdim=True)
    # A shrunk scale may cut the largest values.
    errors = largest * (0.3 if kind == "int4" else 0.5 / 127.5 + 2**-8)
    return errors.expand_as(groups).flatten(1)


@every_kind
def test_transformers_computes_the_same_logits(kind: Kind, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "model")
    out = tmp_path / "out"
    quantised(tmp_path / "model", out, kind)
    if kind == "fp8":  # transformers would quantise activations, too
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        (out / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    token_ids = [5, 9, 3, 17, 4, 11, 30, 2, 8]
    with torch.inference_mode():
        wanted = model(torch.tensor([token_ids])).logits[0]
    found = forward_logits([PagedModel(out, products="exact")], token_ids)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@every_kind
def test_values_are_rounded_to_the_format(kind: Kind, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "model")
    done = quantised(tmp_path / "model", tmp_path / "out", kind)
    plain, found = read_all(tmp_path / "model"), read_all(tmp_path / "out")
    assert found.keys() == plain.keys()
    linear = {name for name in plain if "_proj." in name}
    assert done.num_matrices == len(linear)
    for name, values in plain.items():
        if name not in linear:
            assert torch.equal(found[name], values)
            continue
        error = (found[name] - values.float()).abs()
        assert bool((error <= step_of(kind, values.float())).all()), name
        assert float(error.square().mean().sqrt() / values.float().std()) < 0.1


@every_kind
def test_a_quantised_model_is_served_and_takes_less_space(kind: Kind, tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "model")
    done = quantised(tmp_path / "model", tmp_path / "out", kind)
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert done.num_bytes == sum(each.nbytes for each in files.values())
    assert done.num_bytes < sum(each.nbytes for each in read_all(tmp_path / "model").values())
    with ServedModel(tmp_path / "out", num_tokens=4, max_model_len=64, dtype="float32") as served:
        assert all(len(answer) == 4 for answer in served.answers([[5, 9, 3], [11, 30]]))


def test_shards_and_other_files_are_kept(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_tiny_llama(model, max_shard_size="100KB")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    quantised(model, out, "int4")
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert read_all(out).keys() == read_all(model).keys()


def test_modules_that_stay_are_named_for_other_readers(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "model")
    done = quantised(tmp_path / "model", tmp_path / "out", "int8")
    config: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert set(done.kept) <= set(ignored)


def test_inputs_that_are_no_groups_stay_and_nothing_to_do_is_an_error(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=96)
    done = quantised(tmp_path / "model", tmp_path / "out", "int4", group=64)
    assert any("96 inputs are not groups of 64" in reason for reason in done.kept.values())
    with pytest.raises(UnsupportedModel, match="no matrix of the model can be quantised to int4"):
        quantised(tmp_path / "model", tmp_path / "other", "int4", group=1024)
