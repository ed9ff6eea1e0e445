"""The compute queue: a worker's operations, executed in order of submission.

`submit` does not wait. The caller must not modify what a submitted operation reads until the
operation is complete. On CUDA the queue is a stream; on a CPU it is a thread, which tests delay at
random, because without delays violations of that rule would go unnoticed.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import torch

from longshore.connectors.base import QueueEvent
from longshore.protocol.errors import LongshoreError
from longshore.protocol.logs.records import fields

logger = logging.getLogger(__name__)

HANDOVER_TIMEOUT_S: Final = 0.005

HIGH_PRIORITY: Final = -1
"""Priority of the compute stream. Streams of transfers have the default, 0, which is the lowest."""

_Item = TypeVar("_Item")


class Completion:
    """One submitted operation.

    error:     why it failed, or None.
    elapsed_s: its time on the device.
    gap_s:     time for which the device was idle before it, if it was submitted before the
               operation before it had ended; else None.
    step_id:   the step it belongs to, for log lines.
    """

    def __init__(self, step_id: int | None = None) -> None:
        self.step_id = step_id
        self.error: Exception | None = None
        self.elapsed_s = 0.0
        self.gap_s: float | None = None
        self._begun = threading.Event()
        self._done = threading.Event()

    def is_done(self) -> bool:
        """Whether the operation and its `on_done` have finished. Never blocks."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `is_done`, at most `timeout_s`; returns `is_done`."""
        return self._done.wait(timeout_s)

    def wait_until_begun(self, timeout_s: float) -> None:
        """Block until the queue's thread has started the operation, at most `timeout_s`."""
        self._begun.wait(timeout_s)

    def wait_on_queue(self) -> None:
        """See `QueueEvent.wait_on_queue`."""
        self.wait()

    def begin(self) -> None:
        """Called by the queue only: the operation starts."""
        self._begun.set()

    def finish(self) -> None:
        """Called by the queue only: the operation is complete; wakes all waiters."""
        self._done.set()


class ComputeQueue(Protocol):
    """Runs operations in order. If one fails, all later ones fail with the same error."""

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        """Execute `operation` after everything submitted before.

        on_done: called once, on a thread of the queue, in order of submission, when the results
                 are visible on the host. Also called after a failure: check `error`. Must be short.
        step_id: the step of the operation, for the log line of a failure.
        """
        ...

    def computed(self) -> QueueEvent:
        """The end of everything submitted so far. May be called on any thread."""
        ...

    def close(self) -> None:
        """Finish all submitted operations, then stop. No `submit` may follow."""
        ...


def complete(
    on_done: Callable[[Completion], None] | None, completion: Completion
) -> Exception | None:
    """Call `on_done` and finish the operation. Returns the failure of the operation or of
    `on_done`."""
    failure = completion.error
    try:
        if on_done is not None:
            on_done(completion)
    except Exception as error:
        about = fields(step_id=completion.step_id)
        logger.exception("the result of an operation could not be delivered", extra=about)
        failure = failure or error
    completion.finish()
    return failure


def log_failure(text: str, error: Exception, completion: Completion) -> None:
    """Log why an operation failed."""
    if not isinstance(error, LongshoreError):  # its message is complete without a traceback
        about = fields(step_id=completion.step_id)
        logger.error(text, exc_info=error, extra=about)


class ItemThread(Generic[_Item]):
    """A daemon thread that takes items in the order of `put`.

    run: called on the thread with an iterator over the items, which ends after `close`.
    """

    def __init__(self, run: Callable[[Iterator[_Item]], None], *, name: str) -> None:
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=run, args=(iter(self._items.get, None),), name=name, daemon=True
        )
        self._thread.start()

    def put(self, item: _Item) -> None:
        self._items.put(item)

    def close(self) -> None:
        """Wait until all items have been taken and `run` has returned. No `put` may follow."""
        self._items.put(None)
        self._thread.join()


def open_compute_queue(
    device: torch.device, check: Callable[[], None] = lambda: None
) -> ComputeQueue:
    """check: see CudaComputeQueue; on a CPU, operations fail themselves."""
    return CudaComputeQueue(device, check) if device.type == "cuda" else CpuComputeQueue()


class _Submitted(NamedTuple):
    operation: Callable[[], object]
    on_done: Callable[[Completion], None] | None
    completion: Completion
    is_ahead: bool


