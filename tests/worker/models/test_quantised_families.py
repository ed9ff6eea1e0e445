"""Quantised matrices of every family stay as they are. On a CPU, the logits have the bits of the
dequantised model's; on a GPU they have another order of sums; and they are close if inputs are
rounded."""

import re
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor

from longshore.deploy.model.folder import read_model_folder
from longshore.worker.config import QuantisedProducts
from longshore.worker.kernels.native import native
from longshore.worker.layers.matrix_memory import MatrixMemory, Source
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.quantise import Kind, Scheme, quantise
from longshore.worker.models.families import read_model_config
from tests.conftest import TESTS
from tests.gguf.writing import changed
from tests.models import make_tiny_model
from tests.worker.kernels.variants import TRITON, using
from tests.worker.models.cases import FIRST_CASES, Case
from tests.worker.models.paged_model import PagedModel, forward_logits

pytestmark = pytest.mark.skipif(
    native() is None or not native().multiplies_bfloat16, reason="no products of bfloat16"
)
TOKEN_IDS: Final = (5, 9, 3, 17, 4, 11, 30, 2, 8)
FILES: Final = sorted(TESTS.glob("gguf/*.gguf"))
QUICK: Final = "llama", "gemma3"
FLOATS: Final = re.compile(r"(gate|router|router\.layer)\.weight$|_bias$|\.mixer\.experts\.")
"""Routers, biases, and experts without a gate become floats."""

MAX_ERROR: Final = 0.15
"""Of rounded inputs: tiny random models magnify it, and mixtures may choose other experts."""


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the tensors that stay as they are."""
    names: set[str] = set()
    add, dequantise = MatrixMemory.add, MatrixMemory.dequantise

    def note(memory: MatrixMemory, source: Source) -> None:
        names.add(source.name)
        add(memory, source)

    def drop(memory: MatrixMemory, read: object) -> None:
        names.difference_update(source.name for source in memory._sources)
        dequantise(memory, read)  # type: ignore[arg-type]

    monkeypatch.setattr(MatrixMemory, "add", note)
    monkeypatch.setattr(MatrixMemory, "dequantise", drop)
    return names


def quantised_names(model: Path) -> set[str]:
    return {name for name, each in find_weights(model).tensors.items() if each.kept_bits}


def logits(model: Path, products: QuantisedProducts | None) -> Tensor:
    return forward_logits([PagedModel(model, dtype=torch.bfloat16, products=products)], TOKEN_IDS)


def check_logits(model: Path) -> None:
    exact = logits(model, "exact")
    assert torch.equal(exact, logits(model, None))
    error = (logits(model, "int8") - exact).norm() / exact.norm()
    assert 0 < error < MAX_ERROR


@pytest.mark.parametrize("case", FIRST_CASES.values(), ids=str)
def test_integers_in_groups(case: Case, kept: set[str], tmp_path: Path) -> None:
    source, model = tmp_path / "source", tmp_path / "model"
    make_tiny_model(case.family, source, **case.settings)
    model.mkdir()
    quantise(source, read_model_config(source), Scheme("int4", 32), model, show_progress=False)
    check_logits(model)
    assert kept == quantised_names(model)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_blocks_of_gguf_files(file: Path, kept: set[str], tmp_path: Path) -> None:
    if file.stem == "bert":
        pytest.skip("an encoder, whose tokens are not computed one after the other")
    target = changed(file, tmp_path / file.name, quantise=True)
    model = read_model_folder(target, tmp_path / "state").path
    check_logits(model)
    others = quantised_names(model) - kept
    assert kept
    assert not [name for name in others if not FLOATS.search(name)]


def check_logits_on_a_gpu(model: Path, *, is_fp8: bool = False) -> None:
    def logits(products: QuantisedProducts | None) -> Tensor:
        return forward_logits([PagedModel(model, products=products)], TOKEN_IDS)

    with using(TRITON):
        plain, packed = logits(None), logits("exact on a GPU")
        rounded = logits("fp8 on a GPU")
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))
    error = (rounded - packed).norm() / packed.norm()
    assert 0 < error < MAX_ERROR if is_fp8 else error == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "stem",
    [
        pytest.param(file.stem, marks=[] if file.stem in QUICK else pytest.mark.long)
        for file in FILES
        if file.stem != "bert"
    ],
)
def test_blocks_of_gguf_files_on_a_gpu(stem: str, kept: set[str], tmp_path: Path) -> None:
    (file,) = (file for file in FILES if file.stem == stem)
    target = changed(file, tmp_path / file.name, quantise=True)
    check_logits_on_a_gpu(read_model_folder(target, tmp_path / "state").path)
    assert kept
    assert stem not in QUICK or any("embed" in name for name in kept)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("case", FIRST_CASES.values(), ids=str)
def test_linear_layers_on_a_gpu(case: Case, kind: Kind, kept: set[str], tmp_path: Path) -> None:
    source, model = tmp_path / "source", tmp_path / "model"
    make_tiny_model(case.family, source, **case.settings)
    model.mkdir()
    quantise(source, read_model_config(source), Scheme(kind, 32), model, show_progress=False)
    check_logits_on_a_gpu(model, is_fp8=kind == "fp8")
    assert kept
