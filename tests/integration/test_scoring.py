"""Scores through real processes: those of transformers, with clients' requests."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tokenizers import processors

from longshore import LLM, AsyncLLM, PoolingParams, SamplingParams
from tests.deploy.tiny_tokenizer import (
    BOS,
    BOS_ID,
    EOS,
    EOS_ID,
    VOCAB_SIZE,
    byte_level_tokenizer,
)
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment
from tests.models import make_tiny_model

SETTINGS: Final[dict[str, Any]] = {"num_blocks": 600, "max_num_seqs": 32, "threads": 1}
QUERY: Final = "where does the crane lift the box to"
DOCUMENTS: Final = [
    "the quay",
    "a crane lifts the box onto the ship " * 4,
    "fog",
    "é, the harbour 日本",
]


def make_classifier(path: Path, num_labels: int, family: str = "Qwen3") -> Any:
    """A random classifier whose tokenizer puts a token before every text and between two."""
    model = make_tiny_model(
        family,
        path,
        head="ForSequenceClassification",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        num_labels=num_labels,
    )
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    return model


def make_encoder(path: Path, head: str, **settings: Any) -> Any:
    """A random BERT, with or without a head, whose tokenizer joins texts as BERT's does."""
    path.mkdir()
    model = make_tiny_model(
        "Bert",
        path,
        head=head,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=512,
        type_vocab_size=2,
        pad_token_id=VOCAB_SIZE - 1,
        **settings,
    )
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}",
        pair=f"{BOS} $A {EOS} $B:1 {EOS}:1",
        special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)],
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": EOS}))
    return model


def encoded(path: Path, model: Any, *texts: str) -> Any:
    """What transformers makes of one text or a pair, with its token types."""
    import torch
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode(*texts)
    with torch.inference_mode():
        return model(torch.tensor([ids.ids]), token_type_ids=torch.tensor([ids.type_ids]))


def logits_of(path: Path, model: Any, *texts: str) -> Any:
    """The scores of one prompt, made by transformers of one text or a pair."""
    import torch
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    with torch.inference_mode():
        return model(torch.tensor([tokenizer(*texts)["input_ids"]])).logits[0].double()


def relevance(path: Path, model: Any, query: str, documents: Sequence[str]) -> list[float]:
    return [logits_of(path, model, query, document).sigmoid().item() for document in documents]


def post(url: str, body: Mapping[str, Any], key: str = "none") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["error"]["message"]


def assert_close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("reranker")
    return path, make_classifier(path, 1)