class CpuComputeQueue:
    """One thread that runs the operations.

    before_each: called on that thread before every operation; tests insert delays with it.
    """

    def __init__(self, before_each: Callable[[], None] | None = None) -> None:
        self._before_each = before_each
        self._failure: Exception | None = None
        self._last = Completion()
        self._last.finish()
        self._ended_at = 0.0  # of the operation before
        self._thread = ItemThread(self._run, name="compute")

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        completion = Completion(step_id)
        was_idle = self._last.is_done()
        self._last = completion
        self._thread.put(_Submitted(operation, on_done, completion, not was_idle))
        if was_idle:
            # Let the thread take the GIL now. Otherwise the caller would prepare the next step
            # first, which would delay the first token of a request.
            completion.wait_until_begun(HANDOVER_TIMEOUT_S)
        return completion

    def computed(self) -> QueueEvent:
        return self._last

    def close(self) -> None:
        self._thread.close()

    def _run(self, submitted: Iterator[_Submitted]) -> None:
        with torch.inference_mode():
            for operation, on_done, completion, is_ahead in submitted:
                completion.begin()
                if self._failure is None:
                    self._execute(operation, completion, is_ahead)
                completion.error = self._failure
                self._failure = complete(on_done, completion)

    def _execute(
        self, operation: Callable[[], object], completion: Completion, is_ahead: bool
    ) -> None:
        try:
            if self._before_each is not None:
                self._before_each()
            started = time.perf_counter()
            if is_ahead:
                completion.gap_s = started - self._ended_at
            operation()
            self._ended_at = time.perf_counter()
            completion.elapsed_s = self._ended_at - started
        except Exception as error:
            log_failure("a compute operation failed", error, completion)
            self._failure = error


class CudaEvent:
    """A recorded CUDA event as a `QueueEvent`."""

    error: Exception | None = None
    elapsed_s: float = 0.0

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self, timeout_s: float | None = None) -> bool:
        """A timeout is checked once per millisecond, because CUDA has no wait with a timeout."""
        if timeout_s is None:
            self._event.synchronize()
            return True
        deadline_s = time.monotonic() + timeout_s
        while not (is_done := self._event.query()) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return is_done

    def wait_on_queue(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _Launched(NamedTuple):
    """ahead_of: the end of the operation before, if that was still to come."""

    started: torch.cuda.Event
    ended: torch.cuda.Event
    ahead_of: torch.cuda.Event | None
    on_done: Callable[[Completion], None] | None
    completion: Completion


class CudaComputeQueue:
    """One stream. `submit` launches the operations; a thread waits for their events.

    check: called on that thread after the end of each operation. Raises if what it has launched
           failed in a way that does not stop the device.
    """

    def __init__(self, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self._device = device
        self._check = check
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._failure: Exception | None = None
        self._last_ended: torch.cuda.Event | None = None
        self._thread = ItemThread(self._run, name="compute-events")

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
        ahead_of = self._last_ended
        if ahead_of is not None and ahead_of.query():
            ahead_of = None
        completion.error = self._failure
        if completion.error is None:
            try:
                with torch.inference_mode(), torch.cuda.stream(self._stream):
                    started.record()
                    operation()
                    ended.record()
                self._last_ended = ended
            except Exception as error:
                log_failure("a compute operation could not be launched", error, completion)
                completion.error = self._failure = error
        self._thread.put(_Launched(started, ended, ahead_of, on_done, completion))
        return completion

    def computed(self) -> QueueEvent:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaEvent(event)

    def close(self) -> None:
        self._thread.close()

    def _run(self, launched: Iterator[_Launched]) -> None:
        torch.cuda.set_device(self._device)
        failure: Exception | None = None  # of this or an earlier operation; fails all later ones
        for started, ended, ahead_of, on_done, completion in launched:
            completion.error = (
                failure or completion.error or await_end(started, ended, completion, self._check)
            )
            if completion.error is None and ahead_of is not None:
                completion.gap_s = max(0.0, ahead_of.elapsed_time(started) / 1000)
            failure = complete(on_done, completion)
            # From now on nothing is launched. Keep a failure that `submit` has set meanwhile.
            self._failure = self._failure or failure


def await_end(
    started: torch.cuda.Event,
    ended: torch.cuda.Event,
    completion: Completion,
    check: Callable[[], None] = lambda: None,
) -> Exception | None:
    """Wait for a launched operation. Returns its error on the device or that of `check`, if any."""
    try:
        ended.synchronize()
        check()
        completion.elapsed_s = started.elapsed_time(ended) / 1000
    except Exception as error:  # CUDA reports a failed kernel at the next synchronisation
        log_failure("a compute operation failed", error, completion)
        return error
    return None
