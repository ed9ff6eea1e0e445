"""Transfer queues: operations that run in parallel with the steps, in order of submission.

On CUDA a queue is a stream of low priority, on a CPU a thread, which tests delay at random: without
delays, a transfer that reads or writes a block at the wrong time would go unnoticed. Unlike on the
compute queue, an operation that fails has no effect on later ones.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from longshore.connectors.base import QueueEvent, TransferQueue
from longshore.worker.process.device import is_out_of_memory
from longshore.worker.queues.compute_queue import (
    Completion,
    ComputeQueue,
    ItemThread,
    await_end,
    complete,
    log_failure,
)

logger = logging.getLogger(__name__)


class _Submitted(NamedTuple):
    operation: Callable[[], object]
    on_done: Callable[[QueueEvent], None] | None
    after: Sequence[QueueEvent]
    completion: Completion


class HostTransferQueue:
    """One thread that runs the operations.

    before_each: called on that thread before every operation; tests insert delays with it.
    """

    def __init__(self, name: str, before_each: Callable[[], None] | None = None) -> None:
        self._name = name
        self._before_each = before_each
        self._thread = ItemThread(self._run, name=name)

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[QueueEvent], None] | None = None,
        *,
        after: Sequence[QueueEvent] = (),
    ) -> Completion:
        completion = Completion()
        self._thread.put(_Submitted(operation, on_done, after, completion))
        return completion

    def close(self) -> None:
        """Finish all submitted operations, then stop. No `submit` may follow."""
        self._thread.close()

    def _run(self, submitted: Iterator[_Submitted]) -> None:
        with torch.inference_mode():
            for operation, on_done, after, completion in submitted:
                completion.begin()
                try:
                    _wait_for(after)
                    if self._before_each is not None:
                        self._before_each()
                    started = time.perf_counter()
                    operation()
                    completion.elapsed_s = time.perf_counter() - started
                except Exception as error:
                    _log_failed_transfer(self._name, error, completion)
                    completion.error = error
                complete(on_done, completion)


def _log_failed_transfer(name: str, error: Exception, completion: Completion) -> None:
    """Log why an operation of the queue failed. Only this one has failed if there was no memory."""
    if is_out_of_memory(error):
        logger.warning("%s: no memory for a transfer, which has failed: %s", name, error)
    else:
        log_failure(f"a transfer of {name} failed", error, completion)


def _wait_for(events: Sequence[QueueEvent]) -> None:
    """Wait on the host. Raises the error of the first event that failed."""
    for event in events:
        event.wait()
        if event.error is not None:
            raise event.error


class CudaCompletion(Completion):
    """A launched operation, between two events."""

    def __init__(self) -> None:
        super().__init__()
        self.started = torch.cuda.Event(enable_timing=True, blocking=True)
        self.ended = torch.cuda.Event(enable_timing=True, blocking=True)

    def wait_on_queue(self) -> None:
        torch.cuda.current_stream().wait_event(self.ended)


class _Launched(NamedTuple):
    on_done: Callable[[QueueEvent], None] | None
    completion: CudaCompletion


class CudaTransferQueue:
    """One stream of low priority. `submit` launches the operations; a thread waits for their ends.

    An operation must not wait for the host: its stream makes it wait for `after`.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._name, self._device = name, device
        self._stream = torch.cuda.Stream(device)
        self._thread = ItemThread(self._run, name=name)

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[QueueEvent], None] | None = None,
        *,
        after: Sequence[QueueEvent] = (),
    ) -> CudaCompletion:
        completion = CudaCompletion()
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                for event in after:
                    event.wait_on_queue()
                completion.started.record()
                operation()
        except Exception as error:
            _log_failed_transfer(self._name, error, completion)
            completion.error = error
        # Also after a failure: what was launched before it may still read or write.
        completion.ended.record(self._stream)
        self._thread.put(_Launched(on_done, completion))
        return completion

    def close(self) -> None:
        """Finish all submitted operations, then stop. No `submit` may follow."""
        self._thread.close()

    def _run(self, launched: Iterator[_Launched]) -> None:
        torch.cuda.set_device(self._device)
        for on_done, completion in launched:
            error = await_end(completion.started, completion.ended, completion)
            completion.error = completion.error or error
            complete(on_done, completion)


class WorkerQueues:
    """The `TransferQueues` of one rank.

    compute: the queue of the steps.
    wake:    called on any thread when the connector has something to report.
    before_each: see HostTransferQueue.
    """

    def __init__(
        self,
        device: torch.device,
        compute: ComputeQueue,
        wake: Callable[[], None],
        before_each: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        self._compute = compute
        self._wake = wake
        self._before_each = before_each
        self._opened: list[HostTransferQueue | CudaTransferQueue] = []

    def open(self, name: str, *, on_host: bool = False) -> TransferQueue:
        queue: HostTransferQueue | CudaTransferQueue
        if self._device.type == "cuda" and not on_host:
            queue = CudaTransferQueue(self._device, name)
        else:
            queue = HostTransferQueue(name, self._before_each)
        self._opened.append(queue)
        return queue

    def computed(self) -> QueueEvent:
        return self._compute.computed()

    def wake(self) -> None:
        self._wake()

    def close(self) -> None:
        """Finish all operations of all queues."""
        for queue in self._opened:
            queue.close()
        self._opened.clear()
