"""A setting is one annotated field: its value is checked, and a component gets its part."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from longshore.protocol.errors import ConfigError
from longshore.protocol.settings import Duration, Setting, Settings, part_of, read_config


@dataclass(frozen=True, kw_only=True)
class PoolSettings(Settings):
    num_blocks: Annotated[
        Annotated[int, Meta(ge=1, le=9)] | None, Setting("KV cache", "Blocks.")
    ] = None
    mode: Annotated[Literal["fast", "slow"] | None, Setting("KV cache", "How.")] = None
    timeout_s: Annotated[Duration, Setting("KV cache", "How long.")] = 1.0
    share: Annotated[float, Meta(ge=0), Setting("KV cache", "Of it.", because="it is a part")] = 0.5


@dataclass(frozen=True, kw_only=True)
class PoolConfig(PoolSettings):
    block_size: Annotated[int, Meta(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Options(PoolSettings):
    port: Annotated[int, Setting("Server", "Where.")] = 80
    block_size: Annotated[int | None, Setting("KV cache", "Tokens.")] = None


class Listener(msgspec.Struct, frozen=True):
    port: int
    settings: PoolSettings


class Process(msgspec.Struct, forbid_unknown_fields=True):
    pools: list[PoolConfig]
    name: str = ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0 must be between 1 and 9"),
        ({"num_blocks": 10}, "num_blocks=10 must be between 1 and 9"),
        ({"mode": "odd"}, "mode='odd' is unknown; use one of fast, slow"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0 and at most 604800"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be above 0"),
        ({"share": -1}, "share=-1 must be at least 0, because it is a part"),
        ({"block_size": 0}, "block_size=0 must be above 0"),
    ],
)
def test_a_value_outside_of_its_bounds_or_choices_is_rejected_by_name(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PoolConfig(**({"block_size": 1} | settings))


def test_values_at_their_bounds_and_none_are_accepted() -> None:
    for num_blocks in (None, 1, 9):
        PoolConfig(block_size=1, num_blocks=num_blocks, mode="slow", timeout_s=604_800, share=0)


def test_a_component_gets_its_part_with_what_was_derived() -> None:
    options = Options(num_blocks=3, mode="fast", port=81)
    config = part_of(PoolConfig, options, block_size=16)
    assert config == PoolConfig(num_blocks=3, mode="fast", block_size=16)


def test_a_process_gets_its_part_and_the_settings_of_a_component() -> None:
    options = Options(num_blocks=3, port=81)
    pool = part_of(PoolSettings, options)
    assert part_of(Listener, options, settings=pool) == Listener(81, PoolSettings(num_blocks=3))


def test_a_config_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "process.json"
    process = Process([PoolConfig(block_size=2), PoolConfig(block_size=3, num_blocks=4)], "name")
    path.write_bytes(msgspec.json.encode(process))
    assert read_config(path, Process) == process


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"pools": [{"block_size": 2}, {"block_size": 2, "size": 1}]}', r"pools\.1\.size is not"),
        ('{"pools": [], "colour": 1}', "unknown field `colour`"),
        ('{"pools": [{}]}', "missing required field `block_size`"),
        ("{", "truncated"),
    ],
)
def test_a_file_that_is_no_config_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "process.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"process\.json: .*{message}"):
        read_config(path, Process)
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "none", Process)
