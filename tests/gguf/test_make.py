"""The GGUF files beside this test are those that llama.cpp's converter makes."""

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

from tests.gguf.cases import CASES, FILES
from tests.gguf.ggml import Ggml
from tests.gguf.reference import LAYOUTS, any_blocks, reference

PACKAGE: Final = "llama-cpp-python"
VERSION: Final = "0.3.36"
DIGEST: Final = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCES: Final = ("conversion/", "convert_hf_to_gguf.py", "ggml/", "gguf-py/")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama_cpp")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    package = ["--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
    if subprocess.run([*command, *package], check=False).returncode != 0:
        pytest.skip(f"the sources of {PACKAGE} cannot be downloaded")
    (archive,) = folder.glob("*.tar.gz")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == DIGEST
    root = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
    with tarfile.open(archive) as opened:
        wanted = tuple(root + name for name in SOURCES)
        members = [each for each in opened.getmembers() if each.name.startswith(wanted)]
        opened.extractall(folder, members, filter="data")
    return folder / root


@pytest.mark.long
def test_the_files_are_what_the_converter_makes(llama_cpp: Path, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "tests.gguf.make", llama_cpp, tmp_path],
        check=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
    )
    names = [case.file.name for case in CASES]
    names += [str(path.relative_to(FILES)) for path in FILES.glob("[!_]*/*.*")]
    assert {"nvfp4/model.gguf", "types/model.gguf", "tokenizers/bert.json"} < set(names)
    for name in names:
        if (tmp_path / name).read_bytes() != (FILES / name).read_bytes():
            check_same_but_for_rounding(tmp_path / name, FILES / name)


def check_same_but_for_rounding(made: Path, expected: Path) -> None:
    """Exponentials in the converter are rounded otherwise on other processors."""
    assert made.suffix == ".gguf", made.name
    one, other = GGUFReader(made), GGUFReader(expected)
    assert one.fields.keys() == other.fields.keys(), made.name
    for name, field in other.fields.items():
        assert one.fields[name].contents() == field.contents(), (made.name, name)
    for tensor, wanted in zip(one.tensors, other.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type) == (wanted.name, wanted.tensor_type)
        np.testing.assert_allclose(tensor.data, wanted.data, rtol=2**-22)


def test_the_reference_has_the_values_of_llama_cpp(llama_cpp: Path, tmp_path: Path) -> None:
    ggml = Ggml(llama_cpp, tmp_path)
    rng = np.random.default_rng(0)
    for name in LAYOUTS:
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        stored = any_blocks(name, (64, 4096 // block), rng)
        exact = reference(stored, name)
        assert np.abs(ggml.dequantise(stored, name) - exact).max() < 2**-22 * np.abs(exact).max()
