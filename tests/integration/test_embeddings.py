"""Embeddings through real processes: those of transformers, as the official client decodes them."""

import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, processors

from longshore import LLM, PoolingParams, SamplingParams
from tests.deploy.tiny_tokenizer import BOS, BOS_ID, EOS, EOS_ID, VOCAB_SIZE, byte_level_tokenizer
from tests.integration.conftest import StartDeployment
from tests.integration.deployment import Deployment
from tests.models import make_tiny_llama, make_tiny_model

SETTINGS: dict[str, Any] = {"num_blocks": 600, "max_num_seqs": 32, "threads": 1}
NO_GATES = {"watermark": 0.0, "preempt_threshold": 1.0, "admit_threshold": 1.0}
TEXTS = ["the quay", "a crane lifts the box", "fog"]


def vector_of(model: Any, token_ids: Sequence[int], kind: str = "last") -> Any:
    """Vectors of length 1, from the hidden states of transformers."""
    import torch

    with torch.inference_mode():
        states = model.model(torch.tensor([list(token_ids)])).last_hidden_state[0].double()
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[kind].numpy()
    return vector / np.linalg.norm(vector)


def assert_close(embedding: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(embedding), expected, rtol=0, atol=2e-5)


def ids_of(text: str) -> list[int]:
    found: list[int] = byte_level_tokenizer().encode(text).ids
    return found


def post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/embeddings",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    return served.id


@pytest.mark.req("FEA-04")
def test_the_official_client_gets_the_vectors_of_transformers(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    answer = client.embeddings.create(model=model, input=TEXTS, user="somebody")  # as base64
    as_floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1, 2]
    for text, item, same in zip(TEXTS, answer.data, as_floats.data, strict=True):
        assert_close(item.embedding, vector_of(tiny_model[1], ids_of(text)))
        # Computed twice, possibly in batches of different sizes, whose sums differ in the last
        # bits.
        np.testing.assert_allclose(item.embedding, same.embedding, rtol=0, atol=1e-6)
    assert answer.model == model
    assert (
        answer.usage.prompt_tokens
        == answer.usage.total_tokens
        == sum(len(ids_of(text)) for text in TEXTS)
    )


