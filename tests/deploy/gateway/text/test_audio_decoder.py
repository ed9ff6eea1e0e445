"""Uploads to features: how much is held at a time, and what ends when the client disconnects."""

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longshore.deploy.gateway.api.errors import headers_of, status_of
from longshore.deploy.gateway.text import audio_decoder
from longshore.deploy.gateway.text.audio_decoder import AudioDecoder
from longshore.deploy.gateway.text.tokenizer import load_tokenizer
from longshore.deploy.model.folder import AudioInput
from longshore.deploy.requests.audio import BadAudio
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.speech import SpeechModel
from tests.deploy.sounds import as_file, tone
from tests.deploy.tiny_whisper import save_whisper_tokenizer

RATE = 16_000
SECOND_BYTES = 4 * RATE
AUDIO = AudioInput(sampling_rate=RATE, max_samples=RATE, num_tokens=50)
MAX_S = 60.0


@pytest.fixture
def speech(tmp_path: Path) -> SpeechModel:
    save_whisper_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    return SpeechModel(tmp_path, AUDIO, tokenizer, vocab_size=400, max_model_len=64)


async def test_features_are_the_pieces_of_the_sound(speech: SpeechModel) -> None:
    sound = tone(2.5)
    async with AudioDecoder().features(as_file(sound), speech, MAX_S) as features:
        pieces = [feature.data.view("<f4") for feature in features]
    assert len(pieces) == 3
    assert np.array_equal(np.concatenate(pieces), sound)


async def test_sound_is_taken_while_there_is_room(speech: SpeechModel) -> None:
    decoder = AudioDecoder(max_bytes=5 * SECOND_BYTES)
    file = as_file(tone(2.0))
    for _ in range(3):  # held memory is released
        async with AsyncExitStack() as held:
            for _ in range(2):
                await held.enter_async_context(decoder.features(file, speech, MAX_S))
            with pytest.raises(
                RequestError, match="4 s of audio are being processed, and the limit is 5 s"
            ) as caught:
                await held.enter_async_context(decoder.features(file, speech, MAX_S))
            assert status_of(caught.value) == 429
            assert dict(headers_of(caught.value)) == {b"retry-after": b"1"}
            await held.enter_async_context(decoder.features(as_file(tone(1.0)), speech, MAX_S))


async def test_sound_that_never_fits_is_taken_alone(speech: SpeechModel) -> None:
    decoder = AudioDecoder(max_bytes=SECOND_BYTES)
    file = as_file(tone(3.0))
    async with decoder.features(file, speech, MAX_S):
        with pytest.raises(RequestError, match="retry later"):
            async with decoder.features(file, speech, MAX_S):
                pass
    async with decoder.features(file, speech, MAX_S) as features:
        assert len(features) == 3


async def test_header_that_says_too_much_counts_until_the_sound_is_known(
    speech: SpeechModel,
) -> None:
    file = as_file(tone(4.0), kind="MP3")
    cut = file[: len(file) // 4]
    decoder = AudioDecoder(max_bytes=5 * SECOND_BYTES)
    async with (
        decoder.features(cut, speech, MAX_S) as features,
        decoder.features(cut, speech, MAX_S),
    ):
        assert sum(feature.data.nbytes for feature in features) < SECOND_BYTES
        with pytest.raises(
            RequestError, match="2 s of audio are being processed, and the limit is 5 s"
        ):
            async with decoder.features(cut, speech, MAX_S):
                pass
        async with decoder.features(as_file(tone(3.0)), speech, MAX_S):
            pass


async def test_what_is_rejected_is_not_held(speech: SpeechModel) -> None:
    decoder = AudioDecoder(max_bytes=4 * SECOND_BYTES)
    bad = as_file(np.full(2 * RATE, np.nan, np.float32))
    async with decoder.features(as_file(tone(1.0)), speech, MAX_S):
        for _ in range(3):
            with pytest.raises(BadAudio, match="not finite numbers"):
                async with decoder.features(bad, speech, MAX_S):
                    pass
            with pytest.raises(BadAudio, match=r"longer than the limit of 0\.5 s"):
                async with decoder.features(bad, speech, 0.5):
                    pass
        async with decoder.features(as_file(tone(3.0)), speech, MAX_S):
            pass


async def test_decoding_ends_when_nobody_waits(
    speech: SpeechModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soundfile

    reading, resume = threading.Event(), threading.Event()
    num_reads = 0
    read = soundfile.SoundFile.read

    def slow(self: Any, frames: int, **options: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        reading.set()
        assert resume.wait(20)
        return read(self, frames, **options)

    monkeypatch.setattr(audio_decoder, "NUM_THREADS", 1)
    monkeypatch.setattr("longshore.deploy.requests.audio.BLOCK_SAMPLES", RATE)
    monkeypatch.setattr(soundfile.SoundFile, "read", slow)
    decoder = AudioDecoder(max_bytes=8 * SECOND_BYTES)

    async def decode() -> None:
        async with decoder.features(as_file(tone(8.0)), speech, MAX_S):
            raise AssertionError("it was cancelled")

    task = asyncio.create_task(decode())
    await asyncio.to_thread(reading.wait, 20)
    task.cancel()
    await asyncio.wait([task])
    resume.set()
    # On the single thread, after the other one; and there is capacity for it.
    async with decoder.features(as_file(tone(0.5)), speech, MAX_S):
        pass
    assert num_reads == 1 + 2
