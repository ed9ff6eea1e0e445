"""sentence-transformers' files, written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.model.embedding import EmbeddingModel, read_embedding_model
from longshore.protocol.errors import ConfigError
from longshore.protocol.requests import PoolingParams

TYPE = "sentence_transformers.models"
MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}


def write(path: Path, names: list[str], pooling: Any = MEAN) -> Path:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"{TYPE}.{name}"}
        for i, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_a_folder_that_says_nothing_gives_the_last_state_at_length_one(tmp_path: Path) -> None:
    assert read_embedding_model(tmp_path, 64) == EmbeddingModel(64, "last", normalize=True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (MEAN, "mean"),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 64}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_folders_modules_say_how(
    pooling: Any, kind: Any, normalize: bool, tmp_path: Path
) -> None:
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    found = read_embedding_model(write(tmp_path, names, pooling), 64)
    assert found == EmbeddingModel(64, kind, normalize)
    assert found.pooling() == PoolingParams(kind, normalize)
    assert found.pooling(kind="cls", normalize=True, dimensions=3) == PoolingParams("cls", True, 3)


@pytest.mark.parametrize(
    ("names", "pooling", "says"),
    [
        (["Transformer", "Pooling", "Dense"], MEAN, "a module Dense"),
        (["Transformer", "Pooling", "Pooling"], MEAN, "a module Pooling"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pools max_tokens"),
        (["Transformer", "Pooling"], MEAN | {"pooling_mode_cls_token": True}, "cls_token, mean"),
        (["Transformer", "Pooling"], {}, "pools nothing"),
    ],
)
def test_what_is_not_computed_is_named_when_a_vector_is_asked_for(
    names: list[str], pooling: Any, says: str, tmp_path: Path
) -> None:
    model = read_embedding_model(write(tmp_path, names, pooling), 64)
    with pytest.raises(ValueError, match=says):
        model.pooling()
    assert model.pooling(kind="mean").kind == "mean"  # unknown kinds of pooling are not guessed


@pytest.mark.parametrize("text", ["{", "{}", '[{"idx": 0}]', "[]", '[{"type": 1, "path": ""}]'])
def test_a_file_that_is_no_list_of_modules_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        read_embedding_model(tmp_path, 64)


@pytest.mark.parametrize("dimensions", [0, -1, 65])
def test_dimensions_lie_within_the_models(dimensions: int) -> None:
    with pytest.raises(ValueError, match=rf"dimensions={dimensions} must be between 1 and 64"):
        EmbeddingModel(64).pooling(dimensions=dimensions)