@pytest.fixture(scope="module")
def served(
    reranker: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with Deployment(
        reranker[0],
        tmp_path_factory.mktemp("run"),
        "--served-model-name",
        "ranker",
        "--max-num-batched-tokens",
        "48",
    ) as own:
        yield own.wait_until_ready()
        assert own.stop() == 0, own.output


def test_scores_of_a_cross_encoder_are_those_of_transformers(
    served: Deployment, reranker: tuple[Path, Any]
) -> None:
    """Prompts are computed in chunks, and the second time read the prefix cache."""
    expected = relevance(*reranker, QUERY, DOCUMENTS)
    assert np.ptp(expected) > 1e-3, "equal scores would prove nothing"
    for has_cached in (False, True):
        body = {"model": "ranker", "text_1": QUERY, "text_2": DOCUMENTS}
        answer = post(f"{served.url}/v1/score", body)
        assert_close([item["score"] for item in answer["data"]], expected)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert not has_cached or cached > 0


def test_a_client_of_cohere_gets_the_best_documents(
    served: Deployment, reranker: tuple[Path, Any]
) -> None:
    """The bodies that its SDK sends, in both versions."""
    expected = relevance(*reranker, QUERY, DOCUMENTS)
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    old = {**body, "documents": [{"text": text} for text in DOCUMENTS], "return_documents": False}
    for path, given in (("v2/rerank", body), ("v1/rerank", old), ("rerank", body)):
        results = post(f"{served.url}/{path}", given)["results"]
        assert [result["index"] for result in results] == order[:2]
        assert_close(
            [result["relevance_score"] for result in results],
            [expected[index] for index in order[:2]],
        )


def test_a_model_that_never_chats_has_no_advice_about_chats(served: Deployment) -> None:
    assert "chat template" not in served.output


def test_another_model_and_other_endpoints_are_rejected(served: Deployment) -> None:
    body = {"model": "other", "query": "q", "documents": ["a"]}
    assert "other" in post(f"{served.url}/v1/rerank", body)
    assert "classifies text" in post(f"{served.url}/v1/embeddings", {"input": "x"})
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert "classifies text" in post(f"{served.url}/v1/chat/completions", chat)


def test_labels_are_those_of_transformers(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    path = tmp_path / "labels"
    path.mkdir()
    model = make_classifier(path, 3, "Llama")
    file = path / "config.json"
    names = {"0": "sad", "1": "so so", "2": "glad"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": names}))
    url = start_deployment(model_dir=path).wait_until_ready().url
    answer = post(f"{url}/classify", {"input": DOCUMENTS})
    for text, item in zip(DOCUMENTS, answer["data"], strict=True):
        expected = logits_of(path, model, text).softmax(dim=-1)
        assert_close(item["probs"], expected.numpy())
        assert item["label"] == names[str(expected.argmax().item())]
    assert "has 3 labels" in post(f"{url}/v1/score", {"text_1": "q", "text_2": "a"})


def test_a_model_without_a_head_compares_embeddings(deployment: Deployment) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS}
    results = post(f"{deployment.url}/v1/rerank", body)["results"]
    inputs = [QUERY, *DOCUMENTS]
    vectors = post(f"{deployment.url}/v1/embeddings", {"input": inputs})["data"]
    query, *others = (np.array(item["embedding"]) for item in vectors)
    for result in results:
        assert_close(result["relevance_score"], query @ others[result["index"]])
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)


def test_llm_scores_and_classifies(reranker: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = reranker
    with LLM(path, **SETTINGS) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert_close(
            [output.outputs.score for output in outputs], relevance(path, model, QUERY, DOCUMENTS)
        )
        one, two = llm.score(["a", "b"], ["c", "d"], use_tqdm=False)
        assert_close(one.outputs.score, relevance(path, model, "a", ["c"])[0])
        assert_close(two.outputs.score, relevance(path, model, "b", ["d"])[0])
        (label,) = llm.classify(QUERY, use_tqdm=False)
        assert_close(label.outputs.probs, logits_of(path, model, QUERY).sigmoid().numpy())
        assert (label.outputs.label, label.outputs.num_classes) == ("LABEL_0", 1)
        (whole,) = llm.score("a", "bcdef", use_tqdm=False)
        length = len(whole.prompt_token_ids) - 3
        (cut,) = llm.score("a", "bcdef", tokenization_kwargs={"truncate_prompt_tokens": length})
        assert len(cut.prompt_token_ids) == length
        assert_close(cut.outputs.score, relevance(path, model, "a", ["bc"])[0])
        for words, kwargs in (
            ("leaves none of 2", {"truncate_prompt_tokens": 2}),
            ("add_special_tokens=False", {"add_special_tokens": False}),
        ):
            with pytest.raises(ValueError, match=words):
                llm.score("a", "b", tokenization_kwargs=kwargs)
        with pytest.raises(ValueError, match="2 texts and data_2 has 3"):
            llm.score(["a"] * 2, ["b"] * 3)
        for call in (llm.generate, llm.embed):
            with pytest.raises(ValueError, match=r"classifies text: use LLM\.classify"):
                call("x")


async def test_async_llm_encodes_with_a_classifier(reranker: tuple[Path, Any]) -> None:
    path, model = reranker
    async with AsyncLLM(path, **SETTINGS) as engine:
        (output,) = [each async for each in engine.encode(QUERY, PoolingParams(), "labels")]
        assert_close(output.outputs.data, logits_of(path, model, QUERY).sigmoid().numpy())
        with pytest.raises(ValueError, match=r"no output head: use AsyncLLM\.encode"):
            await anext(engine.generate(QUERY, SamplingParams(), "text"))


def test_llm_of_a_generating_model_compares_embeddings(tiny_model: tuple[Path, Any]) -> None:
    with LLM(tiny_model[0], in_process=True, **SETTINGS) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        query, *others = llm.embed([QUERY, *DOCUMENTS], use_tqdm=False)
        for output, other in zip(outputs, others, strict=True):
            assert_close(
                output.outputs.score, np.dot(query.outputs.embedding, other.outputs.embedding)
            )
        with pytest.raises(ValueError, match="no classification head"):
            llm.classify("x")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["2 shards", "2 stages"],
)
def test_several_ranks_give_the_scores_of_one(
    layout: dict[str, Any], reranker: tuple[Path, Any]
) -> None:
    path, model = reranker
    with LLM(path, device="cpu", max_num_batched_tokens=32, **SETTINGS, **layout) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert_close(
            [output.outputs.score for output in outputs], relevance(path, model, QUERY, DOCUMENTS)
        )


@pytest.mark.slow
def test_a_reranker_that_is_an_encoder_gives_the_scores_of_transformers(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    path = tmp_path / "encoder"
    model = make_encoder(path, "ForSequenceClassification", num_labels=1)
    expected = [
        encoded(path, model, QUERY, document).logits.sigmoid().item() for document in DOCUMENTS
    ]
    assert np.ptp(expected) > 1e-3, "equal scores would prove nothing"
    url = start_deployment(model_dir=path).wait_until_ready().url
    for _ in range(2):
        answer = post(f"{url}/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        for result in answer["results"]:
            assert_close(result["relevance_score"], expected[result["index"]])
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    long = {"query": QUERY, "documents": ["a word " * 400]}
    assert "maximum context length is 512" in post(f"{url}/v1/rerank", long)
    assert "results" in post(f"{url}/v1/rerank", {**long, "truncate_prompt_tokens": -1})


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2], ids="{} shards".format)
def test_embeddings_of_an_encoder_are_those_of_transformers(shards: int, tmp_path: Path) -> None:
    """Pooled as the files of sentence-transformers say."""
    path = tmp_path / "encoder"
    model = make_encoder(path, "Model")
    kind = "sentence_transformers.models"
    modules = [
        {"path": each and f"1_{each}", "type": f"{kind}.{each or 'Transformer'}"}
        for each in ("", "Pooling")
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(path, device="cpu", tensor_parallel_size=shards, **SETTINGS) as llm:
        outputs = llm.embed(DOCUMENTS, use_tqdm=False)
        for text, output in zip(DOCUMENTS, outputs, strict=True):
            states = encoded(path, model, text).last_hidden_state[0]
            assert_close(output.outputs.embedding, states.mean(0).numpy())
        with pytest.raises(ValueError, match="no output head"):
            llm.generate("x")
