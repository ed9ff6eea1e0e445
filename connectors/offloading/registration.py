"""Registers the host tier with CUDA, so that the device copies from and to it asynchronously."""

import ctypes
import logging
import time
from typing import Any, Final

from longshore.connectors.offloading.cuda_copies import check
from longshore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 30
"""Registered at a time. A copy must not cross a border of chunks: see `divided_at`."""

LONG_REGISTRATION_S: Final = 2.0

_PORTABLE_AND_MAPPED: Final = 3  # cudaHostRegisterPortable, cudaHostRegisterMapped


class RegisteredMemory:
    """Host memory that is registered in chunks, until `close`."""

    def __init__(
        self, library: Any, address: int, num_bytes: int, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """library: the CUDA runtime, a ctypes library. address: of a page.

        Raises ConfigError if a chunk cannot be registered; then none is.
        """
        self._library = library
        self._chunks: list[int] = []
        started_s = shown_s = time.monotonic()
        for start in range(0, num_bytes, chunk_bytes):
            size = min(chunk_bytes, num_bytes - start)
            try:
                check(
                    library,
                    library.cudaHostRegister(
                        ctypes.c_void_p(address + start),
                        ctypes.c_size_t(size),
                        ctypes.c_uint(_PORTABLE_AND_MAPPED),
                    ),
                )
            except RuntimeError as error:
                self.close()
                raise ConfigError(
                    f"only {start} of the {num_bytes} bytes of the host tier could be registered "
                    f"for copies to and from the device: {error}. Lower cpu_bytes_to_use, or raise "
                    "the limit of locked memory (ulimit -l) or of the container's memory."
                ) from error
            self._chunks.append(address + start)
            now_s = time.monotonic()
            if now_s - shown_s > LONG_REGISTRATION_S:
                shown_s = now_s
                share = 100 * (start + size) // num_bytes
                logger.info("host tier: %d %% of its memory is registered", share)
        logger.info(
            "host tier: registered for copies in %.1f s, chunks: %d",
            time.monotonic() - started_s,
            len(self._chunks),
        )

    def close(self) -> None:
        """Unregister all chunks: the next region may get the same addresses, which cannot be
        registered twice. No copy may be in progress."""
        while self._chunks:
            try:
                check(self._library, self._library.cudaHostUnregister(self._next()))
            except RuntimeError as error:
                logger.warning("host tier: a chunk could not be unregistered: %s", error)

    def _next(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._chunks.pop())
