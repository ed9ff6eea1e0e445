"""Scores, ranks and labels with a scripted engine: what they request, answer and reject."""

import json
from typing import Any, Final

import numpy as np
import pytest
from tokenizers import processors

from longshore.deploy.gateway.api import prompts
from longshore.deploy.gateway.openai.scoring import SCORE_NAMES
from longshore.deploy.model.classifier import CLASSIFIED, ClassifierModel
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.protocol.outputs import EngineOutputs, FinishedRequest, FinishReason
from longshore.protocol.requests import AddRequest, PoolingParams
from tests.deploy.gateway.conftest import RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine
from tests.deploy.tiny_tokenizer import BOS, BOS_ID, EOS, EOS_ID, byte_level_tokenizer

EMBEDS: Final = EmbeddingModel(size=2)
RANKS: Final = ClassifierModel(("LABEL_0",), "sigmoid")
LABELS: Final = ClassifierModel(("no", "maybe", "yes"), "softmax")
SCORE: Final = {"text_1": "q", "text_2": ["a", "bb"]}
RERANK: Final = {"query": "q", "documents": ["a", "bbb", "cc"]}
PATHS: Final = {
    "/v1/score": SCORE,
    "/score": SCORE,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/rerank": RERANK,
}


def ids_of(text: str) -> list[int]:
    found: list[int] = byte_level_tokenizer().encode(text).ids
    return found


def prompts_of(gateway: RunningGateway) -> list[list[int]]:
    return [request.prompt_token_ids.tolist() for request in gateway.engine.requests]


def send(engine: FakeEngine, request: AddRequest, *vector: float) -> None:
    end = FinishedRequest(
        request.handle,
        FinishReason.STOPPED,
        0,
        num_cached_tokens=1,
        pooled=np.array(vector, np.float32),
    )
    engine.send(EngineOutputs(finished=(end,)))


def by_length(engine: FakeEngine, request: AddRequest) -> None:
    """One label, whose score is the number of tokens."""
    send(engine, request, len(request.prompt_token_ids))


def turned(engine: FakeEngine, request: AddRequest) -> None:
    """A vector of length 1, turned by as many quarters as the text has tokens."""
    angle = (len(request.prompt_token_ids) - 1) * np.pi / 2
    send(engine, request, np.cos(angle), np.sin(angle))


def three(engine: FakeEngine, request: AddRequest) -> None:
    send(engine, request, 0.0, 1.0, len(request.prompt_token_ids))


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


async def ask(gateway: RunningGateway, path: str, body: Any) -> Any:
    answer = await gateway.post(path, body)
    content = json.loads(answer.body)
    assert answer.status == 200, content
    return content


async def refuse(gateway: RunningGateway, path: str, body: Any) -> Any:
    answer = await gateway.post(path, body)
    assert answer.status == 400, answer.body
    assert gateway.engine.requests == []
    return json.loads(answer.body)["error"]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_a_pair_is_one_prompt_with_the_score_of_its_label(
    path: str, start_gateway: StartGateway
) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        body = {**SCORE, "priority": 3, "cache_salt": "s", "user": "u"}
        answer = await ask(gateway, path, body)
        scores = [sigmoid(2), sigmoid(3)]
        assert [item["score"] for item in answer["data"]] == pytest.approx(scores)
        assert [(item["index"], item["object"]) for item in answer["data"]] == [
            (0, "score"),
            (1, "score"),
        ]
        assert (answer["object"], answer["model"]) == ("list", "tiny")
        assert answer["id"].startswith("score-")
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        assert prompts_of(gateway) == [ids_of("qa"), ids_of("qbb")]
        for request in gateway.engine.requests:
            assert request.options.pooling == CLASSIFIED
            assert (request.options.priority, request.options.cache_salt) == (3, "s")
            assert request.request_id.startswith(answer["id"])


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_ordered_by_score(path: str, start_gateway: StartGateway) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        answer = await ask(gateway, path, RERANK)
        assert [result["index"] for result in answer["results"]] == [1, 2, 0]
        assert [result["document"] for result in answer["results"]] == [
            {"text": "bbb"},
            {"text": "cc"},
            {"text": "a"},
        ]
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == pytest.approx([sigmoid(4), sigmoid(3), sigmoid(2)])
        assert answer["id"].startswith("rerank-")
        assert answer["usage"]["total_tokens"] == 9


