"""Tensors in GGUF files: the values of all types, and files that are damaged."""

import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from longshore.protocol.gguf_header import read_gguf_header
from longshore.worker.errors import BrokenCheckpoint, UnsupportedModel
from longshore.worker.loading import gguf_files
from longshore.worker.loading.checkpoint import find_weights
from longshore.worker.loading.gguf_files import GgufFiles, readable_types
from tests.fuzz.mutations import mutated_bytes, refusal
from tests.fuzz.test_files import read_all_tensors
from tests.gguf.cases import CASES, FILES, NVFP4, TYPES, TYPES_SHAPE, GgufCase
from tests.gguf.reference import LAYOUTS, any_blocks, reference

ROWS, COLUMNS = TYPES_SHAPE
ALL = (slice(None), slice(None))
BOUND = 2.0**-22
"""Relative to the largest value: two products and a difference in float32."""
LOSSES = {
    "F32": 0.0,
    "F16": 0.0003,
    "BF16": 0.002,
    "Q8_0": 0.006,
    "Q6_K": 0.02,
    "Q5_K": 0.04,
    "Q5_1": 0.04,
    "Q5_0": 0.045,
    "Q4_1": 0.08,
    "Q4_K": 0.08,
    "IQ4_NL": 0.08,
    "IQ4_XS": 0.08,
    "Q4_0": 0.09,
    "NVFP4": 0.1,
    "MXFP4": 0.13,
    "IQ3_S": 0.15,
    "Q3_K": 0.16,
    "IQ3_XXS": 0.2,
    "IQ2_S": 0.26,
    "Q2_K": 0.28,
    "IQ2_XS": 0.31,
    "IQ2_XXS": 0.35,
    "IQ1_M": 0.48,
    "IQ1_S": 0.52,
    "TQ1_0": 0.85,
    "TQ2_0": 0.85,
}
"""What values of N(0, 1) lose when they are stored: the error that is allowed, as root mean square.
TQ1 and TQ2 are for models that have only three different values."""


def write_file(
    folder: Path, name: str, stored: np.ndarray, kind: GGMLQuantizationType | None
) -> Path:
    """A file of one tensor of values or of blocks of a type."""
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_uint32("qwen2.attention.head_count", 4)
    writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(weights: GgufFiles, name: str) -> np.ndarray:
    with weights.reader() as read:
        values: np.ndarray = read(name, ALL).numpy()
        part = read(name, (slice(1, 7, 2), slice(100, 300)))
        assert np.array_equal(part.numpy(), values[1:7:2, 100:300])
        assert read(name, (slice(3, 3), slice(None))).shape == (0, values.shape[1])
    return values


