"""Rows of quantised checkpoints that keep their format: their values, and models that compute with
them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longshore.worker.config import QuantisedProducts
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.native import native
from longshore.worker.kernels.packing import values_of
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.models.families import read_model_config
from longshore.worker.ranks.parallel import Parallel
from tests.models import make_tiny_llama
from tests.worker.kernels.variants import TRITON, using
from tests.worker.loading.test_quantised_weights import (
    FOLDERS,
    every_folder,
    reference_of,
)
from tests.worker.models.paged_model import PagedModel, forward_logits
from tests.worker.models.thread_ranks import on_every_rank

GROUP: Final = 32
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)

Parts = dict[str, Tensor]


def numbers(*shape: int, bits: int, seed: int) -> Tensor:
    return torch.randint(1 << bits, shape, generator=torch.Generator().manual_seed(seed))


def words(values: Tensor, dim: int, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Packed in int32 along a dimension."""
    several = values.movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    if order:
        several = several[..., list(order)]
    packed = sum(several[..., i] << bits * i for i in range(32 // bits))
    assert isinstance(packed, Tensor)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def awq(rows: int, columns: int, seed: int) -> Parts:
    grid = columns // GROUP, rows
    return {
        "qweight": words(numbers(columns, rows, bits=4, seed=seed), 1, 4, _AWQ_ORDER),
        "qzeros": words(numbers(*grid, bits=4, seed=seed + 1), 1, 4, _AWQ_ORDER),
        "scales": scales(*grid, seed=seed).half(),
    }


def gptq(bits: int) -> Callable[[int, int, int], Parts]:
    def make(rows: int, columns: int, seed: int) -> Parts:
        grid = columns // GROUP, rows
        return {
            "qweight": words(numbers(columns, rows, bits=bits, seed=seed), 0, bits),
            "qzeros": words(numbers(*grid, bits=bits, seed=seed + 1), 1, bits),
            "scales": scales(*grid, seed=seed).half(),
            "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
        }

    return make


def packed_int4(rows: int, columns: int, seed: int) -> Parts:
    grid = rows, columns // GROUP
    return {
        "weight_packed": words(numbers(rows, columns, bits=4, seed=seed), 1, 4),
        "weight_scale": scales(*grid, seed=seed).bfloat16(),
        "weight_zero_point": words(numbers(*grid, bits=4, seed=seed + 1), 0, 4),
        "weight_shape": torch.tensor([rows, columns]),
    }


def fp8_block(rows: int, columns: int, seed: int) -> Parts:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return {
        "weight": weight.to(torch.float8_e4m3fn),
        "weight_scale_inv": scales(-(-rows // GROUP), columns // GROUP, seed=seed),
    }


def scales(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + 2)) / 64 + 0.001


_CT: Final = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": GROUP,
    "symmetric": False,
}
METHODS: Final[dict[str, tuple[dict[str, Any], Callable[[int, int, int], Parts]]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq(4)),
    "gptq_2bit": ({"quant_method": "gptq", "bits": 2, "group_size": GROUP}, gptq(2)),
    "gptq_8bit": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP}, gptq(8)),
    "ct_int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _CT}},
            "ignore": ["lm_head"],
        },
        packed_int4,
    ),
    "fp8_block": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8_block),
}


def make_quantised(path: Path, method: str) -> Path:
    """A tiny llama whose linear layers are in groups of 32, as of published models: the files of
    `quantised/` have smaller ones."""
    config, make = METHODS[method]
    make_tiny_llama(path)
    tensors = load_file(path / "model.safetensors")
    made: Parts = {}
    for seed, (name, tensor) in enumerate(sorted(tensors.items())):
        if "_proj." in name:
            parts = make(*tensor.shape, 10 * seed)
            module = name.removesuffix(".weight")
            made |= {f"{module}.{end}": part for end, part in parts.items()}
        else:
            made[name] = tensor
    save_file(made, path / "model.safetensors")
    path.joinpath("config.json").write_text(
        json.dumps(
            {**json.loads((path / "config.json").read_text()), "quantization_config": config}
        )
    )
    return path


