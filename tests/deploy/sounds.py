"""Sounds for tests: tones with some noise, and files that contain them."""

import io
from typing import Any

import numpy as np

from longshore.deploy.requests.audio import Samples


def tone(
    seconds: float, hertz: float = 440.0, *, rate: int = 16_000, noise: float = 0.02, seed: int = 0
) -> Samples:
    """A tone of amplitude 0.3."""
    times = np.arange(round(seconds * rate)) / rate
    rng = np.random.default_rng(seed)
    wave = 0.3 * np.sin(2 * np.pi * hertz * times) + noise * rng.normal(size=len(times))
    return wave.astype(np.float32)


def as_file(samples: Any, rate: int = 16_000, kind: str = "WAV", **options: Any) -> bytes:
    """samples: (n,) or (n, channels).
    kind: a format of libsndfile. WAV has floats, so that it is lossless.
    """
    import soundfile

    if kind == "WAV":
        options = {"subtype": "FLOAT", **options}
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return file.getvalue()