@pytest.fixture(autouse=True)
def few_values_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are computed in several parts, which end within a tensor."""
    monkeypatch.setattr(gguf_files, "_VALUES_AT_A_TIME", 3 * COLUMNS)


def assert_equal(values: np.ndarray, exact: np.ndarray) -> None:
    assert values.shape == exact.shape
    assert np.isfinite(exact).all()
    assert np.abs(values - exact).max() <= BOUND * np.abs(exact).max()


def loss(values: np.ndarray, original: np.ndarray) -> float:
    return float(np.sqrt(np.square(values - original).mean() / np.square(original).mean()))


def test_every_type_is_tested() -> None:
    assert LOSSES.keys() == LAYOUTS.keys() == readable_types().keys()


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_those_that_llama_cpp_stored(name: str) -> None:
    weights = GgufFiles(TYPES)
    assert (weights.tensors[name].shape, weights.tensors[name].dtype) == (TYPES_SHAPE, name)
    (tensor,) = (
        each for each in gguf.GGUFReader(TYPES / "model.gguf").tensors if each.name == name
    )
    exact = reference(np.array(tensor.data).view(np.uint8), name)
    assert_equal(read_all(weights, name), exact)
    original = read_all(weights, "F32").astype(np.float64)
    assert loss(exact, original) <= LOSSES[name]
    for shift, axis in ((1, 0), (1, 1), (16, 1), (128, 1)):  # another order
        assert loss(np.roll(exact, shift, axis), original) > 1.3 > LOSSES[name]


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_those_of_the_reference_for_all_codes(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    stored = any_blocks(name, (ROWS, COLUMNS // block), np.random.default_rng(0))
    write_file(tmp_path, "token_embd.weight", stored, kind)
    weights = GgufFiles(tmp_path)
    assert weights.tensors["model.embed_tokens.weight"].shape == TYPES_SHAPE
    assert_equal(read_all(weights, "model.embed_tokens.weight"), reference(stored, name))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_family_has_the_values_of_every_type(case: GgufCase, tmp_path: Path) -> None:
    """Compared with a file that has them as floats."""
    types = list(LAYOUTS)
    used = set()
    for turn in range(0, len(types), 9):  # the families have 9 matrices or more
        folders = tmp_path / f"{turn}-stored", tmp_path / f"{turn}-floats"
        used |= write_in_types(case.file, *folders, types[turn:] + types[:turn])
        stored, floats = map(GgufFiles, folders)
        assert stored.tensors.keys() == floats.tensors.keys()
        with stored.reader() as read, floats.reader() as read_floats:
            for name in stored.tensors:
                assert_equal(read(name, ()).numpy(), read_floats(name, ()).numpy())
                part = (slice(min(1, stored.tensors[name].shape[0] - 1), 3),)
                assert_equal(read(name, part).numpy(), read_floats(name, part).numpy())
    assert used == set(types)


SIZES = (
    "attention.head_count", "attention.head_count_kv", "ssm.group_count", "ssm.time_step_rank",
    "ssm.state_size", "ssm.inner_size",
)  # fmt: skip
"""Settings that say what rows are."""


def write_in_types(path: Path, stored_in: Path, floats_in: Path, types: list[str]) -> set[str]:
    """Two files with the tensors of a family, whose rows have 256 values: one in each of the types
    in turn, and the same values as floats. Returns the types that occur."""
    reader = gguf.GGUFReader(path)
    rng = np.random.default_rng(0)
    architecture = reader.fields["general.architecture"].contents()
    writers = []
    for folder in (stored_in, floats_in):
        folder.mkdir()
        writers.append(gguf.GGUFWriter(folder / "model.gguf", architecture))
        for key in SIZES:
            field = reader.fields.get(f"{architecture}.{key}")
            if field is not None:
                count = field.contents()
                writers[-1].add_key_value(field.name, count, field.types[0], field.types[-1])
    rest = iter(types * 9)
    used = set()
    for tensor in reader.tensors:
        shape = tensor.data.shape
        if len(shape) == 1 or shape[-1] < 8:
            for writer in writers:
                writer.add_tensor(tensor.name, np.array(tensor.data))
            continue
        rows = min(shape[-2], 32) if len(shape) == 2 and "embd" in tensor.name else shape[-2]
        shape = (*shape[:-2], 256 if "attn_k_b" in tensor.name else rows, 256)
        name = next(rest)
        used.add(name)
        kind = GGMLQuantizationType[name]
        blocks = 256 // gguf.GGML_QUANT_SIZES[kind][0]
        blocks_of = any_blocks(name, (prod(shape[:-1]), blocks), rng)
        values = reference(blocks_of, name).astype(np.float32).reshape(shape)
        writers[0].add_tensor(tensor.name, blocks_of.reshape(*shape[:-1], -1), raw_dtype=kind)
        writers[1].add_tensor(tensor.name, values)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return used


@pytest.mark.parametrize(("name", "num_matrices"), [("nvfp4", 7), ("nvfp4-experts", 10)])
def test_matrices_in_nvfp4_have_the_values_of_the_checkpoint_that_was_converted(
    name: str, num_matrices: int
) -> None:
    """Of a checkpoint of Model Optimizer: each matrix has a factor, also in a stack of experts."""
    weights = GgufFiles(FILES / name)
    with np.load(NVFP4[name] / "reference.npz") as reference, weights.reader() as read:
        assert len(reference) == num_matrices
        for name in reference:
            assert weights.tensors[name].dtype == "NVFP4"
            assert_equal(read(name, ()).numpy(), reference[name])
    assert not [name for name in weights.tensors if "scale" in name]


def test_values_that_the_package_cannot_compute_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path, "token_embd.weight", np.ones((4, 32), np.int32), None)
    with pytest.raises(UnsupportedModel, match=r"token_embd.weight is stored as I32. Supported: "):
        find_weights(tmp_path)


def test_tensors_that_the_model_does_not_have_keep_their_names(tmp_path: Path) -> None:
    write_file(tmp_path, "blk.0.attn_unheard_of.weight", np.ones((4, 32), np.float32), None)
    assert list(find_weights(tmp_path).tensors) == ["blk.0.attn_unheard_of.weight"]


def header_of(path: Path) -> int:
    return read_gguf_header(path).data_begin


def patched(content: bytes, place: int, value: int, width: int = 8) -> bytes:
    return content[:place] + value.to_bytes(width, "little") + content[place + width :]


def place_of(content: bytes, text: str) -> int:
    """Where the type of a value begins, or the number of dimensions of a tensor."""
    return content.index(len(text).to_bytes(8, "little") + text.encode()) + 8 + len(text)


HUGE = 1 << 60
DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda good: b"", "too short"),
    "another file": (lambda good: b"PK\x03\x04" + good[4:], "does not begin as a GGUF file"),
    "version": (lambda good: patched(good, 4, 1, 4), "its version is 1"),
    "big-endian": (lambda good: patched(good, 4, 3 << 24, 4), "its version is 50331648"),
    "tensors": (lambda good: patched(good, 8, HUGE), "a count in it is wrong"),
    "values": (lambda good: patched(good, 16, HUGE), "a count in it is wrong"),
    "a key": (lambda good: patched(good, 24, HUGE), "a count in it is wrong"),
    "a list": (
        lambda good: patched(good, place_of(good, "tokenizer.ggml.tokens") + 8, HUGE),
        "a count in it is wrong",
    ),
    "a type of a value": (
        lambda good: patched(good, place_of(good, "llama.block_count"), 99, 4),
        "a value of the unknown type 99",
    ),
    "lists of lists": (
        lambda good: patched(good, place_of(good, "tokenizer.ggml.tokens") + 4, 9, 4),
        "a value of the unknown type 9",
    ),
    "a text": (lambda good: good.replace(b"general.type", b"general.\xff\xff\xff\xff"), "utf-8"),
    "twice": (
        lambda good: good.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"),
        r"it has the tensor blk\.0\.attn_k\.weight twice",
    ),
    "alignment": (
        lambda good: good.replace(b"llama.block_count", b"general.alignment").replace(
            b"general.alignment\x04\0\0\0\x02", b"general.alignment\x04\0\0\0\0"
        ),
        r"general\.alignment=0 is not a number of bytes",
    ),
    "dimensions": (
        lambda good: patched(good, place_of(good, "token_embd.weight"), 5, 4),
        "token_embd.weight has 5 dimensions",
    ),
    "no elements": (
        lambda good: patched(good, place_of(good, "token_embd.weight") + 4, 0),
        "token_embd.weight has no elements",
    ),
    "a shape": (
        lambda good: patched(good, place_of(good, "token_embd.weight") + 12, HUGE),
        "token_embd.weight ends at byte",
    ),
    "a type": (
        lambda good: patched(good, place_of(good, "token_embd.weight") + 20, 77, 4),
        "token_embd.weight is stored as type 77",
    ),
    "an offset": (
        lambda good: patched(good, place_of(good, "token_embd.weight") + 24, 1 << 40),
        "token_embd.weight begins at byte",
    ),
    "an offset at the end": (
        lambda good: patched(good, place_of(good, "token_embd.weight") + 24, 99_000 - 12_000),
        "token_embd.weight ends at byte",
    ),
    "cut in the header": (lambda good: good[:3000], "a count in it is wrong"),
    "cut in the data": (lambda good: good[:-40], "ends at byte"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_before_memory_is_spent(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    good = (FILES / "llama.gguf").read_bytes()
    content = change(good)
    assert content != good
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises((BrokenCheckpoint, UnsupportedModel), match=message) as error:
            find_weights(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_of_a_file_is_checked_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from longshore.deploy.model.folder import read_model_folder\n"
        "from longshore.worker.loading.checkpoint import find_weights\n"
        "from longshore.worker.models.families import check_weights, read_model_config\n"
        "path = read_model_folder(sys.argv[1], Path(sys.argv[2])).path\n"
        "check_weights(read_model_config(path), find_weights(path))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, FILES / "qwen2.gguf", tmp_path / "state"], check=True
    )


def test_forty_mutations_are_read_or_refused(tmp_path: Path) -> None:
    good = (FILES / "gpt-oss.gguf").read_bytes()
    header = header_of(FILES / "gpt-oss.gguf")
    path = tmp_path / "mutated.gguf"
    rng = random.Random(0)
    errors = []
    for _ in range(40):
        path.write_bytes(mutated_bytes(good[:header], rng) + good[header:])
        errors.append(
            refusal(lambda: read_all_tensors(tmp_path), BrokenCheckpoint, UnsupportedModel)
        )
    refused = [str(error) for error in errors if error is not None]
    assert 0 < len(refused) < 40
    assert all(str(path) in error for error in refused)
