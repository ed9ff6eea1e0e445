"""Encoders: vectors and scores of BERT, RoBERTa and XLM-RoBERTa are those of transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from longshore.protocol.handshake import Feature
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import PoolingParams
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.models.bert_config import BertConfig
from longshore.worker.models.families import read_model_config
from tests.models import make_tiny_model
from tests.worker.models.conftest import prompt_of
from tests.worker.models.paged_model import PagedModel
from tests.worker.models.served_model import ServedModel
from tests.worker.models.thread_ranks import on_every_rank

CLASSIFY: Final = PoolingParams("classify", normalize=False)
LENGTHS: Final = (37, 1, 70, 16, 256)
SEPARATOR: Final = 3
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "Bert": {"type_vocab_size": 2, "pad_token_id": 0},
    "Roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "XLMRoberta": {"type_vocab_size": 1, "pad_token_id": 2, "max_position_embeddings": 259},
}


def make_encoder(family: str, path: Path, head: str = "Model", **overrides: Any) -> Any:
    """A random encoder of up to 256 tokens or more, whose tokenizer separates texts by token 3."""
    settings = {"max_position_embeddings": 258, **FAMILIES[family], **overrides}
    model = make_tiny_model(family, path, head=head, **settings)
    tokens = [{"id": 1, "content": "[SEP]"}, {"id": SEPARATOR, "content": "|"}]
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "|"}))
    return model


def pair_of(length: int, seed: int) -> tuple[list[int], list[int]]:
    """A prompt of two texts, each followed by a separator, and the token types."""
    first, second = prompt_of(length // 2, seed), prompt_of(length - length // 2, seed + 1)
    texts = [[token + (token == SEPARATOR) for token in text] for text in (first, second)]
    return (
        [*texts[0], SEPARATOR, *texts[1], SEPARATOR],
        [0] * (len(first) + 1) + [1] * (len(second) + 1),
    )


def states_of(model: Any, prompt: Sequence[int], types: Sequence[int] | None = None) -> Any:
    given = None if types is None else torch.tensor([list(types)])
    with torch.inference_mode():
        return model(torch.tensor([list(prompt)]), token_type_ids=given)


def assert_close(got: npt.NDArray[np.float32], expected: torch.Tensor) -> None:
    largest = max(1.0, expected.abs().max().item())
    np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize("kind", ["cls", "mean", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(family: str, kind: Any, tmp_path: Path) -> None:
    reference = make_encoder(family, tmp_path)
    prompts = [
        [token + (token == SEPARATOR) for token in prompt_of(length, seed)]
        for seed, length in enumerate(LENGTHS)
    ]
    with ServedModel(tmp_path, num_tokens=1) as served:
        for prompt in prompts:
            served.add(prompt, pooling=PoolingParams(kind, normalize=False))
        served.answers([])
        for handle, prompt in enumerate(prompts):
            states = states_of(reference, prompt).last_hidden_state[0]
            expected = {"cls": states[0], "mean": states.mean(0), "last": states[-1]}[kind]
            end = served.ended[handle]
            assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 0)
            assert_close(end.pooled, expected)


@pytest.mark.parametrize("num_labels", [1, 3, 80], ids="{} labels".format)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_pairs_are_those_of_transformers(
    family: str, num_labels: int, tmp_path: Path
) -> None:
    reference = make_encoder(family, tmp_path, "ForSequenceClassification", num_labels=num_labels)
    pairs = [pair_of(length, seed) for seed, length in enumerate((37, 3, 70, 16))]
    with ServedModel(tmp_path, num_tokens=1) as served:
        for prompt, _ in pairs:
            served.add(prompt, pooling=CLASSIFY)
        served.answers([])
        for handle, (prompt, types) in enumerate(pairs):
            given = types if family == "Bert" else None
            assert_close(served.ended[handle].pooled, states_of(reference, prompt, given).logits[0])


def test_the_second_text_of_a_pair_has_another_type(tmp_path: Path) -> None:
    reference = make_encoder("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    prompt, types = pair_of(20, seed=1)
    typed, untyped = (states_of(reference, prompt, given).logits for given in (types, None))
    assert (typed - untyped).abs().max() > 1e-3


@pytest.mark.parametrize("num_blocks", [None, 200], ids=["little memory", "enough memory"])
def test_prompts_are_computed_whole_and_never_from_the_cache(
    num_blocks: int | None, tmp_path: Path
) -> None:
    """However full the steps and the memory are, and also if equal prompts were computed before."""
    reference = make_encoder("XLMRoberta", tmp_path, "ForSequenceClassification", num_labels=1)
    prompts = [prompt_of(150 + seed, seed % 5) for seed in range(10)]
    with ServedModel(tmp_path, num_tokens=1, num_blocks=num_blocks) as served:
        for prompt in prompts:
            served.add(prompt, pooling=CLASSIFY)
        served.answers([])
        for handle, prompt in enumerate(prompts):
            assert served.ended[handle].num_cached_tokens == 0
            assert_close(served.ended[handle].pooled, states_of(reference, prompt).logits[0])


def test_an_encoder_gives_no_tokens(tmp_path: Path) -> None:
    make_encoder("Bert", tmp_path)
    with ServedModel(tmp_path, num_tokens=1) as served:
        features = {Feature.POOLING, Feature.POOLING_ONLY, Feature.BIDIRECTIONAL}
        assert set(served.worker.features) == features


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_compute_the_states_of_one(family: str, tmp_path: Path) -> None:
    reference = make_encoder(family, tmp_path)
    prompt, types = pair_of(40, seed=2)
    given = types if family == "Bert" else None
    expected = states_of(reference, prompt, given).last_hidden_state[0]
    tokens = torch.tensor(prompt, dtype=torch.int32)
    for got in on_every_rank(
        2, 1, lambda places: PagedModel(tmp_path, parallel=places[0]).forward(tokens, 0)
    ):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_a_checkpoint_with_the_prefix_of_its_encoder_is_served(tmp_path: Path) -> None:
    """As when a classifier's encoder is saved: names with `bert.`, without a pooler."""
    reference = make_encoder("Bert", tmp_path, "ForSequenceClassification", num_labels=1)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    with pytest.raises(UnsupportedModel, match=r"classifier\.bias"):
        ServedModel(tmp_path, num_tokens=1)
    reference.bert.save_pretrained(tmp_path)
    with ServedModel(tmp_path, num_tokens=1) as served:
        served.add([5, 6, 7], pooling=PoolingParams("cls", normalize=False))
        served.answers([])
        states = states_of(reference.bert, [5, 6, 7]).last_hidden_state[0]
        assert_close(served.ended[0].pooled, states[0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"position_embedding_type": "relative_key"}, "relative positions"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"num_attention_heads": 7}, "a multiple of num_attention_heads"),
        ({"max_position_embeddings": 2}, "more than 2"),
        ({"num_hidden_layers": 3}, "the checkpoint has 2"),
    ],
    ids=str,
)
def test_a_config_that_is_not_computed_is_rejected(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make_encoder("Roberta", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=says):
        read_model_config(tmp_path)


def test_pipeline_stages_are_rejected(tmp_path: Path) -> None:
    make_encoder("Bert", tmp_path)
    config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="pipeline_parallel_size=2"):
        config.check_split(num_shards=1, num_stages=2)


@pytest.mark.parametrize(
    ("settings", "tokens", "separator"),
    [
        ({}, [{"id": 9, "content": "[SEP]"}], 9),
        ({"sep_token": {"content": "</s>"}}, [{"id": 4, "content": "</s>"}], 4),
        ({"sep_token": "</s>"}, [{"id": 9, "content": "[SEP]"}], None),
        ({}, None, None),
    ],
    ids=str,
)
def test_the_separator_is_the_tokenizers(
    settings: Any, tokens: Any, separator: int | None, tmp_path: Path
) -> None:
    make_encoder("Bert", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = read_model_config(tmp_path)
    assert isinstance(config, BertConfig)
    assert config.separator_id == separator


def test_positions_begin_after_that_of_the_padding(tmp_path: Path) -> None:
    make_encoder("XLMRoberta", tmp_path)
    assert read_model_config(tmp_path).max_supported_len == 256


def test_a_folder_without_architectures_is_known_by_its_type(tmp_path: Path) -> None:
    make_encoder("XLMRoberta", tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["architectures"]
    file.write_text(json.dumps(config))
    assert read_model_config(tmp_path).model_type == "xlm-roberta"
