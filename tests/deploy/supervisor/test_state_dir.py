"""The directory that outlives a deployment, and the seed in it."""

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from longshore.deploy.supervisor.home_dir import provide_caches
from longshore.deploy.supervisor.state_dir import StateDir, default_state_dir
from longshore.protocol.errors import ConfigError

NUM_RACING = 8
# Waits for the end of the race's pipe, so that all processes begin at once.
RACER = """
import sys
import tempfile
from pathlib import Path
from longshore.deploy.supervisor.state_dir import StateDir
print("ready", flush=True)
sys.stdin.read()
print(StateDir(Path(sys.argv[1])).block_hash_seed().hex())
"""


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_seed_is_created_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state"
    seed = StateDir(path).block_hash_seed()
    assert len(seed) == 32
    assert StateDir(path).block_hash_seed() == seed
    assert StateDir(tmp_path / "another").block_hash_seed() != seed
    (file,) = path.iterdir()
    assert (mode(path), mode(file)) == (0o700, 0o600)


def test_the_secret_of_transfers_is_created_once_and_private(tmp_path: Path) -> None:
    file = StateDir(tmp_path / "state").transfer_secret_file()
    secret = file.read_text()
    assert StateDir(tmp_path / "state").transfer_secret_file() == file
    assert (mode(file), file.read_text(), len(secret.strip())) == (0o600, secret, 40)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can use it"):
        StateDir(tmp_path / "state").transfer_secret_file()


def test_processes_that_start_together_get_the_same_seed(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path / "state")],
            stdin=read_end,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(NUM_RACING)
    ]
    os.close(read_end)
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    os.close(write_end)
    seeds = {racer.communicate(timeout=60)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * NUM_RACING
    assert seeds == {StateDir(tmp_path / "state").block_hash_seed().hex() + "\n"}
    assert len(list((tmp_path / "state").iterdir())) == 1


def test_seed_of_a_faster_process_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process creates the file between the check that it is missing and the link."""
    state = StateDir(tmp_path / "state")
    path = state.path / "block_hash_seed"
    link = os.link

    def other_is_faster(source: str, target: Path) -> None:
        path.write_text("ab" * 32)
        path.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", other_is_faster)
    assert state.block_hash_seed() == b"\xab" * 32
    assert list(state.path.iterdir()) == [path]


@pytest.mark.parametrize("bits", [0o040, 0o020, 0o004, 0o002, 0o001])
def test_directory_that_other_users_can_use_is_rejected_with_the_fix(
    tmp_path: Path, bits: int
) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(0o700 | bits)
    with pytest.raises(ConfigError, match=f"{path} has mode 07.*chmod 700 {path}"):
        StateDir(path)


def test_seed_that_other_users_can_read_is_rejected_with_the_fix(tmp_path: Path) -> None:
    StateDir(tmp_path / "state").block_hash_seed()
    file = tmp_path / "state" / "block_hash_seed"
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=f"{file} has mode 0640.*chmod 600 {file}"):
        StateDir(tmp_path / "state").block_hash_seed()


def test_directory_of_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    StateDir(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=rf"{path} belongs to another user \(uid {owner}\)"):
        StateDir(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"ab" * 31, b"ab" * 33, b"x" * 64, b"\xff" * 64, b"ab " * 21 + b"a", "²".encode() * 32],
    ids=lambda content: f"{len(content)} bytes, {content[:3]!r}",
)
def test_damaged_seed_is_an_error_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    state = StateDir(tmp_path / "state")
    file = state.path / "block_hash_seed"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{file} is damaged.*backup, or delete it"):
        state.block_hash_seed()
    assert file.read_bytes() == content


def test_directory_that_cannot_be_created_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"/proc/no/state cannot be created.*--state-dir"):
        StateDir(Path("/proc/no/state"))


def test_seed_that_cannot_be_written_is_an_error_that_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    state = StateDir(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"Operation not permitted.*--state-dir"):
        state.block_hash_seed()
    assert list(state.path.iterdir()) == []


def test_default_is_in_the_state_directory_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "longshore"
    monkeypatch.setenv("HOME", str(tmp_path))
    for not_absolute in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", not_absolute)
        assert default_state_dir() == tmp_path / ".local" / "state" / "longshore"


@pytest.fixture(params=["no passwd entry", "read-only home"])
def without_home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A user without a home that can be written to; returns the user's directory in TMPDIR."""

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    if request.param == "read-only home":
        (tmp_path / "file").touch()
        monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"longshore-home-{os.geteuid()}"


def test_without_a_home_it_is_in_tmpdir_private_with_one_warning(
    without_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = StateDir(), StateDir()
    assert first.path == second.path == without_home
    assert mode(without_home) == 0o700
    assert first.block_hash_seed() == second.block_hash_seed()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{without_home} is the state directory" in caplog.text
    assert "--state-dir" in caplog.text


def test_without_a_home_a_directory_of_others_in_tmpdir_is_rejected(without_home: Path) -> None:
    without_home.mkdir(mode=0o755)
    without_home.chmod(0o755)
    with pytest.raises(ConfigError, match="other users can use it"):
        StateDir()


def test_without_a_home_caches_of_libraries_are_in_tmpdir(without_home: Path) -> None:
    variables = {"TRITON_CACHE_DIR": "/cache"}
    provide_caches(variables)
    assert variables == {
        "TRITON_CACHE_DIR": "/cache",
        "HF_HOME": str(without_home / "huggingface"),
        "CUPY_CACHE_DIR": str(without_home / "kernel_cache"),
    }
    assert mode(without_home) == 0o700


def test_without_any_temporary_directory_the_error_says_so(
    without_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(ConfigError, match="Mount a writable volume at /tmp, or set TMPDIR"):
        StateDir()
    provide_caches({})


def test_with_a_home_caches_of_libraries_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    variables: dict[str, str] = {}
    provide_caches(variables)
    assert variables == {}


def test_no_test_uses_the_state_directory_of_the_user() -> None:
    assert not default_state_dir().is_relative_to(Path.home())


def test_a_path_may_be_text(tmp_path: Path) -> None:
    assert StateDir(str(tmp_path / "state")).path == tmp_path / "state"