async def test_results_are_as_many_as_requested_with_or_without_texts(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        for top_n, number in ((None, 3), (0, 3), (1, 1), (2, 2), (9, 3)):
            body = {**RERANK, "top_n": top_n, "return_documents": False}
            results = (await ask(gateway, "/rerank", body))["results"]
            assert [result["index"] for result in results] == [1, 2, 0][:number]
            assert all(result.keys() == {"index", "relevance_score"} for result in results)
        objects = [{"text": "a", "id": 5}, "bbb", {"text": "cc"}]
        results = (await ask(gateway, "/rerank", {**RERANK, "documents": objects}))["results"]
        assert [result["document"]["text"] for result in results] == ["bbb", "cc", "a"]
        answer = await gateway.post("/rerank", {**RERANK, "documents": objects})
        assert answer.headers["x-longshore-ignored-fields"] == "documents[0].id"


@pytest.mark.parametrize(("path", "body"), [("/score", SCORE), ("/rerank", RERANK)])
async def test_a_side_without_truncation_is_rejected(
    start_gateway: StartGateway, path: str, body: dict[str, Any]
) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        answer = await gateway.post(path, {**body, "truncation_side": "left"})
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["param"] == "truncation_side"
        await ask(gateway, path, {**body, "truncation_side": "left", "max_tokens_per_doc": 1})


async def test_equal_scores_keep_the_order_of_the_documents(start_gateway: StartGateway) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        body = {"query": "q", "documents": ["a", "b", "cc", "d"]}
        results = (await ask(gateway, "/rerank", body))["results"]
        assert [result["index"] for result in results] == [2, 0, 1, 3]


async def test_scores_before_the_activation(start_gateway: StartGateway) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        body = {**SCORE, "use_activation": False}
        assert [item["score"] for item in (await ask(gateway, "/score", body))["data"]] == [2, 3]


@pytest.mark.parametrize("names", SCORE_NAMES, ids=" and ".join)
async def test_texts_are_scored_in_pairs_or_one_with_all(
    names: tuple[str, str], start_gateway: StartGateway
) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        for ones, others in (
            ("q", "a"),
            (["q"], "a"),
            ("q", ["a"]),
            (["q"], ["a", "b"]),
            (["q", "r"], ["a", "b"]),
        ):
            gateway.engine.requests.clear()
            await ask(gateway, "/score", dict(zip(names, (ones, others), strict=True)))
            queries = ones if len(ones) == len(others) and isinstance(ones, list) else [ones[0]]
            queries = queries * len(others) if len(queries) == 1 else queries
            assert prompts_of(gateway) == [
                ids_of(one + other) for one, other in zip(queries, others, strict=True)
            ]
        error = await gateway.post("/score", dict(zip(names, (["q", "r"], ["a"]), strict=True)))
        assert f"{names[0]} has 2 texts and {names[1]} has 1" in error.body.decode()


async def test_embedding_models_compare_each_text_once(start_gateway: StartGateway) -> None:
    async with start_gateway(turned, embedding=EMBEDS) as gateway:
        body = {"text_1": "q", "text_2": ["a", "bb", "ccc"]}
        answer = await ask(gateway, "/v1/score", body)
        scores = [item["score"] for item in answer["data"]]
        assert scores == pytest.approx([1.0, 0.0, -1.0], abs=1e-6)
        assert prompts_of(gateway) == [ids_of(text) for text in ("q", "a", "bb", "ccc")]
        assert all(
            each.options.pooling == PoolingParams("last") for each in gateway.engine.requests
        )
        assert answer["usage"]["prompt_tokens"] == 7
        results = (await ask(gateway, "/v1/rerank", {"query": "qqq", "documents": ["a", "bbb"]}))[
            "results"
        ]
        assert [result["index"] for result in results] == [1, 0]


async def test_special_tokens_of_a_pair_are_those_of_the_tokenizer(
    start_gateway: StartGateway, tmp_path: Any
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {EOS} $B {EOS}",
        special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)],
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with start_gateway(by_length, classifier=RANKS, tokenizer=False) as gateway:
        await ask(gateway, "/score", {"text_1": "qr", "text_2": ["ab", "c"]})
        cut = {**SCORE, "text_2": "abcdef", "truncate_prompt_tokens": 6}
        await ask(gateway, "/score", cut)
        await ask(gateway, "/score", {**cut, "truncation_side": "left"})
        assert prompts_of(gateway) == [
            [BOS_ID, *ids_of("qr"), EOS_ID, *ids_of("ab"), EOS_ID],
            [BOS_ID, *ids_of("qr"), EOS_ID, *ids_of("c"), EOS_ID],
            [BOS_ID, *ids_of("q"), EOS_ID, *ids_of("ab"), EOS_ID],
            [BOS_ID, *ids_of("q"), EOS_ID, *ids_of("ef"), EOS_ID],
        ]


