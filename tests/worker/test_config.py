"""Settings of a worker: what is rejected, and what the process derives from its identity."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.transport.channel import Endpoint
from longshore.worker.config import (
    RankLayout,
    WorkerConfig,
    WorkerProcessConfig,
    load_config,
)
from longshore.worker.process.device import (
    available_bytes,
    fits_in_memory,
    open_device,
    resolve_dtype,
)
from longshore.worker.process.host_resources import num_physical_cores

IDENTITY = EngineIdentity(
    model_fingerprint="f",
    dtype="bfloat16",
    block_size=32,
    max_model_len=512,
    max_num_seqs=7,
    max_num_batched_tokens=99,
    hash_seed_digest="d",
)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": -1}, "num_blocks=-1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"threads": 0}, "threads=0"),
        ({"kv_memory_fraction": 0.0}, r"kv_memory_fraction=0\.0"),
        ({"kv_memory_fraction": 1.5}, r"kv_memory_fraction=1\.5"),
        ({"gpu_memory_utilization": 1.1, "device": "cuda"}, r"gpu_memory_utilization=1\.1"),
        ({"gpu_memory_utilization": 0.9}, r"gpu_memory_utilization=0\.9 needs a GPU"),
        (
            {"gpu_memory_utilization": 0.9, "kv_memory_fraction": 0.5, "device": "cuda"},
            r"kv_memory_fraction=0\.5 and gpu_memory_utilization=0\.9 both set the size",
        ),
        ({"num_blocks": 5, "kv_cache_bytes": 5}, "Give one of them"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_rejected_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WorkerConfig(model="m", **changes)


@pytest.mark.parametrize("name", ["tpu", "cpu:0", "cuda:x", ""])
def test_an_unknown_device_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="Use cpu, cuda or cuda:N"):
        open_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_here_is_rejected() -> None:
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        open_device("cuda")


def test_auto_is_the_dtype_of_the_checkpoint() -> None:
    assert resolve_dtype("auto", "bfloat16") == torch.bfloat16
    assert resolve_dtype("float32", "bfloat16") == torch.float32


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("no"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_an_allocation_that_fails_is_a_config_error_that_names_it(error: Exception) -> None:
    def allocate() -> None:
        with fits_in_memory("A KV cache of 9 blocks", torch.device("cpu")):
            raise error

    with pytest.raises(ConfigError, match="A KV cache of 9 blocks cannot be allocated on cpu: "):
        allocate()


def test_memory_and_cores_of_this_machine_are_counted() -> None:
    assert available_bytes(torch.device("cpu")) > 1 << 20
    assert num_physical_cores() >= 1


def test_a_process_takes_its_sizes_from_the_identity_it_shares(tmp_path: Path) -> None:
    config = WorkerProcessConfig(
        model="m",
        identity=IDENTITY,
        endpoint=Endpoint("ipc://x"),
        num_blocks=40,
        threads=1,
        max_num_scheduled_tokens=50,
        max_steps_in_flight=1,
    )
    path = tmp_path / "worker.json"
    path.write_bytes(msgspec.json.encode(config))
    assert load_config(path) == config
    assert load_config(path).worker == WorkerConfig(
        model="m",
        dtype="bfloat16",
        block_size=32,
        num_blocks=40,
        max_num_seqs=7,
        max_num_batched_tokens=99,
        max_num_scheduled_tokens=50,
        max_steps_in_flight=1,
        max_model_len=512,
        threads=1,
        show_progress=False,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"pipeline_parallel_size": -1}, "pipeline_parallel_size=-1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0"),
        ({"cp_kv_cache_interleave_size": 0}, "cp_kv_cache_interleave_size=0"),
        (
            {"tensor_parallel_size": 3, "decode_context_parallel_size": 2, "rendezvous": "r"},
            "decode_context_parallel_size=2 does not divide tensor_parallel_size=3",
        ),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, "6 ranks need a rendezvous"),
    ],
)
def test_a_wrong_layout_of_ranks_is_rejected_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RankLayout(**changes)


def test_ranks_share_a_cpu_and_have_a_gpu_each() -> None:
    layout = RankLayout(tensor_parallel_size=2, pipeline_parallel_size=2, rendezvous="r")
    assert (layout.num_ranks, layout.sampling_rank) == (4, 2)

    def rank(rank: int, device: str, num_replicas: int = 1) -> WorkerProcessConfig:
        return WorkerProcessConfig(
            model="m",
            identity=IDENTITY,
            endpoint=Endpoint("ipc://x"),
            rank=rank,
            ranks=layout,
            num_replicas=num_replicas,
            device=device,
        )

    assert rank(3, "cpu").worker.num_ranks_on_device == 4
    assert rank(3, "cuda:3").worker.num_ranks_on_device == 1
    assert rank(3, "cpu", num_replicas=3).worker.num_ranks_on_device == 12
    assert rank(3, "cuda:7", num_replicas=3).worker.num_ranks_on_device == 1
    with pytest.raises(ConfigError, match="num_replicas=0"):
        rank(3, "cpu", num_replicas=0)
    with pytest.raises(ConfigError, match=r"rank=4 is outside 0\.\.3"):
        rank(4, "cpu")


@pytest.mark.parametrize("text", [None, "{", '{"model": 1}', '{"model": "m", "colour": 3}'])
def test_a_file_that_is_no_worker_config_is_rejected(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"worker\.json"):
        load_config(path)
