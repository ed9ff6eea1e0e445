"""Decodes uploaded audio to the engine's input, on separate threads and within a memory limit."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from longshore.deploy.requests.audio import longest_s, read_audio, split_audio
from longshore.deploy.requests.errors import RateLimited
from longshore.deploy.requests.speech import SpeechModel
from longshore.protocol.requests import MultimodalFeature

MAX_SAMPLE_BYTES: Final = 2 << 30
"""Limit of the samples of all live requests: about nine hours at 16 kHz."""
NUM_THREADS: Final = 4
SAMPLE_BYTES: Final = 4

T = TypeVar("T")


class AudioDecoder:
    """There is one per gateway, on its event loop. Samples are held once: features are views of
    them. The engine holds only a part of them, so its memory is bounded too."""

    def __init__(self, max_bytes: int = MAX_SAMPLE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        # Not the loop's default threads: long audio would occupy all of them.
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="audio")

    @asynccontextmanager
    async def features(
        self, file: bytes, speech: SpeechModel, max_s: float
    ) -> AsyncIterator[list[MultimodalFeature]]:
        """The pieces of a file, whose samples are held until the context ends.

        Raises BadAudio, and RateLimited if the limit would be exceeded: before decoding, by the
        duration in the file's header. A file that exceeds the limit by itself is accepted when
        nothing else is held.
        """
        rate = speech.audio.sampling_rate
        seconds = min(max_s, await self._run(_longest_s, file))
        num_bytes = round(seconds * rate) * SAMPLE_BYTES
        if self._held_bytes and self._held_bytes + num_bytes > self._max_bytes:
            raise RateLimited(
                f"{self._held_bytes / rate / SAMPLE_BYTES:.0f} s of audio are being processed, and "
                f"the limit is {self._max_bytes / rate / SAMPLE_BYTES:.0f} s; retry later",
                "queue_full",
                retry_after_s=1,
            )
        self._held_bytes += num_bytes
        try:
            features = await self._run(_features, file, speech, max_s)
            del file
            self._held_bytes -= num_bytes  # the header may give far too long a duration
            num_bytes = sum(feature.data.nbytes for feature in features)
            self._held_bytes += num_bytes
            yield features
        finally:
            self._held_bytes -= num_bytes

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work` on a thread. Its first argument is a function to call repeatedly, which raises
        CancelledError once the result is no longer awaited."""
        is_over = threading.Event()

        def end_if_over() -> None:
            if is_over.is_set():
                raise CancelledError

        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, work, end_if_over, *arguments)
        finally:
            is_over.set()


def _longest_s(_: Callable[[], None], file: bytes) -> float:
    return longest_s(file)


def _features(
    on_block: Callable[[], None], file: bytes, speech: SpeechModel, max_s: float
) -> list[MultimodalFeature]:
    needs = speech.audio
    samples = read_audio(file, needs.sampling_rate, max_s=max_s, on_block=on_block)
    pieces = split_audio(samples, needs.sampling_rate, needs.max_samples)
    return [speech.feature(piece) for piece in pieces]