async def test_a_template_of_the_operator_makes_the_prompt_of_a_pair(
    start_gateway: StartGateway, tmp_path: Any
) -> None:
    template = tmp_path / "rerank.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
        "{% if messages[1].content == 'bad' %}{{ raise_exception('a bad one') }}{% endif %}"
    )
    settings = {"classifier": RANKS, "chat_template": str(template)}
    async with start_gateway(by_length, **settings) as gateway:
        error = await refuse(gateway, "/rerank", {**RERANK, "documents": ["a", "bad"]})
        assert "rejects documents[1]: a bad one" in error["message"]
        error = await refuse(gateway, "/rerank", {**RERANK, "truncate_prompt_tokens": 5})
        assert "use max_tokens_per_doc" in error["message"]
        body = {"query": "q", "documents": ["a", "bcd"], "max_tokens_per_doc": 2}
        await ask(gateway, "/rerank", body)
        assert prompts_of(gateway) == [
            ids_of("query=q;document=a;"),
            ids_of("query=q;document=bc;"),
        ]


async def test_documents_are_cut_and_returned_whole(start_gateway: StartGateway) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        body = {"query": "q", "documents": ["abcdef", "é!"], "max_tokens_per_doc": 3}
        results = (await ask(gateway, "/rerank", body))["results"]
        await ask(gateway, "/rerank", {**body, "truncation_side": "left"})
        assert prompts_of(gateway) == list(map(ids_of, ["qabc", "qé!", "qdef", "qé!"]))
        assert {result["document"]["text"] for result in results} == {"abcdef", "é!"}


async def test_compared_texts_are_cut_at_the_side_of_the_request(
    start_gateway: StartGateway,
) -> None:
    body = {"text_1": "abcd", "text_2": "wxyz", "truncate_prompt_tokens": 2}
    async with start_gateway(turned, embedding=EMBEDS) as gateway:
        await ask(gateway, "/score", body)
        await ask(gateway, "/score", {**body, "truncation_side": "left"})
        assert prompts_of(gateway) == list(map(ids_of, ["ab", "wx", "cd", "yz"]))


