"""Measures the memory of the largest steps, before the size of the KV cache is decided.

The steps are those of the warm-up: made-up tokens on the null block, so that a cache of a few
blocks is enough. All ranks run them together.
"""

import numpy as np

from longshore.worker.kv_cache.memory_budget import StepMemory
from longshore.worker.process.memory_meter import MemoryMeter
from longshore.worker.step.decode_graphs import DecodeGraphs
from longshore.worker.step.step_batch import StepBatch, decodes
from longshore.worker.step.step_launcher import StepLauncher
from longshore.worker.step.warm_up import WarmUp, demanding_settings


class MemoryProfile:
    """launcher: of a runner that is used for nothing else. meter: of its device."""

    def __init__(self, launcher: StepLauncher, meter: MemoryMeter) -> None:
        self._launcher = launcher
        self._meter = meter
        self._steps = WarmUp(launcher, demanding_settings(launcher))
        # The prompts of an encoder have no chunks, and nothing follows them.
        self._is_whole = launcher.state.model.config.is_bidirectional

    def run(self) -> StepMemory:
        """Compute the largest steps. Raises as `WarmUp.compute` does."""
        # Once before, because the first call of a kernel loads it, and its memory stays.
        self._compute_chunk()
        self._compute_decodes()
        used = self._meter.used_bytes()
        activations = max(
            self._meter.peak_bytes(self._compute_chunk),
            self._meter.peak_bytes(self._compute_decodes),
        )
        graphs = self._launcher.state.graphs
        return StepMemory(
            total=self._meter.total_bytes(),
            used=used,
            activations=activations,
            graphs=0 if graphs is None else self._estimate(graphs),
        )

    def _compute_chunk(self) -> None:
        """The largest chunk, at the end of the longest prompt, and an item for the encoder."""
        count = np.array([self._launcher.max_step_tokens])
        starts = np.zeros_like(count) if self._is_whole else self._launcher.max_model_len - count
        silence = self._launcher.encoder.silence(row=0)
        self._steps.compute(
            StepBatch(np.zeros(1, np.int64), starts, count, num_decodes=0),
            encoded=() if silence is None else (silence,),
        )

    def _compute_decodes(self) -> None:
        """A decode in every row. Their contexts together are as long as the longest request, which
        the cache can hold at least."""
        launcher = self._launcher
        count = launcher.max_decodes
        length = 1 if self._is_whole else max(1, launcher.max_model_len // count)
        self._steps.compute(decodes(count, launcher.max_num_seqs, start=length - 1))

    def _estimate(self, graphs: DecodeGraphs) -> int:
        """The memory of all graphs: the largest one with the pool that all share, and as much for
        each other one as the second largest needs beside it."""
        largest, *others = reversed(graphs.keys)
        before = self._meter.used_bytes()
        self._steps.capture(largest)
        with_first = self._meter.used_bytes()
        if not others:
            return max(0, with_first - before)
        self._steps.capture(others[0])
        each = max(0, self._meter.used_bytes() - with_first)
        return max(0, with_first - before) + len(others) * each
