"""A rank's model over a paged cache of its own, without a runner."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.kv_cache import KVCache
from longshore.worker.loader import load_weights
from longshore.worker.models.families import read_model_config
from longshore.worker.models.registry import MODELS
from longshore.worker.parallel import ALONE, Parallel
from longshore.worker.step_batch import StepBatch
from tests.worker.forward import metadata

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class PagedModel:
    """One sequence at a time, on shuffled blocks."""

    def __init__(
        self,
        path: Path,
        *,
        max_model_len: int = 256,
        dtype: torch.dtype = torch.float32,
        parallel: Parallel = ALONE,
    ) -> None:
        config = read_model_config(path)
        self.model = MODELS[type(config)](
            config, max_model_len=max_model_len, dtype=dtype, device=CPU, parallel=parallel
        )
        load_weights(self.model, path, show_progress=False)
        num_blocks = max_model_len // BLOCK_SIZE
        cache = KVCache(
            num_blocks + 1,
            num_layers=self.model.num_local_layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=self.model.num_local_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=CPU,
        )
        self._attention = TorchAttention(cache, num_heads=self.model.num_local_heads)
        block_ids = list(range(1, num_blocks + 1))
        random.Random(0).shuffle(block_ids)
        self._table = np.array([block_ids], np.int32)

    def forward(self, inputs: Tensor, start: int) -> Tensor:
        """Positions from `start` on: token ids, or the hidden states of the stage before."""
        count = len(inputs)
        rows, starts, counts = np.zeros(1, np.int64), np.array([start]), np.array([count])
        batch = StepBatch(rows, starts, counts, num_decodes=int(count == 1))
        step = self._attention.begin_step(metadata(batch, self._table, BLOCK_SIZE))
        with torch.inference_mode():
            return self.model.forward(inputs, torch.from_numpy(batch.positions()), step)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model.logits(hidden)


def forward_logits(
    stages: Sequence[PagedModel], token_ids: Sequence[int], start: int = 0
) -> Tensor:
    """(len(token_ids), vocab_size): the tokens through all stages, one after the other."""
    hidden = torch.tensor(token_ids, dtype=torch.int32)
    for stage in stages:
        hidden = stage.forward(hidden, start)
    return stages[-1].logits(hidden)


def greedy(stages: Sequence[PagedModel], prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` answers to the prompt, which is computed in two chunks."""
    half = len(prompt) // 2
    if half:
        forward_logits(stages, prompt[:half])
    logits = forward_logits(stages, prompt[half:], half)
    token_ids = [int(logits[-1].argmax())]
    for position in range(len(prompt), len(prompt) + num_tokens - 1):
        logits = forward_logits(stages, token_ids[-1:], position)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids
