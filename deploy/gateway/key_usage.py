"""What each API key uses now, in memory that all gateways of a deployment share.

Each gateway writes only its own counters and reads those of all. To admit a request it adds to its
own first, then reads the sums, and subtracts again if a limit is exceeded. So no lock is needed, a
gateway that is stopped or dies blocks no other, and two gateways that admit at the same moment may
both reject, but never exceed a limit.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from longshore.deploy.gateway.api_keys import ApiKey
from longshore.deploy.gateway.metrics import KEY_LIMITS, GatewayMetrics, KeyCounts
from longshore.deploy.requests.errors import RateLimited, RequestError, invalid

WINDOW_S: Final = 60
LIVE_REQUESTS, TOKENS_PER_MINUTE = KEY_LIMITS
MAX_SLOTS: Final = 4000
"""Limit of the keys that a deployment can have had. Memory is used for those that send requests."""
_NUM_CELLS: Final = 64
"""One per second; more than the window has, so that no cell in it is overwritten."""


class Admitted:
    """The use of one admitted HTTP request; a context manager that ends it.

    charge: adds tokens to what the key has used in this minute.
    """

    def __init__(self, end: Callable[[], None], charge: Callable[[int], None]) -> None:
        self.charge = charge
        self._end = end

    def __enter__(self) -> "Admitted":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()


_UNLIMITED: Final = Admitted(lambda: None, lambda _: None)


class KeyUsage:
    """Counts live requests and tokens by key, and compares them with the keys' limits.

    keys:   the same ones in all gateways.
    number: of this gateway. What it counted before a restart is dropped: those requests are lost.
    memory_fd: memory shared by all gateways; None: there is only one.
    now_s:  a clock that all gateways share.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        metrics: GatewayMetrics,
        *,
        number: int = 0,
        num_gateways: int = 1,
        memory_fd: int | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts: dict[int, KeyCounts] = {}
        self._metrics = metrics
        self._number = number
        self._now_s = now_s
        shape = (num_gateways, MAX_SLOTS, 1 + 2 * _NUM_CELLS)
        if memory_fd is None or not keys:
            counters = np.zeros(shape, np.int64)
        else:
            size_bytes = 8 * int(np.prod(shape))
            os.ftruncate(memory_fd, size_bytes)  # new memory is empty; extends it with zeros
            counters = np.frombuffer(mmap.mmap(memory_fd, size_bytes), np.int64).reshape(shape)
        self._num_live = counters[:, :, 0]
        self._seconds = counters[:, :, 1 : 1 + _NUM_CELLS]
        self._tokens = counters[:, :, 1 + _NUM_CELLS :]
        self._num_live[number, [key.slot for key in keys]] = 0
        self.use(keys)

    def use(self, keys: Sequence[ApiKey]) -> None:
        """Count for these keys from now on. Requests of others may still be running."""
        for key in keys:
            if key.slot not in self._counts:
                self._counts[key.slot] = self._metrics.keys.counts(key.name)

    def num_live(self, key: ApiKey) -> int:
        """Live requests of a key, in all gateways."""
        return int(self._num_live[:, key.slot].sum()) if key.name else 0

    def num_tokens(self, key: ApiKey) -> int:
        """Tokens that a key has used within the last minute, in all gateways."""
        return sum(tokens for _, tokens in self._used(key.slot))

    def num_at_a_time(self, maximum: int, key: ApiKey) -> int:
        """Parts of a request that may be live at a time, at most `maximum`."""
        if key.max_live_requests is None:
            return maximum
        return max(1, min(maximum, key.max_live_requests - self.num_live(key)))

    def admit(self, key: ApiKey, *, num_live: int, num_tokens: int) -> Admitted:
        """Count a request with `num_live` requests to the engine and `num_tokens` prompt tokens.
        Raises RequestError if it exceeds a limit of its key."""
        if not key.name:
            return _UNLIMITED
        index = key.slot
        counts = self._counts[index]
        own = self._num_live[self._number]
        own[index] += num_live
        error = self._live_error(key, index, num_live)
        if error is None:
            self._charge(index, num_tokens)
            if (error := self._token_error(key, index, num_tokens)) is not None:
                self._charge(index, -num_tokens)
        if error is not None:
            own[index] -= num_live
            counts.rejected[error.code or ""].inc()
            raise error
        counts.live_requests.inc(num_live)
        counts.tokens.inc(num_tokens)

        def end() -> None:
            own[index] -= num_live
            counts.live_requests.dec(num_live)

        def charge(num_new: int) -> None:
            counts.tokens.inc(num_new)
            self._charge(index, num_new)

        return Admitted(end, charge)

    def _live_error(self, key: ApiKey, index: int, num_new: int) -> RequestError | None:
        limit = key.max_live_requests
        if limit is None:
            return None
        if num_new > limit:
            return invalid(
                f"this request has {num_new} answers at a time, and the limit of this API key is "
                f"{limit} live requests (max_live_requests); send fewer prompts or samples",
                code=LIVE_REQUESTS,
            )
        num_live = int(self._num_live[:, index].sum())
        if num_live <= limit:
            return None
        return RateLimited(
            f"{num_live - num_new} requests of this API key are running or waiting, and its limit "
            f"is {limit} (max_live_requests); retry later",
            LIVE_REQUESTS,
            retry_after_s=1,
        )

    def _token_error(self, key: ApiKey, index: int, num_new: int) -> RequestError | None:
        limit = key.tokens_per_minute
        if limit is None:
            return None
        if num_new > limit:
            return invalid(
                f"the prompt has {num_new} tokens, and the limit of this API key is {limit} tokens "
                "per minute (tokens_per_minute); shorten it",
                code=TOKENS_PER_MINUTE,
            )
        used = self._used(index)
        excess = sum(tokens for _, tokens in used) - limit
        if excess <= 0:
            return None
        retry_after_s = WINDOW_S
        for second, tokens in used:
            excess -= tokens
            if excess <= 0:
                retry_after_s = second + WINDOW_S - int(self._now_s()) + 1
                break
        return RateLimited(
            f"this API key has used its {limit} tokens per minute (tokens_per_minute; prompts and "
            f"answers count); retry in {retry_after_s} s",
            TOKENS_PER_MINUTE,
            retry_after_s=retry_after_s,
        )

    def _used(self, index: int) -> list[tuple[int, int]]:
        """(second, tokens) of all gateways within the window, oldest first."""
        seconds, tokens = self._seconds[:, index].copy(), self._tokens[:, index].copy()
        is_recent = seconds > int(self._now_s()) - WINDOW_S
        return sorted(zip(seconds[is_recent].tolist(), tokens[is_recent].tolist(), strict=True))

    def _charge(self, index: int, num_tokens: int) -> None:
        second = int(self._now_s())
        cell = second % _NUM_CELLS
        if self._seconds[self._number, index, cell] != second:
            self._tokens[self._number, index, cell] = 0
            self._seconds[self._number, index, cell] = second
        self._tokens[self._number, index, cell] += num_tokens
