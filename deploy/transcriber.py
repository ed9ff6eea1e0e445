"""`LLM.transcribe`: audio to requests, and their answers to transcripts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longshore.deploy.audio import Audio, BadAudio, read_audio, split_audio
from longshore.deploy.llm_outputs import RequestOutput, TranscriptionOutput
from longshore.deploy.speech import (
    NUM_PRIMED,
    ONLY_LANGUAGE,
    BadSpeechRequest,
    SpeechModel,
    join_texts,
)
from longshore.protocol.inputs import MultimodalFeature
from longshore.protocol.sampling import SamplingParams


@dataclass(frozen=True)
class SpeechRequest:
    """One piece of an audio. num_primed: see `LiveRequests.open`."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    feature: MultimodalFeature
    num_primed: int


Answer = Callable[[Sequence[SpeechRequest]], list[RequestOutput]]


def as_list(audio: Audio | Sequence[Audio]) -> list[Audio]:
    """One audio or many, as many. A pair of samples and rate is one."""
    return [audio] if isinstance(audio, str | Path | bytes | tuple) else list(audio)


def transcribe(
    speech: SpeechModel,
    audios: Sequence[Audio],
    *,
    language: str | None,
    task: str,
    prompt: str | None,
    params: SamplingParams,
    answer: Answer,
) -> list[TranscriptionOutput]:
    """One output per audio. Raises ValueError for what cannot be transcribed."""
    known = speech.language(language, task)
    params = speech.params(params)
    pieces = [_features(speech, audio, index) for index, audio in enumerate(audios)]
    languages = [known] * len(audios)
    if speech.must_detect(known):
        ids, sampling = speech.detection()
        requests = [SpeechRequest(ids, sampling, features[0], 0) for features in pieces]
        languages = [_detected(speech, output) for output in answer(requests)]
    prompts = [speech.prompt(code, task, prompt) for code in languages]
    answers = answer(
        [
            SpeechRequest(ids, params, feature, NUM_PRIMED)
            for ids, features in zip(prompts, pieces, strict=True)
            for feature in features
        ]
    )
    outputs = []
    for code, features in zip(languages, pieces, strict=True):
        own, answers = answers[: len(features)], answers[len(features) :]
        errors = [output.error for output in own if output.error is not None]
        text = join_texts([output.text for output in own])
        outputs.append(
            TranscriptionOutput(text, code or ONLY_LANGUAGE, own, errors[0] if errors else None)
        )
    return outputs


def _features(speech: SpeechModel, audio: Audio, index: int) -> list[MultimodalFeature]:
    needs = speech.audio
    try:
        samples = read_audio(audio, needs.sampling_rate)
    except BadAudio as error:
        raise BadAudio(f"audio[{index}]: {error}") from error
    return [
        speech.feature(piece)
        for piece in split_audio(samples, needs.sampling_rate, needs.max_samples)
    ]


def _detected(speech: SpeechModel, output: RequestOutput) -> str:
    if output.error is not None:
        raise BadSpeechRequest("language", f"the language was not detected: {output.error}")
    return speech.detected(output.token_ids)
