"""The lmcache connector with the real LMCache: what it stores, locks and verifies."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from longshore.connectors.base import WorkerConnectorConfig
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.lmcache.options import read_options
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from tests.connectors.conftest import KINDS
from tests.connectors.engine import Engine, prompts_of

pytestmark = [pytest.mark.services, pytest.mark.req("CRG-04")]

SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 4, "dtype_bytes": 4}
SPECS = (FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=32))
BLOCK_BYTES = 512
HASHES = [bytes([number]) * 32 for number in range(8)]


@contextmanager
def storage(num_blocks: int = 64, rank: int = 0, **options: Any) -> Iterator[Any]:
    """A Storage of two groups, with host memory for `num_blocks` blocks."""
    from longshore.connectors.lmcache.storage import Storage

    config = WorkerConnectorConfig(
        {"cpu_bytes_to_use": num_blocks * 576 * 2} | options,
        specs=SPECS,
        num_groups=2,
        hash_block_size=16,
        num_ranks=2,
        rank=rank,
        rank_block_bytes=(BLOCK_BYTES, BLOCK_BYTES),
        namespace="0123456789abcdef",
    )
    opened = Storage(
        read_options(config), config, StoredGroups(config, None).groups, [BLOCK_BYTES] * 2
    )
    try:
        yield opened
    finally:
        opened.close()


def write(storage: Any, hashes: list[bytes], group: int = 0) -> int:
    """Store blocks whose bytes are the first one of their hash. Returns how many were stored."""
    contents = storage.reserve(group, hashes)
    for key_hash, content in contents.items():
        content[:BLOCK_BYTES] = key_hash[0]
    storage.publish(group, contents)
    return len(contents)


def read(storage: Any, hashes: list[bytes], group: int = 0) -> list[int | None]:
    """The value of the bytes of each locked block."""
    from longshore.connectors.lmcache.storage import StoredBlock

    contents = storage.read([StoredBlock(group, key_hash) for key_hash in hashes])
    for content in contents:
        assert content is None or (len(content) == BLOCK_BYTES and len(content.unique()) == 1)
    return [None if content is None else int(content[0]) for content in contents]


def release(storage: Any, hashes: list[bytes], group: int = 0) -> None:
    from longshore.connectors.lmcache.storage import StoredBlock

    storage.release([StoredBlock(group, key_hash) for key_hash in hashes])


def num_deletable(storage: Any, hashes: list[bytes], group: int = 0) -> int:
    """How many of these blocks nothing has locked; they are deleted."""
    from longshore.connectors.lmcache.storage import StoredBlock

    keys = [storage._key(StoredBlock(group, key_hash)) for key_hash in hashes]
    deleted, _ = storage._storage.delete_l1_keys(keys)
    return int(deleted)


def test_blocks_are_found_by_hash_and_group_and_leading_ones_are_locked() -> None:
    with storage() as opened:
        assert write(opened, [HASHES[0], HASHES[1], HASHES[3]]) == 3
        assert write(opened, [HASHES[1], HASHES[3]], group=1) == 2
        # A window does not need all blocks of a prefix.
        assert opened.lock([HASHES[:5], HASHES[:5]]) == [[0, 1], [1, 3]]
        assert read(opened, HASHES[:2]) == [0, 1]
        assert read(opened, [HASHES[1], HASHES[3]], group=1) == [1, 3]
        assert write(opened, HASHES[:3]) == 1  # what is stored is not stored again


def test_locked_blocks_are_not_deleted_until_each_lookup_has_released_them() -> None:
    with storage() as opened:
        write(opened, HASHES[:3])
        for _ in range(2):
            assert opened.lock([HASHES[:2], []]) == [[0, 1], []]
        release(opened, HASHES[:2])
        assert num_deletable(opened, HASHES[:3]) == 1  # the third one, which was not asked for
        release(opened, HASHES[:2])
        assert num_deletable(opened, HASHES[:2]) == 2


def test_a_late_prefetch_is_a_miss_whose_locks_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = [{"type": "fs", "base_path": str(tmp_path / "kv")}]
    with storage(l2_adapters=adapters) as opened:
        write(opened, HASHES[:2])
    with storage(l2_adapters=adapters) as opened:
        handles: list[Any] = []
        wait = opened._storage.wait_prefetch_status
        with monkeypatch.context() as patch:
            patch.setattr(
                opened._storage,
                "wait_prefetch_status",
                lambda handle, timeout: handles.append(handle),
            )
            assert opened.lock([HASHES[:2], []]) == [[], []]
        (handle,) = handles
        assert wait(handle, 30)  # the answer came, and has locked the blocks
        assert num_deletable(opened, HASHES[:2]) == 0
        assert opened.lock([[HASHES[7]], []]) == [[], []]
        assert num_deletable(opened, HASHES[:2]) == 2


def test_a_server_that_hangs_costs_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        adapter = {"type": "resp", "host": "127.0.0.1", "port": server.getsockname()[1]}
        with storage(l2_adapters=[adapter], lookup_timeout_s=0.3) as opened:
            write(opened, HASHES[:2])
            # What is in host memory is found nevertheless.
            assert opened.lock([HASHES[:3], []]) == [[0, 1], []]
            monkeypatch.delattr(type(opened._storage), "wait_prefetch_status")
            assert opened.lock([HASHES[:3], []]) == [[0, 1], []]  # without waiting


def test_host_memory_alone_is_asked_for_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with storage(l2_adapters=[{"type": "fs", "base_path": str(tmp_path / "kv")}]) as opened:
        write(opened, HASHES[:3])
        monkeypatch.delattr(type(opened._storage), "wait_prefetch_status")
        assert opened.lock([HASHES[:3], []]) == [[0, 1, 2], []]


def test_a_prefetch_that_fails_is_not_read(tmp_path: Path) -> None:
    """The file is there when it is looked up, but it has fewer bytes than a block."""
    adapters = [{"type": "fs", "base_path": str(tmp_path / "kv")}]
    with storage(l2_adapters=adapters) as opened:
        write(opened, HASHES[:3])
    files = sorted((tmp_path / "kv").glob("*.data"))
    assert len(files) == 3
    files[1].write_bytes(files[1].read_bytes()[:100])
    with storage(l2_adapters=adapters) as opened:
        assert opened.lock([HASHES[:3], []]) == [[0], []]
        assert read(opened, HASHES[:3]) == [0, None, None]


@pytest.mark.parametrize("kind", ["fs", "fs_native"])
def test_files_survive_and_damaged_ones_are_misses_and_deleted(kind: str, tmp_path: Path) -> None:
    from longshore.connectors.lmcache.storage import StoredBlock

    folder = tmp_path / "kv"
    adapters = [{"type": kind, "base_path": str(folder)}]
    with storage(l2_adapters=adapters) as opened:
        write(opened, HASHES[:4])
    assert folder.stat().st_mode & 0o777 == 0o700
    files = sorted(folder.glob("*.data"))
    damaged = bytearray(files[2].read_bytes())
    damaged[77] ^= 4
    files[2].write_bytes(damaged)
    with storage(l2_adapters=adapters) as opened:
        assert opened.lock([HASHES[:4], []]) == [[0, 1, 2, 3], []]
        assert read(opened, HASHES[:4]) == [0, 1, None, 3]
        release(opened, HASHES[:4])
        opened.delete([StoredBlock(0, HASHES[2])])
        assert not files[2].exists()
        assert opened.lock([HASHES[:4], []]) == [[0, 1], []]
    with storage(rank=1, l2_adapters=adapters) as opened:  # another rank has other bytes
        assert opened.lock([HASHES[:4], []]) == [[], []]


def test_without_room_the_first_blocks_are_stored() -> None:
    many = [bytes([number // 256, number % 256]) * 16 for number in range(100)]
    with storage(num_blocks=32) as opened:
        num_stored = write(opened, many)
        assert 10 <= num_stored < 100
        assert opened.lock([many, []])[0] == list(range(num_stored))


def test_unusable_storage_is_an_error_that_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for adapter, words in (
        ({"type": "fs", "base_path": str(tmp_path / "file" / "kv")}, "base_path"),
        ({"type": "resp", "host": "127.0.0.1"}, "port must be a positive integer"),
        ({"type": "resp", "host": "127.0.0.1", "port": 1}, "no Redis server at 127.0.0.1:1"),
    ):
        with pytest.raises(ConfigError, match=words), storage(l2_adapters=[adapter]):
            pass


def test_a_missing_dependency_of_lmcache_is_named_with_the_command() -> None:
    code = (
        "import sys; sys.modules['cachetools'] = None\nimport longshore.connectors.lmcache.storage"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError: --kv-connector lmcache: LMCache cannot be imported" in last
    assert "cachetools" in last
    assert last.endswith("pip install --no-deps lmcache==0.5.6")


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_prompts_are_loaded_and_change_no_token(
    kind: str, model_of: Callable[[str], tuple[Path, Any]]
) -> None:
    model, _ = model_of(kind)
    prompts = prompts_of(100, 130, 60, 150)
    with Engine(model) as plain:
        wanted = plain.run(*prompts)
    options = {"cpu_bytes_to_use": "64MiB"}
    with Engine(model, "lmcache", options, num_blocks=24 if kind == "full" else 60) as engine:
        assert engine.run(*prompts) == wanted
        assert engine.run(*prompts) == wanted
        assert engine.run(*prompts, is_together=True) == wanted
        engine.engine.scheduler.check()  # type: ignore[union-attr]
        if kind == "full":
            assert engine.stats.num_external_hit_tokens > 100


def test_what_the_worker_has_locked_is_released_when_requests_have_ended(
    model_of: Callable[[str], tuple[Path, Any]],
) -> None:
    model, _ = model_of("full")
    prompts = prompts_of(100, 130, 60, 150)
    with Engine(model, "lmcache", {"cpu_bytes_to_use": "64MiB"}, num_blocks=24) as engine:
        engine.run(*prompts)
        aborted = [engine.add(prompt) for prompt in prompts]
        for answer in aborted:
            engine.abort(answer)
        engine.wait(*aborted)
        engine.run(*prompts)
        _, worker = engine.engine.connector_halves  # type: ignore[union-attr]
        manager = worker._storage._storage._l1_manager
        engine.run(prompts[0])
        assert not worker._locked
        assert manager._objects
        assert not any(entry.read_lock.is_locked() for entry in manager._objects.values())
        assert torch.equal(worker._blocks[0][0], torch.zeros_like(worker._blocks[0][0]))
