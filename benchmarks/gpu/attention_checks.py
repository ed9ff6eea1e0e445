"""Attention of whole steps, with the KV write, against float64: shapes that cross every tile edge,
and those of real models. Blocks that no sequence uses are NaN."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from attention import Case, Shape
from torch import Tensor

from benchmarks.gpu.exactness import assert_near, poisoned_memory
from benchmarks.gpu.results import Run
from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.selector import make_attention
from longshore.worker.kernels import write_kv
from longshore.worker.kernels.cascade_attention import cascade_attention
from longshore.worker.kernels.decode_attention import decode_attention, num_splits
from longshore.worker.kernels.decode_attention import reference as decode_reference
from longshore.worker.kernels.prefill_attention import prefill_attention
from longshore.worker.kernels.scoring import Scoring
from longshore.worker.kv_cache.fp8 import FP8, KVScales

EDGES: Final = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097)
MAX_COMPARED: Final = 96
"""Tokens of a step that are compared: the first and last of each sequence, and others at random."""

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CELLS: Final[Sequence[tuple[Shape, torch.dtype, Mapping[str, Any]]]] = [
    ((4, 2, 64, 1), F32, {}),
    ((4, 2, 64, 1), F32, {"block_size": 1}),
    ((4, 2, 64, 1), F32, {"block_size": 7, "window": 33}),
    ((4, 1, 96, 2), F32, {"block_size": 64, "chunk": 100}),
    ((5, 1, 80, 1), F32, {"softcap": 5.0, "sinks": True}),
    ((3, 3, 256, 1), F32, {"window": 128, "sinks": True}),
    ((32, 8, 128, 2), BF16, {}),
    ((32, 8, 128, 2), F16, {"block_size": 32}),
    ((32, 8, 128, 1), BF16, {"kv_cache_dtype": "fp8_e4m3"}),
    ((64, 8, 64, 1), BF16, {"window": 128, "sinks": True}),
    ((16, 8, 256, 1), BF16, {"softcap": 50.0, "window": 512}),
    ((16, 1, 192, 1), F16, {}),
    ((70, 1, 16, 1), BF16, {}),
]
REAL_STEPS: Final = [
    # shape, sequences, tokens before, new tokens
    ((32, 8, 128, 1), 256, 4095, 1),
    ((64, 8, 128, 1), 1, 131_071, 1),
    ((16, 8, 128, 1), 64, 8191, 1),
    ((32, 8, 128, 1), 1, 0, 8192),
    ((32, 8, 128, 1), 4, 16_384, 512),
]


def check(run: Run) -> None:
    device = torch.device(run.device)
    cells = CELLS[:1] + CELLS[5:6] + CELLS[8:9] if run.is_dry else CELLS
    edges = (1, 16, 17) if run.is_dry else EDGES
    for shape, dtype, more in cells:
        if run.is_dry:
            shape = (2, 1, 16, 1)
        for name, earlier, new in (
            ("decodes", [edge - 1 for edge in edges], [1] * len(edges)),
            (
                "chunks",
                [*(0 for _ in edges), *edges],
                [*edges, *(edge % 130 + 2 for edge in edges)],
            ),
            ("decodes and chunks", [edges[-1], 0, 40, 200], [1, 3, 1, 70]),
        ):
            if run.is_dry and name == "chunks":
                continue  # the interpreter takes seconds
            settings = ", ".join(f"{key} {value}" for key, value in more.items())
            run.check(
                f"{name} of {shape[:3]}, {_name(dtype)}{', ' if settings else ''}{settings}",
                partial(_check_step, shape, earlier, new, dtype=dtype, device=device, **more),
            )
    for shape, batch, earlier, new in [] if run.is_dry else REAL_STEPS:
        run.check(
            f"{batch} x {new} tokens after {earlier:,} of {shape[:3]}, bfloat16",
            partial(
                _check_step, shape, [earlier] * batch, [new] * batch, dtype=BF16, device=device
            ),
        )
    for dtype in (F32,) if run.is_dry else (F32, F16, BF16):
        run.check(f"latents, {_name(dtype)}", partial(_check_latents, run, dtype))
        run.check(f"shared blocks, {_name(dtype)}", partial(_check_shared, run, dtype))


def _check_step(
    shape: Shape,
    earlier: Sequence[int],
    new: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    **more: Any,
) -> None:
    case = Case(shape, len(new), earlier, new, dtype=dtype, device=device, **more)
    planes = case.cache.planes
    _fill_with_nan(planes[:1])
    keys, values = planes[:, :, 0].unbind(2)
    expected = planes.clone()
    write_kv.reference(
        *case.qkv[1:], *expected[:, :, 0].unbind(2), case.metadata.slot_mapping, KVScales()
    )
    with torch.inference_mode(), poisoned_memory():
        step = make_attention(case.cache, case.kind).begin_step(case.metadata)
        out = step.forward(0, AttentionInputs(*case.qkv, sinks=case.sinks))
    assert torch.equal(planes.view(torch.uint8), expected.view(torch.uint8)), "stored KV differs"
    _compare(
        out.view(len(out), shape[0], -1),
        case.qkv[0],
        keys,
        values,
        case.metadata.block_table,
        torch.from_numpy(case.batch.token_rows()),
        torch.from_numpy(case.batch.positions()) + 1,
        Scoring(shape[2] ** -0.5, case.reach, case.kind.softcap, case.sinks),
        edges=(*case.batch.first_tokens.tolist(), *case.batch.last_tokens.tolist()),
    )


def _check_latents(run: Run, dtype: torch.dtype) -> None:
    """Keys whose first elements are the values, as in MLA."""
    num_heads, size, value_dim = (2, 24, 16) if run.is_dry else (16, 576, 512)
    lens = torch.tensor((1, 17, 40) if run.is_dry else (1, 63, 64, 65, 500, 4000))
    block_size, generator = 16, torch.Generator(run.device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=run.device).to(dtype)

    num_blocks = int(lens.max()) // block_size + 1
    keys = draw(len(lens) * num_blocks + 1, 1, block_size, size)
    _fill_with_nan(keys[:1])
    values = keys[..., :value_dim]
    ids = torch.randperm(len(lens) * num_blocks, generator=generator, device=run.device)
    table = (ids.view(len(lens), num_blocks) + 1).int()
    for row, length in enumerate(lens.tolist()):
        table[row, -(-length // block_size) :] = 0
    rows = torch.arange(len(lens))
    scoring = Scoring(size**-0.5)
    with torch.inference_mode(), poisoned_memory():
        q = draw(len(lens), num_heads, size)
        splits = num_splits(len(lens), 1, int(lens.max()))
        on_device = rows.to(run.device), lens.to(run.device)
        out, _ = decode_attention(q, keys, values, table, *on_device, scoring, num_splits=splits)
        _compare(out, q, keys, values, table, rows, lens, scoring)
        count = int(lens[-1]) // 2
        q = draw(count, num_heads, size)
        chunk = torch.tensor([[len(lens) - 1, 0, count, int(lens[-1])]], device=run.device)
        out, _ = prefill_attention(q, keys, values, table, chunk, scoring, max_tokens=count)
        ends = torch.arange(int(lens[-1]) - count, int(lens[-1])) + 1
        rows = torch.full_like(ends, len(lens) - 1)
        _compare(out, q, keys, values, table, rows, ends, scoring, edges=(0, count - 1))


def _check_shared(run: Run, dtype: torch.dtype) -> None:
    """Sequences of different lengths that begin with the same blocks."""
    num_heads, num_kv_heads, size = (2, 1, 16) if run.is_dry else (32, 8, 128)
    lens = torch.tensor((20, 33, 40) if run.is_dry else (513, 600, 528, 4097, 1000, 520) * 8)
    block_size, num_shared = 16, 1 if run.is_dry else 32
    num_blocks = int(lens.max()) // block_size + 1
    shape = (2, len(lens) * num_blocks + 1, num_kv_heads, block_size, size)
    keys, values = torch.randn(shape, device=run.device).to(dtype)
    for cache in (keys, values):
        _fill_with_nan(cache[:1])
    table = (torch.randperm(len(lens) * num_blocks, device=run.device) + 1).int()
    table = table.view(len(lens), num_blocks)
    table[:, :num_shared] = table[0, :num_shared].clone()
    for row, length in enumerate(lens.tolist()):
        table[row, -(-length // block_size) :] = 0
    rows, q = torch.arange(len(lens)), torch.randn(len(lens), num_heads, size).to(keys)
    scoring = Scoring(size**-0.5)
    with torch.inference_mode(), poisoned_memory():
        for shared in (num_shared * block_size, 0):
            out, _ = cascade_attention(
                q,
                keys,
                values,
                table,
                rows.to(run.device),
                lens.to(run.device),
                torch.tensor([shared], device=run.device),
                scoring,
                num_splits=3,
                num_shared_splits=2,
            )
            _compare(out, q, keys, values, table, rows, lens, scoring)


def _compare(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scoring: Scoring,
    *,
    edges: Sequence[int] = (),
) -> None:
    """Compare some tokens with the reference. rows, lens: (n,) of each token, on the host."""
    block_size = keys.shape[2]
    others = torch.randperm(len(out), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = list(dict.fromkeys((*edges, *others)))[:MAX_COMPARED]
    exact = []
    for token in chosen:
        blocks = table[int(rows[token]), : -(-int(lens[token]) // block_size)].long()
        wide = (cache[blocks].double() for cache in (keys, values))
        line = torch.arange(len(blocks), dtype=torch.int32, device=out.device)[None]
        row, length = torch.zeros(1, dtype=torch.int64), lens[token : token + 1]
        one, _ = decode_reference(q[token : token + 1].double(), *wide, line, row, length, scoring)
        exact.append(one)
    assert_near(out[chosen], torch.cat(exact))


def _fill_with_nan(blocks: Tensor) -> None:
    if blocks.dtype == FP8:
        blocks.view(torch.uint8).fill_(0x7F)
    else:
        blocks.fill_(math.nan)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
