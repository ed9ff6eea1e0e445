"""The connector lmcache_mp, with a server that speaks LMCache's protocol."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.connectors.lmcache_mp import worker as worker_module
from longshore.connectors.lmcache_mp.scheduler import LMCacheMPConnector
from longshore.protocol.errors import ConfigError
from longshore.testing.connectors import ConnectorConformance
from longshore.testing.engines import settle
from tests.connectors.adapters.lmcache_server import CHUNK_SIZE, LMCacheServer
from tests.connectors.engine import Engine, prompts_of

ModelOf = Callable[[str], tuple[Path, Any]]
PROMPTS: Final = prompts_of(100, 130, 60, 150)
SMALL: Final[dict[str, Any]] = {"num_blocks": 18}
LIMIT_S: Final = 60.0


@pytest.fixture
def server() -> Iterator[LMCacheServer]:
    server = LMCacheServer(chunk_size=32)
    yield server
    server.close()


def with_server(model: Path, server: LMCacheServer, **settings: Any) -> Engine:
    options = {"server_url": server.url, "chunk_size": 32, "timeout_s": 5}
    return Engine(model, "lmcache_mp", options, **settings)


@pytest.mark.req("CRG-05")
def test_evicted_prompts_come_back_from_the_server(
    model_of: ModelOf, server: LMCacheServer
) -> None:
    model, _ = model_of("full")
    rounds = PROMPTS * 2
    with Engine(model, **SMALL) as plain:
        wanted = plain.run(*rounds)
    with with_server(model, server, **SMALL) as engine:
        assert engine.run(*rounds) == wanted
        assert settle(engine.engine) == 0
        num_found = engine.stats.num_external_hit_tokens
    assert num_found >= sum(len(prompt) // 32 * 32 for prompt in PROMPTS)
    assert not server.locked
    assert "unregister_kv_cache_engine_driven_context" in server.calls


@pytest.mark.req("CRG-05")
def test_a_slow_lookup_does_not_block_the_scheduler(
    model_of: ModelOf, server: LMCacheServer
) -> None:
    model, _ = model_of("full")
    with Engine(model) as plain:
        wanted = plain.run(*PROMPTS[:2])
    with with_server(model, server) as engine:
        engine.run(PROMPTS[0])
        running = engine.add(PROMPTS[1], max_tokens=100)
        engine.until(lambda: bool(running.token_ids))
        server.gate.clear()
        waiting = engine.add(PROMPTS[2])
        engine.until(lambda: "lookup" in server.calls[-1:] or len(running.token_ids) > 40)
        engine.until(lambda: len(running.token_ids) > 60)  # it goes on, step by step
        assert not waiting.token_ids
        server.gate.set()
        engine.wait(running, waiting)
        assert running.token_ids[:8] == wanted[1]
        assert settle(engine.engine) == 0


def test_a_server_that_is_silent_is_a_miss_and_is_not_asked_for_a_while(
    model_of: ModelOf, server: LMCacheServer
) -> None:
    model, _ = model_of("full")
    with Engine(model) as plain:
        wanted = plain.run(*PROMPTS)
    options = {"server_url": server.url, "chunk_size": 32, "timeout_s": 0.2}
    with Engine(model, "lmcache_mp", options) as engine:
        server.is_silent = True
        num_calls = len(server.calls)
        assert engine.run(*PROMPTS) == wanted
        assert settle(engine.engine) == 0
        assert len(server.calls) <= num_calls + 3  # one of each thread
        assert engine.stats.num_external_hit_tokens == 0


def test_a_server_that_was_restarted_is_used_again(
    model_of: ModelOf, server: LMCacheServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_of("full")
    monkeypatch.setattr(worker_module, "PAUSE_S", 0.0)
    options = {"server_url": server.url, "chunk_size": 32, "timeout_s": 0.5}
    with Engine(model, **SMALL) as plain:
        wanted = plain.run(*PROMPTS)
    with Engine(model, "lmcache_mp", options, **SMALL) as engine:
        assert engine.run(*PROMPTS) == wanted
        server._of_engine.clear()  # it knows no engine any more
        server._chunks.clear()
        for _ in range(3):
            assert engine.run(*PROMPTS) == wanted
        assert settle(engine.engine) == 0
        assert server._of_engine
        assert engine.stats.num_external_hit_tokens > 0


def test_damaged_blocks_are_computed(
    model_of: ModelOf, server: LMCacheServer, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = model_of("full")
    with Engine(model, **SMALL) as plain:
        wanted = plain.run(*PROMPTS)
    with with_server(model, server, **SMALL) as engine:
        assert engine.run(*PROMPTS) == wanted
        assert settle(engine.engine) == 0
        server.damage()
        assert engine.run(*PROMPTS) == wanted
        assert settle(engine.engine) == 0
    assert "blocks in LMCache are damaged" in caplog.text


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("chunk_size", 64, "chunks have 64 tokens, and the option 'chunk_size' is 32"),
        ("has_pool", False, "has no shared memory for engines.*--shm-name"),
        ("is_silent", True, "did not answer within 0.2 s"),
    ],
)
def test_a_server_that_does_not_fit_is_rejected_at_startup(
    attribute: str, value: Any, message: str, model_of: ModelOf, server: LMCacheServer
) -> None:
    model, _ = model_of("full")
    setattr(server, attribute, value)
    options = {"server_url": server.url, "chunk_size": 32, "timeout_s": 0.2}
    with pytest.raises(ConfigError, match=message):
        Engine(model, "lmcache_mp", options)


def test_shared_memory_that_is_not_the_servers_is_not_used(
    model_of: ModelOf, server: LMCacheServer, tmp_path: Path
) -> None:
    """Every user may create files where it is."""
    model, _ = model_of("full")
    options = {"server_url": server.url, "chunk_size": 32, "timeout_s": 0.5}
    memory = shutil.move(server.path, tmp_path / "memory")
    server.path.symlink_to(memory)
    with pytest.raises(ConfigError, match="it is a symbolic link, which is not followed"):
        Engine(model, "lmcache_mp", options)
    server.path.unlink()
    shutil.move(memory, server.path)
    if os.geteuid() == 0:
        os.chown(server.path, 12345, 12345)
        with pytest.raises(ConfigError, match=r"it belongs to another user \(uid 12345\)"):
            Engine(model, "lmcache_mp", options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server_url": "http://127.0.0.1"}, "'server_url' to begin with tcp:// or ipc://"),
        ({"chunk_size": 2}, "'chunk_size' to be a whole number of at least 4"),
        ({"chunks": 2}, "no option 'chunks'"),
        ({"timeout_s": 0}, "'timeout_s' to be a finite number"),
    ],
)
def test_options_are_checked_before_anything_is_started(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LMCacheMPConnector.check_options(options)


def test_chunks_must_be_whole_blocks(model_of: ModelOf) -> None:
    model, _ = model_of("full")
    with pytest.raises(ConfigError, match="'chunk_size' to be a multiple of the block size of 16"):
        Engine(model, "lmcache_mp", {"chunk_size": 40})


def test_a_model_with_windows_is_rejected(model_of: ModelOf) -> None:
    model, _ = model_of("windows")
    with pytest.raises(ConfigError, match="lmcache_mp is for models that attend to all tokens"):
        Engine(model, "lmcache_mp", {})


@pytest.mark.slow
@pytest.mark.req("CRG-05")
class TestLMCacheMP(ConnectorConformance):
    connector = "lmcache_mp"
    is_variant = True
    num_seeds = 1

    @pytest.fixture(autouse=True)
    def with_server(self) -> Iterator[None]:
        self.server = LMCacheServer()
        yield
        self.server.close()

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"server_url": self.server.url, "chunk_size": CHUNK_SIZE, "timeout_s": 5}


@pytest.mark.long
class TestLMCacheMPWithEveryFault(TestLMCacheMP):
    is_variant = False
