"""Files of a model and of a tier: a damaged one is used, or refused with an error that names it."""

import importlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from longshore.connectors.base.checksum import IDENTITY_DIGEST_BYTES, block_checksum
from longshore.connectors.offloading.disk.index import INDEX_FILE
from longshore.connectors.offloading.remote.record import decode_record, encode_record
from longshore.deploy.model.folder import read_model_folder
from longshore.protocol.errors import ConfigError
from longshore.protocol.gguf_header import read_gguf_header
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.models.families import check_weights, read_model_config
from tests.connectors.offloading.disk.stores import (
    expected,
    key,
    open_store,
    rank_directory,
    read_all,
    write,
)
from tests.fuzz.mutations import mutated_bytes, mutated_json, refusal
from tests.gguf.cases import CASES as GGUF_CASES
from tests.models import SHAPE
from tests.worker.models.cases import CASES, Case

NUM_CONFIGS = 150  # of each family's case
NUM_CHECKPOINTS = 4000
NUM_GGUF_FILES = 5  # of each case
NUM_QUANTISED = 40  # of each folder
NUM_INDEXES = 1000
NUM_RECORDS = 20_000
QUANTISED_DIR = Path(__file__).parents[1] / "worker" / "loading" / "quantised"
QUANTISED = (
    "gpt_oss-mxfp4",
    "llama-auto_round",
    "llama-awq",
    "llama-ct_int4_asym",
    "llama-ct_nvfp4",
    "llama-fp8_block",
    "llama-gptq_3bit",
    "llama-gptq_asym_actorder",
    "llama-gptq_dynamic",
    "llama-modelopt_nvfp4",
)
REFUSED = (BrokenCheckpoint, UnsupportedModel, ConfigError)

Times = Callable[[int], int]


@pytest.fixture
def times(long_run: bool) -> Times:
    """How many inputs instead of so many."""
    return lambda count: count * (20 if long_run else 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mutated_config_is_read_or_refused(case: Case, tmp_path: Path, times: Times) -> None:
    model_class = getattr(importlib.import_module("transformers"), f"{case.family}ForCausalLM")
    config = model_class.config_class(**(SHAPE | case.settings)).to_dict()
    config["architectures"] = [model_class.__name__]
    path = tmp_path / "config.json"
    rng = random.Random(case.name)
    path.write_text(json.dumps(config))
    read_model_config(tmp_path)
    for number in range(times(NUM_CONFIGS)):
        if number % 5:
            path.write_text(json.dumps(mutated_json(config, rng)))
        else:
            path.write_bytes(mutated_bytes(json.dumps(config).encode(), rng))
        error = refusal(lambda: read_model_config(tmp_path), *REFUSED)
        assert error is None or str(tmp_path) in str(error)


def test_a_mutated_checkpoint_is_read_or_refused(tmp_path: Path, times: Times) -> None:
    tensors = {f"model.layers.{n}.weight": torch.full((4, 4), float(n)) for n in range(4)}
    good = save(tensors)
    path = tmp_path / "model.safetensors"
    rng = random.Random(0)
    num_refused = 0
    for number in range(times(NUM_CHECKPOINTS)):
        header = 300 if number % 2 else len(good)
        path.write_bytes(mutated_bytes(good[:header], rng) + good[header:])
        error = refusal(lambda: read_all_tensors(tmp_path), BrokenCheckpoint)
        assert error is None or str(path) in str(error)
        num_refused += error is not None
    assert 0 < num_refused < times(NUM_CHECKPOINTS)


def test_a_mutated_gguf_file_is_a_model_or_refused(tmp_path: Path, times: Times) -> None:
    path = tmp_path / "model.gguf"
    rng = random.Random(0)
    for case in GGUF_CASES:
        good = case.file.read_bytes()
        header = read_gguf_header(case.file).data_begin
        for _ in range(times(NUM_GGUF_FILES)):
            path.write_bytes(mutated_bytes(good[:header], rng) + good[header:])
            error = refusal(lambda: read_model_folder(path, tmp_path / "state"), *REFUSED)
            assert error is None or str(tmp_path) in str(error)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_mutated_quantised_checkpoint_is_read_or_refused(
    name: str, tmp_path: Path, times: Times
) -> None:
    folder = Path(shutil.copytree(QUANTISED_DIR / name, tmp_path / "model"))
    path, config_path = folder / "model.safetensors", folder / "config.json"
    good, config = path.read_bytes(), json.loads(config_path.read_text())
    header = int.from_bytes(good[:8], "little") + 8
    rng = random.Random(name)
    num_refused = 0
    for number in range(times(NUM_QUANTISED)):
        if number % 2:
            settings = mutated_json(config["quantization_config"], rng)
            config_path.write_text(json.dumps({**config, "quantization_config": settings}))
        else:
            path.write_bytes(mutated_bytes(good[:header], rng) + good[header:])
        error = refusal(lambda: load_quantised(folder), *REFUSED)
        assert error is None or (str(folder) in str(error) and "\n" not in str(error))
        num_refused += error is not None
        path.write_bytes(good)
        config_path.write_text(json.dumps(config))
    assert num_refused > 0


def load_quantised(folder: Path) -> None:
    check_weights(read_model_config(folder), find_weights(folder))
    read_all_tensors(folder)


def read_all_tensors(model_dir: Path) -> None:
    weights = find_weights(model_dir)
    with weights.reader() as read:
        for name, weight in weights.tensors.items():
            read(name, (slice(None),) * len(weight.shape))


def test_a_mutated_index_of_a_disk_tier_loses_blocks_and_returns_no_wrong_one(
    tmp_path: Path, times: Times
) -> None:
    slots = {key(number): number for number in range(8)}
    with open_store(tmp_path) as store:
        write(store, slots)
    index = rank_directory(tmp_path) / INDEX_FILE
    good = index.read_bytes()
    rng = random.Random(0)
    for number in range(times(NUM_INDEXES)):
        begin = 0 if number % 2 else 4096
        index.write_bytes(good[:begin] + mutated_bytes(good[begin:], rng))
        with open_store(tmp_path) as store:
            assert expected(slots).items() >= read_all(store).items()


def test_a_mutated_record_of_a_remote_tier_is_never_another_block(times: Times) -> None:
    rng = random.Random(0)
    identity, block_key, payload = (
        rng.randbytes(IDENTITY_DIGEST_BYTES),
        rng.randbytes(32),
        rng.randbytes(64),
    )
    good = encode_record(payload, block_checksum(payload, identity, block_key), identity)
    for _ in range(times(NUM_RECORDS)):
        record = mutated_bytes(good, rng)
        found = decode_record(memoryview(record), len(payload), identity, block_key)
        assert isinstance(found, str) or bytes(found) == payload
