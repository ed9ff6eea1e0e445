"""The values of ggml's element types in float64, by the layout of their blocks in llama.cpp
(`ggml-common.h`): for each element a formula of its place in the block.

Only the grids that IQ1 to IQ3 choose from are those of the `gguf` package.
"""

from collections.abc import Callable
from functools import cache
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType, quants

Values = np.ndarray

_FP4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_IQ4: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64
)
_I32: Final = np.arange(32)
_I64: Final = np.arange(64)
_I: Final = np.arange(256)

LAYOUTS: Final[dict[str, np.dtype]] = {
    name: np.dtype([tuple(field.split(":")) for field in fields.split()])
    for name, fields in {
        "F32": "value:<f4",
        "F16": "value:<f2",
        "BF16": "value:<u2",
        "Q4_0": "d:<f2 qs:(16,)u1",
        "Q4_1": "d:<f2 m:<f2 qs:(16,)u1",
        "Q5_0": "d:<f2 qh:(1,)<u4 qs:(16,)u1",
        "Q5_1": "d:<f2 m:<f2 qh:(1,)<u4 qs:(16,)u1",
        "Q8_0": "d:<f2 qs:(32,)i1",
        "Q2_K": "scales:(16,)u1 qs:(64,)u1 d:<f2 dmin:<f2",
        "Q3_K": "hmask:(32,)u1 qs:(64,)u1 scales:(12,)u1 d:<f2",
        "Q4_K": "d:<f2 dmin:<f2 scales:(12,)u1 qs:(128,)u1",
        "Q5_K": "d:<f2 dmin:<f2 scales:(12,)u1 qh:(32,)u1 qs:(128,)u1",
        "Q6_K": "ql:(128,)u1 qh:(64,)u1 scales:(16,)i1 d:<f2",
        "TQ1_0": "qs:(48,)u1 qh:(4,)u1 d:<f2",
        "TQ2_0": "qs:(64,)u1 d:<f2",
        "MXFP4": "e:u1 qs:(16,)u1",
        "NVFP4": "d:(4,)u1 qs:(32,)u1",
        "IQ1_S": "d:<f2 qs:(32,)u1 qh:(8,)<u2",
        "IQ1_M": "qs:(32,)u1 qh:(16,)u1 scales:(4,)<u2",
        "IQ2_XXS": "d:<f2 qs:(16,)<u4",
        "IQ2_XS": "d:<f2 qs:(32,)<u2 scales:(8,)u1",
        "IQ2_S": "d:<f2 qs:(32,)u1 signs:(32,)u1 qh:(8,)u1 scales:(8,)u1",
        "IQ3_XXS": "d:<f2 qs:(64,)u1 rest:(8,)<u4",
        "IQ3_S": "d:<f2 qs:(64,)u1 qh:(8,)u1 signs:(32,)u1 scales:(4,)u1",
        "IQ4_NL": "d:<f2 qs:(16,)u1",
        "IQ4_XS": "d:<f2 scales_h:(1,)<u2 scales_l:(4,)u1 qs:(128,)u1",
    }.items()
}
"""The fields of a block of each type."""


def reference(stored: np.ndarray, name: str) -> Values:
    """stored: (rows, bytes) of a type."""
    blocks = np.ascontiguousarray(stored).view(LAYOUTS[name]).reshape(-1)
    values = _VALUES[name](blocks)
    assert values.dtype == np.float64
    return values.reshape(len(stored), -1)


def _bits(
    blocks: np.ndarray, field: str, at: np.ndarray, shift: np.ndarray | int, mask: int
) -> Values:
    """Of each element: some bits of the word `at` in a field."""
    return blocks[field][:, at].astype(np.int64) >> shift & mask


def _number(blocks: np.ndarray, field: str) -> Values:
    return blocks[field].astype(np.float64)[:, None]


def _bfloat16(blocks: np.ndarray) -> Values:
    words = blocks["value"].astype(np.int64)
    sign, exponent, fraction = 1 - (words >> 15) * 2, words >> 7 & 0xFF, words & 0x7F
    return sign * np.ldexp(np.where(exponent, 128 + fraction, 2 * fraction), exponent - 134)


