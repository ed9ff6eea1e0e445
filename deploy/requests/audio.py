"""Decodes audio to a speech model's input: mono float32 samples at its sampling rate.

Audio is decoded and resampled block by block, so that a small file cannot decompress to more than
the limit. Audio longer than the model's window is split into pieces, at positions with little
energy.
"""

import contextlib
import importlib
import io
import numbers
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

Samples: TypeAlias = npt.NDArray[np.float32]
"""(n,), mono, usually within -1..1"""
Audio: TypeAlias = str | Path | bytes | tuple[npt.ArrayLike, int]
"""A file's path or content, or samples (n,) or (n, channels) with their rate in Hz"""

BLOCK_SAMPLES: Final = 1 << 18
MIN_RATE, MAX_RATE = 1_000, 768_000
MAX_CHANNELS: Final = 64
# Decoding time depends on the samples of all channels. The limit is that of 48 kHz stereo with the
# maximum duration, or with MIN_WORK_S if that is longer.
WORK_PER_S: Final = 2 * 48_000
MIN_WORK_S: Final = 600.0
# Cut at the quietest QUIET_S within SEARCH_S before or after an even cut.
QUIET_S: Final = 0.1
SEARCH_S: Final = 2.5
SEARCH_STEP_S: Final = 0.01


class BadAudio(ValueError):
    """Audio that cannot be transcribed; the message gives the reason."""


def require_extra(*names: str) -> list[ModuleType]:
    """Import the modules. Raises ConfigError, with how to install what is missing."""
    try:
        return [importlib.import_module(name) for name in names]
    except (ImportError, OSError) as error:  # OSError: soundfile without its library
        raise ConfigError(
            f"cannot read audio: {error}. Install the extra: {install_command('audio')}"
        ) from error


def read_audio(
    audio: Audio,
    sampling_rate: int,
    *,
    max_s: float | None = None,
    on_block: Callable[[], None] = lambda: None,
) -> Samples:
    """Mono samples at `sampling_rate`, averaged over all channels, held in memory once.

    max_s: limit of the duration, and of the decoding work accordingly; longer audio is rejected as
           soon as the limit is exceeded.
    on_block: called repeatedly during decoding; an exception from it ends the decoding.
    Raises BadAudio, or ConfigError if the extra `audio` is needed and not installed.
    """
    if isinstance(audio, tuple):
        array, rate = _given_samples(audio)
        blocks: Iterator[npt.NDArray[Any]] = iter([array])
        return _collect(blocks, rate, sampling_rate, max_s, on_block)
    with _opened(audio) as file:
        return _collect(_blocks(file), file.samplerate, sampling_rate, max_s, on_block)


def longest_s(audio: Audio) -> float:
    """Upper bound of the duration, from the header: far too large if the header has none.

    Raises as `read_audio` does, for what the header shows.
    """
    if isinstance(audio, tuple):
        array, rate = _given_samples(audio)
        return len(array) / rate
    with _opened(audio) as file:
        seconds: float = file.frames / file.samplerate
    return seconds


