"""`LLM.transcribe`: converts audio to requests, and their outputs to transcripts."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from longshore.deploy.llm.outputs import RequestOutput, TranscriptionOutput
from longshore.deploy.llm.sampling_params import SamplingParams
from longshore.deploy.requests.audio import Audio, BadAudio, longest_s, read_audio, split_audio
from longshore.deploy.requests.speech import (
    NUM_PRIMED,
    ONLY_LANGUAGE,
    BadSpeechRequest,
    SpeechModel,
    join_texts,
)
from longshore.protocol.requests import MultimodalFeature
from longshore.protocol.sampling import SamplingParams as EngineSamplingParams


@dataclass(frozen=True)
class SpeechRequest:
    """One piece of an audio input. num_primed: see `LiveRequests.open`."""

    prompt_token_ids: list[int]
    sampling: EngineSamplingParams
    feature: MultimodalFeature
    num_primed: int


AnswerAll: TypeAlias = Callable[[Sequence[SpeechRequest]], list[RequestOutput]]

Features: TypeAlias = list[MultimodalFeature]
"""The pieces of one audio input."""

MAX_PIECES: Final = 512
"""Pieces that are decoded and answered together: a gigabyte at thirty seconds each."""


_NOT_OF_SPEECH: Final = (
    "n",
    "stop",
    "include_stop_str_in_output",
    "structured_outputs",
    "detokenize",
    "skip_special_tokens",
    "skip_reading_prefix_cache",
)


def as_list(audio: Audio | Sequence[Audio]) -> list[Audio]:
    """A list of one or more audio inputs. A pair of samples and rate is one input, and so is an
    object of an unknown type, which is rejected when it is read."""
    one = str | os.PathLike | bytes | bytearray | memoryview | tuple | np.ndarray
    return list(audio) if isinstance(audio, Iterable) and not isinstance(audio, one) else [audio]


def check_speech_settings(settings: SamplingParams) -> None:
    """Raises ValueError naming a setting that does not apply to transcripts."""
    usual = SamplingParams()
    for name in _NOT_OF_SPEECH:
        given, neutral = getattr(settings, name), getattr(usual, name)
        if given != neutral and (given or neutral):
            raise BadSpeechRequest(name, f"SamplingParams: {name} is not supported for audio")


def transcribe(
    speech: SpeechModel,
    audios: Sequence[Audio],
    *,
    language: str | None,
    task: str,
    prompt: str | None,
    params: EngineSamplingParams,
    answer: AnswerAll,
) -> list[TranscriptionOutput]:
    """One output per audio input. Raises ValueError for invalid audio, with its index.

    Inputs are decoded and answered in groups, one after the other. All are opened before the first
    is decoded, to find invalid ones early.
    """
    known = speech.language(language, task)
    params = speech.params(params)
    for index, audio in enumerate(audios):
        with _numbered(index):
            longest_s(audio)
    outputs: list[TranscriptionOutput] = []
    for group in _groups(speech, audios):
        codes = [known] * len(group)
        if speech.must_detect(known):
            codes = _detect(speech, group, len(outputs), answer)
        prompts = [speech.prompt(code, task, prompt) for code in codes]
        outputs += _transcribe(group, codes, prompts, params, answer)
        del group  # before the next is decoded
    return outputs


def _detect(
    speech: SpeechModel, group: Sequence[Features], first_index: int, answer: AnswerAll
) -> list[str | None]:
    ids, sampling = speech.detection()
    answers = answer([SpeechRequest(ids, sampling, features[0], 0) for features in group])
    codes: list[str | None] = []
    for index, output in enumerate(answers, first_index):
        with _numbered(index):
            (found,) = output.outputs
            if found.error is not None:
                raise BadSpeechRequest(
                    "language", f"the language could not be detected: {found.error}"
                )
            codes.append(speech.detected(found.token_ids))
    return codes


def _transcribe(
    group: Sequence[Features],
    codes: Sequence[str | None],
    prompts: Sequence[list[int]],
    params: EngineSamplingParams,
    answer: AnswerAll,
) -> list[TranscriptionOutput]:
    answers = answer(
        [
            SpeechRequest(ids, params, feature, NUM_PRIMED)
            for ids, features in zip(prompts, group, strict=True)
            for feature in features
        ]
    )
    outputs = []
    for code, features in zip(codes, group, strict=True):
        own, answers = answers[: len(features)], answers[len(features) :]
        texts = [output.outputs[0].text for output in own]
        errors = [error for output in own if (error := output.outputs[0].error) is not None]
        outputs.append(
            TranscriptionOutput(
                join_texts(texts), code or ONLY_LANGUAGE, own, errors[0] if errors else None
            )
        )
    return outputs


def _groups(speech: SpeechModel, audios: Sequence[Audio]) -> Iterator[list[Features]]:
    """Groups of inputs with at most MAX_PIECES together; an input with more is its own group."""
    needs = speech.audio
    group: list[Features] = []
    for index, audio in enumerate(audios):
        with _numbered(index):
            samples = read_audio(audio, needs.sampling_rate)
        pieces = split_audio(samples, needs.sampling_rate, needs.max_samples)
        if group and sum(map(len, group)) + len(pieces) > MAX_PIECES:
            yield group
            group = []
        group.append([speech.feature(piece) for piece in pieces])
        del samples, pieces
    if group:
        yield group


@contextlib.contextmanager
def _numbered(index: int) -> Iterator[None]:
    """Add the index of the audio input to errors."""
    try:
        yield
    except BadAudio as error:
        raise BadAudio(f"audio[{index}]: {error}") from error
    except BadSpeechRequest as error:
        raise BadSpeechRequest(error.param, f"audio[{index}]: {error}") from error
