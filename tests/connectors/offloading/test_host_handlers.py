"""Copies between the device, host memory and disk, on real memory with delayed transfer queues."""

import ctypes
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from longshore.connectors.base import KVCaches
from longshore.connectors.offloading import host_handlers
from longshore.connectors.offloading.copy_method import HostCopySpeed
from longshore.connectors.offloading.cuda_copies import CudaCopier
from longshore.connectors.offloading.disk_tier import CLEAR, DiskContents
from longshore.connectors.offloading.host_handlers import SAMPLE_EVERY
from longshore.connectors.offloading.registration import RegisteredMemory
from longshore.connectors.offloading.tiers import HOST_KEPT, HOST_TIER, TierMessage
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheSpec
from tests.connectors.offloading import ranks as ranks_module
from tests.connectors.offloading.cuda_runtime import Library, Runtime
from tests.connectors.offloading.ranks import (
    Rank,
    blocks_of,
    cache_of,
    configs_of,
    disk_options,
)
from tests.connectors.offloading.storing_worker import start
from tests.harness.kv_groups import full, latent, state, window

MakeRanks = Callable[..., list[Rank]]


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    """Ranks that share one region. layers: per rank, the number of layers of each group."""
    with ExitStack() as stack:

        def make(
            specs: Sequence[KVCacheSpec],
            layers: Sequence[Sequence[int]] = ((1,),),
            *,
            num_blocks: int = 40,
            seed: int = 0,
            **options: Any,
        ) -> list[Rank]:
            fd = os.memfd_create("tier")
            stack.callback(os.close, fd)
            caches = [cache_of(num_blocks, specs, each) for each in layers]
            ranks = []
            for rank, config in enumerate(configs_of(caches, fd=fd, **options)):
                ranks.append(Rank(caches[rank], config, seed + rank))
                stack.callback(ranks[-1].close)
            return ranks

        yield make


