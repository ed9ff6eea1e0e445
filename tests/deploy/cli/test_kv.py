"""`longshore kv`: what it prints, and what it refuses to delete."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.connectors.offloading.disk.errors import DiskStoreError, StoreInUse
from longshore.connectors.offloading.disk.identity import IDENTITY_FILE, StoreIdentity
from longshore.connectors.offloading.disk.index import HEADER_BYTES, INDEX_FILE, RECORD_BYTES
from longshore.deploy.cli.kv import age_s
from longshore.deploy.cli.main import app
from longshore.protocol.errors import ConfigError
from tests.connectors.offloading.disk.stores import (
    IDENTITY,
    SLOT_BYTES,
    flip,
    key,
    open_store,
    rank_directory,
    write,
)

OTHER = msgspec.structs.replace(
    IDENTITY, model_name="other", model_fingerprint="f2", dtype="float16", num_ranks=2
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """20 blocks of IDENTITY, and 7 and 6 of the two ranks of OTHER."""
    for identity, rank, count in [(IDENTITY, 0, 20), (OTHER, 0, 7), (OTHER, 1, 6)]:
        with open_store(tmp_path, identity=identity, rank=rank) as store:
            write(store, {key(n): n for n in range(count)})
    return tmp_path


@pytest.fixture
def kv(path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command on `path`; returns what it prints. The exit status must be `status`."""

    def run(command: str, *arguments: str, status: int = 0) -> str:
        found = 0
        try:
            app(["kv", command, str(path), *arguments], exit_on_error=False)
        except SystemExit as exit:
            found = exit.code
        assert found == status
        return capsys.readouterr().out

    return run


def left(path: Path) -> set[str]:
    return {
        identity.model_name for identity in (IDENTITY, OTHER) if (path / identity.digest).exists()
    }


def rank_file(path: Path, identity: StoreIdentity = IDENTITY, rank: int = 0) -> Path:
    return rank_directory(path, identity, rank) / "segment-000000.kv"


def test_ls_lists_the_stores_of_all_models(kv: Callable[..., str]) -> None:
    lines = {line.split()[0]: line.split() for line in kv("ls").splitlines()}
    ours, others = lines[IDENTITY.digest[:8]], lines[OTHER.digest[:8]]
    assert ours[1:7] == ["tiny-llama", "bfloat16", "1", "of", "1", "20"]
    assert others[1:7] == ["other", "float16", "2", "of", "2", "6"]


def test_ls_prints_json(kv: Callable[..., str], path: Path) -> None:
    with open_store(path):
        stores: dict[str, Any] = {store["model"]: store for store in json.loads(kv("ls", "--json"))}
    assert stores["tiny-llama"]["in_use"]
    assert not stores["other"]["in_use"]
    assert stores["other"]["ranks"] == [0, 1]
    assert stores["other"]["num_blocks"] == 6
    assert stores["other"]["size_bytes"] >= 13 * SLOT_BYTES
    assert stores["other"]["last_write_s"] == pytest.approx(time.time(), abs=3600)
    assert stores["other"]["problems"] == []


def test_ls_of_an_empty_folder_and_of_no_folder(tmp_path: Path, capsys: Any) -> None:
    app(["kv", "ls", str(tmp_path)], exit_on_error=False, result_action="return_value")
    assert capsys.readouterr().out == f"There are no stores in {tmp_path}.\n"
    for command in ("stats", "verify"):
        with contextlib.suppress(SystemExit):
            app(["kv", command, str(tmp_path)], exit_on_error=False, result_action="return_value")
        assert capsys.readouterr().out == f"There are no stores in {tmp_path}.\n"
    with pytest.raises(DiskStoreError, match=r"the disk tier's path cannot be read: .*disk_path"):
        app(["kv", "ls", str(tmp_path / "no")], exit_on_error=False, result_action="return_value")


def test_stats_shows_the_identity_and_each_rank(kv: Callable[..., str]) -> None:
    text = kv("stats", "--store", OTHER.digest[:5])
    assert "f2" in text
    assert "tiny-llama" not in text
    (store,) = json.loads(kv("stats", "--store", OTHER.digest, "--json"))
    assert store["identity"] == msgspec.structs.asdict(OTHER)
    assert [rank["num_blocks"] for rank in store["by_rank"]] == [7, 6]
    assert [rank["block_bytes"] for rank in store["by_rank"]] == [7 * SLOT_BYTES, 6 * SLOT_BYTES]


def test_an_id_that_matches_no_store_is_an_error_that_lists_them(kv: Callable[..., str]) -> None:
    with pytest.raises(DiskStoreError, match=f"begins with xyz.*{OTHER.digest[:8]}"):
        kv("stats", "--store", "xyz")


def test_verify_finds_nothing_wrong_with_good_stores(kv: Callable[..., str], path: Path) -> None:
    with open_store(path):
        assert kv("verify") == "Read 33 blocks, 264.0 KiB: all of them are good.\n"
    result = json.loads(kv("verify", "--json"))
    expected = {"num_blocks": 33, "size_bytes": 33 * SLOT_BYTES, "bad_blocks": [], "problems": []}
    assert result == expected


