"""Messages name the distribution as it is installed."""

import sys
from pathlib import Path

import pytest

from longshore.protocol.install_command import install_command


def test_the_command_has_the_name_of_the_installed_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {
        "another": "another.longshore:main",
        "renamed-serve": "longshore.deploy.__main__:main",
    }.items():
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[console_scripts]\nlongshore = {script}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("s3") == "pip install 'renamed-serve[s3]'"


def test_without_an_installation_the_command_is_for_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("s3") == "pip install '.[s3]'"
