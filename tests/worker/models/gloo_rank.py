"""One of two tensor parallel ranks over gloo: `python gloo_rank.py STORE SHARD JOBS ANSWERS`.

JOBS is a JSON list of [model folder, max_model_len, prompts, num_tokens]; what each prompt is
answered is written to ANSWERS, as JSON.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from longshore.worker.parallel import Parallel
from tests.worker.models.paged_model import PagedModel, greedy

NUM_SHARDS = 2


def main(store_path: str, shard: int, jobs: Path, answers: Path) -> None:
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
    found = []
    for path, max_model_len, prompts, num_tokens in json.loads(jobs.read_text()):
        model = PagedModel(Path(path), max_model_len=max_model_len, parallel=parallel)
        found.append([greedy([model], prompt, num_tokens) for prompt in prompts])
    answers.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
