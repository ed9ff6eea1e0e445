"""What the device can do at most, measured: all other figures are shares of these."""

import time
from statistics import median
from typing import Final

import torch
from dma import DIRECTIONS, Move, bytes_per_s, sides_of

from benchmarks.gpu.results import Run
from benchmarks.gpu.timing import device_seconds, graph_seconds

NUM_LAUNCHES: Final = 1000
MATRIX_SIZES: Final = (1024, 2048, 4096, 8192, 16384)
BEST_MATRIX_SIZE: Final = 8192


def measure(run: Run) -> None:
    run.check("ceilings are measured", lambda: _measure(run))


def _measure(run: Run) -> None:
    run.figure("copy within the device, read and written", copy_bytes_per_s(run) / 1e9, "GB/s")
    for size in (64, 128) if run.is_dry else MATRIX_SIZES:
        rate = _matmul_flops_per_s(run, size)
        run.figure(f"bfloat16 product of {size} x {size}", rate / 1e12, "TFLOP/s")
    for direction in (*DIRECTIONS, "both"):
        rate = pinned_bytes_per_s(run, direction)
        run.figure(f"one pinned copy, {direction}", rate / 1e9, "GB/s")
    run.figure("launch of a kernel by the host", _host_launch_s(run) * 1e6, "µs")
    run.figure("a kernel within a graph", graph_kernel_s(run) * 1e6, "µs")
    run.figure("launch of a graph until its event", _graph_launch_s(run) * 1e6, "µs")


def copy_bytes_per_s(run: Run) -> float:
    """Bytes read plus bytes written, of a copy far larger than the cache."""

    def measured() -> float:
        source = torch.randn((1 << 18) if run.is_dry else (1 << 29), device=run.device)
        target = torch.empty_like(source)
        seconds = device_seconds(lambda: target.copy_(source), source.device)
        return 2 * source.nbytes / seconds

    return run.once("copy_bytes_per_s", measured)


def matmul_flops_per_s(run: Run) -> float:
    """Rate of a large product of random bfloat16 matrices."""
    size = 128 if run.is_dry else BEST_MATRIX_SIZE
    return run.once("matmul_flops_per_s", lambda: _matmul_flops_per_s(run, size))


def pinned_bytes_per_s(run: Run, direction: str) -> float:
    """Rate of one copy, to or from registered host memory; "both": the sum of two at once."""

    def measured() -> float:
        num_bytes = (1 << 20) if run.is_dry else (256 << 20)
        with sides_of(torch.device(run.device), num_bytes) as sides:
            moved = [side for side in sides if direction in (side.direction, "both")]
            return bytes_per_s([Move(side.peak(), side, num_bytes) for side in moved], 10)

    return run.once(f"pinned_bytes_per_s, {direction}", measured)


def graph_kernel_s(run: Run) -> float:
    """Time of a kernel that does nearly nothing, in a graph of many."""

    def measured() -> float:
        number = torch.zeros(1, device=run.device)
        return graph_seconds([lambda: number.add_(1)] * NUM_LAUNCHES, number.device)

    return run.once("graph_kernel_s", measured)


def _matmul_flops_per_s(run: Run, size: int) -> float:
    a, b = torch.randn(2, size, size, device=run.device).bfloat16()
    out = torch.empty_like(a)
    seconds = device_seconds(lambda: torch.mm(a, b, out=out), a.device)
    return 2 * size**3 / seconds


def _host_launch_s(run: Run) -> float:
    """The host's time per launch, when the device is faster."""
    number = torch.zeros(1, device=run.device)
    for _ in range(NUM_LAUNCHES):
        number.add_(1)
    _synchronize(number.device)
    started_s = time.perf_counter()
    for _ in range(NUM_LAUNCHES):
        number.add_(1)
    _synchronize(number.device)
    return (time.perf_counter() - started_s) / NUM_LAUNCHES


def _graph_launch_s(run: Run) -> float:
    """From the call until the host knows that the graph has ended: the latency of an event, too."""
    if run.device != "cuda":
        return _host_launch_s(run)
    number = torch.zeros(1, device=run.device)
    graph = torch.cuda.CUDAGraph()
    number.add_(1)
    with torch.cuda.graph(graph):
        number.add_(1)
    seconds = []
    for _ in range(200):
        started_s = time.perf_counter()
        graph.replay()
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return median(seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
