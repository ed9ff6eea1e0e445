"""The example connector where it differs from what the other tests show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import ConnectorConfig, ConnectorOutput, Matched, RequestView
from longshore.connectors.example.scheduler import ExampleConnector, Report
from longshore.protocol.arrays import int32_array
from longshore.testing.leaks import strings_in
from tests.connectors.engine import Engine, prompts_of


def test_blocks_with_several_hashes_are_loaded_into_their_places(
    model_of: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """The first block of a prompt is in the prefix cache, the others are loaded."""
    model, _ = model_of("full")
    prompts = prompts_of(100, 130, 60, 150)
    with Engine(model) as plain:
        wanted = plain.run(*prompts)
    options = {"path": str(tmp_path)}
    for connector, of_connector in (
        ("example", options),
        ("simple_cpu", {"cpu_bytes_to_use": "16MiB"}),
    ):
        with Engine(model, connector, of_connector, num_blocks=18, hash_block_size=8) as engine:
            assert engine.run(*prompts) == wanted
            engine.run(prompts[0][:17] + prompts[1][:3], max_tokens=1)
            assert engine.run(*prompts) == wanted
            assert engine.stats.num_external_hit_tokens > 0


HASHES = [bytes([number]) * 32 for number in range(3)]
REQUEST = RequestView("r", int32_array(list(range(50))), 50, HASHES)


def started() -> ExampleConnector:
    """A connector whose only rank has found two blocks."""
    connector = ExampleConnector(ConnectorConfig({"path": "/var/tmp/kv"}))
    found = msgspec.msgpack.encode(Report(found=HASHES[:2]))
    connector.update_connector_output(ConnectorOutput(metadata=(found,)))
    return connector


@pytest.mark.parametrize("num_computed", [0, 16, 32], ids=["two blocks", "one block", "miss"])
def test_a_request_that_ends_after_its_lookup_is_forgotten(num_computed: int) -> None:
    connector = started()
    match = connector.get_num_new_matched_tokens(REQUEST, num_computed)
    assert match == Matched(32 - num_computed, is_async=True)
    assert strings_in(connector, {"r"}) == {"r"}
    connector.request_finished(REQUEST, (int32_array([]),))
    assert strings_in(connector, {"r"}) == set()


def test_a_damaged_file_that_cannot_be_deleted_ends_the_load(
    model_of: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that cannot be written: the load must be reported, or the request waits."""
    model, _ = model_of("full")
    prompts = prompts_of(100)
    with Engine(model, "example", {"path": str(tmp_path)}) as engine:
        wanted = engine.run(*prompts)
    for path in tmp_path.rglob("*.kv"):
        path.write_bytes(b"junk")

    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    with Engine(model, "example", {"path": str(tmp_path)}, load_timeout_s=1000.0) as engine:
        assert engine.run(*prompts) == wanted
        monkeypatch.undo()
