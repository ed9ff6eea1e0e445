"""The activation of a classification head, as the config says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longshore.deploy.model.classifier import Activation, ClassifierModel, read_classifier
from longshore.deploy.model.folder import read_model_folder
from longshore.protocol.arrays import EMPTY_FLOAT32
from longshore.protocol.errors import ConfigError
from tests.models import make_tiny_model

ONE, TWO = ("score",), ("no", "yes")
SIGMOID = "torch.nn.modules.activation.Sigmoid"
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ONE, "sigmoid"),
        ({}, TWO, "softmax"),
        ({"problem_type": "single_label_classification"}, TWO, "softmax"),
        ({"problem_type": "multi_label_classification"}, TWO, "sigmoid"),
        ({"problem_type": "regression"}, ONE, "identity"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, ONE, "identity"),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, ONE, "sigmoid"),
        ({"sbert_ce_default_activation_function": IDENTITY}, ONE, "identity"),
        ({"sentence_transformers": {"version": "5.1.0"}}, ONE, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, TWO, "softmax"),
    ],
    ids=str,
)
def test_the_activation_is_that_of_the_config(
    config: dict[str, Any], labels: tuple[str, ...], activation: Activation
) -> None:
    assert read_classifier(config, labels) == ClassifierModel(labels, activation)


@pytest.mark.parametrize("name", ["torch.nn.modules.activation.Tanh", 5, "x" * 9999], ids=type)
def test_another_activation_is_rejected(name: object) -> None:
    with pytest.raises(ConfigError, match="activation") as error:
        read_classifier({"sentence_transformers": {"activation_fn": name}}, ONE)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "identity"])
def test_activations_are_those_of_torch(activation: Activation) -> None:
    scores = np.array([[-800.0, 800.0, 0.0], [0.5, -1.5, 3.0]], np.float32)
    values = torch.from_numpy(scores).double()
    expected = {
        "sigmoid": values.sigmoid(),
        "softmax": values.softmax(dim=-1),
        "identity": values,
    }[activation]
    got = ClassifierModel(("a", "b", "c"), activation).activated(scores)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12, atol=0)


def test_probabilities_are_activated_scores_unless_asked_for_without() -> None:
    model = ClassifierModel(("a", "b"), "softmax")
    scores = np.array([1.0, 1.0], np.float32)
    assert model.probabilities(scores).tolist() == [0.5, 0.5]
    assert model.probabilities(scores, use_activation=True).tolist() == [0.5, 0.5]
    assert model.probabilities(scores, use_activation=False).tolist() == [1.0, 1.0]
    assert not model.probabilities(EMPTY_FLOAT32).size  # of a request that failed


def test_a_folder_of_a_classifier_has_labels_and_no_embeddings(tmp_path: Path) -> None:
    make_tiny_model("Qwen3", tmp_path, head="ForSequenceClassification", num_labels=3)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"id2label": {"0": "x", "1": "y", "2": "z"}}
    file.write_text(json.dumps(config))
    folder = read_model_folder(tmp_path)
    assert folder.classifier == ClassifierModel(("x", "y", "z"), "softmax")
    assert folder.embedding is None
