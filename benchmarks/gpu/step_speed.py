"""Steps of models with weights at random, as shares of what their bytes and operations allow, and
the same steps while copies to and from the host use the whole bus."""

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from dma import Move, sides_of
from torch.profiler import ProfilerActivity

from benchmarks.gpu.ceilings import (
    copy_bytes_per_s,
    graph_kernel_s,
    matmul_flops_per_s,
    pinned_bytes_per_s,
)
from benchmarks.gpu.results import Run, at_least, at_most
from benchmarks.gpu.shapes import QWEN_0_6B, QWEN_8B, QWEN_32B, TINY, ModelShape
from benchmarks.gpu.stepped_worker import SteppedWorker
from benchmarks.gpu.trace import device_spans, has_gpu, profiled, read_events
from longshore.connectors.offloading.cuda_copies import fastest

ROOFLINE_SHARE: Final = 0.75
PREFILL_SHARE: Final = 0.55
SLOWER_UNDER_COPIES: Final = 1.05
MAX_GAP_US: Final = 100.0
LARGEST_BATCH: Final = 256
PAGE_BYTES: Final = 64 << 10
COUNTED_STEPS: Final = (2, 6)


def measure_0_6b(run: Run) -> None:
    _measure(run, QWEN_0_6B, (1024, 4096), prefills=((8192, 0),), counts_launches=True)


def measure_8b(run: Run) -> None:
    _measure(
        run, QWEN_8B, (1024, 4096, 16_384), prefills=((8192, 0), (2048, 0), (2048, 14_336)),
        copies=True,
    )  # fmt: skip


def measure_32b(run: Run) -> None:
    _measure(run, QWEN_32B, (512, 2048), prefills=((2048, 0),))


