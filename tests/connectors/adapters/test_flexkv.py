"""The connector flexkv with a fake of FlexKV's interface. The real library needs a GPU."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from longshore.connectors.base import ConnectorConfig, WorkerConnectorConfig
from longshore.connectors.base.lookup_worker import TransferStuck
from longshore.connectors.base.prefix_store.messages import Prefix, Store
from longshore.connectors.base.prefix_store.store import StoreError
from longshore.connectors.flexkv import worker as worker_module
from longshore.connectors.flexkv.scheduler import FlexKVConnector
from longshore.connectors.flexkv.worker import FlexKVStore
from longshore.protocol.errors import ConfigError, LongshoreError
from longshore.protocol.kv_cache_spec import FullAttentionSpec
from longshore.testing.engines import settle
from tests.connectors.adapters import fake_flexkv
from tests.connectors.engine import Engine, prompts_of

ModelOf = Callable[[str], tuple[Path, Any]]
PROMPTS: Final = prompts_of(100, 130, 60, 150)
SMALL: Final[dict[str, Any]] = {"num_blocks": 18}
SPEC: Final = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype_bytes=4)
OPTIONS: Final[dict[str, Any]] = {"cpu_bytes_to_use": "1MiB"}
HASHES: Final = [bytes([number]) * 32 for number in range(1, 7)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    fake_flexkv.install(monkeypatch)
    monkeypatch.setattr(worker_module, "SOCKETS", tmp_path / "sockets")
    yield
    fake_flexkv.registered.clear()


@pytest.fixture
def on_cpu(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake copies host memory."""
    monkeypatch.setattr(worker_module, "DEVICE_TYPE", "cpu")


def rank_store(rank: int = 0, num_ranks: int = 1, **options: Any) -> tuple[FlexKVStore, Any]:
    config = WorkerConnectorConfig(
        {**OPTIONS, **options},
        specs=(SPEC,),
        num_ranks=num_ranks,
        rank_block_bytes=(512,) * num_ranks,
        engine_id="engine.0",
        namespace="of-this-model",
        rank=rank,
    )
    blocks = torch.randint(0, 255, (20, 512), dtype=torch.uint8)
    group = SimpleNamespace(blocks=blocks, size_bytes=512)
    caches: Any = SimpleNamespace(groups=(group,), device=torch.device(worker_module.DEVICE_TYPE))
    return FlexKVStore(config, caches), blocks


def test_sockets_are_in_a_folder_that_only_this_user_can_write_to(
    on_cpu: None, tmp_path: Path
) -> None:
    store, _ = rank_store()
    assert store._port.startswith(f"ipc://{tmp_path}/sockets/")
    assert (tmp_path / "sockets").stat().st_mode & 0o777 == 0o700
    (tmp_path / "sockets").chmod(0o777)
    with pytest.raises(ConfigError, match=r"connector flexkv .*sockets has mode 0777"):
        rank_store()


@pytest.mark.req("CRG-12")
def test_evicted_prompts_come_back(on_cpu: None, model_of: ModelOf) -> None:
    model, _ = model_of("full")
    rounds = PROMPTS * 2
    with Engine(model, **SMALL) as plain:
        wanted = plain.run(*rounds)
    with Engine(model, "flexkv", OPTIONS, **SMALL) as engine:
        assert engine.run(*rounds) == wanted
        assert engine.run(*PROMPTS, is_together=True) == wanted[: len(PROMPTS)]
        assert settle(engine.engine) == 0
        assert engine.stats.num_external_hit_tokens > 200
        (manager,) = fake_flexkv.made
        assert not manager.tasks  # each was launched or cancelled
    assert not manager.is_open


@pytest.mark.req("CRG-12")
def test_tiers_are_configured(on_cpu: None, tmp_path: Path) -> None:
    remote, ssd = {"remote_cache_path": "/mnt/kv"}, str(tmp_path / "ssd")
    rank_store(ssd_bytes="4MiB", ssd_path=ssd, remote=remote)
    settings = fake_flexkv.made[0].cache_config
    assert (settings.enable_cpu, settings.enable_ssd, settings.enable_remote) == (True,) * 3
    assert (settings.num_cpu_blocks, settings.num_ssd_blocks) == (2048, 8192)
    assert (settings.ssd_cache_dir, settings.remote_cache_path) == (ssd, "/mnt/kv")
    assert (tmp_path / "ssd").stat().st_mode & 0o777 == 0o700