@pytest.mark.req("WRK-01", "WRK-02", "WRK-03", "OFF-10")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("specs", "layers", "factor"),
    [
        ([full()], [[2]], 1),
        ([full()], [[2]], 4),
        ([latent()], [[3], [1]], 4),
        ([full(), window(6), state()], [[3, 1, 2], [1, 1, 1]], 1),
        ([full(), window(6, 8)], [[1, 2], [0, 2], [2, 0]], 1),  # of pipeline stages
    ],
)
def test_what_is_loaded_is_what_was_stored(
    make_ranks: MakeRanks, specs: list[KVCacheSpec], layers: list[list[int]], factor: int, seed: int
) -> None:
    """Several stores and loads at once, in random slots, with blocks that are not copied."""
    chance = random.Random(seed)
    block_size = factor * specs[0].block_size if factor > 1 else None
    ranks = make_ranks(
        specs, layers, seed=seed, block_size=block_size, cpu_bytes_to_use="64K", verify_kv="always"
    )
    for rank in ranks:
        rank.fill(chance)
    num_slots = min(ranks[0].spec.num_slots, 36 // factor)
    ids = chance.sample(range(1, 40), num_slots * factor)
    rows = [ids[first : first + factor] for first in range(0, len(ids), factor)]
    groups = [chance.randrange(len(specs)) for _ in rows]
    slots = chance.sample(range(ranks[0].spec.num_slots), len(rows))
    blocks = blocks_of(groups, rows)
    for rank in ranks:
        before = rank.content(blocks)
        half = len(rows) // 2
        for name, part in (("first", slice(half)), ("second", slice(half, None))):
            some = msgspec.structs.replace(
                blocks,
                keys=blocks.keys[part],
                groups=blocks.groups[part],
                block_ids=np.array(rows, np.int32)[part].tobytes(),
            )
            rank.store(name, some, slots[part])
        assert rank.wait() == {"first": [], "second": []}
        rank.fill(chance)
        everything = rank.cache.buffer.clone()
        targets = chance.sample(rows, len(rows))
        skipped = {targets[0][0]} if factor > 1 else set()
        loaded = [[0 if each in skipped else each for each in row] for row in targets]
        rank.load(
            "load",
            msgspec.structs.replace(blocks, block_ids=np.array(loaded, np.int32).tobytes()),
            slots,
        )
        assert rank.wait() == {"load": []}
        after = rank.content(
            msgspec.structs.replace(blocks, block_ids=np.array(targets, np.int32).tobytes())
        )
        for index, content in enumerate(after):
            size = len(content) // factor
            start = size if set(targets[index]) & skipped else 0
            assert content[start:] == before[index][start:]
        copied = {each for row in loaded for each in row}
        for block_id in set(range(40)) - copied:
            assert (rank.cache.buffer[block_id] == everything[block_id]).all(), "was overwritten"
    assert all(not rank.cache.buffer[0].any() for rank in ranks)


@pytest.mark.req("WRK-06")
def test_a_loaded_block_is_a_copy_in_the_memory_of_the_device(make_ranks: MakeRanks) -> None:
    """Steps read it many times, and never through host memory."""
    (rank,) = make_ranks([full()], cpu_bytes_to_use="64K")
    rank.fill(random.Random(0))
    blocks = blocks_of([0], [[3]])
    rank.store("store", blocks, [5])
    assert rank.wait() == {"store": []}
    (before,) = rank.content(blocks)
    rank.cache.buffer[3] = 0
    rank.load("load", blocks, [5])
    assert rank.wait() == {"load": []}
    rank.handlers._region.memory[:] = 0
    assert rank.content(blocks) == [before]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the size of every memory copy."""
    sizes: list[int] = []
    move = ctypes.memmove

    def counted(target: int, source: int, size: int) -> int:
        sizes.append(size)
        return move(target, source, size)

    monkeypatch.setattr(ctypes, "memmove", counted)
    one_thread = HostCopySpeed(1, 1e9)
    monkeypatch.setattr(host_handlers, "choose_host_copies", lambda *_: one_thread)
    return sizes


@pytest.mark.req("WRK-08", "ERR-29")
def test_neighbouring_blocks_are_copied_at_once(make_ranks: MakeRanks, copies: list[int]) -> None:
    (rank,) = make_ranks([full()])
    size = rank.cache.block_size_bytes
    ids = [3, 4, 5, 9, 10, 12, 11]
    rank.store("store", blocks_of([0] * 7, [[each] for each in ids]), [0, 1, 2, 3, 4, 5, 6])
    assert rank.wait() == {"store": []}
    assert copies == [3 * size, 2 * size, size, size]
    copies.clear()
    rank.load("load", blocks_of([0] * 4, [[20], [21], [22], [23]]), [4, 5, 0, 1])
    rank.wait()
    assert copies == [2 * size, 2 * size]


@pytest.mark.req("WRK-08")
def test_the_blocks_of_one_offloaded_block_are_copied_at_once(
    make_ranks: MakeRanks, copies: list[int]
) -> None:
    ranks = make_ranks([full()], [[1], [1]], block_size=16)
    for rank in ranks:
        rank.store("store", blocks_of([0, 0], [[4, 5, 6, 7], [8, 9, 11, 10]]), [0, 1])
        rank.wait()
    size = ranks[0].cache.block_size_bytes
    assert copies == [4 * size, 2 * size, size, size] * 2, "slots also hold the other rank's share"


@pytest.mark.req("WRK-02", "WRK-08")
@pytest.mark.parametrize("kind", ["batch", "runs", "kernel"])
def test_the_copies_of_a_cuda_device(
    make_ranks: MakeRanks, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a runtime that copies host memory. Slots cross the borders of registered chunks, and
    copies do not."""
    chunk = 4096 - 40
    runtimes: list[Runtime] = []
    library = Library()

    def copier(device: Any, page_bytes: int, direction: str) -> CudaCopier:
        assert page_bytes == cache_of(1, [full()], [1]).block_size_bytes
        assert direction == ("to host", "to device")[len(runtimes)]
        runtimes.append(Runtime(13_000))
        return runtimes[-1].copier(kind)

    def register(region: Any, device: Any) -> RegisteredMemory:
        return RegisteredMemory(library, region.address, region.memory.nbytes, chunk_bytes=chunk)

    monkeypatch.setattr(host_handlers, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(host_handlers, "cuda_copier", copier)
    monkeypatch.setattr(host_handlers, "_register", register)
    on_cpu = ranks_module.caches_of
    monkeypatch.setattr(
        ranks_module,
        "caches_of",
        lambda cache: KVCaches(on_cpu(cache).groups, torch.device("cuda")),
    )
    (rank,) = make_ranks([full()], cpu_bytes_to_use="64K", verify_kv="always")
    rank.fill(random.Random(0))
    moved: list[tuple[int, int]] = []
    to_host = rank.handlers._copiers[0]
    copy = to_host.copy

    def recorded(targets: Any, sources: Any, sizes: Any) -> None:
        first = rank.handlers._region.address
        moved.extend(zip((targets - first).tolist(), sizes.tolist(), strict=True))
        copy(targets, sources, sizes)

    handlers = rank.handlers._handlers
    handlers["GPU", "CPU"] = handlers["GPU", "CPU"]._replace(move=recorded)
    num_slots = min(rank.spec.num_slots, 39)
    blocks = blocks_of([0] * num_slots, [[each] for each in range(1, num_slots + 1)])
    before = rank.content(blocks)
    rank.store("store", blocks, range(num_slots))
    assert rank.wait() == {"store": []}
    assert sum(size for _, size in moved) == rank.handlers._region.slot_bytes * num_slots
    assert len(moved) > 2
    assert all(at // chunk == (at + size - 1) // chunk for at, size in moved)
    assert len(library.registered) > 2
    rank.cache.buffer[1:] = 0
    rank.load("load", blocks, range(num_slots))
    assert rank.wait() == {"load": []}
    assert rank.content(blocks) == before
    rank.close()
    assert not library.registered


def damage(rank: Rank, slot: int) -> None:
    rank.handlers._region.share(slot, 1)[0] ^= 1


@pytest.mark.req("MET-05")
def test_a_damaged_block_is_reported_and_not_copied(
    make_ranks: MakeRanks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = make_ranks([full(), window(6)], [[1, 2], [1, 1]], verify_kv="always")
    chance = random.Random(1)
    blocks = blocks_of([0, 1, 0], [[3], [4], [5]])
    for rank in ranks:
        rank.fill(chance)
        rank.store("store", blocks, [7, 2, 1])
        rank.wait()
    damage(ranks[1], 2)
    targets = blocks_of([0, 1, 0], [[13], [14], [15]])
    for rank, failed in zip(ranks, ([], [1]), strict=True):
        before = rank.cache.buffer[14].clone()
        rank.load("load", targets, [7, 2, 1])
        assert rank.wait() == {"load": failed}
        expected = rank.content(blocks)
        loaded = rank.content(targets)
        assert [loaded[0], loaded[2]] == [expected[0], expected[2]]
        if failed:
            assert (rank.cache.buffer[14] == before).all()
    assert "in slot 2 of host memory is damaged; it counts as a miss" in caplog.text


def test_a_block_under_another_key_does_not_match_its_checksum(make_ranks: MakeRanks) -> None:
    (rank,) = make_ranks([full()], verify_kv="always")
    rank.store("store", blocks_of([0], [[3]]), [7])
    rank.wait()
    rank.load("load", blocks_of([0], [[4]], tag="other"), [7])
    assert rank.wait() == {"load": [0]}


@pytest.mark.parametrize(("verify_kv", "expected"), [("never", 0), ("sampled", 4), ("always", 64)])
def test_as_many_blocks_are_verified_as_asked_for(
    make_ranks: MakeRanks, verify_kv: str, expected: int
) -> None:
    (rank,) = make_ranks([full()], verify_kv=verify_kv)
    rank.store("store", blocks_of([0] * 8, [[each] for each in range(1, 9)]), range(8))
    rank.wait()
    for slot in range(8):
        damage(rank, slot)
    failed = []
    for number in range(8):
        rank.load(f"{number}", blocks_of([0] * 8, [[each] for each in range(11, 19)]), range(8))
        failed += [8 * number + index for index in rank.wait()[f"{number}"]]
    assert len(failed) == expected
    if verify_kv == "sampled":
        assert failed == list(range(SAMPLE_EVERY - 1, 64, SAMPLE_EVERY))


@pytest.mark.req("MET-05")
def test_a_copy_that_raises_has_copied_nothing_for_certain(
    make_ranks: MakeRanks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (rank,) = make_ranks([full()])

    def fail(*_: int) -> None:
        raise OSError("no access")

    blocks = blocks_of([0, 0], [[3], [4]])
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", fail)
        rank.store("store", blocks, [0, 1])
        rank.load("load", blocks, [0, 1])
        assert rank.wait() == {"store": [0, 1], "load": [0, 1]}
    assert caplog.text.count("a transfer of offload-") == 2
    rank.store("again", blocks, [0, 1])
    assert rank.wait() == {"again": []}, "an operation that fails has no effect on later ones"


def test_host_memory_outlives_a_worker_that_is_killed() -> None:
    """A new process finds it, says so, and loads what the old one stored."""
    fd = os.memfd_create("tier")
    arguments = ["-m", "tests.connectors.offloading.storing_worker", str(fd), "5", "8"]
    with subprocess.Popen(
        [sys.executable, *arguments], pass_fds=[fd], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        process.kill()
    rank = start(fd, 5)
    os.close(fd)
    message = msgspec.msgpack.decode(rank.handlers.take_messages()[0], type=TierMessage)
    assert message == TierMessage(HOST_TIER, HOST_KEPT)
    blocks = blocks_of([0] * 8, [[1 + index] for index in range(8)])
    expected = rank.content(blocks)
    rank.cache.buffer.zero_()
    rank.load("load", blocks, range(8))
    assert rank.wait() == {"load": []}
    assert rank.content(blocks) == expected
    rank.close()


def test_a_reset_deletes_all_blocks_on_disk(make_ranks: MakeRanks, tmp_path: Path) -> None:
    (rank,) = make_ranks([full()], **disk_options(tmp_path))
    blocks = blocks_of([0] * 3, [[1], [2], [3]])
    rank.store("store", blocks, [0, 1, 2])
    rank.wait()
    rank.spill("spill", blocks, [0, 1, 2], [0, 1, 2])
    assert rank.wait() == {"spill": []}
    rank.command("clear", CLEAR)
    rank.command("wrong", b"no such command")
    assert rank.wait() == {"clear": [], "wrong": [0]}
    rank.close()
    (again,) = make_ranks([full()], **disk_options(tmp_path))
    assert contents(again) == {}


# Disk


def contents(rank: Rank) -> dict[bytes, int]:
    """What the rank says that it has found on disk."""
    found: dict[bytes, int] = {}
    is_last = False
    while not is_last:
        *host, message = rank.handlers.take_messages()
        assert len(host) == (not found), "and at first, whether host memory was kept"
        tier_message = msgspec.msgpack.decode(message, type=TierMessage)
        assert tier_message.tier == 0
        read = msgspec.msgpack.decode(tier_message.message, type=DiskContents)
        found |= dict(zip(read.keys, np.frombuffer(read.slots, np.int64).tolist(), strict=True))
        is_last = read.is_last
    assert rank.handlers.take_messages() == []
    return found


@pytest.mark.req("TIE-02", "WRK-03")
@pytest.mark.parametrize("factor", [1, 2])
def test_blocks_come_back_from_disk_after_a_restart(
    make_ranks: MakeRanks, tmp_path: Path, factor: int
) -> None:
    specs = [full()] if factor > 1 else [full(), window(6)]
    layers = [[2], [1]] if factor > 1 else [[2, 1], [0, 1]]
    options = disk_options(tmp_path) | {"block_size": 4 * factor if factor > 1 else None}
    chance = random.Random(factor)
    ids = np.arange(1, 1 + 4 * factor).reshape(4, factor).tolist()
    blocks = blocks_of([index % len(specs) for index in range(4)], ids)
    before = []
    for rank in make_ranks(specs, layers, **options):
        assert contents(rank) == {}
        rank.fill(chance)
        before.append(rank.content(blocks))
        rank.store("store", blocks, [3, 2, 1, 0])
        rank.wait()
        rank.spill("spill", blocks, [3, 2, 1, 0], [5, 6, 7, 8])
        assert rank.wait() == {"spill": []}
        rank.close()
    for rank, expected in zip(make_ranks(specs, layers, **options), before, strict=True):
        assert rank.num_wakes, "the contents are sent although the engine is idle"
        assert contents(rank) == dict(zip(blocks.keys, [5, 6, 7, 8], strict=True))
        rank.load("load", blocks, [9, 4, 6, 1], [(0, 5), (1, 6), (2, 7), (3, 8)])
        assert rank.wait() == {"load": []}
        assert rank.content(blocks) == expected
        rank.cache.buffer.zero_()
        rank.load("again", blocks, [9, 4, 6, 1])
        assert rank.wait() == {"again": []}
        assert rank.content(blocks) == expected, "the blocks are in host memory, too"


def test_a_block_that_the_disk_has_lost_fails_alone(make_ranks: MakeRanks, tmp_path: Path) -> None:
    (rank,) = make_ranks([full()], **disk_options(tmp_path), verify_kv="always")
    rank.fill(random.Random(1))
    blocks = blocks_of([0] * 3, [[1], [2], [3]])
    expected = rank.content(blocks)
    rank.store("store", blocks, [0, 1, 2])
    rank.wait()
    rank.spill("spill", blocks, [0, 1, 2], [0, 1, 2])
    rank.wait()
    (segment,) = tmp_path.glob("*/rank-0/*seg*")
    with segment.open("r+b") as file:
        file.seek(4096 + 5)
        byte = file.read(1)
        file.seek(4096 + 5)
        file.write(bytes((byte[0] ^ 1,)))
    os.sync()
    rank.cache.buffer.zero_()
    rank.load("load", blocks, [5, 6, 2], [(0, 0), (1, 1)])
    assert rank.wait() == {"load": [1]}
    assert rank.content(blocks) == [expected[0], bytes(len(expected[1])), expected[2]]
    rank.load("again", blocks, [5, 6, 2], [(1, 1)])
    assert rank.wait() == {"again": [1]}, "its entry is gone"


def test_blocks_that_are_not_read_in_time_are_late_and_stay_on_disk(
    make_ranks: MakeRanks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (rank,) = make_ranks([full()], **disk_options(tmp_path))
    rank.fill(random.Random(1))
    blocks = blocks_of([0] * 2, [[1], [2]])
    expected = rank.content(blocks)
    rank.store("store", blocks, [0, 1])
    rank.wait()
    rank.spill("spill", blocks, [0, 1], [0, 1])
    rank.wait()
    rank.handlers.take_messages()
    for name in ("first", "second"):
        rank.load(name, blocks, [5, 1], [(0, 0)], limit_s=0.0)
        assert rank.wait() == {name: [0]}
    messages = [
        msgspec.msgpack.decode(each, type=TierMessage) for each in rank.handlers.take_messages()
    ]
    assert [message.late for message in messages] == [blocks.keys[:1]] * 2
    assert "reads of the disk tier take longer than computing" in caplog.text
    rank.load("closed", blocks, [5, 1], [(0, 0)], limit_s=60.0)
    assert rank.wait() == {"closed": [0]}, "it is not read for a while"
    rank.cache.buffer.zero_()
    rank.load("patient", blocks, [5, 1], [(0, 0)])
    assert rank.wait() == {"patient": []}, "a job without a limit waits in any case"
    assert rank.content(blocks) == expected


def test_a_block_that_is_damaged_in_host_memory_is_not_intact_on_disk(
    make_ranks: MakeRanks, tmp_path: Path
) -> None:
    """It is written with the checksum of what was stored."""
    (rank,) = make_ranks([full()], **disk_options(tmp_path))
    blocks = blocks_of([0], [[1]])
    rank.store("store", blocks, [0])
    rank.wait()
    damage(rank, 0)
    rank.spill("spill", blocks, [0], [0])
    rank.wait()
    rank.load("load", blocks, [1], [(0, 0)])
    assert rank.wait() == {"load": [0]}


def test_a_load_from_host_memory_does_not_wait_for_the_disk(
    make_ranks: MakeRanks, tmp_path: Path
) -> None:
    (rank,) = make_ranks([full()], **disk_options(tmp_path))
    blocks = blocks_of([0], [[1]])
    rank.store("store", blocks, [0])
    rank.wait()
    handlers = rank.handlers._handlers
    reads = handlers["disk", "CPU"]
    handlers["disk", "CPU"] = reads._replace(queue=_Never())
    rank.load("slow", blocks, [1], [(0, 0)])
    rank.load("quick", blocks, [0])
    assert rank.wait() == {"quick": []}
    handlers["disk", "CPU"] = reads


@pytest.mark.req("WRK-03", "WRK-04")
def test_every_pair_of_media_has_one_handler_with_a_queue_of_its_own(
    make_ranks: MakeRanks, tmp_path: Path
) -> None:
    (rank,) = make_ranks([full()], **disk_options(tmp_path))
    handlers = rank.handlers._handlers
    media = {(each.source, each.destination) for each in handlers.values()}
    assert media == {("GPU", "CPU"), ("CPU", "GPU"), ("CPU", "DISK"), ("DISK", "CPU")}
    assert len(handlers) == len({id(each.queue) for each in handlers.values()}) == 4


class _Never:
    """A queue whose operations do not begin."""

    def submit(self, *_: object, **__: object) -> Any:
        return None


@pytest.mark.req("CFG-05")
def test_a_disk_that_holds_no_block_is_rejected(make_ranks: MakeRanks, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk"):
        make_ranks([full()], **disk_options(tmp_path, 100))
