"""Checkpoints that are rejected at startup, with an error that says what is wrong and what to
do."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.deploy.model.folder import read_model_folder
from longshore.protocol.errors import ConfigError
from longshore.worker.config import WorkerConfig
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.kernels.native import PANEL
from longshore.worker.kernels.packing import QuantisedRows
from longshore.worker.layers import matrix_memory
from longshore.worker.loading import loader
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.host_weights import tensors_of
from longshore.worker.loading.stored_weights import StoredWeights, WeightReader
from longshore.worker.worker import Worker
from tests.gguf.cases import FILES
from tests.models import make_tiny_llama

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    make_tiny_llama(path, max_shard_size="100KB")
    return path


@pytest.fixture
def folder(checkpoint: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the checkpoint that the test may damage."""
    return Path(shutil.copytree(checkpoint[0], tmp_path / "model"))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def load(folder: Path) -> Worker:
    return Worker(WorkerConfig(model=str(folder), num_blocks=40, show_progress=False))


UNSUPPORTED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq'"),
    ({"sliding_window": 128}, "sliding_window=128"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ({"num_local_experts": 8}, "num_local_experts"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "warp": 9}}, "warp"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
]

BROKEN_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"hidden_size": "64"}, "hidden_size='64'"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"num_attention_heads": True}, "num_attention_heads=True"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"head_dim": 15}, "head_dim=15"),
    ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size=64"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ({"rope_parameters": [1]}, "rope_parameters=\\[1\\]"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor=0.5"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "original_max_position_embeddings is missing"),
    (
        {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64}},
        "short_factor=None must be a list of 8 numbers",
    ),
    (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
            }
        },
        "high_freq_factor=1.0",
    ),
]


@pytest.mark.parametrize(("changes", "named"), UNSUPPORTED_CONFIGS, ids=str)
def test_a_config_that_is_not_computed_is_rejected_by_name(
    changes: dict[str, Any], named: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModel, match=named):
        load(folder)


@pytest.mark.parametrize(("changes", "named"), BROKEN_CONFIGS, ids=str)
def test_a_config_that_makes_no_sense_is_rejected_by_key_and_value(
    changes: dict[str, Any], named: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(BrokenCheckpoint, match=named):
        load(folder)


def test_a_folder_that_is_not_there_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match=r"config\.json does not exist"):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
def test_a_config_that_is_no_json_object_is_rejected(text: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BrokenCheckpoint, match=r"config\.json"):
        load(folder)