def test_any_part_of_a_prefix_is_loaded(on_cpu: None) -> None:
    store, blocks = rank_store()
    store.store(Store(1, Prefix(HASHES[:2]), [1, 2]))
    store.store(Store(2, Prefix(HASHES[:5]), [3, 4, 5]))
    before = blocks.clone()
    assert store.lookup(1, Prefix(HASHES)) == 5
    assert store.load(1, 1, [11, 12, 13]) == []
    assert torch.equal(blocks[11:14], before[2:5])
    assert store.lookup(2, Prefix(HASHES, "after a reset")) == 0
    store.release(2)
    assert not fake_flexkv.made[0].tasks


def test_the_first_rank_moves_the_blocks_of_all(on_cpu: None, monkeypatch: Any) -> None:
    second, other_blocks = rank_store(rank=1, num_ranks=2)
    first, _ = rank_store(num_ranks=2)
    (manager,) = fake_flexkv.made
    assert manager.model_config.tp_size == 2
    for each in (first, second):
        each.store(Store(1, Prefix(HASHES[:2]), [1, 2]))
        assert each.lookup(1, Prefix(HASHES[:2])) == 2
        assert each.load(1, 0, [8, 9]) == []
        each.close()
    assert torch.equal(other_blocks[8:10], other_blocks[1:3])


def test_what_fails_is_reported(on_cpu: None) -> None:
    store, _ = rank_store(timeout_s=0.05)
    (manager,) = fake_flexkv.made
    with pytest.raises(StoreError, match="evicted blocks before those to store"):
        store.store(Store(1, Prefix(HASHES[:2]), [2]))
    store.store(Store(1, Prefix(HASHES[:2]), [1, 2]))
    manager.fails = True
    assert store.lookup(1, Prefix(HASHES)) == 2
    assert store.load(1, 0, [8, 9]) == [8, 9]
    with pytest.raises(StoreError, match="did not copy the blocks"):
        store.store(Store(1, Prefix(HASHES[:3]), [3]))
    manager.stored.popitem()
    assert store.lookup(2, Prefix(HASHES)) == 1
    manager.fails = False
    assert store.load(2, 0, [8, 9]) == [9]  # evicted since the lookup
    manager.hangs = True
    with pytest.raises(TransferStuck, match=r"took over 0\.05 s"):
        store.store(Store(1, Prefix(HASHES[:3]), [2, 3]))


def test_a_transfer_that_never_ends_stops_the_worker(on_cpu: None, model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with Engine(model, "flexkv", {**OPTIONS, "timeout_s": 0.05}) as engine:
        fake_flexkv.made[0].hangs = True
        engine.add(PROMPTS[0], max_tokens=100)
        with pytest.raises(LongshoreError, match="a transfer of FlexKV took over"):
            engine.until(lambda: False)


def test_a_cpu_is_rejected(library: None, model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with pytest.raises(ConfigError, match="flexkv needs a GPU"):
        Engine(model, "flexkv", OPTIONS)


def test_a_missing_library_is_named(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flexkv.kvmanager", None)
    model, _ = model_of("full")
    with pytest.raises(ConfigError, match=r"needs FlexKV.*pip install 'git\+https"):
        Engine(model, "flexkv", OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs 'cpu_bytes_to_use'"),
        ({**OPTIONS, "ssd_bytes": "1GiB"}, "needs 'ssd_path'"),
        ({**OPTIONS, "remote": {"remote_file_num": 1}}, "'ssd_bytes' and 'ssd_path' for 'remote'"),
        ({**OPTIONS, "remote": {"url": 1}}, "'remote' to be an object with some of"),
        ({**OPTIONS, "size": 1}, "no option 'size'"),
    ],
)
def test_options_are_checked_before_anything_is_started(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FlexKVConnector.check_options(options)


def test_ranks_with_different_blocks_are_rejected() -> None:
    config = ConnectorConfig(OPTIONS, specs=(SPEC,), num_ranks=2, rank_block_bytes=(512, 256))
    with pytest.raises(ConfigError, match="blocks of the same size on all ranks"):
        FlexKVConnector(config)
