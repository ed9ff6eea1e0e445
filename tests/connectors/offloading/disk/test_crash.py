"""A kill at any point leaves each entry whole or absent, and keeps every acknowledged batch."""

import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from longshore.connectors.offloading.disk.catalog import check_blocks, stores
from tests.conftest import ROOT
from tests.connectors.offloading.disk import crashing_writer
from tests.connectors.offloading.disk.stores import open_store, read_all

ROUNDS = 12

Model = dict[bytes, tuple[int, bytes]]
"""Slot and content by key."""


def crash(path: Path, seed: int, io: str, *, calls: int = 0, acknowledged: int = 0) -> int:
    """Run a writer until it kills itself, or until it has acknowledged this number of batches.
    Returns the number of acknowledged batches."""
    writer = subprocess.Popen(
        [sys.executable, "-m", crashing_writer.__name__, str(path), str(seed), io, str(calls)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert writer.stdout is not None
    with writer.stdout as lines:
        count = sum(1 for _ in islice(lines, acknowledged or None))
        if not calls:
            writer.kill()
        count += sum(1 for _ in lines)
    assert writer.wait() == -9
    return count


def apply(model: Model, batch: Model) -> Model:
    """The entries after a batch: what was in its slots, or had its keys, is replaced."""
    slots = {slot for slot, _ in batch.values()}
    kept = {k: entry for k, entry in model.items() if k not in batch and entry[0] not in slots}
    return {**kept, **batch}


def check(path: Path, model: Model, seed: int, num_acknowledged: int) -> Model:
    """Compare a store with the acknowledged batches; returns its entries."""
    *done, last = islice(crashing_writer.batches(seed), num_acknowledged + 1)
    for batch in done:
        model = apply(model, batch)
    (report,) = stores(path)
    assert report.ranks[0].num_damaged_records <= 1
    assert [block for block in check_blocks(report.ranks[0]) if block.problem] == []
    with open_store(path, num_slots=crashing_writer.NUM_SLOTS) as store:
        slots = dict(store.entries())
        contents = read_all(store)
    untouched = {k: entry for k, entry in apply(model, last).items() if k not in last}
    found = {k: (slot, contents[k]) for k, slot in slots.items()}
    assert {k: found.get(k) for k in untouched} == untouched
    for k in found.keys() - untouched.keys():
        assert found[k] in (model.get(k), last.get(k))
    return found


@pytest.mark.slow
def test_a_kill_in_any_system_call_leaves_every_entry_whole_or_absent(
    tmp_path: Path, long_run: bool
) -> None:
    rng = random.Random(13)
    model: Model = {}
    num_acknowledged = 0
    for seed in range(ROUNDS * (10 if long_run else 1)):
        count = crash(tmp_path, seed, "threads", calls=rng.randint(1, 60))
        model = check(tmp_path, model, seed, count)
        num_acknowledged += count
    assert num_acknowledged > ROUNDS
    assert model


@pytest.mark.parametrize("io", ["threads", pytest.param("nixl", marks=pytest.mark.services)])
def test_a_kill_from_outside_leaves_every_entry_whole_or_absent(tmp_path: Path, io: str) -> None:
    rng = random.Random(7)
    model: Model = {}
    for seed in range(8 if io == "threads" else 3):
        count = crash(tmp_path, 100 + seed, io, acknowledged=rng.randint(1, 200))
        model = check(tmp_path, model, 100 + seed, count)
    assert model