def test_verify_names_each_corrupt_block(kv: Callable[..., str], path: Path) -> None:
    flip(rank_file(path), 5 * SLOT_BYTES + 100)
    flip(rank_file(path, OTHER, 1), SLOT_BYTES - 1, 7)
    text = kv("verify", status=1)
    assert f"corrupt: block {key(5).hex()} in {rank_file(path)}, slot 5: the bytes do not" in text
    assert f"corrupt: block {key(0).hex()} in {rank_file(path, OTHER, 1)}, slot 0" in text
    assert "Read 33 blocks, 264.0 KiB: 2 corrupt blocks, 0 other problems." in text
    bad = json.loads(kv("verify", "--json", status=1))["bad_blocks"]
    assert {(block["store"], block["rank"], block["slot"]) for block in bad} == {
        (IDENTITY.digest, 0, 5),
        (OTHER.digest, 1, 0),
    }
    assert kv("verify", "--store", OTHER.digest, status=1).count("corrupt: ") == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda path: flip(rank_directory(path) / INDEX_FILE, HEADER_BYTES + RECORD_BYTES + 3),
            "rank 0: the index has 1 damaged record",
        ),
        (
            lambda path: flip(rank_directory(path) / INDEX_FILE, 9),
            "rank 0: the index is unusable: its header is not one of this format",
        ),
        (
            lambda path: (rank_directory(path) / INDEX_FILE).unlink(),
            "rank 0: the index is unusable: [Errno 2] No such file",
        ),
        (
            lambda path: flip(path / IDENTITY.digest / IDENTITY_FILE, 40),
            "identity.json is missing or damaged",
        ),
        (lambda path: rank_file(path).unlink(), "No such file or directory"),
        (lambda path: os.truncate(rank_file(path), 9000), "the file ends before the block"),
    ],
)
def test_verify_names_all_other_damage(
    kv: Callable[..., str], path: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(path)
    assert words in kv("verify", status=1)
    kv("ls")
    kv("stats")


def test_verify_changes_nothing(kv: Callable[..., str], path: Path) -> None:
    flip(rank_file(path), 100)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    kv("verify", status=1)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_clean_deletes_the_stores_of_a_model(kv: Callable[..., str], path: Path) -> None:
    text = kv("clean", "--model", "other", "--yes")
    assert text.startswith(OTHER.digest[:8])
    assert "Deleted 1 store, " in text
    assert left(path) == {"tiny-llama"}


def test_clean_deletes_one_store_or_all(kv: Callable[..., str], path: Path) -> None:
    kv("clean", "--store", OTHER.digest[:5], "--yes")
    assert left(path) == {"tiny-llama"}
    kv("clean", "--all", "--yes")
    assert left(path) == set()


def test_clean_deletes_what_has_not_been_written_for_a_time(
    kv: Callable[..., str], path: Path
) -> None:
    os.utime(rank_file(path), (time.time() - 3 * 86400,) * 2)
    assert kv("clean", "--older-than", "4d", "--yes") == "No store matches; nothing was deleted.\n"
    kv("clean", "--older-than", "2d", "--yes")
    assert left(path) == {"other"}


def test_clean_without_a_choice_is_rejected(kv: Callable[..., str], path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is chosen"):
        kv("clean", "--yes")
    assert left(path) == {"tiny-llama", "other"}


def test_clean_of_a_store_in_use_deletes_nothing(kv: Callable[..., str], path: Path) -> None:
    with (
        open_store(path, identity=OTHER, rank=1),
        pytest.raises(StoreInUse, match=r"\(other\) is in use; stop the engine"),
    ):
        kv("clean", "--all", "--yes")
    assert left(path) == {"tiny-llama", "other"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "remaining"), [("y\n", 0), ("\n", 2), ("no\n", 2)])
def test_clean_asks_first(
    kv: Callable[..., str],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    remaining: int,
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert "Delete 2 stores? [y/N]" in kv("clean", "--all")
    assert len(left(path)) == remaining


def test_clean_without_a_terminal_needs_yes(
    kv: Callable[..., str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ConfigError, match="use --yes"):
        kv("clean", "--all")
    assert len(left(path)) == 2


def test_no_environment_variable_answers_for_the_operator(
    kv: Callable[..., str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LONGSHORE_YES", "LONGSHORE_ALL", "LONGSHORE_KV_CLEAN_ALL"):
        monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match="nothing is chosen"):
        app.meta(["kv", "clean", str(path)], exit_on_error=False)
    assert len(left(path)) == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800)]
)
def test_an_age_has_a_unit(text: str, seconds: int) -> None:
    assert age_s(text) == seconds
    with pytest.raises(ConfigError, match="give a number and a unit"):
        age_s(text[:-1])
