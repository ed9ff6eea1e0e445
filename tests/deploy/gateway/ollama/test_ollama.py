"""Ollama's API: what reaches the engine, and what the client gets."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.gateway.http import connection
from longshore.deploy.gateway.ollama.requests import OllamaChatRequest, keep_seconds, parse_chat
from longshore.deploy.model.embedding import EmbeddingModel
from longshore.deploy.requests.chat_messages import template_input
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest, PoolingParams
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import never_answer, scored_echo
from tests.deploy.gateway.http.test_exchange import ids_of, say
from tests.deploy.gateway.openai.test_embeddings import pooled
from tests.deploy.tiny_tokenizer import byte_level_tokenizer, save_tokenizer

CHAT, GENERATE = "/api/chat", "/api/generate"
HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
HEADER = "x-longshore-ignored-fields"
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {"type": "object", "properties": {"id": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "lookup", "arguments": {"id": 5}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.arguments.id }}</tool_call>{% endfor %}{% endfor %}"
)


def lines_of(answer: HttpAnswer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


def prompt_of(request: AddRequest) -> str:
    return str(byte_level_tokenizer().decode(request.prompt_token_ids.tolist(), False))


def check_end(line: dict[str, Any], request: AddRequest, *, num_tokens: int) -> None:
    """The counts and durations."""
    assert line["prompt_eval_count"] == len(request.prompt_token_ids)
    assert (line["eval_count"], line["load_duration"]) == (num_tokens, 0)
    parts = line["prompt_eval_duration"], line["eval_duration"]
    assert all(part > 0 for part in parts)
    assert abs(sum(parts) - line["total_duration"]) <= 1
    assert line["total_duration"] < PATIENCE_S * 1e9


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        (CHAT, HI, lambda line: line["message"]["content"]),
        (GENERATE, {"model": "tiny", "prompt": "hi"}, lambda line: line["response"]),
    ],
)
async def test_an_answer_is_a_stream_of_lines_unless_the_request_says_otherwise(
    start_gateway: StartGateway, path: str, body: dict[str, Any], text_of: Any
) -> None:
    async with start_gateway(say("hey")) as gateway:
        streamed = await gateway.post(path, body)
        whole = await gateway.post(path, {**body, "stream": False})
        first, second = gateway.engine.requests
    *parts, last = lines_of(streamed)
    assert "".join(map(text_of, parts)) == "hey"
    assert not any(part["done"] for part in parts)
    assert all(part["created_at"].endswith("Z") for part in parts)
    assert (text_of(last), last["done"], last["done_reason"]) == ("", True, "stop")
    check_end(last, first, num_tokens=4)
    assert whole.headers["content-type"] == "application/json"
    answer = json.loads(whole.body)
    assert (text_of(answer), answer["model"]) == ("hey", "tiny")
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    check_end(answer, second, num_tokens=4)
    assert prompt_of(first) == prompt_of(second)
    assert prompt_of(first) == "<s>[user]hi</s>[assistant]"


async def test_options_are_the_parameters_of_chats(start_gateway: StartGateway) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 11,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 1,
    }
    async with start_gateway(say("hello world")) as gateway:
        answer = await gateway.post(
            CHAT, {**HI, "options": {**options, "stop": ["wor"]}, "stream": False}
        )
        for changes in ({"num_predict": -1, "seed": -1}, {"repeat_last_n": 0}):
            await gateway.post(CHAT, {**HI, "options": {**options, **changes}, "stream": False})
        first, unlimited, unpenalized = (each.sampling for each in gateway.engine.requests)
    assert json.loads(answer.body)["message"]["content"] == "hello "
    assert (first.max_tokens, first.temperature, first.top_k, first.top_p) == (3, 0.5, 7, 0.75)
    assert (first.min_p, first.seed, first.repetition_penalty) == (0.25, 11, 1.5)
    assert (first.presence_penalty, first.frequency_penalty) == (0.5, 1)
    assert unlimited.seed != 11
    assert unlimited.max_tokens is None or unlimited.max_tokens > 30
    assert (unpenalized.repetition_penalty, unpenalized.presence_penalty) == (1, 0)


async def test_options_without_effect_are_named_unless_they_are_of_the_process(
    start_gateway: StartGateway,
) -> None:
    options = {
        **{"num_ctx": 4096, "num_keep": 3, "repeat_last_n": 64, "num_gpu": 1, "num_thread": 4},
        **{"mirostat": 0, "tfs_z": 1.0, "repeat_penalty": 1.1, "spare": 1},
    }
    body = {**HI, "options": options, "keep_alive": "5m", "shift": True, "stream": False}
    async with start_gateway(say("x")) as gateway:
        answer = await gateway.post(CHAT, body)
    assert answer.status == 200, answer.body
    named = {"shift", "num_ctx", "num_keep", "options.repeat_last_n", "spare"}
    assert set(answer.headers[HEADER].split(", ")) == named


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"options": {"mirostat": 2}}, "mirostat is not supported"),
        (CHAT, {"options": {"typical_p": 0.5}}, "typical_p is not supported"),
        (CHAT, {"options": {"temperature": -1}}, "options.temperature=-1"),
        (CHAT, {"options": {"num_predict": "many"}}, "num_predict"),
        (CHAT, {"options": {"stop": ["x" * 300]}}, "options.stop has a string of 300"),
        (CHAT, {"format": "yaml"}, "format is 'yaml'; it must be \"json\" or a JSON schema"),
        (CHAT, {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"model": "other"}, "the model 'other' does not exist"),
        (CHAT, {"n": 2}, "n is not supported"),
        (GENERATE, {"prompt": "x", "context": [1, 2]}, "context is not supported; send the mess"),
        (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        (GENERATE, {"prompt": "x", "images": ["aGk="]}, "images is not supported"),
        (GENERATE, {"prompt": "x", "system": "y", "raw": True}, "system needs a template"),
        (GENERATE, {"prompt": "x", "suffix": "y"}, "suffix needs a model that fills"),
        ("/api/embed", {"input": "x"}, "tiny"),
        ("/api/show", {"model": "other"}, "the model 'other' does not exist"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    start_gateway: StartGateway, path: str, body: dict[str, Any], says: str
) -> None:
    asked = {**(HI if path == CHAT else {"model": "tiny"}), **body}
    async with start_gateway(say("x")) as gateway:
        answer = await gateway.post(path, asked)
    assert answer.status in (400, 404)
    error = json.loads(answer.body)
    assert error.keys() == {"error"}
    assert says in error["error"]


@pytest.mark.parametrize(
    ("method", "path", "verb"),
    [
        ("POST", "/api/pull", "pull"),
        ("POST", "/api/push", "push"),
        ("POST", "/api/create", "create"),
        ("POST", "/api/copy", "copy"),
        ("DELETE", "/api/delete", "delete"),
        ("POST", "/api/blobs/sha256:00", "create"),
    ],
)
async def test_changes_of_the_models_are_refused_by_name(
    start_gateway: StartGateway, method: str, path: str, verb: str
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.client.request(method, path, b"{}", timeout_s=PATIENCE_S)
    assert answer.status == 400
    assert f"does not {verb} models" in json.loads(answer.body)["error"]


async def test_a_request_without_a_prompt_only_loads_the_model(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway() as gateway:
        for path, body in (
            (GENERATE, {"model": "tiny", "keep_alive": 0}),
            (CHAT, {"model": "tiny:latest", "messages": []}),
        ):
            answer = json.loads((await gateway.post(path, body)).body)
            assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert gateway.engine.requests == []


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        ("", None),
        (300, 300),
        (0, 0),
        (-1, math.inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("-1m", math.inf),
        ("-1", math.inf),
        (1e300, math.inf),  # a time that no calendar has
        ("9" * 64, math.inf),
        ("0", 0),
        ("60", 60),
    ],
)
def test_how_long_a_model_is_kept_is_read_as_ollama_does(
    given: float | str | None, seconds: float | None
) -> None:
    assert keep_seconds(given) == seconds


@pytest.mark.parametrize("given", ["soon", "m5", "5 m", "5m" * 40, "nan", True])
async def test_another_time_to_keep_a_model_is_rejected(
    start_gateway: StartGateway, given: Any
) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.post(CHAT, {**HI, "keep_alive": given})
    assert answer.status == 400
    assert "keep_alive" in json.loads(answer.body)["error"]


async def test_a_raw_prompt_has_no_template(start_gateway: StartGateway, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with_markers = byte_level_tokenizer()
    with_markers.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    with_markers.save(str(tmp_path / "tokenizer.json"))
    async with start_gateway(say("x"), tokenizer=False) as gateway:
        for changes in ({"raw": True}, {"suffix": "q"}, {"system": "s"}):
            await gateway.post(GENERATE, {"model": "tiny", "prompt": "p", **changes})
        raw, filled, chat = (each.prompt_token_ids.tolist() for each in gateway.engine.requests)
    assert raw == ids_of("p")
    assert with_markers.decode(filled, False) == "<fim_prefix>p<fim_suffix>q<fim_middle>"
    assert "s" in with_markers.decode(chat)
    assert len(chat) > len(raw)


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    file = tmp_path / "with_tools.jinja"
    file.write_text(TEMPLATE)
    return {"chat_template": str(file), "reasoning_parser": "think"}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_reasoning_and_calls_have_fields_of_their_own(
    start_gateway: StartGateway, settings: Any, is_stream: bool
) -> None:
    script = say(f"<think>Hm.</think>Wait.\n{CALL}\n{CALL}")
    body = {**HI, "tools": [LOOKUP], "stream": is_stream}
    async with start_gateway(script, **settings) as gateway:
        answer = await gateway.post(CHAT, body)
    lines = lines_of(answer) if is_stream else [json.loads(answer.body)]
    messages = [line["message"] for line in lines]
    assert "".join(message["content"] for message in messages) == "Wait."
    assert "".join(message.get("thinking", "") for message in messages) == "Hm."
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert len({call["id"] for call in calls}) == 2
    assert [call["function"] for call in calls] == [
        {"name": "lookup", "arguments": {"id": 5}, "index": index} for index in range(2)
    ]
    assert lines[-1]["done_reason"] == "stop"


async def test_reasoning_is_left_out_if_the_request_says_so(
    start_gateway: StartGateway, settings: Any
) -> None:
    async with start_gateway(say("<think>Hm.</think>Well"), **settings) as gateway:
        answer = await gateway.post(CHAT, {**HI, "think": False, "stream": False})
    message = json.loads(answer.body)["message"]
    assert message == {"role": "assistant", "content": "Well"}


def test_results_are_of_the_calls_that_they_answer() -> None:
    calls = [
        {"function": {"name": "lookup", "arguments": {"id": 5}, "index": 0}},
        {"function": {"name": "count", "arguments": {}}, "id": "mine"},
        {"function": {"name": "lookup", "arguments": {"id": 6}}},
    ]
    history = [
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": calls},
        {"role": "tool", "content": "a", "tool_name": "lookup"},
        {"role": "tool", "content": "b", "tool_call_id": "mine"},
        {"role": "tool", "content": "c"},
    ]
    body = json.dumps({**HI, "messages": history}).encode()
    asked, *results = template_input(parse_chat(OllamaChatRequest, body).messages)
    assert asked["reasoning_content"] == "Hm"
    called: Any = asked["tool_calls"]
    ids = [call["id"] for call in called]
    assert ids == ["call00001", "mine", "call00003"]
    assert [call["function"]["arguments"] for call in called] == [{"id": 5}, {}, {"id": 6}]
    assert [(result["tool_call_id"], result["name"]) for result in results] == [
        ("call00001", "lookup"),
        ("mine", "count"),
        ("call00003", "lookup"),
    ]


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {}}])
async def test_a_format_constrains_the_answer(start_gateway: StartGateway, form: Any) -> None:
    async with start_gateway(say("{}")) as gateway:
        await gateway.post(CHAT, {**HI, "format": form})
        await gateway.post(CHAT, {**HI, "format": ""})
        constrained, free = gateway.engine.requests
    assert constrained.options.structured_output is not None
    assert free.options.structured_output is None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_log_probabilities_are_those_of_the_line(
    start_gateway: StartGateway, is_stream: bool
) -> None:
    options = {"num_predict": 2}
    body = {**HI, "options": options, "logprobs": True, "top_logprobs": 1, "stream": is_stream}
    async with start_gateway(scored_echo) as gateway:
        answer = await gateway.post(CHAT, body)
    lines = lines_of(answer) if is_stream else [json.loads(answer.body)]
    logprobs = [entry for line in lines for entry in line.get("logprobs", ())]
    assert len(logprobs) == 2
    assert all(len(entry["top_logprobs"]) == 1 for entry in logprobs)
    assert lines[-1]["done_reason"] == "length"


@pytest.mark.parametrize(
    ("reason", "last"),
    [(FinishReason.STOPPED, {"done": True}), (FinishReason.ERROR, {"error": "a fault"})],
)
async def test_a_client_that_sends_no_more_gets_only_json(
    start_gateway: StartGateway,
    monkeypatch: pytest.MonkeyPatch,
    reason: FinishReason,
    last: dict[str, Any],
) -> None:
    """A comment for such a client would break a line. A failure is the last line."""
    monkeypatch.setattr(connection, "FIRST_PROBE_S", 0.01)
    monkeypatch.setattr(connection, "PROBE_INTERVAL_S", 0.01)
    body = json.dumps(HI).encode()
    head = b"POST /api/chat HTTP/1.0\r\ncontent-type: application/json\r\n"
    async with start_gateway(never_answer) as gateway:
        engine = gateway.engine
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await engine.wait_for(lambda: len(engine.requests) == 1)
        engine.send_tokens(engine.requests[0], ids_of("a"))
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.readuntil(b"}\n")
            writer.write_eof()
            answer += await reader.readexactly(2)  # comments
            engine.finish(engine.requests[0], reason, num_output_tokens=1, message="a fault")
            answer += await reader.read()
        writer.close()
    _, _, content = answer.partition(b"\r\n\r\n")
    lines = [json.loads(line) for line in content.splitlines()]
    assert (len(lines), lines[0]["done"]) == (2, False)
    assert last.items() <= lines[1].items()


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_embeddings_are_those_of_the_model(start_gateway: StartGateway, path: str) -> None:
    model = EmbeddingModel(4, "mean", normalize=False)
    given = {"input": ["ab", "x" * 99]} if path == "/api/embed" else {"prompt": "ab"}
    async with start_gateway(pooled, embedding=model) as gateway:
        answer = await gateway.post(path, {"model": "tiny:latest", **given})
        poolings = [each.options.pooling for each in gateway.engine.requests]
        nothing = json.loads((await gateway.post(path, {"model": "tiny"})).body)
    body = json.loads(answer.body)
    if path == "/api/embeddings":
        assert body["embedding"][0] == len(ids_of("ab"))
        assert poolings == [PoolingParams("mean", False)]
        assert nothing == {"embedding": []}
        return
    assert [vector[0] for vector in body["embeddings"]] == [len(ids_of("ab")), 64]  # cut
    assert body["prompt_eval_count"] == len(ids_of("ab")) + 64
    assert poolings == [PoolingParams("mean", True)] * 2
    assert nothing["embeddings"] == []


async def test_an_input_that_is_too_long_is_rejected_if_it_may_not_be_cut(
    start_gateway: StartGateway,
) -> None:
    async with start_gateway(pooled, embedding=EmbeddingModel(4)) as gateway:
        body = {"model": "tiny", "input": "x" * 99, "truncate": False}
        answer = await gateway.post("/api/embed", body)
    assert answer.status == 400
    assert "99" in json.loads(answer.body)["error"]


async def test_the_model_is_described(start_gateway: StartGateway, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "hidden_size": 8, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    async with start_gateway(aliases=("other",), embedding=EmbeddingModel(4), **parsers) as gateway:
        tags = json.loads((await gateway.get("/api/tags")).body)["models"]
        loaded = json.loads((await gateway.get("/api/ps")).body)["models"]
        shown = json.loads((await gateway.post("/api/show", {"model": "tiny:latest"})).body)
        version = json.loads((await gateway.get("/api/version")).body)["version"]
    assert [model["name"] for model in tags] == ["tiny", "other"]
    assert tags[0]["details"]["family"] == "qwen3"
    assert tags[0]["details"]["quantization_level"] == "bfloat16"
    assert tags[0]["size"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert [model["context_length"] for model in loaded] == [64, 64]
    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert shown["model_info"]["general.architecture"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] == 64
    assert [part.isdecimal() for part in version.split(".")] == [True] * 3
