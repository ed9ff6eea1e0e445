"""What the CUDA transfer queue submits, with streams and events that record it."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from longshore.worker.queues.compute_queue import CudaComputeQueue
from longshore.worker.queues.transfer_queues import CudaTransferQueue, WorkerQueues

DEVICE = torch.device("cuda")


class Device:
    """submitted: what each stream was given, in order. An event ends when `end` is set."""

    def __init__(self) -> None:
        self.submitted: dict[str, list[str]] = {}
        self.current = "none"
        self.num_events = 0
        self.end = threading.Event()

    def submit(self, stream: str, what: str) -> None:
        self.submitted.setdefault(stream, []).append(what)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()

    class Stream:
        def __init__(self, _: torch.device, priority: int = 0) -> None:
            self.name = "compute" if priority < 0 else f"transfers {len(device.submitted)}"
            device.submitted[self.name] = []

        def wait_event(self, event: "Event") -> None:
            device.submit(self.name, f"wait {event.number}")

    class Event:
        def __init__(self, **_: Any) -> None:
            self.number = device.num_events
            device.num_events += 1

        def record(self, stream: Stream | None = None) -> None:
            device.submit(
                device.current if stream is None else stream.name, f"record {self.number}"
            )

        def synchronize(self) -> None:
            assert device.end.wait(10)

        def query(self) -> bool:
            return device.end.is_set()

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * (end.number - self.number)  # ms

    @contextlib.contextmanager
    def current(stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream.name
        yield
        device.current = before

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: type("Current", (), {"wait_event": wait_on_current})()
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def wait_on_current(_: object, event: Event) -> None:
        device.submit(device.current, f"wait {event.number}")

    yield device
    device.end.set()


@pytest.mark.req("WRK-04", "WRK-05")
def test_a_transfer_waits_for_the_steps_on_its_stream_between_two_events(device: Device) -> None:
    """All transfers of a queue are on one stream, so each also waits for the one before."""
    compute = CudaComputeQueue(DEVICE)
    queues = WorkerQueues(DEVICE, compute, lambda: None)
    queue = queues.open("stores")
    compute.submit(lambda: device.submit(device.current, "step"))
    queue.submit(lambda: device.submit(device.current, "copy"), after=[queues.computed()])
    queue.submit(lambda: device.submit(device.current, "another copy"))
    device.end.set()
    queues.close()
    compute.close()
    assert device.submitted["compute"] == ["record 0", "step", "record 1", "record 2"]
    (transfers,) = (each for name, each in device.submitted.items() if name != "compute")
    assert transfers == [
        *("wait 2", "record 3", "copy", "record 4"),
        *("record 5", "another copy", "record 6"),
    ]


@pytest.mark.req("WRK-07")
def test_the_end_of_a_transfer_is_asked_for_without_waiting(device: Device) -> None:
    queue = CudaTransferQueue(DEVICE, "stores")
    reported: list[float] = []
    completion = queue.submit(lambda: None, lambda event: reported.append(event.elapsed_s))
    assert not completion.is_done()
    assert not reported
    device.end.set()
    queue.close()
    assert completion.is_done()
    assert reported == [1.0], "the seconds between its two events"


def test_a_transfer_that_could_not_be_submitted_fails_alone_after_its_stream(
    device: Device,
) -> None:
    queue = CudaTransferQueue(DEVICE, "stores")

    def fail() -> None:
        device.submit(device.current, "first half")
        raise OSError("the second half")

    failed, other = queue.submit(fail), queue.submit(lambda: None)
    assert not failed.is_done(), "the first half may still be read and written"
    device.end.set()
    queue.close()
    assert isinstance(failed.error, OSError)
    assert other.error is None
    (transfers,) = device.submitted.values()
    assert transfers[:3] == ["record 0", "first half", "record 1"]
