"""The warm-up of a rank: steps of made-up tokens on the null block, before the first plan."""

import logging
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from longshore.protocol.errors import EngineDead
from longshore.protocol.sampling import MAX_LOGPROBS, SamplingParams
from longshore.worker.errors import OutOfMemory, RankLost
from longshore.worker.process.byte_size import byte_size
from longshore.worker.process.device import available_bytes
from longshore.worker.sampling.columns import (
    ASKS_EDITS,
    ASKS_LOGPROBS,
    ASKS_PENALTIES,
    ASKS_PROMPT_LOGPROBS,
    SamplingColumns,
)
from longshore.worker.sampling.logit_edits import RowEdits
from longshore.worker.step.decode_graphs import DecodeGraphs, GraphKey
from longshore.worker.step.encoder_rows import EncoderInput
from longshore.worker.step.model_forward import GRAPH_TOKENS
from longshore.worker.step.step_batch import StepBatch, decodes
from longshore.worker.step.step_launcher import StepLauncher
from longshore.worker.step.step_task import Preparation, StepTask

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
        batches = [
            StepBatch(row_zero, np.zeros(1, np.int64), half, num_decodes=0),
            self._first_decodes(num_decodes),
        ]
        if 2 * half <= num_prefill_tokens:
            batches.append(StepBatch(row_zero, half, half, num_decodes=0))
        silence = self._launcher.encoder.silence(row=0)
        self.compute(batches[0], encoded=() if silence is None else (silence,))
        for batch in batches[1:]:
            self.compute(batch)
        if self._launcher.state.cache.device.type == "cuda":
            self._compile_kernels(num_prefill_tokens, num_decodes)
        if self._launcher.state.graphs is not None:
            self._capture_decodes(self._launcher.state.graphs, show_progress)
        elif self._launcher.state.cache.device.type == "cpu":
            self._prepare_graph()
        self._launcher.clear_null_block()

    def _compile_kernels(self, num_prefill_tokens: int, num_decodes: int) -> None:
        """Kernels that depend on the number of rows or tokens are compiled at powers of two of
        them; those of sampling settings, where the profile did not."""
        for size in _powers_of_two(num_decodes):
            self.compute(self._first_decodes(size))
        for size in _powers_of_two(num_prefill_tokens // 2):
            self.compute(_first_tokens(size))
        demanding = WarmUp(self._launcher, demanding_settings(self._launcher))
        demanding.compute(self._first_decodes(num_decodes))

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
        self.compute(self._first_decodes(key.num_rows), captured=key)

    def _first_decodes(self, count: int) -> StepBatch:
        return decodes(count, self._launcher.max_num_seqs)

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
            num_slots = min(launcher.tables.block_sizes)
            for size in dict.fromkeys(min(size, num_slots) for size in sizes):
                self.compute(_first_tokens(size), forward.verify)
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
        samples = np.lexsort((batch.ends, batch.rows))
        if not self._launcher.state.model.config.has_head:
            samples = samples[:0]
        task = StepTask(
            batch,
            self._sampling,
            sampled_rows=batch.rows[samples],
            sampled_positions=batch.ends[samples],
            encoded=encoded,
            num_drafts=0 if self._launcher.network is None else self._launcher.network.num_drafts,
            prepare=prepare,
            captured=captured,
        )
        step = self._launcher.prepare(task)
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


def _powers_of_two(limit: int) -> list[int]:
    """Those below `limit`, which is computed anyway."""
    return [1 << exponent for exponent in range(max(limit - 1, 0).bit_length())]


def _first_tokens(count: int) -> StepBatch:
    """The first `count` tokens of a prompt in row 0."""
    return StepBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([count]), num_decodes=0)


def demanding_settings(launcher: StepLauncher) -> SamplingColumns:
    """Settings with which every row needs as much memory as it can to sample."""
    num_rows, config = launcher.max_num_seqs, launcher.state.model.config
    vocab_size = config.vocab_size
    columns = SamplingColumns(num_rows, vocab_size=vocab_size)
    if not config.has_head:
        return columns
    columns.temperature[:] = 1.0
    columns.top_k[:] = vocab_size // 2
    columns.top_p[:] = 0.9
    columns.min_p[:] = 0.01
    columns.repetition_penalty[:] = 1.1
    columns.logprobs[:] = columns.prompt_logprobs[:] = MAX_LOGPROBS
    edits = RowEdits.of(
        SamplingParams(logit_bias={0: 1.0}),
        np.zeros(0, np.int32),
        eos_token_ids=(),
        vocab_size=vocab_size,
    )
    columns.edits = [edits] * num_rows
    columns.asks[:] = ASKS_EDITS | ASKS_PENALTIES | ASKS_LOGPROBS
    columns.asks[0] |= ASKS_PROMPT_LOGPROBS
    columns.num_prompt[0] = launcher.max_model_len
    return columns
