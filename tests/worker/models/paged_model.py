"""The model of a rank over its own paged cache, without a model runner."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.worker.config import QuantisedProducts
from longshore.worker.kv_cache.plan import (
    CacheSizes,
    groups_of_rank,
    plan_groups,
)
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.loader import load_weights
from longshore.worker.models.families import read_model_config
from longshore.worker.models.registry import MODELS
from longshore.worker.process.device import dtype_name
from longshore.worker.ranks.parallel import ALONE, Parallel
from tests.worker.forward import PagedSequence

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class PagedModel(PagedSequence):
    """The part of a model that one rank holds; one sequence at a time."""

    def __init__(
        self,
        path: Path,
        *,
        max_model_len: int = 256,
        dtype: torch.dtype = torch.float32,
        parallel: Parallel = ALONE,
        products: QuantisedProducts | None = None,
    ) -> None:
        config = read_model_config(path)
        model = MODELS[type(config)](
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=CPU,
            parallel=parallel,
            products=products,
        )
        load_weights(model, find_weights(path), show_progress=False)
        sizes = CacheSizes(
            block_size=BLOCK_SIZE, dtype_bytes=dtype.itemsize, num_shards=parallel.num_shards
        )
        names = {layer.name for layer in model.cached_layers()}
        groups = groups_of_rank(
            plan_groups(
                config.cache_specs(sizes),
                max_model_len=max_model_len,
                max_num_batched_tokens=max_model_len,
            ),
            names,
        )
        num_blocks = len(groups) * -(-max_model_len // BLOCK_SIZE) + 1
        super().__init__(
            model,
            KVCacheConfig(num_blocks, groups, dtype_name(dtype)),
            max_model_len=max_model_len,
            dtype=dtype,
        )


def forward_logits(
    stages: Sequence[PagedModel], token_ids: Sequence[int], start: int = 0
) -> Tensor:
    """(len(token_ids), vocab_size): the tokens through all stages, one after the other."""
    hidden = torch.tensor(token_ids, dtype=torch.int32)
    for stage in stages:
        hidden = stage.forward(hidden, start)
    return stages[-1].logits(hidden)


def greedy(stages: Sequence[PagedModel], prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens after the prompt, which is computed in two chunks."""
    half = len(prompt) // 2
    if half:
        forward_logits(stages, prompt[:half])
    logits = forward_logits(stages, prompt[half:], half)
    token_ids = [int(logits[-1].argmax())]
    for position in range(len(prompt), len(prompt) + num_tokens - 1):
        logits = forward_logits(stages, token_ids[-1:], position)
        token_ids.append(int(logits[-1].argmax()))
    return token_ids