def _halves(blocks: np.ndarray, field: str = "qs") -> Values:
    """Four bits of each of 32 elements: the first half of them in the low bits."""
    return _bits(blocks, field, _I32 % 16, 4 * (_I32 // 16), 15)


def _q4_0(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * (_halves(blocks) - 8)


def _q4_1(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * _halves(blocks) + _number(blocks, "m")


def _fifth_bit(blocks: np.ndarray) -> Values:
    return 16 * _bits(blocks, "qh", 0 * _I32, _I32, 1)


def _q5_0(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * (_halves(blocks) + _fifth_bit(blocks) - 16)


def _q5_1(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * (_halves(blocks) + _fifth_bit(blocks)) + _number(blocks, "m")


def _q8_0(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * blocks["qs"]


def _two_bits(blocks: np.ndarray) -> Values:
    """Of 128 elements each: a byte has those of the same place in four runs of 32."""
    return _bits(blocks, "qs", 32 * (_I // 128) + _I % 32, 2 * (_I // 32 % 4), 3)


def _q2_k(blocks: np.ndarray) -> Values:
    scale = _number(blocks, "d") * _bits(blocks, "scales", _I // 16, 0, 15)
    least = _number(blocks, "dmin") * _bits(blocks, "scales", _I // 16, 4, 15)
    return scale * _two_bits(blocks) - least


def _q3_k(blocks: np.ndarray) -> Values:
    number = _two_bits(blocks) + 4 * _bits(blocks, "hmask", _I % 32, _I // 32, 1) - 4
    run = _I // 16  # 16 scales: four bits in eight bytes, two bits in the last four
    low = _bits(blocks, "scales", run % 8, 4 * (run // 8), 15)
    high = _bits(blocks, "scales", 8 + run % 4, 2 * (run // 4), 3)
    return _number(blocks, "d") * (low + 16 * high - 32) * number


def _scale_and_min(blocks: np.ndarray) -> tuple[Values, Values]:
    """Of Q4_K and Q5_K: six bits each for every run of 32. The last four have their highest two
    bits in the bytes of the first four."""
    run = _I // 32
    first = run % 4
    scale = np.where(
        run < 4,
        _bits(blocks, "scales", first, 0, 63),
        _bits(blocks, "scales", 8 + first, 0, 15) + 16 * _bits(blocks, "scales", first, 6, 3),
    )
    least = np.where(
        run < 4,
        _bits(blocks, "scales", 4 + first, 0, 63),
        _bits(blocks, "scales", 8 + first, 4, 15) + 16 * _bits(blocks, "scales", 4 + first, 6, 3),
    )
    return _number(blocks, "d") * scale, _number(blocks, "dmin") * least


def _four_bits(blocks: np.ndarray) -> Values:
    """Of 64 elements each: the first 32 in the low bits."""
    return _bits(blocks, "qs", 32 * (_I // 64) + _I % 32, 4 * (_I // 32 % 2), 15)


def _q4_k(blocks: np.ndarray) -> Values:
    scale, least = _scale_and_min(blocks)
    return scale * _four_bits(blocks) - least


def _q5_k(blocks: np.ndarray) -> Values:
    scale, least = _scale_and_min(blocks)
    fifth = _bits(blocks, "qh", _I % 32, _I // 32, 1)
    return scale * (_four_bits(blocks) + 16 * fifth) - least


def _q6_k(blocks: np.ndarray) -> Values:
    low = _bits(blocks, "ql", 64 * (_I // 128) + _I % 64, 4 * (_I // 64 % 2), 15)
    high = _bits(blocks, "qh", 32 * (_I // 128) + _I % 32, 2 * (_I // 32 % 4), 3)
    scale = _number(blocks, "d") * blocks["scales"][:, _I // 16]
    return scale * (low + 16 * high - 32)


def _tq1_0(blocks: np.ndarray) -> Values:
    """Five digits of base 3 per byte, as the first digits after the point of a number below 1."""
    place = np.concatenate([_I[:160] % 32, 32 + _I[:80] % 16, 48 + _I[:16] % 4])
    digit = np.concatenate([_I[:160] // 32, _I[:80] // 16, _I[:16] // 4])
    stored = np.concatenate([blocks["qs"], blocks["qh"]], axis=1)[:, place].astype(np.int64)
    return _number(blocks, "d") * (stored * 3**digit % 256 * 3 // 256 - 1)


def _tq2_0(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * (_two_bits(blocks) - 1)


def _mxfp4(blocks: np.ndarray) -> Values:
    return np.ldexp(_FP4[_halves(blocks)], blocks["e"].astype(np.int64)[:, None] - 127)


def _nvfp4(blocks: np.ndarray) -> Values:
    codes = _bits(blocks, "qs", 8 * (_I64 // 16) + _I64 % 8, 4 * (_I64 // 8 % 2), 15)
    scale = _bits(blocks, "d", _I64 // 16, 0, 0x7F)  # E4M3 without a sign
    exponent, fraction = scale >> 3, scale & 7
    scales = np.ldexp(np.where(exponent, 8 + fraction, 2 * fraction), exponent - 10)
    return np.where(scale == 0x7F, 0.0, scales) * _FP4[codes]


@cache
def _grid(name: str) -> np.ndarray:
    kind = quants._type_traits[GGMLQuantizationType[name]]
    kind.init_grid()
    grid: np.ndarray = kind.grid[0, 0].astype(np.float64)
    return grid


def _of_grid(name: str, index: Values) -> Values:
    """index: of the entry of each element."""
    grid = _grid(name)
    found: Values = grid[index, _I % grid.shape[1]]
    return found


def _sign(blocks: np.ndarray) -> Values:
    """A bit for each element."""
    return 1 - 2 * _bits(blocks, "signs", _I // 8, _I % 8, 1)


def _sign_of_seven(seven: Values) -> Values:
    """Seven bits for eight elements: the number of negative ones is even."""
    last = sum(seven >> bit & 1 for bit in range(7)) & 1
    return 1 - 2 * ((seven | last << 7) >> _I % 8 & 1)


def _scale_of_16(blocks: np.ndarray) -> Values:
    """Of IQ2_XS and IQ2_S."""
    number = _bits(blocks, "scales", _I // 32, 4 * (_I // 16 % 2), 15)
    return _number(blocks, "d") * (0.5 + number) / 4


def _iq2_xxs(blocks: np.ndarray) -> Values:
    """Of 32 elements each: four entries in a word, and four times seven signs in the next one."""
    eight = _I // 8 % 4
    word = 2 * (_I // 32)
    index = _bits(blocks, "qs", word, 8 * eight, 0xFF)
    signs = _sign_of_seven(_bits(blocks, "qs", word + 1, 7 * eight, 0x7F))
    scale = _number(blocks, "d") * (0.5 + _bits(blocks, "qs", word + 1, 28, 15)) / 4
    return scale * _of_grid("IQ2_XXS", index) * signs


def _iq2_xs(blocks: np.ndarray) -> Values:
    index = _bits(blocks, "qs", _I // 8, 0, 0x1FF)
    signs = _sign_of_seven(_bits(blocks, "qs", _I // 8, 9, 0x7F))
    return _scale_of_16(blocks) * _of_grid("IQ2_XS", index) * signs


def _iq2_s(blocks: np.ndarray) -> Values:
    high = _bits(blocks, "qh", _I // 32, 2 * (_I // 8 % 4), 3)
    index = _bits(blocks, "qs", _I // 8, 0, 0xFF) + 256 * high
    return _scale_of_16(blocks) * _of_grid("IQ2_S", index) * _sign(blocks)


def _iq3_xxs(blocks: np.ndarray) -> Values:
    index = _bits(blocks, "qs", _I // 4, 0, 0xFF)
    signs = _sign_of_seven(_bits(blocks, "rest", _I // 32, 7 * (_I // 8 % 4), 0x7F))
    scale = _number(blocks, "d") * (0.5 + _bits(blocks, "rest", _I // 32, 28, 15)) / 2
    return scale * _of_grid("IQ3_XXS", index) * signs


def _iq3_s(blocks: np.ndarray) -> Values:
    high = _bits(blocks, "qh", _I // 32, _I // 4 % 8, 1)
    index = _bits(blocks, "qs", _I // 4, 0, 0xFF) + 256 * high
    scale = 1 + 2 * _bits(blocks, "scales", _I // 64, 4 * (_I // 32 % 2), 15)
    return _number(blocks, "d") * scale * _of_grid("IQ3_S", index) * _sign(blocks)


def _iq1_s(blocks: np.ndarray) -> Values:
    high = _bits(blocks, "qh", _I // 32, 3 * (_I // 8 % 4), 7)
    index = _bits(blocks, "qs", _I // 8, 0, 0xFF) + 256 * high
    scale = 1 + 2 * _bits(blocks, "qh", _I // 32, 12, 7)
    shift = np.where(_bits(blocks, "qh", _I // 32, 15, 1), -0.125, 0.125)
    return _number(blocks, "d") * scale * (_of_grid("IQ1_S", index) + shift)


def _iq1_m(blocks: np.ndarray) -> Values:
    """The scale of all is in the highest four bits of the four words of scales."""
    words = blocks["scales"].astype(np.int64) >> 12
    of_all = sum(words[:, place] << 4 * place for place in range(4)).astype("<u2").view("<f2")
    scale = 1 + 2 * _bits(blocks, "scales", _I // 64, 3 * (_I // 16 % 4), 7)
    of_eight = 4 * (_I // 8 % 2)
    high = _bits(blocks, "qh", _I // 16, of_eight, 7)
    index = _bits(blocks, "qs", _I // 8, 0, 0xFF) + 256 * high
    shift = np.where(_bits(blocks, "qh", _I // 16, of_eight + 3, 1), -0.125, 0.125)
    return of_all.astype(np.float64)[:, None] * scale * (_of_grid("IQ1_M", index) + shift)


def _iq4_nl(blocks: np.ndarray) -> Values:
    return _number(blocks, "d") * _IQ4[_halves(blocks)]


def _iq4_xs(blocks: np.ndarray) -> Values:
    low = _bits(blocks, "scales_l", _I // 64, 4 * (_I // 32 % 2), 15)
    high = _bits(blocks, "scales_h", 0 * _I, 2 * (_I // 32), 3)
    codes = _bits(blocks, "qs", 16 * (_I // 32) + _I % 16, 4 * (_I // 16 % 2), 15)
    return _number(blocks, "d") * (low + 16 * high - 32) * _IQ4[codes]


_VALUES: Final[dict[str, Callable[[np.ndarray], Values]]] = {
    "F32": lambda blocks: _number(blocks, "value"),
    "F16": lambda blocks: _number(blocks, "value"),
    "BF16": _bfloat16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def any_blocks(name: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bits whose scales are finite. shape: blocks per row."""
    layout = LAYOUTS[name]
    rows, count = shape
    stored = rng.integers(0, 256, (rows, count * layout.itemsize), dtype=np.uint8)
    blocks = stored.view(layout)
    for field in ("d", "m", "dmin", "value"):
        if field in (layout.names or ()) and layout[field].kind == "f":
            blocks[field] = rng.standard_normal(blocks.shape)
    if name == "BF16":
        blocks["value"] &= 0xBFFF
    if name == "MXFP4":
        blocks["e"] = rng.integers(100, 140, blocks.shape)
    if name == "NVFP4":
        blocks["d"] &= 0x7E
    if name == "IQ1_M":  # the exponent of the scale, but for its last bit
        blocks["scales"][..., 3] = blocks["scales"][..., 3] & 0x8FFF | 0x3000
    return stored