class _Content(io.BytesIO):
    """Clamps seeks before the start, which the library requests for broken files and then reports
    as an error. An exception from here would put a traceback into the log for every such upload."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return super().seek(max(offset, 0) if whence == os.SEEK_SET else offset, whence)


@contextlib.contextmanager
def _opened(audio: str | Path | bytes) -> Iterator[Any]:
    """Open the file. Errors while it is read become BadAudio too."""
    if not isinstance(audio, str | os.PathLike | bytes):
        raise BadAudio(
            f"the audio has the type {type(audio).__name__}; it must be a path, a file's content "
            "as bytes, or a pair (samples, rate)"
        )
    (soundfile,) = require_extra("soundfile")
    source = _Content(audio) if isinstance(audio, bytes) else os.fspath(audio)
    try:
        with soundfile.SoundFile(source) as file:
            yield file
    except (soundfile.SoundFileError, TypeError, OSError) as error:  # TypeError: raw samples
        what = "the file" if isinstance(audio, bytes) else str(audio)
        reason = str(getattr(error, "error_string", error)).rstrip(".")
        raise BadAudio(
            f"{what} cannot be read as audio: {reason}. Supported are wav, flac, ogg (vorbis or "
            "opus), mp3, and other formats of libsndfile"
        ) from error


def _given_samples(audio: tuple[Any, ...]) -> tuple[npt.NDArray[Any], float]:
    """(n,) or (n, channels) in float32, and their rate."""
    if len(audio) != 2:
        raise BadAudio(f"the audio is a tuple of {len(audio)}; it must be a pair (samples, rate)")
    given, rate = audio
    if not isinstance(rate, numbers.Real):
        raise BadAudio(
            f"the audio's rate has the type {type(rate).__name__}; pass samples with their rate in "
            "Hz, and several audio inputs as a list"
        )
    _check_rate(float(rate))
    try:
        samples = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise BadAudio(f"the audio's samples are not an array of numbers: {error}") from error
    dtype = samples.dtype
    if samples.ndim not in (1, 2) or dtype.kind not in "fiu":
        raise BadAudio(
            f"the audio is an array of {dtype} with {samples.ndim} dimensions; it must have "
            "numbers, as (samples,) or (samples, channels)"
        )
    # Wider integers come from lists or numpy's arithmetic: their full scale is unknown.
    if dtype.kind == "u" or (dtype.kind == "i" and dtype.itemsize > 4):
        raise BadAudio(
            f"the audio is an array of {dtype}, whose full scale is unknown; pass floats within "
            "-1..1, int8, int16 or int32"
        )
    if samples.ndim == 2 and samples.shape[1] > MAX_CHANNELS:
        raise BadAudio(
            f"the audio has {samples.shape[1]} channels; at most {MAX_CHANNELS} are allowed. If "
            "the array is (channels, samples), pass its transpose: .T"
        )
    if dtype.kind == "i":
        samples = samples / -float(np.iinfo(dtype).min)
    return samples.astype(np.float32, copy=False), float(rate)


def _blocks(file: Any) -> Iterator[npt.NDArray[Any]]:
    frames = max(1, BLOCK_SAMPLES // file.channels)
    while len(block := file.read(frames, dtype="float32")):
        yield block


def _check_rate(rate: float) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise BadAudio(
            f"the audio has a rate of {rate:g} Hz; it must be between {MIN_RATE} and {MAX_RATE}"
        )


def _collect(
    blocks: Iterator[npt.NDArray[Any]],
    rate: float,
    wanted_rate: int,
    max_s: float | None,
    on_block: Callable[[], None],
) -> Samples:
    """blocks: (n,) or (n, channels) of float32."""
    _check_rate(rate)
    resampler = None
    if rate != wanted_rate:
        (soxr,) = require_extra("soxr")
        resampler = soxr.ResampleStream(rate, wanted_rate, 1, dtype="float32")
    pcm = bytearray()  # grows in place; joining parts would need their memory twice
    num_read = work = 0
    for block in blocks:
        on_block()
        num_read += len(block)
        work += block.size
        if max_s is not None:
            _check_size(num_read / rate, work, max_s)
        mono = block if block.ndim == 1 else block.mean(axis=1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise BadAudio("the audio has samples that are not finite numbers")
        _append(pcm, mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        _append(pcm, resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    if not pcm:
        raise BadAudio("the audio has no samples")
    return np.frombuffer(pcm, np.float32)


def _append(pcm: bytearray, samples: Samples) -> None:
    pcm.extend(np.ascontiguousarray(samples).data)


def _check_size(seconds: float, work: int, max_s: float) -> None:
    if seconds > max_s:
        raise BadAudio(f"the audio is longer than the limit of {max_s:g} s; split it")
    max_work = max(max_s, MIN_WORK_S) * WORK_PER_S
    if work > max_work:
        raise BadAudio(
            f"the audio has more than {max_work:.0f} samples in all its channels; lower its rate, "
            "mix its channels or split it"
        )


def split_audio(samples: Samples, sampling_rate: int, max_samples: int) -> list[Samples]:
    """Split into pieces of at most `max_samples`, in order.

    There are as few pieces as possible, of nearly equal length. Each cut is in the middle of the
    quietest 0.1 s within 2.5 s (and an eighth of the window) of an even cut.
    """
    pieces = []
    quiet = max(1, round(QUIET_S * sampling_rate))
    reach = min(round(SEARCH_S * sampling_rate), max_samples // 8)
    while (num_pieces := -(-len(samples) // max_samples)) > 1:
        even = len(samples) // num_pieces
        # The rest must fit the other pieces.
        first = max(even - reach, len(samples) - (num_pieces - 1) * max_samples, 1)
        last = min(even + reach, max_samples)
        cut = _quietest(samples, first, last, quiet, round(SEARCH_STEP_S * sampling_rate) or 1)
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]


def _quietest(samples: Samples, first: int, last: int, width: int, step: int) -> int:
    """The position within [first, last] around which `width` samples have the least energy."""
    places = np.arange(first, last + 1, step)
    begin = max(0, first - width)
    energy = np.square(samples[begin : last + width], dtype=np.float64)
    sums = np.concatenate(([0.0], np.cumsum(energy)))
    left = np.clip(places - width // 2 - begin, 0, len(energy))
    right = np.clip(places + width - width // 2 - begin, 0, len(energy))
    means = (sums[right] - sums[left]) / np.maximum(right - left, 1)
    return int(places[means.argmin()])
