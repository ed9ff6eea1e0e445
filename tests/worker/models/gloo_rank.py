"""One of two tensor parallel ranks over gloo: `python gloo_rank.py STORE SHARD`.

Each line of its input is a JSON object: a model's `path`, its `max_model_len`, `prompts` and
`num_tokens`. For each it prints one line of JSON with the answers to the prompts. It ends when its
input ends.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longshore.worker.ranks.parallel import Parallel
from tests.worker.models.paged_model import PagedModel, greedy

NUM_SHARDS = 2


def main(store_path: str, shard: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, NUM_SHARDS)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=shard, world_size=NUM_SHARDS, timeout=timeout)
    parallel = Parallel(
        shard=shard,
        num_shards=NUM_SHARDS,
        shard_group=dist.group.WORLD,
        all_ranks=dist.group.WORLD,
    )
    for line in sys.stdin:
        print(json.dumps(answers(json.loads(line), parallel)), flush=True)
    dist.destroy_process_group()


def answers(job: dict[str, Any], parallel: Parallel) -> list[list[int]]:
    model = PagedModel(Path(job["path"]), max_model_len=job["max_model_len"], parallel=parallel)
    return [greedy([model], prompt, job["num_tokens"]) for prompt in job["prompts"]]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
