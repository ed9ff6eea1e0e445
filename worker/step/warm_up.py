"""The warm-up of a rank: steps of made-up tokens on the null block, before the first plan."""

import logging
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from longshore.protocol.errors import EngineDead
from longshore.worker.errors import OutOfMemory, RankLost
from longshore.worker.process.byte_size import byte_size
from longshore.worker.process.device import available_bytes
from longshore.worker.sampling.columns import SamplingColumns
from longshore.worker.step.decode_graphs import DecodeGraphs, GraphKey
from longshore.worker.step.device_step import Preparation
from longshore.worker.step.encoder_rows import EncoderInput
from longshore.worker.step.model_forward import GRAPH_TOKENS
from longshore.worker.step.step_batch import StepBatch
from longshore.worker.step.step_launcher import StepLauncher

logger = logging.getLogger(__name__)


class WarmUp:
    """Computes steps without a plan, on the null block.

    sampling: settings of all rows.
    """

    def __init__(self, launcher: StepLauncher, sampling: SamplingColumns) -> None:
        self._launcher = launcher
        self._sampling = sampling

    def run(
        self, num_prefill_tokens: int, num_decodes: int, *, show_progress: bool | None = None
    ) -> None:
        """Compute a prompt in two chunks and a step of decodes on the null block, capture the
        graphs, and clear the block. A model with an encoder encodes silence first.

        The first calls of a process choose kernels and grow memory pools; requests must not wait
        for that. Call it on all ranks before the first plan. Raises as `compute` does.
        """
        row_zero, half = np.zeros(1, np.int64), np.array([max(1, num_prefill_tokens // 2)])
        rows = np.arange(num_decodes)
        batches = [
            StepBatch(row_zero, np.zeros(1, np.int64), half, num_decodes=0),
            StepBatch(rows, np.zeros_like(rows), np.ones_like(rows), num_decodes=num_decodes),
        ]
        if 2 * half <= num_prefill_tokens:
            batches.append(StepBatch(row_zero, half, half, num_decodes=0))
        silence = self._launcher.encoder.silence(row=0)
        self.compute(batches[0], encoded=() if silence is None else (silence,))
        for batch in batches[1:]:
            self.compute(batch)
        if self._launcher.state.graphs is not None:
            self._capture_decodes(self._launcher.state.graphs, show_progress)
        elif self._launcher.state.cache.device.type == "cpu":
            self._prepare_graph()
        self._launcher.clear_null_block()

    def _capture_decodes(self, graphs: DecodeGraphs, show_progress: bool | None) -> None:
        """Capture decode steps, the largest first, so that the others find its memory in the
        pool."""
        device = self._launcher.state.cache.device
        bytes_before, started = available_bytes(device), time.perf_counter()
        keys = tqdm(
            graphs.keys[::-1],
            desc="Capturing decode steps",
            unit="graph",
            disable=None if show_progress is None else not show_progress,
        )
        for key in keys:
            self.capture(key)
        logger.info(
            "captured decode steps of up to %d rows as %d graphs in %.1f s; they hold %s",
            graphs.keys[-1].num_rows,
            len(graphs.keys),
            time.perf_counter() - started,
            byte_size(max(0, bytes_before - available_bytes(device))),
        )

    def capture(self, key: GraphKey) -> None:
        """Capture a graph of decodes. Raises as `compute` does."""
        rows = np.arange(key.num_rows)
        batch = StepBatch(rows, np.zeros_like(rows), np.ones_like(rows), num_decodes=key.num_rows)
        self.compute(batch, captured=key)

    def _prepare_graph(self) -> None:
        launcher = self._launcher
        forward = launcher.state.forward
        sizes = [size for size in GRAPH_TOKENS if size <= launcher.max_step_tokens]
        if not sizes or not forward.is_capturable:
            return
        for size in sizes:
            self.compute(_first_tokens(size), forward.capture)
        if forward.has_graph or launcher.state.parallel.num_stages > 1:  # stages step together
            # The null block alone has distinct slots for this many tokens.
            num_verified = min(*launcher.tables.block_sizes, sizes[0])
            self.compute(_first_tokens(num_verified), forward.verify)
            for size in sizes:
                self.compute(_first_tokens(size), forward.time)

    def compute(
        self,
        batch: StepBatch,
        prepare: Preparation | None = None,
        *,
        encoded: Sequence[EncoderInput] = (),
        captured: GraphKey | None = None,
    ) -> None:
        """Compute one step, with a token for every sequence. Raises OutOfMemory, EngineDead if the
        model cannot be computed, RankLost if another rank is lost."""
        samples = slice(None if self._launcher.state.model.config.has_head else 0)
        step = self._launcher.prepare(
            batch,
            self._sampling,
            sampled_rows=np.sort(batch.rows)[samples],
            sampled_positions=batch.ends[samples],
            encoded=encoded,
            prepare=prepare,
            captured=captured,
        )
        completion = step.submit()
        completion.wait()
        if isinstance(completion.error, RankLost | OutOfMemory):
            raise completion.error
        if step.lacked_memory:
            raise OutOfMemory("no memory for its intermediate tensors")
        if completion.error is not None:
            raise EngineDead(
                f"the model cannot be computed on this device: {completion.error}"
            ) from completion.error


def _first_tokens(count: int) -> StepBatch:
    """The first `count` tokens of a prompt in row 0."""
    return StepBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([count]), num_decodes=0)
