"""Sound of any common kind to what a speech model takes: mono float32 samples at its rate.

Decoded and resampled block by block, so that a small file cannot unfold to more than the limit. An
audio longer than the model's window is cut into pieces at quiet places.
"""

import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from longshore.protocol.errors import ConfigError

Samples: TypeAlias = npt.NDArray[np.float32]
"""(n,), mono, within -1..1 as a rule"""
Audio: TypeAlias = str | Path | bytes | tuple[npt.ArrayLike, int]
"""A file's path or content, or samples (n,) or (n, channels) with their rate in Hz"""

BLOCK_SAMPLES: Final = 1 << 18
LEAST_RATE, MOST_RATE = 1_000, 768_000
# The quietest so many seconds, within so many before or behind the place of an even cut.
QUIET_S: Final = 0.1
SEARCH_S: Final = 2.5
SEARCH_STEP_S: Final = 0.01


class BadAudio(ValueError):
    """What was given is no sound that can be transcribed; the text says why."""


def require_extra(*names: str) -> list[ModuleType]:
    """The modules. Raises ConfigError that says how to install what is missing."""
    try:
        return [importlib.import_module(name) for name in names]
    except (ImportError, OSError) as error:  # OSError: soundfile without its library
        raise ConfigError(
            f"audio cannot be read here: {error}. Install what it takes: "
            "pip install 'longshore[audio]'"
        ) from error


def read_audio(audio: Audio, sampling_rate: int, *, max_s: float | None = None) -> Samples:
    """Mono samples at `sampling_rate`, the mean of all channels.

    max_s: longer audio is refused, as soon as it is known to be.
    Raises BadAudio, or ConfigError if the extra `audio` is not installed and needed.
    """
    if isinstance(audio, tuple):
        array, rate = _given_samples(*audio)
        blocks: Iterator[Samples] = iter([array])
        return _collect(blocks, rate, sampling_rate, max_s)
    (soundfile,) = require_extra("soundfile")
    source = io.BytesIO(audio) if isinstance(audio, bytes) else os.fspath(audio)
    try:
        with soundfile.SoundFile(source) as file:
            return _collect(_blocks(file), file.samplerate, sampling_rate, max_s)
    except (soundfile.SoundFileError, TypeError, OSError) as error:  # TypeError: raw samples
        what = "the file" if isinstance(audio, bytes) else str(audio)
        raise BadAudio(
            f"{what} cannot be read as audio: {error}. It may be wav, flac, ogg (vorbis or opus), "
            "mp3, or what else libsndfile reads"
        ) from error


def _given_samples(array: npt.ArrayLike, rate: int) -> tuple[npt.NDArray[Any], int]:
    samples = np.asarray(array)
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "fiu":
        raise BadAudio(
            f"the audio is an array of {samples.dtype} with {samples.ndim} dimensions; it must "
            "hold numbers, as (samples,) or (samples, channels)"
        )
    if samples.dtype.kind == "u":
        raise BadAudio(f"the audio is an array of {samples.dtype}; give floats or signed integers")
    if samples.dtype.kind == "i":
        samples = samples / -float(np.iinfo(samples.dtype).min)
    return samples.astype(np.float32, copy=False), rate


def _blocks(file: Any) -> Iterator[Samples]:
    frames = max(1, BLOCK_SAMPLES // file.channels)
    while len(block := file.read(frames, dtype="float32")):
        yield block


def _collect(
    blocks: Iterator[Samples], rate: int, wanted_rate: int, max_s: float | None
) -> Samples:
    """blocks: (n,) or (n, channels)."""
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise BadAudio(
            f"the audio has a rate of {rate} Hz; it must lie within {LEAST_RATE}..{MOST_RATE}"
        )
    resampler = None
    if rate != wanted_rate:
        (soxr,) = require_extra("soxr")
        resampler = soxr.ResampleStream(rate, wanted_rate, 1, dtype="float32")
    parts: list[Samples] = []
    num_read = 0
    for block in blocks:
        mono = block if block.ndim == 1 else block.mean(axis=1, dtype=np.float32)
        num_read += len(mono)
        if max_s is not None and num_read > max_s * rate:
            raise BadAudio(
                f"the audio is longer than the {max_s:g} s that are taken at once; cut it"
            )
        if not np.isfinite(mono).all():
            raise BadAudio("the audio holds samples that are no finite numbers")
        parts.append(mono if resampler is None else resampler.resample_chunk(mono))
    if resampler is not None:
        parts.append(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(samples):
        raise BadAudio("the audio has no samples")
    return samples


def split_audio(samples: Samples, sampling_rate: int, max_samples: int) -> list[Samples]:
    """Pieces of at most `max_samples`, in order, which together are the whole.

    There are as few as can be, of nearly equal length: each cut is in the middle of the quietest
    0.1 s within 2.5 s (and an eighth of the window) of where an even cut would be.
    """
    pieces = []
    quiet = max(1, round(QUIET_S * sampling_rate))
    reach = min(round(SEARCH_S * sampling_rate), max_samples // 8)
    while (num_pieces := -(-len(samples) // max_samples)) > 1:
        even = len(samples) // num_pieces
        # What is left must fit the other pieces.
        first = max(even - reach, len(samples) - (num_pieces - 1) * max_samples, 1)
        last = min(even + reach, max_samples)
        cut = _quietest(samples, first, last, quiet, round(SEARCH_STEP_S * sampling_rate) or 1)
        pieces.append(samples[:cut])
        samples = samples[cut:]
    return [*pieces, samples]


def _quietest(samples: Samples, first: int, last: int, width: int, step: int) -> int:
    """The place within [first, last] around which `width` samples have the least energy."""
    places = np.arange(first, last + 1, step)
    begin = max(0, first - width)
    energy = np.square(samples[begin : last + width], dtype=np.float64)
    sums = np.concatenate(([0.0], np.cumsum(energy)))
    left = np.clip(places - width // 2 - begin, 0, len(energy))
    right = np.clip(places + width - width // 2 - begin, 0, len(energy))
    means = (sums[right] - sums[left]) / np.maximum(right - left, 1)
    return int(places[means.argmin()])
