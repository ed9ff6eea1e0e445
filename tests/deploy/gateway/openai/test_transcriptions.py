"""Transcriptions as a client sees them, with a scripted engine that recognises amplitudes."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore.deploy.bench.sse_client import HttpAnswer
from longshore.deploy.gateway.openai.transcriptions import MAX_IN_FLIGHT
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer, load_tokenizer
from longshore.deploy.model.folder import AudioInput
from longshore.deploy.requests.audio import Samples
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, never_answer
from tests.deploy.gateway.forms import encode_form
from tests.deploy.sounds import as_file
from tests.deploy.tiny_whisper import save_whisper_settings, save_whisper_tokenizer

PATH = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
AUDIO = AudioInput(sampling_rate=16_000, max_samples=1600, num_tokens=50)
WORDS = (" the", " a", " ster", " ", "  the ")

Start = Callable[..., AbstractAsyncContextManager[RunningGateway]]


def sound(*loudness: int) -> Samples:
    """One window of each loudness, from 0."""
    return np.concatenate([np.full(1600, 0.1 * each, np.float32) for each in loudness])


def loudness_of(request: AddRequest) -> int:
    (item,) = request.options.multimodal
    return round(float(item.data.view("<f4").max()) * 10)


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.body)["error"]
    return error


class Listener:
    """Answers each piece with the word for its loudness, one token at a time, and the end. Language
    detection returns `language`. The pieces of one audio are answered last first."""

    def __init__(self, tokenizer: ModelTokenizer, num_pieces: int = 1) -> None:
        self.tokenizer = tokenizer
        self.language = "<|de|>"
        self._num_pieces = num_pieces
        self._held: list[AddRequest] = []

    def __call__(self, engine: FakeEngine, request: AddRequest) -> None:
        if request.sampling.logit_bias:
            engine.send_tokens(request, [self.tokenizer.added_tokens[self.language]])
            engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=1)
            return
        self._held.append(request)
        if len(self._held) < self._num_pieces:
            return
        while self._held:
            self._answer(engine, self._held.pop())

    def _answer(self, engine: FakeEngine, request: AddRequest) -> None:
        text = WORDS[loudness_of(request)]
        ids = [*self.tokenizer.encode_rendered(text), self.tokenizer.added_tokens["<|endoftext|>"]]
        for token_id in ids:
            engine.send_tokens(request, [token_id])
        num_outputs = len(request.output_token_ids) + len(ids)
        engine.finish(request, FinishReason.STOPPED, num_output_tokens=num_outputs)


@pytest.fixture
def tokenizer(tmp_path: Path) -> ModelTokenizer:
    save_whisper_tokenizer(tmp_path)
    save_whisper_settings(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def start(start_gateway: StartGateway, tokenizer: ModelTokenizer) -> Start:
    """`async with start(script, **config)`: a gateway of a model with a window of 0.1 s."""

    def start(script: Any = None, **settings: Any) -> AbstractAsyncContextManager[RunningGateway]:
        settings = {"audio": AUDIO, "vocab_size": 400, **settings}
        return start_gateway(script or Listener(tokenizer), tokenizer=False, **settings)

    return start


async def test_audio_becomes_its_text(start: Start, tokenizer: ModelTokenizer) -> None:
    async with start() as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(2)), model="tiny", language="en")
        assert answer.status == 200
        assert json.loads(answer.body) == {
            "text": "ster",
            "usage": {
                "type": "tokens",
                "input_tokens": 54,
                "output_tokens": 4,  # including the end
                "total_tokens": 58,
                "input_token_details": {"audio_tokens": 50, "text_tokens": 4},
            },
        }
        (request,) = gateway.engine.requests
        (item,) = request.options.multimodal
        assert np.array_equal(item.data.view("<f4"), sound(2))
        names = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>"]
        assert request.prompt_token_ids.tolist() == [tokenizer.added_tokens[n] for n in names]
        assert request.output_token_ids.tolist() == [tokenizer.added_tokens["<|notimestamps|>"]]
        assert request.sampling.temperature == 0
        assert request.sampling.max_tokens is None


async def test_text_format_is_plain_text(start: Start) -> None:
    async with start() as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(0)), response_format="text")
        assert answer.body == b"the\n"


async def test_settings_reach_the_engine(start: Start) -> None:
    fields = {"temperature": "0.7", "top_k": "5", "top_p": "0.9", "min_p": "0.1", "seed": "3"}
    fields |= {"max_tokens": "9", "priority": "-2", "user": "someone", "prompt": "the null"}
    async with start() as gateway:
        answer = await gateway.post_form(TRANSLATIONS, file=as_file(sound(0)), **fields)
        assert answer.status == 200
        detection, request = gateway.engine.requests
        assert detection.sampling.max_tokens == 1
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 5, 0.9)
        assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 3, 10)
        assert request.options.priority == detection.options.priority == -2
        assert len(request.prompt_token_ids) > 4


async def test_language_that_is_not_given_is_asked_for_once(
    start: Start, tokenizer: ModelTokenizer
) -> None:
    async with start(Listener(tokenizer, num_pieces=2)) as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(0, 1)))
        assert json.loads(answer.body)["text"] == "the a"
        detection, *pieces = gateway.engine.requests
        assert loudness_of(detection) == 0
        assert len(detection.prompt_token_ids) == 1
        assert not len(detection.output_token_ids)
        german = tokenizer.added_tokens["<|de|>"]
        assert [request.prompt_token_ids[1] for request in pieces] == [german] * 2


async def test_language_that_the_engine_does_not_name_is_a_400(
    start: Start, tokenizer: ModelTokenizer
) -> None:
    listener = Listener(tokenizer)
    listener.language = "<|nospeech|>"
    async with start(listener) as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(0)))
        assert answer.status == 400
        assert error_of(answer)["param"] == "language"


async def test_pieces_answered_out_of_order_are_joined_in_order(
    start: Start, tokenizer: ModelTokenizer
) -> None:
    file = as_file(sound(3, 0, 1, 3, 2, 3))
    async with start(Listener(tokenizer, num_pieces=6)) as gateway:
        whole = await gateway.post_form(PATH, file=file, language="en")
        streamed = await gateway.post_form(PATH, file=file, language="en", stream="true")
    text = "the a  ster"
    body = json.loads(whole.body)
    assert body["text"] == text
    assert body["usage"]["input_token_details"] == {"audio_tokens": 300, "text_tokens": 24}
    *events, end = [data for _, data in streamed.events]
    assert end == b"[DONE]"
    *deltas, done = map(json.loads, events)
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == text
    assert done == {"type": "transcript.text.done", "text": text, "usage": body["usage"]}


async def test_stream_grows_with_the_tokens(start: Start, tokenizer: ModelTokenizer) -> None:
    first, *others = tokenizer.encode_rendered(" ster")
    deltas: list[str] = []
    async with start(lambda engine, request: engine.send_tokens(request, [first])) as gateway:
        engine = gateway.engine

        def read(data: bytes) -> None:
            event = {} if data == b"[DONE]" else json.loads(data)
            if "delta" not in event:
                return
            deltas.append(event["delta"])
            if len(deltas) == 1:  # the rest is sent once this has arrived
                (request,) = engine.requests
                engine.send_tokens(request, others)
                engine.finish(request, FinishReason.LENGTH_CAPPED, num_output_tokens=4)

        kind, body = encode_form({"language": "en", "stream": "1"}, {"file": as_file(sound(2))})
        await gateway.client.request(
            "POST", PATH, body, timeout_s=PATIENCE_S, content_type=kind, on_event=read
        )
    assert len(deltas) == 2
    assert "".join(deltas) == "ster"


async def test_long_audio_leaves_the_engine_s_queue_to_others(start: Start) -> None:
    async with start(never_answer) as gateway:
        engine = gateway.engine
        long = gateway.post_form(PATH, file=as_file(sound(*[1] * 40)), language="en")
        waiting = [asyncio.create_task(long)]
        await engine.wait_for(lambda: len(engine.requests) >= MAX_IN_FLIGHT)
        short = gateway.post_form(PATH, file=as_file(sound(2)), language="en")
        waiting.append(asyncio.create_task(short))
        await engine.wait_for(lambda: loudness_of(engine.requests[-1]) == 2)
        assert len(engine.requests) == MAX_IN_FLIGHT + 1
        for num_more in (1, 2):
            engine.finish(engine.requests[num_more], FinishReason.STOPPED, num_output_tokens=1)
            await engine.wait_for(
                lambda num_more=num_more: len(engine.requests) == MAX_IN_FLIGHT + 1 + num_more
            )
        for task in waiting:
            task.cancel()
        await engine.wait_for(lambda: len(engine.aborted) == MAX_IN_FLIGHT + 1)


async def test_audio_of_many_pieces_is_transcribed_in_the_room_that_there_is(
    start: Start, tokenizer: ModelTokenizer
) -> None:
    listener = Listener(tokenizer, num_pieces=2)  # it answers when it has two

    def listen(engine: FakeEngine, request: AddRequest) -> None:
        if loudness_of(request) != 4:
            listener(engine, request)

    async with start(listen, max_live_requests=3) as gateway:
        engine = gateway.engine
        endless = gateway.post_form(PATH, file=as_file(sound(4)), language="en")
        task = asyncio.create_task(endless)
        await engine.wait_for(lambda: len(engine.requests) == 1)
        answer = await gateway.post_form(PATH, file=as_file(sound(*[1] * 8)), language="en")
        assert json.loads(answer.body)["text"] == " ".join(["a"] * 8)
        task.cancel()
        await engine.wait_for(lambda: len(engine.aborted) == 1)


@pytest.mark.parametrize("fields", [{}, {"language": "en"}], ids=["detected", "given"])
async def test_no_more_answers_are_under_way_than_are_taken(
    start: Start, fields: dict[str, str]
) -> None:
    async with start(never_answer, max_live_requests=3) as gateway:
        file = as_file(sound(1))
        pending = {
            asyncio.create_task(gateway.post_form(PATH, file=file, **fields)) for _ in range(10)
        }
        refused: set[asyncio.Task[HttpAnswer]] = set()
        while len(refused) < 7:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
        assert {task.result().status for task in refused} == {429}
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 3)
        noise = await gateway.post_form(PATH, file=b"noise", **fields)  # is not even read
        assert noise.status == 429
        for task in pending:
            task.cancel()
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == 3)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": "verbose_json"}, "response_format", "timestamps are not computed"),
        ({"response_format": "srt"}, "response_format", "use json or text"),
        ({"response_format": "vtt"}, "response_format", "use json or text"),
        ({"response_format": "xml"}, "response_format", "use json or text"),
        ({"response_format": "text", "stream": "true"}, "response_format", "JSON events"),
        ({"timestamp_granularities[]": ["word"]}, "timestamp_granularities", "not supported"),
        ({"include[]": ["logprobs"]}, "include", "not supported"),
        ({"chunking_strategy": "auto"}, "chunking_strategy", "not supported"),
        ({"known_speaker_names[]": ["a"]}, "known_speaker_names", "not supported"),
        ({"language": "klingon"}, "language", "not supported by this model"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"temperature": "-1"}, "temperature", "at least 0"),
        ({"top_p": "0"}, "top_p", "above 0"),
        ({"max_tokens": "0"}, "max_tokens", "at least 1"),
        ({"seed": "1.5"}, "seed", "int"),
        ({"stream": "perhaps"}, "stream", "bool"),
        ({"prompt": "a <|de|> b"}, "prompt", "special token"),
        ({"model": ["tiny", "tiny"]}, "model", "twice"),
    ],
    ids=str,
)
async def test_what_is_not_served_is_rejected_by_name(
    start: Start, fields: dict[str, Any], param: str, reason: str
) -> None:
    async with start() as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(0)), **fields)
        assert answer.status == 400
        error = error_of(answer)
        assert error["param"] == param
        assert reason in error["message"]
        assert error["type"] == "invalid_request_error"


async def test_an_unknown_field_is_ignored_and_named(start: Start) -> None:
    async with start() as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(0)), tempo="1")
        assert answer.status == 200
        assert answer.headers["x-longshore-ignored-fields"] == "tempo"
    async with start(strict_requests=True) as gateway:
        answer = await gateway.post_form(PATH, file=as_file(sound(0)), tempo="1")
        assert (answer.status, error_of(answer)["param"]) == (400, "tempo")


async def test_what_is_no_audio_is_rejected(start: Start) -> None:
    async with start(max_audio_s=1.0) as gateway:
        for file, reason in (
            (None, "the form has no file"),
            (b"", "cannot be read as audio"),
            (b"noise" * 1000, "cannot be read as audio"),
            (as_file(sound(0)[:0]), "no samples"),
            (as_file(np.full(9, np.nan, np.float32)), "not finite numbers"),
            (as_file(np.zeros(16_001, np.float32)), "longer than the limit of 1 s"),
        ):
            answer = await gateway.post_form(PATH, file=file)
            error = error_of(answer)
            assert (answer.status, error["param"]) == (400, "file")
            assert reason in error["message"]
        assert gateway.engine.requests == []


async def test_file_beyond_the_limit_is_a_413(start: Start) -> None:
    async with start(max_audio_bytes=1000) as gateway:
        for num_bytes in (1001, 3 << 20):
            answer = await gateway.post_form(PATH, file=b"a" * num_bytes)
            assert answer.status == 413
            assert "--max-audio-mib" in error_of(answer)["message"]


async def test_body_that_is_no_form_and_another_model_are_rejected(start: Start) -> None:
    async with start() as gateway:
        answer = await gateway.post(PATH, {"file": "sound"})
        assert answer.status == 400
        assert "multipart/form-data" in error_of(answer)["message"]
        answer = await gateway.post_form(PATH, file=as_file(sound(0)), model="whisper-1")
        assert answer.status == 404
        assert "serves 'tiny'" in error_of(answer)["message"]
        kind, body = encode_form({"file": "sound"}, {})
        answer = await gateway.client.request(
            "POST", PATH, body, timeout_s=PATIENCE_S, content_type=kind
        )
        assert "send it as a file" in error_of(answer)["message"]


async def test_english_model_rejects_to_translate(
    start: Start, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    save_whisper_settings(tmp_path, is_multilingual=False)
    async with start() as gateway:
        answer = await gateway.post_form(TRANSLATIONS, file=as_file(sound(0)))
        assert answer.status == 400
        assert "cannot translate" in error_of(answer)["message"]
        answer = await gateway.post_form(PATH, file=as_file(sound(0)))
        assert json.loads(answer.body)["text"] == "the"


async def test_each_model_names_the_endpoint_that_serves_it(
    start: Start, start_gateway: StartGateway
) -> None:
    async with start() as gateway:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            answer = await gateway.post(path, body)
            assert answer.status == 400
            assert PATH in error_of(answer)["message"]
    async with start_gateway() as gateway:
        for path in (PATH, TRANSLATIONS):
            for file in (as_file(sound(0)), b"a" * (27 << 20)):  # which is not read
                answer = await gateway.post_form(path, file=file)
                assert answer.status == 400
                assert "/v1/chat/completions" in error_of(answer)["message"]


async def test_engine_s_rejection_and_failure_are_errors(start: Start) -> None:
    reasons = {FinishReason.IGNORED: 400, FinishReason.ERROR: 500}
    for reason, status in reasons.items():

        def refuse(engine: FakeEngine, request: AddRequest, reason: FinishReason = reason) -> None:
            engine.finish(request, reason, message="not today")

        async with start(refuse) as gateway:
            for fields in ({}, {"language": "en"}, {"language": "en", "stream": "true"}):
                answer = await gateway.post_form(PATH, file=as_file(sound(0)), **fields)
                assert answer.status == status
                assert error_of(answer)["message"] == "not today"


async def test_client_that_goes_away_ends_all_pieces(start: Start) -> None:
    async with start(never_answer) as gateway:
        file = as_file(sound(0, 1, 2))
        client = asyncio.create_task(gateway.post_form(PATH, file=file, language="en"))
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 3)
        client.cancel()
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == 3)


async def test_responses_are_counted_like_those_of_other_endpoints(start: Start) -> None:
    async with start() as gateway:
        await gateway.post_form(PATH, file=as_file(sound(0)), language="en")
        await gateway.post_form(PATH, file=b"")
        metrics = await gateway.metrics()
        for status in (200, 400):
            line = f'longshore_http_responses_total{{endpoint="{PATH}",status="{status}"}} 1.0'
            assert line in metrics
        assert 'longshore_requests_finished_total{reason="stop"} 1.0' in metrics
