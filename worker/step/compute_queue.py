"""Where a worker's computation happens: a queue of operations, executed in order.

The caller submits and goes on; it must not touch what a submitted operation reads until that is
complete. On CUDA the queue is a stream. The CPU twin is a thread, and tests may delay it at will:
a well-behaved single thread would hide every mistake in that rule.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import torch

from longshore.protocol.errors import LongshoreError
from longshore.protocol.logs.records import fields

logger = logging.getLogger(__name__)

HANDOVER_TIMEOUT_S: Final = 0.005


class Completion:
    """One submitted operation.

    error:     why it did not run to its end, or None.
    elapsed_s: time it took on the device.
    step_id:   whose operation it is, for the log.
    """

    def __init__(self, step_id: int | None = None) -> None:
        self.step_id = step_id
        self.error: Exception | None = None
        self.elapsed_s = 0.0
        self._begun = threading.Event()
        self._done = threading.Event()

    def is_done(self) -> bool:
        """Whether the operation, and its `on_done`, have ended. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `is_done`, at most `timeout_s`; returns `is_done`."""
        return self._done.wait(timeout_s)

    def wait_until_begun(self, timeout_s: float) -> None:
        """Block until the queue's thread has taken up the operation, at most `timeout_s`."""
        self._begun.wait(timeout_s)

    def begin(self) -> None:
        """For the queue alone: the operation's turn has come."""
        self._begun.set()

    def finish(self) -> None:
        """For the queue alone: everybody who waits may go on."""
        self._done.set()


class ComputeQueue(Protocol):
    """In order, without gaps: when an operation fails, all after it fail with the same error."""

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        """Execute `operation` after everything submitted before.

        on_done: called once, on a thread of the queue, in order of submission, when the results
                 are visible on the host (also after a failure: look at `error`). Must be short.
        step_id: whose operation it is; the log of a failure says it.
        """
        ...

    def close(self) -> None:
        """Finish what was submitted, then stop. No `submit` may follow."""
        ...


def _tell(on_done: Callable[[Completion], None] | None, completion: Completion) -> Exception | None:
    """End an operation. Returns why nothing may follow it: its own failure, or its listener's."""
    failure = completion.error
    try:
        if on_done is not None:
            on_done(completion)
    except Exception as error:
        about = fields(step_id=completion.step_id)
        logger.exception("the result of a compute operation could not be delivered", extra=about)
        failure = failure or error
    completion.finish()
    return failure


def open_compute_queue(device: torch.device) -> ComputeQueue:
    return CudaComputeQueue(device) if device.type == "cuda" else CpuComputeQueue()


class CpuComputeQueue:
    """One thread that runs operations when their turn comes.

    before_each: called on that thread before every operation; tests delay there.
    """

    def __init__(self, before_each: Callable[[], None] | None = None) -> None:
        self._before_each = before_each
        self._failure: Exception | None = None
        self._last: Completion | None = None
        self._submitted: queue.SimpleQueue[
            tuple[Callable[[], object], Callable[[Completion], None] | None, Completion] | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        completion = Completion(step_id)
        was_idle = self._last is None or self._last.is_done()
        self._last = completion
        self._submitted.put((operation, on_done, completion))
        if was_idle:
            # The thread needs the interpreter's lock to wake up, and whoever submits would go on
            # with the next step under it: the first token of a request would wait for that.
            completion.wait_until_begun(HANDOVER_TIMEOUT_S)
        return completion

    def close(self) -> None:
        self._submitted.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (item := self._submitted.get()) is not None:
                operation, on_done, completion = item
                completion.begin()
                if self._failure is None:
                    self._execute(operation, completion)
                completion.error = self._failure
                self._failure = _tell(on_done, completion)

    def _execute(self, operation: Callable[[], object], completion: Completion) -> None:
        try:
            if self._before_each is not None:
                self._before_each()
            started = time.perf_counter()
            operation()
            completion.elapsed_s = time.perf_counter() - started
        except Exception as error:
            if not isinstance(error, LongshoreError):  # those say all that is known
                about = fields(step_id=completion.step_id)
                logger.exception("a compute operation failed", extra=about)
            self._failure = error


class CudaComputeQueue:
    """One stream. Operations are launched by `submit` itself; a thread waits for their events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._failure: Exception | None = None
        self._launched: queue.SimpleQueue[
            tuple[
                torch.cuda.Event,
                torch.cuda.Event,
                Callable[[Completion], None] | None,
                Completion,
            ]
            | None
        ] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute-events", daemon=True)
        self._thread.start()

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        completion = Completion(step_id)
        started = torch.cuda.Event(enable_timing=True, blocking=True)
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        completion.error = self._failure
        if completion.error is None:
            try:
                with torch.inference_mode(), torch.cuda.stream(self._stream):
                    started.record()
                    operation()
                    ended.record()
            except Exception as error:
                if not isinstance(error, LongshoreError):
                    about = fields(step_id=completion.step_id)
                    logger.exception("a compute operation could not be launched", extra=about)
                completion.error = self._failure = error
        self._launched.put((started, ended, on_done, completion))
        return completion

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        failure: Exception | None = None  # of this or an earlier operation: none after it counts
        while (item := self._launched.get()) is not None:
            started, ended, on_done, completion = item
            completion.error = failure or completion.error or _await(started, ended, completion)
            failure = _tell(on_done, completion)
            # Nothing more is launched; `submit` may have set a reason of its own meanwhile.
            self._failure = self._failure or failure


def _await(
    started: torch.cuda.Event, ended: torch.cuda.Event, completion: Completion
) -> Exception | None:
    """Wait for a launched operation; why it failed on the device, if it did."""
    try:
        ended.synchronize()
        completion.elapsed_s = started.elapsed_time(ended) / 1000
    except Exception as error:  # a kernel that failed is reported at the next synchronisation
        about = fields(step_id=completion.step_id)
        logger.exception("a compute operation failed", extra=about)
        return error
    return None
