"""Scores of sequence classification equal those of transformers, however a prompt is computed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import PoolingParams
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.families import (
    ARCHITECTURES,
    CLASSIFIERS,
    read_labels,
    read_model_config,
)
from longshore.worker.models.json_fields import JsonFields
from tests.models import make_tiny_model
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import prompt_of
from tests.worker.models.paged_model import PagedModel
from tests.worker.models.served_model import ServedModel
from tests.worker.models.thread_ranks import on_every_rank

HEAD: Final = "ForSequenceClassification"
CLASSIFY: Final = PoolingParams("classify", normalize=False)
LENGTHS: Final = (37, 1, 70, 16)
OF_FAMILY: Final = {case.family: case for case in reversed(CASES)}
GEMMA3: Final = "Gemma3Text"
FAMILIES: Final = [name.removesuffix(HEAD) for name in CLASSIFIERS]


def case_of(family: str) -> Case:
    return OF_FAMILY["Gemma3" if family == GEMMA3 else family]


def make_classifier(family: str, path: Path, num_labels: int, **overrides: Any) -> Any:
    settings = {**case_of(family).settings, "num_labels": num_labels, **overrides}
    return make_tiny_model(family, path, head=HEAD, **settings)


def reference_scores(model: Any, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        scores: npt.NDArray[np.float32] = model(torch.tensor([list(prompt)])).logits[0].numpy()
    return scores


def assert_scores(served: ServedModel, handle: int, expected: npt.NDArray[np.float32]) -> None:
    end = served.ended[handle]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 0)
    assert end.pooled.dtype == np.float32
    assert end.pooled.shape == expected.shape
    largest = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(end.pooled, expected, rtol=0, atol=2e-5 * largest)


def test_each_classifier_has_a_family_that_generates() -> None:
    for family in FAMILIES:
        name = family.removesuffix("Text") + "ForCausalLM"
        assert CLASSIFIERS[family + HEAD] is ARCHITECTURES[name]


@pytest.mark.parametrize("step_tokens", [256, 16], ids=["whole", "chunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family: str, step_tokens: int, tmp_path: Path) -> None:
    reference = make_classifier(family, tmp_path, 1)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with ServedModel(tmp_path, num_tokens=1, max_num_batched_tokens=step_tokens) as served:
        for prompt in prompts:
            served.add(prompt, pooling=CLASSIFY)
        served.answers([])
        for handle, prompt in enumerate(prompts):
            assert_scores(served, handle, reference_scores(reference, prompt))


@pytest.mark.parametrize("num_labels", [2, 5, 80], ids="{} labels".format)
def test_any_number_of_labels_beside_vectors_of_hidden_states(
    num_labels: int, tmp_path: Path
) -> None:
    """80 labels are more than a hidden state has elements."""
    reference = make_classifier("Qwen3", tmp_path, num_labels)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with ServedModel(tmp_path, num_tokens=1) as served:
        for prompt in prompts:
            served.add(prompt, pooling=CLASSIFY)
            served.add(prompt, pooling=PoolingParams("last"))
        served.answers([])
        for index, prompt in enumerate(prompts):
            assert_scores(served, 2 * index, reference_scores(reference, prompt))
            with torch.inference_mode():
                states = reference.model(torch.tensor([list(prompt)])).last_hidden_state[0]
            vector = states[-1] / states[-1].norm()
            np.testing.assert_allclose(
                served.ended[2 * index + 1].pooled, vector.numpy(), rtol=0, atol=2e-5
            )


def test_documents_share_the_cached_prefix_of_their_query(tmp_path: Path) -> None:
    reference = make_classifier("Llama", tmp_path, 1)
    query = prompt_of(48, seed=1)
    pairs = [query + prompt_of(length, seed=length) for length in (9, 30, 64)]
    with ServedModel(tmp_path, num_tokens=1) as served:
        for handle, pair in enumerate(pairs):
            served.add(pair, pooling=CLASSIFY)
            served.answers([])
            assert served.ended[handle].num_cached_tokens == (48 if handle else 0)
            assert_scores(served, handle, reference_scores(reference, pair))


def test_preemptions_change_no_score(tmp_path: Path) -> None:
    reference = make_classifier("Llama", tmp_path, 3)
    prompts = [prompt_of(90 + seed, seed) for seed in range(8)]
    with ServedModel(tmp_path, num_tokens=1, max_num_batched_tokens=17, num_blocks=None) as served:
        for prompt in prompts:
            served.add(prompt, pooling=CLASSIFY)
        served.answers([])
        for handle, prompt in enumerate(prompts):
            assert_scores(served, handle, reference_scores(reference, prompt))


def test_a_checkpoint_without_the_head_is_rejected_by_name(tmp_path: Path) -> None:
    make_tiny_model("Llama", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Llama" + HEAD]}))
    with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=r"score\.weight"):
        ServedModel(tmp_path, num_tokens=1)


def make_reranker(path: Path, *, is_tied: bool, **settings: Any) -> Any:
    """A language model whose answers "no" (token 7) and "yes" (token 9) are its score, as vLLM's
    settings for Qwen3-Reranker say it."""
    model = make_tiny_model("Qwen3", path, head_dim=16, tie_word_embeddings=is_tied)
    file = path / "config.json"
    config = json.loads(file.read_text()) | {
        "architectures": ["Qwen3" + HEAD],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
        **settings,
    }
    file.write_text(json.dumps(config))
    vocab = {"model": {"vocab": {"no": 7, "yes": 9, "far": 128}}}
    (path / "tokenizer.json").write_text(json.dumps(vocab))
    return model


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stages", [1, 2], ids="{} stages".format)
@pytest.mark.parametrize("shards", [1, 2], ids="{} shards".format)
def test_two_tokens_of_a_language_model_are_a_head(
    is_tied: bool, stages: int, shards: int, tmp_path: Path
) -> None:
    reference = make_reranker(tmp_path, is_tied=is_tied)
    prompt = prompt_of(37, seed=1)
    logits = reference_scores(reference, prompt)[-1]
    for got in on_every_rank(
        shards,
        stages,
        lambda places: forward_scores([PagedModel(tmp_path, parallel=p) for p in places], prompt),
    ):
        torch.testing.assert_close(got, torch.tensor([logits[9] - logits[7]]), atol=2e-4, rtol=0)


def forward_scores(stages: Sequence[PagedModel], prompt: Sequence[int]) -> torch.Tensor:
    hidden = torch.tensor(prompt, dtype=torch.int32)
    for stage in stages:
        hidden = stage.forward(hidden, 0)
    model = stages[-1].model
    assert model.classifier is not None
    with torch.inference_mode():
        return model.classifier(model.last_norm(hidden[-1:]).double())[0].float()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"is_original_qwen3_reranker": False}, "from_2_way_softmax"),
        ({"classifier_from_token": ["yes"]}, "a list of two tokens"),
        ({"classifier_from_token": ["no", "maybe"]}, "maybe is missing"),
        ({"classifier_from_token": ["no", "far"]}, "below vocab_size=128"),
    ],
    ids=str,
)
def test_tokens_that_make_no_head_are_rejected(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_reranker(tmp_path, is_tied=True, **settings)
    with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=says):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "no", "0": "yes"}}, ("yes", "no")),
    ],
    ids=str,
)
def test_labels_are_those_of_the_config(
    given: dict[str, Any], labels: tuple[str, ...], tmp_path: Path
) -> None:
    make_classifier("Llama", tmp_path, 2)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config = {name: value for name, value in config.items() if "label" not in name} | given
    file.write_text(json.dumps(config))
    assert read_model_config(tmp_path).labels == labels


@pytest.mark.parametrize(
    "id2label", [{}, {"1": "a"}, {"0": 5}, {"0": "a", "2": "b"}, {"0": "a", "x": "b"}], ids=str
)
def test_labels_without_order_are_rejected(id2label: dict[str, Any]) -> None:
    with pytest.raises(BrokenCheckpoint, match="id2label"):
        read_labels(JsonFields({"id2label": id2label}, "config.json"))
