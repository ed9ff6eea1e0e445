"""Settings of a worker: what is rejected, and what the process derives from its identity."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.settings import read_config
from longshore.protocol.transport.channel import Endpoint
from longshore.worker.config import (
    RankLayout,
    WorkerConfig,
    WorkerProcessConfig,
)
from longshore.worker.process.device import (
    available_bytes,
    fits_in_memory,
    open_device,
    resolve_dtype,
)
from longshore.worker.process.host_resources import num_physical_cores
from longshore.worker.worker import Worker
from tests.models import make_tiny_llama
from tests.worker.loading.test_quantised_weights import folder_of

IDENTITY = EngineIdentity(
    model_fingerprint="f",
    dtype="bfloat16",
    block_size=32,
    max_model_len=512,
    max_num_seqs=7,
    max_num_batched_tokens=99,
    hash_seed_digest="d",
)
WORKER = WorkerConfig(
    model="m",
    dtype="bfloat16",
    block_size=32,
    num_blocks=40,
    max_num_seqs=7,
    max_num_batched_tokens=99,
    max_model_len=512,
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


def test_a_process_has_the_sizes_of_the_identity_it_shares(tmp_path: Path) -> None:
    config = WorkerProcessConfig(identity=IDENTITY, endpoint=Endpoint("ipc://x"), worker=WORKER)
    path = tmp_path / "worker.json"
    path.write_bytes(msgspec.json.encode(config))
    assert read_config(path, WorkerProcessConfig) == config
    for name in ("dtype", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        other = msgspec.structs.replace(
            IDENTITY, **{name: "float32" if name == "dtype" else getattr(IDENTITY, name) * 2}
        )
        with pytest.raises(ConfigError, match=f"{name}=.* of the worker is .* in the identity"):
            msgspec.structs.replace(config, identity=other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"pipeline_parallel_size": -1}, "pipeline_parallel_size=-1"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s=0.0"),
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


def test_a_rank_is_one_of_the_layout() -> None:
    layout = RankLayout(tensor_parallel_size=2, pipeline_parallel_size=2, rendezvous="r")
    assert (layout.num_ranks, layout.sampling_rank) == (4, 2)

    def config(rank: int) -> WorkerProcessConfig:
        return WorkerProcessConfig(
            identity=IDENTITY, endpoint=Endpoint("ipc://x"), worker=WORKER, rank=rank, ranks=layout
        )

    assert config(3).rank == 3
    with pytest.raises(ConfigError, match=r"rank=4 is outside 0\.\.3"):
        config(4)


@pytest.mark.parametrize("text", [None, "{", '{"model": 1}', '{"model": "m", "colour": 3}'])
def test_a_file_that_is_no_worker_config_is_rejected(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"worker\.json"):
        read_config(path, WorkerProcessConfig)


@pytest.mark.parametrize(
    ("setting", "device", "dtype", "wanted"),
    [
        ("auto", "cpu", "bfloat16", "exact"),
        ("auto", "cpu", "float16", None),
        ("auto", "cuda", "float16", "exact on a GPU"),
        ("dequantised", "cuda", "bfloat16", None),
        ("int8", "cpu", "float32", "int8"),
        ("fp8", "cuda", "bfloat16", "fp8 on a GPU"),
        ("dequantised", "cpu", "float32", None),
    ],
)
def test_quantised_weights_are_multiplied_as_the_setting_says(
    setting: Any, device: str, dtype: str, wanted: str | None
) -> None:
    config = replace(WORKER, quantised_weights=setting)
    assert config.quantised_products(device, dtype) == wanted
    if setting == "auto":
        without = replace(config, cpu_kernels="torch").quantised_products(device, dtype)
        assert without == (None if device == "cpu" else wanted)


@pytest.mark.parametrize(
    ("device", "dtype", "kernels"),
    [("cuda", "bfloat16", "auto"), ("cpu", "float16", "auto"), ("cpu", "float32", "torch")],
)
def test_rounded_inputs_that_cannot_be_had_are_rejected(
    device: str, dtype: str, kernels: Any
) -> None:
    config = replace(WORKER, quantised_weights="int8", cpu_kernels=kernels)
    with pytest.raises(ConfigError, match=f"device={device}, dtype={dtype}"):
        config.quantised_products(device, dtype)
    with pytest.raises(ConfigError, match="fp8 needs a GPU, but device is cpu"):
        replace(WORKER, quantised_weights="fp8").quantised_products("cpu", dtype)


@pytest.mark.parametrize("name", [None, "llama-fp8_block"])
def test_rounded_inputs_of_a_model_without_quantised_weights_are_rejected(
    tmp_path: Path, name: str | None
) -> None:
    """FP8 is dequantised on a CPU."""
    folder = tmp_path
    if name is None:
        make_tiny_llama(tmp_path)
    else:
        folder = folder_of(name)
    with pytest.raises(ConfigError, match=r"quantised_weights=int8 .* but this model has none"):
        Worker(WorkerConfig(model=str(folder), num_blocks=40, quantised_weights="int8"))


def test_keys_and_values_of_rounded_inputs_have_another_fingerprint(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    exact, floats, *rounded = (
        replace(WORKER, quantised_weights=setting).fingerprint(tmp_path)
        for setting in ("auto", "dequantised", "int8", "fp8")
    )
    assert exact == floats
    assert len({exact, *rounded}) == 3