@pytest.mark.parametrize(
    ("path", "body"),
    [*PATHS.items(), ("/classify", {"input": "x"}), ("/v1/classify", {"input": "x"})],
)
async def test_unknown_fields_are_ignored_and_named(
    path: str, body: dict[str, Any], start_gateway: StartGateway
) -> None:
    async with start_gateway(by_length, classifier=RANKS) as gateway:
        answer = await gateway.post(path, {**body, "spare": 1, "request_id": "crane-7"})
        assert answer.status == 200
        assert answer.headers["x-longshore-ignored-fields"] == "spare"
        assert answer.headers["x-request-id"] == "crane-7"
        assert "-crane-7-" in gateway.engine.requests[0].request_id
    async with start_gateway(classifier=RANKS, strict_requests=True) as gateway:
        assert (await refuse(gateway, path, {**body, "spare": 1}))["param"] == "spare"


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
async def test_each_text_gets_the_label_of_the_highest_score(
    path: str, start_gateway: StartGateway
) -> None:
    async with start_gateway(three, classifier=LABELS) as gateway:
        answer = await ask(gateway, path, {"input": ["abc", "d"]})
        powers = [np.exp([0.0, 1.0, 3.0]), np.exp([0.0, 1.0, 1.0])]
        for item, each in zip(answer["data"], powers, strict=True):
            assert item["probs"] == pytest.approx((each / each.sum()).tolist())
            assert item["num_classes"] == 3
        assert [item["label"] for item in answer["data"]] == ["yes", "maybe"]
        assert [item["index"] for item in answer["data"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == 4
        raw = await ask(gateway, path, {"input": "abc", "use_activation": False})
        assert raw["data"][0]["probs"] == [0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/score", {}, "text_1", "text_1 and text_2 are required"),
        ("/score", {"text_1": "q"}, "text_2", "text_1 and text_2 are required"),
        ("/score", {"documents": "q"}, "queries", "are required"),
        ("/score", {"items": "q"}, "queries", "are required"),
        ("/score", {"data_1": "q"}, "data_2", "are required"),
        ("/score", {"text_1": "q", "documents": "a"}, "text_1", "are required"),
        ("/score", {**SCORE, "data_1": "a", "data_2": "b"}, "text_1", "are required"),
        ("/score", {"text_1": "q", "text_2": []}, "text_2", "empty list"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1", "text_1 is empty"),
        ("/score", {"text_1": "q", "text_2": ["a", ""]}, "text_2", "text_2[1] is empty"),
        ("/score", {"text_1": ["q"] * 2, "text_2": ["a"] * 3}, "text_2", "has 2 texts"),
        ("/score", {"text_1": "q", "text_2": ["a"] * 2049}, "text_2", "at most 2048"),
        ("/score", {"text_1": "q", "text_2": [5]}, "text_2", "str"),
        (
            "/score",
            {"text_1": "q", "text_2": "a" * 64},
            "text_2",
            "text_2 with text_1 has 65",
        ),
        (
            "/score",
            {"text_1": "q" * 60, "text_2": "a", "truncate_prompt_tokens": 60},
            "text_1",
            "leaves none of 60",
        ),
        (
            "/score",
            {**SCORE, "truncate_prompt_tokens": 65},
            "truncate_prompt_tokens",
            "between 1 and 64",
        ),
        ("/score", {**SCORE, "deadline_s": 0}, "deadline_s", "above 0"),
        ("/score", {**SCORE, "no_store": True}, "no_store", "not supported"),
        (
            "/score",
            {**SCORE, "kv_transfer_params": {"a": 1}},
            "kv_transfer_params",
            "not supported",
        ),
        ("/rerank", {**RERANK, "kv_transfer_params": {}}, "kv_transfer_params", "not supported"),
        (
            "/classify",
            {"input": "x", "kv_transfer_params": {"a": 1}},
            "kv_transfer_params",
            "not supported",
        ),
        ("/rerank", {"documents": ["a"]}, "query", "required field"),
        ("/rerank", {"query": "q"}, "documents", "required field"),
        ("/rerank", {"query": "q", "documents": []}, "documents", "empty list"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "query is empty"),
        ("/rerank", {"query": "q", "documents": ["a", ""]}, "documents", "documents[1] is empty"),
        ("/rerank", {"query": "q", "documents": [{"x": 1}]}, "text", "$.documents["),
        ("/rerank", {"query": "q", "documents": ["a"] * 2049}, "documents", "at most 2048"),
        ("/rerank", {"query": "q", "documents": ["a"] * 40_000}, "documents", "more than 32768"),
        ("/rerank", {**RERANK, "top_n": -1}, "top_n", "at least 0"),
        ("/rerank", {**RERANK, "rank_fields": ["title"]}, "rank_fields", "not supported"),
        ("/rerank", {**RERANK, "max_chunks_per_doc": 9}, "max_chunks_per_doc", "not supported"),
        ("/rerank", {**RERANK, "max_tokens_per_doc": -1}, "max_tokens_per_doc", "at least 1"),
        ("/classify", {"input": "x" * 65}, "input", "input[0] has 65 tokens"),
        ("/classify", {"input": ["x", ""]}, "input", "input[1] is empty"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_scored_is_rejected_by_name(
    path: str, body: Any, param: str, says: str, start_gateway: StartGateway
) -> None:
    settings = {"classifier": RANKS, "max_body_bytes": 1 << 20}
    async with start_gateway(by_length, **settings) as gateway:
        error = await refuse(gateway, path, body)
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert says in error["message"]


async def test_the_tokens_of_a_request_are_bounded(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_TOKEN_IDS", 7)
    for settings in ({"classifier": RANKS}, {"embedding": EMBEDS}):
        async with start_gateway(by_length, **settings) as gateway:
            error = await refuse(gateway, "/rerank", {"query": "qqq", "documents": ["ab", "cde"]})
            assert "up to documents[1]" in error["message"]
            assert "at most 7" in error["message"]


@pytest.mark.parametrize(
    ("settings", "path", "body", "says"),
    [
        ({"classifier": LABELS}, "/score", SCORE, "has 3 labels, so no single score"),
        ({"classifier": LABELS}, "/rerank", RERANK, "use /classify"),
        ({"embedding": EMBEDS}, "/classify", {"input": "x"}, "has no classification head"),
        ({}, "/score", SCORE, "is a speech model"),
        ({"classifier": RANKS}, "/v1/embeddings", {"input": "x"}, "classifies text"),
        ({"classifier": RANKS}, "/v1/completions", {"prompt": "x"}, "classifies text"),
        (
            {"embedding": EmbeddingModel(2, problem="has a module Dense")},
            "/score",
            SCORE,
            "has a module Dense",
        ),
    ],
)
async def test_a_model_that_does_something_else_is_rejected_with_what_it_does(
    settings: Any, path: str, body: Any, says: str, start_gateway: StartGateway
) -> None:
    async with start_gateway(by_length, **settings) as gateway:
        error = await refuse(gateway, path, body)
        assert error["param"] == "model"
        assert says in error["message"]


async def test_pairs_need_a_tokenizer_and_cosines_have_no_activation(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(by_length, classifier=RANKS, tokenizer=False) as gateway:
        assert "needs a tokenizer" in (await refuse(gateway, "/rerank", RERANK))["message"]
    async with start_gateway(turned, embedding=EMBEDS) as gateway:
        error = await refuse(gateway, "/rerank", {**RERANK, "use_activation": True})
        assert error["param"] == "use_activation"


@pytest.mark.parametrize("path", PATHS)
async def test_a_pair_that_fails_is_the_answer(path: str, start_gateway: StartGateway) -> None:
    def fail(engine: FakeEngine, request: AddRequest) -> None:
        engine.finish(request, FinishReason.ERROR, message="why")

    async with start_gateway(fail, classifier=RANKS) as gateway:
        answer = await gateway.post(path, PATHS[path])
        assert answer.status == 500
        assert json.loads(answer.body)["error"]["message"] == "why"
