"""POST /v1/audio/transcriptions and /v1/audio/translations: audio to text.

Each piece of an audio file is a request to the engine. A limited number of them run at a time;
their texts are joined in order.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from longshore.deploy.gateway.api.endpoint import (
    ApiEndpoint,
    ResponseWriter,
    Service,
    Services,
    answer_whole,
    check_capacity,
    check_model,
    check_priority,
    generating,
    num_at_a_time,
    stream,
)
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.api.usage import Usage
from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.http.middleware import api_key_of, request_id_of, trace_headers_of
from longshore.deploy.gateway.http.multipart import parse_form
from longshore.deploy.gateway.openai.responses import (
    Transcript,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionUsage,
    transcription_usage,
)
from longshore.deploy.gateway.openai.transcription_requests import (
    TranscriptionRequest,
    read_request,
)
from longshore.deploy.requests.audio import BadAudio
from longshore.deploy.requests.errors import invalid
from longshore.deploy.requests.generation_spec import GenerationSpec, Piece
from longshore.deploy.requests.speech import (
    NUM_PRIMED,
    BadSpeechRequest,
    SpeechModel,
    Task,
    join_texts,
)
from longshore.protocol.requests import MultimodalFeature, RequestOptions
from longshore.protocol.sampling import SamplingParams

FORM_BYTES: Final = 1 << 20  # size of a request body in addition to the file
MAX_IN_FLIGHT: Final = 16
"""Limit of pieces of one file in the engine at a time, so that they do not fill its queue."""


class SpeechEndpoint(ApiEndpoint):
    """Takes an audio file and settings as a form."""

    task: ClassVar[Task]

    async def choose(self, exchange: Exchange, services: Services) -> Service:
        maximum = services.first.max_audio_bytes + FORM_BYTES
        body = await exchange.read_body(maximum, "max-audio-mib")
        exchange.put_back(body)
        headers = dict(exchange.scope["headers"])
        form = await asyncio.to_thread(parse_form, headers.get(b"content-type", b""), body)
        _, request = read_request(form)
        return services.named(request.model)

    async def serve(self, exchange: Exchange, service: Service, arrived_s: float) -> None:
        if service.speech is None:  # before the file is read
            raise invalid(
                f"{service.model_name} takes text, not audio: use /v1/chat/completions or "
                "/v1/completions, or serve a speech model",
                param="model",
            )
        body = await exchange.read_body(service.max_audio_bytes + FORM_BYTES, "max-audio-mib")
        headers = dict(exchange.scope["headers"])
        form = await asyncio.to_thread(parse_form, headers.get(b"content-type", b""), body)
        del body
        file, request = read_request(form)
        check_model(request.model, service)
        if len(file) > service.max_audio_bytes:
            raise ApiError(
                413,
                f"the file has {len(file)} bytes; the limit is {service.max_audio_bytes} "
                "(--max-audio-mib)",
                param="file",
            )
        work = self._answer(exchange, service, service.speech, request, file, arrived_s)
        del form, file  # free the file once it is decoded
        try:
            end_turn = service.end_turn_of(api_key_of(exchange.scope))
            await exchange.run_while_connected(work, end_turn)
        except BadAudio as error:
            raise invalid(str(error), param="file") from error
        except BadSpeechRequest as error:
            raise invalid(str(error), param=error.param) from error

    async def _answer(
        self,
        exchange: Exchange,
        service: Service,
        speech: SpeechModel,
        request: TranscriptionRequest,
        file: bytes,
        arrived_s: float,
    ) -> None:
        language = speech.language(request.language, self.task)
        sampling = speech.params(_sampling(request))
        key = api_key_of(exchange.scope)
        check_priority(request.priority, key)
        check_capacity(1, service)  # before decoding
        request_id = request_id_of(exchange.scope, "audio")
        async with service.audio_decoder.features(file, speech, service.max_audio_s) as features:
            del file
            if speech.must_detect(language):
                language = await _detect(
                    service, speech, request, features[0], key, request_id, arrived_s
                )
            # The field `prompt` may be long; tokenizing it takes a while.
            prompt = await asyncio.to_thread(speech.prompt, language, self.task, request.prompt)
            spec = GenerationSpec(
                request_id=request_id,
                prompts=[prompt] * len(features),
                sampling=sampling,
                is_stream=request.stream,
                arrived_s=arrived_s,
                options=RequestOptions(
                    priority=request.priority,
                    cache_salt=key.cache_salt(None),
                    trace_headers=trace_headers_of(exchange.scope),
                ),
                multimodal=features,
                num_primed=NUM_PRIMED,
                max_in_flight=num_at_a_time(MAX_IN_FLIGHT, key, service),
            )
            check_capacity(spec.num_answers, service)
            num_audio_tokens = speech.audio.num_tokens * len(features)
            writer = TranscriptWriter(len(features), request.response_format, num_audio_tokens)
            async with generating(spec, key, service, speech.tokenizer) as generation:
                if request.stream:
                    await stream(exchange, generation, writer, service.json, include_usage=True)
                else:
                    await answer_whole(exchange, generation, writer, service.json)


class TranscriptionsEndpoint(SpeechEndpoint):
    """Transcribes audio in the spoken language."""

    path = "/v1/audio/transcriptions"
    task = "transcribe"


class TranslationsEndpoint(SpeechEndpoint):
    """Translates audio to English."""

    path = "/v1/audio/translations"
    task = "translate"


def _sampling(request: TranscriptionRequest) -> SamplingParams:
    """Raises RequestError naming a setting that is out of range."""
    try:
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            seed=request.seed,
            max_tokens=request.max_tokens,
        )
    except ValueError as error:
        raise invalid(str(error), param=str(error).partition("=")[0]) from error


async def _detect(
    service: Service,
    speech: SpeechModel,
    request: TranscriptionRequest,
    feature: MultimodalFeature,
    key: ApiKey,
    request_id: str,
    arrived_s: float,
) -> str:
    """The language of an audio file, detected in its first piece."""
    prompt, sampling = speech.detection()
    spec = GenerationSpec(
        request_id=f"{request_id}-language",
        prompts=[prompt],
        sampling=sampling,
        is_stream=False,
        arrived_s=arrived_s,
        options=RequestOptions(priority=request.priority),
        multimodal=[feature],
    )
    check_capacity(spec.num_answers, service)
    async with generating(spec, key, service, None) as generation:
        answers = [piece async for pieces in generation.pieces() for piece in pieces]
    return speech.detected(answers[0].token_ids)


class TranscriptWriter(ResponseWriter):
    """Joins several answers to one text, without leading and trailing spaces. In a stream, an
    answer is shown once those before it are complete."""

    def __init__(self, num_pieces: int, response_format: str, num_audio_tokens: int) -> None:
        self._format = response_format
        self._num_audio_tokens = num_audio_tokens
        self._waiting = [""] * num_pieces
        self._complete = [False] * num_pieces
        self._current = 0
        self._text = ""  # text that has been sent
        self._spaces = ""  # spaces between it and the next text

    def first_chunks(self) -> Sequence[msgspec.Struct]:
        return ()

    def chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        self._waiting[piece.index] += piece.text
        self._complete[piece.index] |= piece.finish_reason is not None
        grown = self._spaces
        while self._current < len(self._waiting):
            grown += self._waiting[self._current]
            self._waiting[self._current] = ""
            if not self._complete[self._current]:
                break
            self._current += 1
        if not self._text:
            grown = grown.lstrip()
        delta = grown.rstrip()
        self._spaces = grown[len(delta) :]
        self._text += delta
        return [TranscriptDelta(delta)] if delta else []

    def last_chunks(self, usage: Usage) -> Sequence[msgspec.Struct]:
        return [TranscriptDone(self._text, self._usage(usage))]

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> msgspec.Struct | str:
        text = join_texts([piece.text for piece in pieces])
        return f"{text}\n" if self._format == "text" else Transcript(text, self._usage(usage))

    def _usage(self, usage: Usage) -> TranscriptionUsage:
        return transcription_usage(
            self._num_audio_tokens, usage.prompt_tokens, usage.completion_tokens
        )