def test_weights_in_another_format_are_rejected(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BrokenCheckpoint, match="nor a GGUF file"):
        load(folder)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_rejected(part: float, folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(BrokenCheckpoint, match="not a complete safetensors file"):
        load(folder)


def test_a_missing_tensor_is_rejected_by_name(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BrokenCheckpoint, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_many_missing_tensors_are_counted_rather_than_listed(folder: Path) -> None:
    def remove(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.0.")]:
            del tensors[name]

    edit_tensors(folder, remove)
    with pytest.raises(BrokenCheckpoint, match=r"model\.layers\.0\..* and 5 more"):
        load(folder)


def test_a_tensor_without_a_place_is_rejected_by_name(folder: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)

    edit_tensors(folder, add)
    with pytest.raises(UnsupportedModel, match=r"q_norm\.weight"):
        load(folder)


def test_a_wrong_shape_is_rejected_with_both_shapes(folder: Path) -> None:
    def shrink(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = torch.ones(63)

    edit_tensors(folder, shrink)
    with pytest.raises(BrokenCheckpoint, match=r"model\.norm\.weight has shape \(63,\).*\(64,\)"):
        load(folder)


def test_weights_that_are_not_floats_are_rejected(folder: Path) -> None:
    def quantise(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)

    edit_tensors(folder, quantise)
    with pytest.raises(UnsupportedModel, match="I8"):
        load(folder)


def test_tensors_that_the_model_derives_itself_are_ignored(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=True)

    def add(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    edit_tensors(tmp_path, add)
    assert "lm_head.weight" not in load(tmp_path).model.checkpoint_tensors()


def test_a_tied_head_that_differs_from_the_embeddings_is_rejected(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, tie_word_embeddings=True)

    def add(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    edit_tensors(tmp_path, add)
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings to false"):
        load(tmp_path)


def test_a_missing_shard_is_rejected_by_name(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(BrokenCheckpoint, match=shard.name):
        load(folder)


def test_an_index_of_another_checkpoint_is_rejected(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, home = next(iter(index["weight_map"].items()))
    index["weight_map"][name] = next(f for f in index["weight_map"].values() if f != home)
    path.write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpoint, match=f"lacks {name}"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, {}, {"model.norm.weight": "../model.safetensors"}])
def test_an_index_that_cannot_be_followed_is_rejected(
    weight_map: Any, sharded: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(BrokenCheckpoint, match=r"index\.json"):
        load(folder)


def test_every_rejection_is_a_config_error() -> None:
    assert issubclass(BrokenCheckpoint, ConfigError)
    assert issubclass(UnsupportedModel, ConfigError)


def test_weights_are_converted_to_the_dtype_asked_for(checkpoint: tuple[Path, Any]) -> None:
    path, reference = checkpoint
    config = WorkerConfig(model=str(path), dtype="bfloat16", num_blocks=40, show_progress=False)
    weight = Worker(config).model.embedding.weight
    torch.testing.assert_close(weight, reference.model.embed_tokens.weight.bfloat16())


def plain_tensors(model: object) -> list[torch.Tensor]:
    """All tensors of a model. Processors with AMX tiles have packed ones."""
    tensors = (each for each in tensors_of(model) if not each.is_meta)
    return [each.to_dense() if each.is_mkldnn else each for each in tensors]


@pytest.mark.parametrize("name", ["llama-awq", "qwen3_moe-fp8_block", "gpt_oss-mxfp4", "gguf"])
def test_large_tensors_are_read_some_rows_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that loading needs little memory beside the model's."""
    if name == "gguf":
        model = read_model_folder(FILES / "llama.gguf", tmp_path).path
    else:
        model = Path(__file__).parent / "quantised" / name
    expected = plain_tensors(load(model).model)
    kind = type(find_weights(model))
    sizes, reader = [], kind.reader

    class Recorded(WeightReader):
        """Notes the sizes of what is read."""

        def __init__(self, read: WeightReader) -> None:
            super().__init__(read)
            self.form = read.form  # type: ignore[method-assign]

        def __call__(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
            found = self._read(name, index)
            sizes.append((found.numel(), found.shape))
            return found

        def rows(self, name: str, rows: torch.Tensor, columns: slice) -> QuantisedRows:
            assert len(rows) <= PANEL
            num_quantised.append(len(rows))
            return self._read.rows(name, rows, columns)

    @contextmanager
    def recorded(self: StoredWeights) -> Iterator[WeightReader]:
        with reader(self) as read:
            yield Recorded(read)

    num_quantised: list[int] = []
    monkeypatch.setattr(loader, "_CHUNK", 150)
    monkeypatch.setattr(matrix_memory, "_CHUNK", 150)
    monkeypatch.setattr(kind, "reader", recorded)
    found = plain_tensors(load(model).model)
    assert all(size <= 150 or shape[0] == 1 for size, shape in sizes)
    assert len(sizes) + len(num_quantised) > len(find_weights(model).tensors)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_progress_bar_counts_the_tensors(
    checkpoint: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = WorkerConfig(model=str(checkpoint[0]), num_blocks=40, show_progress=True)
    num_tensors = len(Worker(config).model.checkpoint_tensors())
    assert f"{num_tensors}/{num_tensors}" in capsys.readouterr().err


def test_a_dummy_model_needs_only_its_config_and_is_the_same_each_time(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = WorkerConfig(model=str(tmp_path), num_blocks=20, load_format="dummy")
    hidden = []
    for _ in range(2):
        with Worker(config) as worker:
            hidden.append(worker.model.embed(torch.tensor([3, 1, 4], dtype=torch.int32)))
            norm = worker.model.norm
            assert norm is not None
            assert bool((norm.weight == 1).all())
    assert torch.equal(*hidden)
    assert 0.01 < hidden[0].std() < 0.03
    with pytest.raises(BrokenCheckpoint):
        Worker(WorkerConfig(model=str(tmp_path), num_blocks=20))