@contextmanager
def kept(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The reader, and the forms of the tensors that can stay quantised."""
    weights = find_weights(folder)
    with weights.reader() as read:
        forms = {name: read.form(name) for name in weights.tensors}
        yield read, {name: form for name, form in forms.items() if form is not None}


def check_rows(folder: Path) -> int:
    """Returns the number of tensors that stay quantised."""
    with kept(folder) as (read, forms):
        for name, form in forms.items():
            whole = read(name, ()).movedim(form.column_dim, -1)
            whole = whole.reshape(-1, whole.shape[-1])
            count, columns = whole.shape
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0))[:40]
            found = read.rows(name, order, slice(0, columns))
            assert found.packing == form.packing
            assert torch.equal(values_of(found), whole[order]), name
            last = slice(columns - form.packing.span, columns)
            part = values_of(read.rows(name, order[:3], last))
            assert torch.equal(part, whole[order[:3], last]), name
        return len(forms)


@every_folder
def test_rows_of_the_tools_files_have_the_values_that_dequantising_gives(folder: Path) -> None:
    num_kept = check_rows(folder)
    of_groups = ("int4_channel", "ct_int8", "ct_int8_asym", "mxfp4", "gptq_3bit", "gptq_8bit")
    if folder.name.endswith(of_groups):
        assert num_kept == len(reference_of(folder))


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_usual_groups_have_the_values_that_dequantising_gives(
    method: str, tmp_path: Path
) -> None:
    folder = make_quantised(tmp_path, method)
    assert check_rows(folder) == 7 * read_model_config(folder).num_layers


def test_groups_in_another_order_are_dequantised(tmp_path: Path) -> None:
    folder = make_quantised(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx"))
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, folder / "model.safetensors")
    with kept(folder) as (_, forms):
        assert name.replace("g_idx", "weight") not in forms


MIXED: Final = ("gpt_oss-mxfp4", "llama-auto_round", "llama-ct_int8_asym", "llama-ct_mxfp4")
IN_FP8: Final = ("llama-ct_fp8_channel", "llama-fp8_tensor", "llama-ct_mxfp8")


@pytest.fixture(scope="session", params=[*METHODS, *MIXED, *IN_FP8])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in METHODS:
        return make_quantised(tmp_path_factory.mktemp(request.param), request.param)
    return next(folder for folder in FOLDERS if folder.name == request.param)


@pytest.mark.skipif(
    native() is None or not native().multiplies_bfloat16, reason="no products of bfloat16"
)
@pytest.mark.parametrize(("num_shards", "num_stages"), [(1, 1), (2, 1), (1, 2)])
def test_logits_have_the_bits_of_the_dequantised_model(
    model: Path, num_shards: int, num_stages: int
) -> None:
    token_ids = [5, 9, 3, 17, 4, 11, 30, 2, 8]
    if num_stages > read_model_config(model).num_layers:
        pytest.skip("the model has one layer")

    def logits(products: QuantisedProducts | None, places: list[Parallel]) -> Tensor:
        stages = [
            PagedModel(model, dtype=torch.bfloat16, parallel=place, products=products)
            for place in places
        ]
        return forward_logits(stages, token_ids)

    packed, plain = (
        on_every_rank(num_shards, num_stages, partial(logits, products))
        for products in ("exact", None)
    )
    assert all(map(torch.equal, packed, plain))


@pytest.mark.slow
def test_on_a_gpu_logits_are_those_of_the_dequantised_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[DeviceMatrix] = []
    product = DeviceMatrix.product

    def counted(matrix: DeviceMatrix, *args: Any, **kwargs: Any) -> Tensor:
        computed.append(matrix)
        return product(matrix, *args, **kwargs)

    monkeypatch.setattr(DeviceMatrix, "product", counted)
    with using(TRITON):
        packed, plain = (
            forward_logits([PagedModel(model, products=products)], [5, 9, 3, 17, 4, 11, 30, 2, 8])
            for products in ("exact on a GPU", None)
        )
        if model.name in IN_FP8:
            rounded = forward_logits(
                [PagedModel(model, products="fp8 on a GPU")], [5, 9, 3, 17, 4, 11, 30, 2, 8]
            )
            assert 0.002 < (rounded - plain).norm() / plain.norm() < 0.1
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-4 * float(plain.abs().max()))
    # The one has only experts that are quantised. In the other, what is computed together with a
    # quantised projection becomes floats, and so does that.
    assert computed or model.name in ("gpt_oss-mxfp4", "llama-auto_round")
