"""Files of a model and of a tier: a damaged one is used, or refused with an error that names it."""

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from longshore.connectors.offloading.checksum import IDENTITY_DIGEST_BYTES, block_checksum
from longshore.connectors.offloading.disk.index import INDEX_FILE
from longshore.connectors.offloading.remote.record import decode_record, encode_record
from longshore.protocol.errors import ConfigError
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading.loader import find_tensors, open_safetensors
from longshore.worker.models.families import read_model_config
from tests.connectors.offloading.disk.stores import (
    expected,
    key,
    open_store,
    rank_directory,
    read_all,
    write,
)
from tests.fuzz.mutations import mutated_bytes, mutated_json, refusal
from tests.models import SHAPE
from tests.worker.models.cases import CASES, Case

NUM_CONFIGS = 150  # of each family's case
NUM_CHECKPOINTS = 4000
NUM_INDEXES = 1000
NUM_RECORDS = 20_000
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


def read_all_tensors(model_dir: Path) -> None:
    for path, names in find_tensors(model_dir).items():
        with open_safetensors(path) as file:
            for name in names:
                file.get_tensor(name)


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