def _measure(
    run: Run,
    shape: ModelShape,
    contexts: tuple[int, ...],
    *,
    prefills: tuple[tuple[int, int], ...],
    counts_launches: bool = False,
    copies: bool = False,
) -> None:
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    if run.is_dry:
        shape, contexts, prefills = TINY, (64,), ((64, 0), (32, 64))
        settings |= {"num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    else:
        most = max(count for count, _ in prefills)
        settings |= {"max_num_seqs": LARGEST_BATCH, "max_num_batched_tokens": most}
    if run.device == "cuda" and not _fits(shape):
        run.not_verified(f"steps of {shape.name}", "the weights do not fit this device")
        return
    _measure_ceilings(run)
    folder = shape.write(run.folder, 256 if run.is_dry else 20_480)
    worker = run.check(
        f"{shape.name} starts", partial(SteppedWorker, folder, run.device, **settings)
    )
    if worker is None:
        return
    with worker:
        num_kernels = 0
        if counts_launches:
            with run.failures(f"launches of {shape.name} are counted"):
                num_kernels = _count_kernels(run, shape, worker, contexts[0])
        for context in contexts:
            fitting = worker.fitting_rows(context, 64)
            for batch in sorted({1, fitting}) if fitting else ():
                name = f"decode step of {shape.name}, {batch} x {context:,}"
                run.check(
                    name,
                    partial(_measure_decode, run, worker, shape, name, batch, context, num_kernels),
                )
        for count, before in prefills:
            name = f"prefill of {shape.name}, {count:,} tokens after {before:,}"
            run.check(name, partial(_measure_prefill, run, worker, shape, name, count, before))
        if copies:
            name = f"decode step of {shape.name} beside copies both ways, relative to none"
            run.check(name, partial(_measure_under_copies, run, worker, name, contexts[0]))


def _fits(shape: ModelShape) -> bool:
    """With a tenth of the memory for the KV cache and activations."""
    return shape.step_weight_bytes < 0.9 * torch.cuda.get_device_properties(0).total_memory


def _measure_ceilings(run: Run) -> None:
    """Before the model takes the memory that this needs."""
    for measure in (copy_bytes_per_s, matmul_flops_per_s, graph_kernel_s):
        measure(run)
    pinned_bytes_per_s(run, "both")
    if run.device == "cuda":
        torch.cuda.empty_cache()


def _measure_decode(
    run: Run,
    worker: SteppedWorker,
    shape: ModelShape,
    name: str,
    batch: int,
    context: int,
    num_kernels: int,
) -> None:
    steps = worker.decode(batch, context, 8 if run.is_dry else 64)
    floor_s = _products_s(run, shape, batch) + num_kernels * graph_kernel_s(run)
    floor_s += batch * context * shape.token_kv_bytes / copy_bytes_per_s(run)
    run.figure(
        name,
        steps.step_s * 1e3,
        "ms",
        floor=floor_s * 1e3,
        target=at_least(ROOFLINE_SHARE),
        compute_ms=steps.compute_s * 1e3,
    )
    if batch > 1 and steps.gaps_s:
        run.figure(
            f"median gap before a {name}",
            statistics.median(steps.gaps_s) * 1e6,
            "µs",
            target=at_most(MAX_GAP_US),
            p99_us=sorted(steps.gaps_s)[int(0.99 * (len(steps.gaps_s) - 1))] * 1e6,
            planned_in_time=len(steps.gaps_s) / steps.num_steps,
        )


def _count_kernels(run: Run, shape: ModelShape, worker: SteppedWorker, context: int) -> int:
    """Kernels, copies and fills on the device in one decode step, by torch's profiler; on a CPU,
    operators. 0 if the profiler does not see the GPU."""
    name = f"launches per decode step of {shape.name}"
    few, many = (_launched(run, worker, context, num_steps) for num_steps in COUNTED_STEPS)
    if few is None or many is None:
        run.not_verified(name, "torch's profiler sees no kernels here")
        return 0
    num_kernels = round((many - few) / (COUNTED_STEPS[1] - COUNTED_STEPS[0]))
    run.figure(name, num_kernels, "kernels")
    return num_kernels


def _products_s(run: Run, shape: ModelShape, batch: int) -> float:
    """The roofline of a decode step's products with weights: each weight of two bytes is read once,
    and takes two operations per row."""
    num_bytes = shape.step_weight_bytes
    return max(num_bytes / copy_bytes_per_s(run), num_bytes * batch / matmul_flops_per_s(run))


def _launched(run: Run, worker: SteppedWorker, context: int, num_steps: int) -> int | None:
    """What runs on the device in decode steps and the steps before them; None: that is not seen."""
    activities = [ProfilerActivity.CPU]
    if run.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profiled(activities) as profiler:
        worker.decode(1, context, num_steps)
    path = run.folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = read_events(path)
    return None if run.device == "cuda" and not has_gpu(events) else len(device_spans(events))


def _measure_prefill(
    run: Run, worker: SteppedWorker, shape: ModelShape, name: str, count: int, before: int
) -> None:
    steps = worker.prefill(count, before, 2 if run.is_dry else 8)
    rate = shape.prefill_flops(count, before) / steps.step_s
    has_target = run.is_dry or (count >= 2048 and before == 0)
    run.figure(
        name,
        rate / 1e12,
        "TFLOP/s",
        ceiling=matmul_flops_per_s(run) / 1e12,
        target=at_least(PREFILL_SHARE) if has_target else None,
        step_ms=steps.step_s * 1e3,
    )


def _measure_under_copies(run: Run, worker: SteppedWorker, name: str, context: int) -> None:
    """The time of a decode step while pages are copied both ways without a pause, divided by that
    without copies, in turns."""
    batch, num_steps = min(64, worker.fitting_rows(context, 64)), 8 if run.is_dry else 64
    alone, beside, rates = [], [], []
    for _ in range(3):
        alone.append(worker.decode(batch, context, num_steps).step_s)
        with _copies_both_ways(run) as copied:
            beside.append(worker.decode(batch, context, num_steps).step_s)
        rates.append(copied[0])
    run.figure(
        name,
        statistics.median(beside) / statistics.median(alone),
        "times",
        target=at_most(SLOWER_UNDER_COPIES),
        batch=batch,
        copied_gb_s=statistics.median(rates) / 1e9,
        peak_gb_s=pinned_bytes_per_s(run, "both") / 1e9,
    )


@contextmanager
def _copies_both_ways(run: Run) -> Iterator[list[float]]:
    """Within the block, pages are copied on two threads, in the way that is chosen for a worker. At
    its end, the list has the bytes per second of both ways together."""
    num_bytes, copied = (1 << 20) if run.is_dry else (64 << 20), [0, 0]
    with sides_of(torch.device(run.device), num_bytes) as sides:
        moves = [
            Move(
                fastest(side.copiers, side.source, side.target, PAGE_BYTES, side.direction),
                side,
                PAGE_BYTES,
            )
            for side in sides
        ]
        has_ended = threading.Event()

        def repeat(index: int) -> None:
            while not has_ended.is_set():
                moves[index].run(1)
                copied[index] += num_bytes

        threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(moves))]
        started_s, rate = time.perf_counter(), [0.0]
        for thread in threads:
            thread.start()
        try:
            yield rate
        finally:
            has_ended.set()
            for thread in threads:
                thread.join()
            rate[0] = sum(copied) / (time.perf_counter() - started_s)
