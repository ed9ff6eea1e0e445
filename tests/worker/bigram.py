"""A model whose logits are a table indexed by the last token, so that sampling tests know all of
them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.worker.queues.compute_queue import Completion, ComputeQueue
from longshore.worker.ranks.parallel import ALONE, Parallel
from longshore.worker.step.model_runner import ModelRunner
from tests.worker.caches import attention_cache

NUM_BLOCKS = 400
BLOCK_SIZE = 4
MAX_MODEL_LEN = 256


class BigramModel:
    """logits after token t: table[t]. table: (vocab_size, vocab_size) float32."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.config = SimpleNamespace(
            vocab_size=len(table), max_encoder_tokens=0, max_audio_samples=0
        )

    def forward(self, token_ids: Tensor, positions: Tensor, attention: object) -> Tensor:
        return token_ids

    def logits(self, hidden: Tensor) -> Tensor:
        rows = self.table.index_select(0, hidden)
        # Like a head that is cut into shards: with some columns after the vocabulary.
        return torch.cat((rows, rows[:, :3]), dim=-1)[:, : len(self.table)]


class NoAttention:
    """Attention of the bigram model, which has no attention layers."""

    shares_blocks = False

    def begin_step(self, metadata: object, hooks: object = None) -> None:
        return None


class InlineQueue:
    """Computes in `submit` itself, on the caller's thread."""

    def submit(
        self,
        operation: Callable[[], object],
        on_done: Callable[[Completion], None] | None = None,
        *,
        step_id: int | None = None,
    ) -> Completion:
        completion = Completion(step_id)
        completion.begin()
        with torch.inference_mode():
            operation()
        if on_done is not None:
            on_done(completion)
        completion.finish()
        return completion

    def close(self) -> None:
        return None


def bigram_table(vocab_size: int, seed: int, *, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, generator=generator) * spread


def as_numpy(table: Tensor) -> npt.NDArray[np.float32]:
    return np.array(table.numpy(), np.float32)


def bigram_runner(
    table: Tensor,
    *,
    queue: ComputeQueue | None = None,
    eos_token_ids: tuple[int, ...] = (),
    parallel: Parallel = ALONE,
) -> ModelRunner:
    cache = attention_cache(
        NUM_BLOCKS,
        num_layers=1,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=1,
        device=str(table.device),
    )
    return ModelRunner(
        cast(Any, BigramModel(table)),
        cache,
        cast(Any, NoAttention()),
        queue or InlineQueue(),
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=eos_token_ids,
        parallel=parallel,
    )
