"""Log-mel spectrograms, the input of Whisper's encoder."""

import math
from typing import Final

import torch
from torch import Tensor

from longshore.worker.models.whisper_config import AudioSettings

MAX_FREQUENCY_HZ: Final = 8_000.0
LEAST_POWER: Final = 1e-10
MAX_DECADES: Final = 8.0
"""Values further below the maximum are raised to this distance."""

# Slaney's mel scale: linear up to 1,000 Hz, which is 15 mel, then 27 mel per factor of 6.4.
HZ_PER_MEL: Final = 200 / 3
LOG_BEGIN_HZ: Final = 1_000.0
MELS_PER_E_FOLD: Final = 27 / math.log(6.4)


class LogMel:
    """filters: (num_mel_bins, num_frequencies); window: (window_length,); float32."""

    def __init__(self, settings: AudioSettings, device: torch.device) -> None:
        self._settings = settings
        self.filters = mel_filters(settings).to(device, torch.float32)
        self.window = torch.hann_window(settings.window_length, device=device)

    def __call__(self, samples: Tensor) -> Tensor:
        """samples: (num_samples,) float32, mono -> (num_mel_bins, num_frames) float32."""
        settings = self._settings
        spectrum = torch.stft(
            samples,
            settings.window_length,
            settings.hop_length,
            window=self.window,
            return_complex=True,
        )
        power = self.filters @ spectrum[:, :-1].abs().square()
        decades = power.clamp_(min=LEAST_POWER).log10_()
        return decades.maximum(decades.max() - MAX_DECADES).add_(4.0).div_(4.0)


def mel_filters(settings: AudioSettings) -> Tensor:
    """(num_mel_bins, num_frequencies) float64: triangular filters with corners that are evenly
    spaced on the mel scale, each with an area of 1 (in Hz, with a height of 2 / width)."""
    num_bins = settings.num_mel_bins
    corners = _mel_to_hz(
        torch.linspace(0, _hz_to_mel(MAX_FREQUENCY_HZ), num_bins + 2, dtype=torch.float64)
    )
    num_frequencies = settings.window_length // 2 + 1
    frequencies = torch.linspace(
        0, settings.sampling_rate // 2, num_frequencies, dtype=torch.float64
    )
    low, peak, high = (corners[i : i + num_bins, None] for i in range(3))
    rising, falling = (frequencies - low) / (peak - low), (high - frequencies) / (high - peak)
    return rising.minimum(falling).clamp_(min=0) * (2 / (high - low))


def _hz_to_mel(hz: float) -> float:
    if hz < LOG_BEGIN_HZ:
        return hz / HZ_PER_MEL
    return LOG_BEGIN_HZ / HZ_PER_MEL + math.log(hz / LOG_BEGIN_HZ) * MELS_PER_E_FOLD


def _mel_to_hz(mels: Tensor) -> Tensor:
    begin = LOG_BEGIN_HZ / HZ_PER_MEL
    logarithmic = LOG_BEGIN_HZ * ((mels - begin) / MELS_PER_E_FOLD).exp()
    return torch.where(mels < begin, mels * HZ_PER_MEL, logarithmic)