def test_an_input_may_be_a_text_or_token_ids_alone_or_in_a_list(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    ids = ids_of(TEXTS[1])
    expected = vector_of(tiny_model[1], ids)
    for given in (TEXTS[1], ids, [ids], [TEXTS[1]]):
        (item,) = client.embeddings.create(model=model, input=given).data
        assert_close(item.embedding, expected)


def test_dimensions_cut_a_vector_that_has_length_one_again(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    whole = vector_of(tiny_model[1], ids_of(TEXTS[0]))
    (item,) = client.embeddings.create(model=model, input=TEXTS[0], dimensions=10).data
    assert_close(item.embedding, whole[:10] / np.linalg.norm(whole[:10]))


def test_texts_are_cut_where_the_request_says_so(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    def cut(given: Any, length: int) -> Any:
        extra = {"truncate_prompt_tokens": length}
        return client.embeddings.create(model=model, input=given, extra_body=extra)

    ids = ids_of("fog " * 2000)
    for given in ("fog " * 2000, ids):
        answer = cut(given, 7)
        assert answer.usage.prompt_tokens == 7
        assert_close(answer.data[0].embedding, vector_of(tiny_model[1], ids[:7]))
        assert cut(given, -1).usage.prompt_tokens == 4096
    with pytest.raises(openai.BadRequestError, match=r"input\[1\] has 8000 tokens.*is 4096"):
        client.embeddings.create(model=model, input=[[5], ids])


def test_as_many_inputs_as_are_taken_come_back_in_order(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    inputs = [[2 + n % 300, 2 + n // 300] for n in range(2048)]
    answer = client.embeddings.create(model=model, input=inputs)
    assert [item.index for item in answer.data] == list(range(2048))
    for index in (0, 255, 256, 1023, 2047):
        expected = vector_of(tiny_model[1], inputs[index])
        assert_close(answer.data[index].embedding, expected)
    with pytest.raises(openai.BadRequestError, match="at most 2048"):
        client.embeddings.create(model=model, input=[*inputs, [5]])


def test_vectors_and_streams_run_side_by_side_and_change_each_other_in_nothing(
    client: openai.OpenAI, model: str, tiny_model: tuple[Path, Any]
) -> None:
    def generate() -> list[str]:
        completion = client.completions.create(
            model=model, prompt=list(TEXTS), max_tokens=64, temperature=0
        )
        return [choice.text for choice in completion.choices]

    alone = generate()
    beside: list[list[str]] = []
    thread = threading.Thread(target=lambda: beside.append(generate()))
    thread.start()
    answers = [client.embeddings.create(model=model, input=TEXTS) for _ in range(10)]
    thread.join()
    assert beside == [alone]
    for answer in answers:
        for text, item in zip(TEXTS, answer.data, strict=True):
            assert_close(item.embedding, vector_of(tiny_model[1], ids_of(text)))


def sentence_folder(path: Path, pooling: Mapping[str, Any], *, normalize: bool) -> Any:
    """A checkpoint as sentence-transformers writes one, with an end token after every text."""
    reference = make_tiny_llama(
        path, vocab_size=VOCAB_SIZE, bos_token_id=BOS_ID, eos_token_id=EOS_ID
    )
    tokenizer: Tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return reference


def test_a_folder_of_sentence_transformers_is_pooled_as_it_says(
    start_deployment: StartDeployment, tmp_path: Path
) -> None:
    path = tmp_path / "sentences"
    path.mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    reference = sentence_folder(path, {**pooling, "pooling_mode_cls_token": False}, normalize=False)
    url = start_deployment(model_dir=path).wait_until_ready().url
    plain = post(url, {"input": TEXTS})
    normal = post(url, {"input": TEXTS, "normalize": True})
    again = post(url, {"input": TEXTS})
    for text, item, unit, same in zip(
        TEXTS, plain["data"], normal["data"], again["data"], strict=True
    ):
        expected = vector_of(reference, [BOS_ID, *ids_of(text), EOS_ID], "mean")
        assert_close(unit["embedding"], expected)
        embedding = np.array(item["embedding"])
        assert np.linalg.norm(embedding) > 1.5
        assert_close(embedding / np.linalg.norm(embedding), expected)
        assert item == same
    # Truncated texts keep their special tokens.
    cut = post(url, {"input": TEXTS[1], "truncate_prompt_tokens": 6, "normalize": True})
    kept = [BOS_ID, *ids_of(TEXTS[1])[:4], EOS_ID]
    assert_close(cut["data"][0]["embedding"], vector_of(reference, kept, "mean"))
    bare = post(url, {"input": TEXTS[1], "add_special_tokens": False, "normalize": True})
    assert_close(bare["data"][0]["embedding"], vector_of(reference, ids_of(TEXTS[1]), "mean"))


@pytest.mark.parametrize("in_process", [False, True], ids=["processes", "in process"])
def test_llm_embeds_texts_and_token_ids(in_process: bool, tiny_model: tuple[Path, Any]) -> None:
    with LLM(tiny_model[0], in_process=in_process, **SETTINGS) as llm:
        prompts = [TEXTS[0], {"prompt_token_ids": list(range(20, 90))}]
        outputs = llm.embed(prompts, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [
            ids_of(TEXTS[0]),
            list(range(20, 90)),
        ]
        for output in outputs:
            assert output.error is None
            assert_close(
                output.outputs.embedding, vector_of(tiny_model[1], output.prompt_token_ids)
            )
        for kind, num_cached in (("last", 64), ("mean", 0), ("cls", 0)):
            (again,) = llm.embed(prompts[1], pooling_params=PoolingParams(kind=kind, dimensions=9))
            assert again.num_cached_tokens == num_cached
            expected = vector_of(tiny_model[1], again.prompt_token_ids, kind)[:9]
            assert_close(again.outputs.embedding, expected / np.linalg.norm(expected))
        with pytest.raises(ValueError, match=r"dimensions=65 must be between 1 and 64"):
            llm.embed(TEXTS, pooling_params=PoolingParams(dimensions=65))
        (answer,) = llm.generate(TEXTS[0], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tensor_parallel_size": 2}, id="2 shards", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, id="2 stages", marks=pytest.mark.long),
        pytest.param(
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "family": "one KV head"},
            id="shared context",
        ),
    ],
)
def test_several_ranks_give_the_vectors_of_one(layout: dict[str, Any], tmp_path: Path) -> None:
    layout = dict(layout)
    overrides = {"num_key_value_heads": 1} if layout.pop("family", None) else {}
    reference = make_tiny_model("Llama", tmp_path, **overrides)
    prompts = [[3 + (7 * n + 11 * index) % 120 for n in range(60 + index)] for index in range(8)]
    as_given = [{"prompt_token_ids": ids} for ids in prompts]
    with LLM(
        tmp_path,
        device="cpu",
        dtype="float32",
        threads=1,
        max_num_seqs=32,
        num_blocks=20,
        max_num_batched_tokens=17,
        verify_plan=True,
        **NO_GATES,
        **layout,
    ) as llm:
        for kind in ("last", "mean"):
            outputs = llm.embed(as_given, pooling_params=PoolingParams(kind=kind))
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_close(output.outputs.embedding, vector_of(reference, prompt, kind))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A decoder without an output head, as embedding models are saved."""
    whole = make_tiny_model("Qwen3", tmp_path_factory.mktemp("whole"), head_dim=16)
    path = tmp_path_factory.mktemp("bare")
    whole.model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    return path, whole


def test_a_decoder_without_a_head_gives_vectors_and_rejects_the_rest(
    bare: tuple[Path, Any], start_deployment: StartDeployment
) -> None:
    path, reference = bare
    url = start_deployment(model_dir=path).wait_until_ready().url
    ids = list(range(5, 60))
    (item,) = post(url, {"input": ids})["data"]
    assert_close(item["embedding"], vector_of(reference, ids))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (served,) = client.models.list().data
        with pytest.raises(
            openai.BadRequestError, match="no output head and only serves embeddings"
        ):
            client.completions.create(model=served.id, prompt=ids)


@pytest.mark.slow
def test_llm_of_a_decoder_without_a_head_embeds_with_every_layout(bare: tuple[Path, Any]) -> None:
    path, reference = bare
    ids = list(range(5, 60))
    for layout in (
        {"in_process": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ):
        with LLM(path, **SETTINGS, **layout) as llm:
            (output,) = llm.embed({"prompt_token_ids": ids}, use_tqdm=False)
            assert_close(output.outputs.embedding, vector_of(reference, ids))
            with pytest.raises(ValueError, match=r"no output head: use LLM\.embed"):
                llm.generate({"prompt_token_ids": ids})
