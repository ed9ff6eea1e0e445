"""Many audio inputs to transcripts, with a fake engine that answers at once."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.llm.outputs import CompletionOutput, RequestOutput
from longshore.deploy.llm.sampling_params import SamplingParams as UserSamplingParams
from longshore.deploy.llm.transcriber import (
    SpeechRequest,
    as_list,
    check_speech_settings,
    transcribe,
)
from longshore.deploy.model.folder import AudioInput
from longshore.deploy.requests.audio import Audio, BadAudio, Samples
from longshore.deploy.requests.speech import BadSpeechRequest, SpeechModel
from longshore.deploy.requests.structured_outputs import StructuredOutputsParams
from longshore.protocol.sampling import SamplingParams
from tests.deploy.sounds import as_file
from tests.deploy.tiny_whisper import save_whisper_settings, save_whisper_tokenizer

RATE = 16_000
AUDIO = AudioInput(sampling_rate=RATE, max_samples=1600, num_tokens=50)


@pytest.fixture
def speech(tmp_path: Path) -> SpeechModel:
    save_whisper_tokenizer(tmp_path)
    save_whisper_settings(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    return SpeechModel(tmp_path, AUDIO, tokenizer, vocab_size=400, max_model_len=64)


class Ear:
    """Answers with the loudness of each piece, and detects German, or no language for loudness 0.
    num_asked: number of requests of each batch.
    """

    def __init__(self, speech: SpeechModel) -> None:
        self.num_asked: list[int] = []
        self._german = speech.languages["de"]
        self._seen: list[Callable[[], Any]] = []

    def __call__(self, requests: Sequence[SpeechRequest]) -> list[RequestOutput]:
        self.num_asked.append(len(requests))
        self._seen += [weakref.ref(request.feature.data) for request in requests]
        return [self._answer(request) for request in requests]

    @property
    def num_held(self) -> int:
        """The handles of the answered pieces."""
        return sum(ref() is not None for ref in self._seen)

    def _answer(self, request: SpeechRequest) -> RequestOutput:
        loudness = round(float(request.feature.data.view("<f4").max()) * 10)
        ids = [self._german if loudness else 0]
        output = CompletionOutput(0, f" {loudness}", ids, finish_reason="stop")
        return RequestOutput("x", None, request.prompt_token_ids, [output], finished=True)


def sound(*loudness: int) -> tuple[Samples, int]:
    """One piece of each input."""
    return np.concatenate([np.full(1600, 0.1 * each, np.float32) for each in loudness]), RATE


def texts(speech: SpeechModel, ear: Ear, audios: Sequence[Audio], language: str | None) -> Any:
    outputs = transcribe(
        speech,
        audios,
        language=language,
        task="transcribe",
        prompt=None,
        params=SamplingParams(temperature=0),
        answer=ear,
    )
    assert {output.language for output in outputs} <= {language or "de"}
    return [output.text for output in outputs]


@pytest.mark.parametrize("language", ["en", None])
def test_audios_are_decoded_a_group_at_a_time(
    speech: SpeechModel, monkeypatch: pytest.MonkeyPatch, language: str | None
) -> None:
    monkeypatch.setattr("longshore.deploy.llm.transcriber.MAX_PIECES", 4)
    audios = [sound(1, 2), sound(3, 4), sound(5), sound(6, 7, 8, 9, 1), sound(2), sound(3)]
    ear = Ear(speech)
    assert texts(speech, ear, audios, language) == ["1 2", "3 4", "5", "6 7 8 9 1", "2", "3"]
    if language is None:
        assert ear.num_asked == [2, 4, 1, 1, 1, 5, 2, 2]
    else:
        assert ear.num_asked == [4, 1, 5, 2]
    assert texts(speech, ear, [], language) == []


def test_what_is_answered_is_not_held_while_more_is_decoded(
    speech: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.deploy.llm.transcriber.MAX_PIECES", 4)
    ear = Ear(speech)
    num_held = []

    class Recorded:
        """Samples that record when they are read."""

        def __array__(self, *_: Any, **__: Any) -> Any:
            num_held.append(ear.num_held)
            return sound(3)[0]

    audios: list[Any] = [sound(1, 1, 1, 1), sound(2), (Recorded(), RATE)]
    assert texts(speech, ear, audios, "en") == ["1 1 1 1", "2", "3"]
    assert ear.num_asked == [4, 2]
    assert num_held == [0, 0]


def test_error_names_the_audio_that_it_is_of(
    speech: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.deploy.llm.transcriber.MAX_PIECES", 1)
    ear = Ear(speech)
    with pytest.raises(BadSpeechRequest, match=r"audio\[2\]: the language could not be detected"):
        texts(speech, ear, [sound(1), sound(2), sound(0)], None)
    with pytest.raises(BadAudio, match=r"audio\[1\]: .*not finite numbers"):
        texts(speech, ear, [sound(1), (np.array([np.nan]), RATE)], "en")


def test_what_cannot_be_opened_is_rejected_before_the_work_on_the_others(
    speech: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.deploy.llm.transcriber.MAX_PIECES", 1)
    ear = Ear(speech)
    for bad in (b"noise", Path("/no/such/file"), (np.zeros(3), "b"), 0.5, (np.zeros(3, int), RATE)):
        with pytest.raises(BadAudio, match=r"audio\[2\]: "):
            texts(speech, ear, [sound(1), sound(2), bad], "en")
    assert ear.num_asked == []


@pytest.mark.parametrize(
    ("audio", "reason"),
    [
        (np.zeros(9), "ndarray"),
        (bytearray(as_file(np.zeros(9, np.float32))), "bytearray"),
        (0.5, "float"),
        (None, "NoneType"),
        (("a.wav", "b.wav"), "several audio inputs as a list"),
        ([0.1, 0.2], "float"),
    ],
)
def test_what_is_no_audio_is_rejected_as_the_first(
    speech: SpeechModel, audio: Any, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"audio\[0\]: .*{reason}"):
        texts(speech, Ear(speech), as_list(audio), "en")


def test_one_audio_is_a_list_of_one() -> None:
    for audio in ("a.wav", Path("a.wav"), b"RIFF", sound(1)):
        assert as_list(audio) == [audio]
    assert as_list(iter(["a.wav", b"RIFF"])) == ["a.wav", b"RIFF"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 2},
        {"stop": "."},
        {"include_stop_str_in_output": True},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
        {"detokenize": False},
        {"skip_special_tokens": False},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_settings_that_do_not_apply_to_transcripts_are_rejected_by_name(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(BadSpeechRequest, match=next(iter(settings))):
        check_speech_settings(UserSamplingParams(**settings))


def test_settings_of_transcripts_can_have_neutral_values() -> None:
    check_speech_settings(
        UserSamplingParams(
            n=1, stop=[], detokenize=True, skip_reading_prefix_cache=False, temperature=0.2
        )
    )
