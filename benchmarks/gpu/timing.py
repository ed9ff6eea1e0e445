"""Times on a device, by its own events. On a CPU, for dry runs, by the clock."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch


def device_seconds(
    function: Callable[[], object], device: torch.device, *, repeats: int = 10
) -> float:
    """Median time of one call on the device, without the time before its first kernel starts. What
    it reads may be in the cache from the call before."""
    for _ in range(2):
        function()
    if device.type != "cuda":
        return median(_clock_seconds(function) for _ in range(repeats))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for started, ended in events:
        started.record()
        function()
        ended.record()
    torch.cuda.synchronize(device)
    return median(started.elapsed_time(ended) for started, ended in events) / 1000


def graph_seconds(
    functions: Sequence[Callable[[], object]], device: torch.device, *, repeats: int = 10
) -> float:
    """Median time of one of `functions`, which run as one CUDA graph, one after the other: without
    the host's time for launches. Functions that read different memory, more than a cache holds,
    read it from memory."""

    def run() -> None:
        for function in functions:
            function()

    if device.type == "cuda":
        run()  # compiles and loads the kernels
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return device_seconds(graph.replay, device, repeats=repeats) / len(functions)
    return device_seconds(run, device, repeats=repeats) / len(functions)


def _clock_seconds(function: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s
