"""Sound files to samples, and where long audio is split."""

import contextlib
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.deploy.requests.audio import BadAudio, longest_s, read_audio, split_audio
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command
from tests.deploy.sounds import as_file, tone

RATE = 16_000


def loudest_hertz(samples: Any, rate: int = RATE) -> float:
    spectrum = np.abs(np.fft.rfft(samples))
    return float(np.fft.rfftfreq(len(samples), 1 / rate)[spectrum.argmax()])


def test_file_at_the_model_s_rate_comes_back_bit_by_bit(tmp_path: Path) -> None:
    sound = tone(0.5)
    path = tmp_path / "sound.wav"
    path.write_bytes(as_file(sound))
    for source in (path, str(path), as_file(sound), (sound, RATE)):
        assert np.array_equal(read_audio(source, RATE), sound)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("WAV", {"subtype": "PCM_16"}),
        ("FLAC", {}),
        ("OGG", {"subtype": "VORBIS"}),
        ("OGG", {"subtype": "OPUS"}),
        ("MP3", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rate", [8_000, 48_000])
def test_every_kind_of_file_is_heard_at_the_model_s_rate(
    kind: str, options: dict[str, Any], rate: int
) -> None:
    file = as_file(tone(1.0, 500.0, rate=rate, noise=0.0), rate, kind, **options)
    samples = read_audio(file, RATE)
    assert samples.dtype == np.float32
    assert abs(len(samples) - RATE) < 0.15 * RATE  # mp3 pads its frames
    assert abs(loudest_hertz(samples) - 500.0) < 3


def test_channels_become_their_mean() -> None:
    left, right = tone(0.2, seed=1), tone(0.2, 900.0, seed=2)
    stereo = np.stack((left, right), axis=1)
    for source in (as_file(stereo), (stereo, RATE)):
        np.testing.assert_allclose(read_audio(source, RATE), (left + right) / 2, atol=1e-7)


def test_blocks_are_resampled_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import soxr

    sound = tone(1.0, rate=44_100)
    monkeypatch.setattr("longshore.deploy.requests.audio.BLOCK_SAMPLES", 1000)
    in_blocks = read_audio(as_file(sound, 44_100), RATE)
    np.testing.assert_allclose(in_blocks, soxr.resample(sound, 44_100, RATE), atol=1e-6)


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_whole_numbers_are_samples_of_full_scale(bits: int) -> None:
    samples = np.array([-(2 ** (bits - 1)), 0, 2 ** (bits - 2)], f"i{bits // 8}")
    assert read_audio((samples, RATE), RATE).tolist() == [-1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    ("audio", "reason"),
    [
        (b"", "cannot be read as audio"),
        (b"no sound at all" * 100, "cannot be read as audio.*wav, flac, ogg"),
        (Path("/no/such/file.wav"), "/no/such/file.wav cannot be read"),
        (as_file(np.zeros(0, np.float32)), "no samples"),
        (as_file(np.array([0.0, np.nan], np.float32)), "not finite numbers"),
        ((np.zeros(0), RATE), "no samples"),
        ((np.array([np.inf]), RATE), "not finite numbers"),
        ((np.zeros((2, 2, 2)), RATE), "3 dimensions"),
        ((np.zeros(9, np.uint8), RATE), "uint8"),
        ((np.array(["a"]), RATE), "must have numbers"),
        ((np.zeros(9), 5), "rate of 5 Hz"),
        ((np.zeros(9), float("nan")), "rate of nan Hz"),
        ((np.zeros(9), "a.wav"), "rate has the type str.*several audio inputs as a list"),
        ((np.zeros(9),), r"tuple of 1.*pair \(samples, rate\)"),
        (([[1.0], [1.0, 2.0]], RATE), "not an array of numbers"),
        (([1, 2, 3], RATE), "int64, whose full scale is unknown"),
        ((np.zeros(9, np.int16) + np.int64(1), RATE), "pass floats within -1..1, int8, int16"),
        ((np.zeros((2, RATE)), RATE), r"16000 channels.*\.T"),
        (np.zeros(9), "has the type ndarray"),
        (bytearray(b"RIFF"), "has the type bytearray.*content as bytes"),
        (0.5, "has the type float"),
    ],
)
def test_what_is_no_sound_is_rejected_with_the_reason(audio: Any, reason: str) -> None:
    with pytest.raises(BadAudio, match=reason):
        read_audio(audio, RATE)
    if "finite" not in reason and "no samples" not in reason:
        with pytest.raises(BadAudio, match=reason):
            longest_s(audio)


def test_rejection_says_what_the_library_says_and_nothing_of_this_process() -> None:
    with pytest.raises(BadAudio) as caught:
        read_audio(b"no sound at all" * 100, RATE)
    assert "cannot be read as audio: Format not recognised. Supported are" in str(caught.value)
    assert "0x" not in str(caught.value)


def test_file_that_points_before_its_start_leaves_no_traceback_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = as_file(tone(0.1), kind="AIFF")
    for place in range(38, 42):  # the length of a chunk
        with contextlib.suppress(BadAudio):
            read_audio(file[:place] + b"\xff" + file[place + 1 :], RATE)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_header_says_how_long_a_file_is(kind: str) -> None:
    file = as_file(tone(2.0, rate=8_000), 8_000, kind)
    assert len(read_audio(file, 8_000)) / 8_000 <= longest_s(file) < 2.2
    assert longest_s((tone(2.0), RATE)) == 2.0


def test_samples_are_held_once() -> None:
    file = as_file(np.zeros(300 * RATE, np.int16), kind="FLAC")
    tracemalloc.start()
    samples = read_audio(file, RATE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert samples.nbytes == 300 * RATE * 4
    assert peak < 1.5 * samples.nbytes


def test_what_is_told_of_each_block_can_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.deploy.requests.audio.BLOCK_SAMPLES", RATE)
    places = [2, 1]
    with pytest.raises(IndexError):  # at the third
        read_audio(as_file(tone(9.0)), RATE, on_block=places.pop)
    places = [2, 1]
    assert len(read_audio(as_file(tone(1.5)), RATE, on_block=places.pop)) == 1.5 * RATE
    assert places == []


def test_work_is_limited_as_the_length_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.deploy.requests.audio.MIN_WORK_S", 1.0)
    surround = as_file(np.zeros((2 * RATE, 8), np.float32))
    with pytest.raises(BadAudio, match="more than 192000 samples in all its channels"):
        read_audio(surround, RATE, max_s=2.0)
    assert len(read_audio(surround, RATE, max_s=3.0)) == 2 * RATE
    stereo = as_file(np.zeros((96_000, 2), np.float32), 48_000)
    assert len(read_audio(stereo, RATE, max_s=2.0)) == 2 * RATE


def test_length_is_limited_at_the_file_s_own_rate() -> None:
    file = as_file(tone(2.0, rate=8_000), 8_000)
    assert len(read_audio(file, RATE, max_s=2.0)) == 2 * RATE
    with pytest.raises(BadAudio, match=r"longer than the limit of 1\.9 s"):
        read_audio(file, RATE, max_s=1.9)


def test_file_that_unfolds_beyond_the_limit_is_not_unfolded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import soundfile

    num_read = 0
    read = soundfile.SoundFile.read

    def counting(self: Any, frames: int, **options: Any) -> Any:
        nonlocal num_read
        num_read += frames
        return read(self, frames, **options)

    silence = as_file(np.zeros(100 * RATE, np.float32), kind="FLAC")
    assert len(silence) < 100_000
    monkeypatch.setattr(soundfile.SoundFile, "read", counting)
    with pytest.raises(BadAudio, match="longer than the limit of 2 s"):
        read_audio(silence, RATE, max_s=2.0)
    assert num_read < 20 * RATE


def test_missing_extra_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = as_file(tone(0.1))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("audio"))):
        read_audio(file, RATE)
    with pytest.raises(ConfigError, match=re.escape(install_command("audio"))):
        read_audio((tone(0.1), 8_000), RATE)
    assert len(read_audio((tone(0.1), RATE), RATE)) == 1600  # at this rate, neither is needed


def test_cut_is_where_it_is_quiet() -> None:
    sound = tone(50.0)
    sound[26 * RATE : round(26.2 * RATE)] *= 0.01
    first, second = split_audio(sound, RATE, 30 * RATE)
    assert abs(len(first) / RATE - 26.1) < 0.06
    assert np.array_equal(np.concatenate((first, second)), sound)


def test_audio_that_fits_is_not_cut() -> None:
    sound = tone(1.0)
    (piece,) = split_audio(sound, RATE, RATE)
    assert piece is sound


@settings(max_examples=200, deadline=None)
@given(
    num_samples=st.integers(1, 5000),
    max_samples=st.integers(1, 900),
    rate=st.integers(10, 1000),
    seed=st.integers(0, 100),
)
def test_pieces_are_few_and_fit_and_are_the_whole(
    num_samples: int, max_samples: int, rate: int, seed: int
) -> None:
    sound = np.random.default_rng(seed).normal(size=num_samples).astype(np.float32)
    pieces = split_audio(sound, rate, max_samples)
    assert all(1 <= len(piece) <= max_samples for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), sound)
    assert len(pieces) == -(-num_samples // max_samples)
