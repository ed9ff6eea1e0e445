"""Log-mel spectrograms against those of transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from longshore.worker.layers.audio_features import LogMel
from longshore.worker.models.whisper_config import AudioSettings
from tests.worker.models.tiny_whisper import SAMPLING_RATE, input_features, padded, sound


def settings(num_mel_bins: int, seconds: int) -> AudioSettings:
    return AudioSettings(
        num_mel_bins=num_mel_bins,
        sampling_rate=SAMPLING_RATE,
        hop_length=160,
        window_length=400,
        num_samples=seconds * SAMPLING_RATE,
    )


@pytest.mark.parametrize(
    ("num_mel_bins", "window_s", "length_s"),
    [(80, 1, 1.0), (80, 30, 7.3), (128, 30, 30.0), (80, 2, 0.001)],
)
def test_spectrograms_equal_those_of_transformers(
    num_mel_bins: int, window_s: int, length_s: float, tmp_path: Path
) -> None:
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=num_mel_bins, chunk_length=window_s).save_pretrained(
        tmp_path
    )
    heard = settings(num_mel_bins, window_s)
    log_mel = LogMel(heard, torch.device("cpu"))
    for seed in range(3):
        samples = sound(seed, length_s)
        wanted = input_features(tmp_path, samples)[0]
        got = log_mel(padded(samples, heard.num_samples))
        assert got.shape == (num_mel_bins, window_s * 100)
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0)


def test_silence_is_flat() -> None:
    log_mel = LogMel(settings(80, 1), torch.device("cpu"))
    assert log_mel(torch.zeros(SAMPLING_RATE)).unique().tolist() == [-1.5]


@pytest.mark.parametrize(("num_mel_bins", "window_length"), [(80, 400), (128, 400), (40, 256)])
def test_filters_equal_those_of_transformers(num_mel_bins: int, window_length: int) -> None:
    from transformers.audio_utils import mel_filter_bank

    from longshore.worker.layers.audio_features import mel_filters

    wanted = mel_filter_bank(
        num_frequency_bins=1 + window_length // 2,
        num_mel_filters=num_mel_bins,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=SAMPLING_RATE,
        norm="slaney",
        mel_scale="slaney",
    )
    heard = AudioSettings(
        num_mel_bins=num_mel_bins,
        sampling_rate=SAMPLING_RATE,
        hop_length=160,
        window_length=window_length,
        num_samples=SAMPLING_RATE,
    )
    np.testing.assert_allclose(mel_filters(heard).numpy().T, wanted, atol=1e-12)
