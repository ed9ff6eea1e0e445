"""Compiles the launches of Triton operators for a GPU that is not there, and runs none of them.

    python -m tests.worker.kernels.compiled [--write | KERNEL ...]

The interpreter accepts kernels that the compiler rejects. Prints what each launch takes of a
multiprocessor: registers of a thread, its stack, and shared memory. Needs a process without
TRITON_INTERPRET.

Compiling takes minutes, so compiled.json has what was printed, and a digest of everything that it
depends on. --write writes it, after all launches have been compiled and checked.
"""

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from longshore.worker.kernels import gpu, packing
from longshore.worker.kernels.device_matrix import DeviceMatrix
from longshore.worker.kernels.gpu.argmax import argmax
from longshore.worker.kernels.gpu.carry_state import carry_state
from longshore.worker.kernels.gpu.cascade_attention import cascade_attention
from longshore.worker.kernels.gpu.copy_arrays import copy_arrays
from longshore.worker.kernels.gpu.decode_attention import decode_attention
from longshore.worker.kernels.gpu.delta_step import delta_step
from longshore.worker.kernels.gpu.draw_tokens import draw_tokens
from longshore.worker.kernels.gpu.embedding import embed_part
from longshore.worker.kernels.gpu.experts import experts, experts_of_fp8
from longshore.worker.kernels.gpu.gate import gate
from longshore.worker.kernels.gpu.gated_norm import gated_norm
from longshore.worker.kernels.gpu.latents import latents
from longshore.worker.kernels.gpu.layer_norm import layer_norm
from longshore.worker.kernels.gpu.logits import logits
from longshore.worker.kernels.gpu.logprobs import score
from longshore.worker.kernels.gpu.one_row import one_row
from longshore.worker.kernels.gpu.penalties import penalise
from longshore.worker.kernels.gpu.prefill_attention import prefill_attention
from longshore.worker.kernels.gpu.rms_norm import rms_norm
from longshore.worker.kernels.gpu.rotary import rotary
from longshore.worker.kernels.gpu.round_rows import round_rows
from longshore.worker.kernels.gpu.route import route
from longshore.worker.kernels.gpu.state_step import conv_step, state_step
from longshore.worker.kernels.gpu.token_masks import forbid_tokens
from longshore.worker.kernels.gpu.wide_norm import sums_of_squares, wide_norm
from longshore.worker.kernels.gpu.write_kv import write_kv

MAX_SHARED_BYTES: Final = 227 << 10
"""Of a program on an H100."""

MAX_STACK_BYTES: Final = 64
"""Of a thread. Registers that do not suffice are kept in its stack; these are few, of which a loop
reads at most two."""

RECORD: Final = Path(__file__).with_suffix(".json")
KERNELS: Final = Path(gpu.__file__).parent

CPU: Final = torch.device("cpu")
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Hopper:
    """What Triton asks its driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Launch(NamedTuple):
    """A compiled launch. sizes: what distinguishes it from others of the kernel."""

    name: str
    sizes: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str

    def __str__(self) -> str:
        used = f"{self.registers} registers, {self.stack_bytes} B stack"
        return f"{self.name} {self.sizes}: {used}, {self.shared_bytes} B shared"


def digest_of_inputs() -> str:
    """Of all that the launches are compiled from and with."""
    found = hashlib.sha256(f"triton {version('triton')}".encode())
    for path in [Path(__file__), *sorted(KERNELS.glob("*.py"))]:
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


@contextmanager
def compiling() -> Iterator[dict[str, Launch]]:
    """Within the block, launches compile only. The result has them by their description."""
    run, launches = JITFunction.run, {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        dtypes = [str(x.dtype).removeprefix("torch.") for x in args[:2] if torch.is_tensor(x)]
        shown = {name: value for name, value in kwargs.items() if name in SHOWN and value}
        launch = Launch(
            f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}",
            " ".join([*dtypes, *(f"{name}={value}" for name, value in shown.items())]),
            *_used(kernel.asm["cubin"]),
            kernel.metadata.shared,
            kernel.asm["ptx"],
        )
        assert launch.shared_bytes <= MAX_SHARED_BYTES, launch
        # Sizes that are no multiples of a block are loaded element by element, as in no model.
        assert launch.stack_bytes <= MAX_STACK_BYTES or "HAS_TAIL" in launch.sizes, launch
        launches[str(launch)] = launch

    driver.set_active(Hopper())
    with patch.object(JITFunction, "run", compile_only):
        yield launches


SHOWN: Final = (
    "SIZE", "V_SIZE", "GROUP", "BLOCK_SIZE", "TILE_H", "TILE_Q", "TILE", "WINDOW", "CHUNK",
    "UNIT", "HAS_TAIL", "BLOCK_M", "BLOCK_N", "BLOCK_K", "HAS_SEEN", "HAS_SHARED",
    "IS_FP8", "IS_ROUNDED", "num_warps", "num_stages",
)  # fmt: skip


def _used(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        command = [tool, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return int(found[1]), int(found[2])


def compile_rms_norm() -> None:
    for dtype in DTYPES:
        x, weight = torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096)
        rms_norm(x, None, weight, 1e-5)
        rms_norm(x, x.clone(), weight.to(dtype), 1e-5)
        rms_norm(x, x.clone(), weight, 1e-5, weight, None)
        rms_norm(x, None, weight.to(dtype), 1e-5, None, x.clone())


def compile_wide_norm() -> None:
    for dtype in DTYPES:
        q, k = torch.zeros(2, 4096, dtype=dtype), torch.zeros(2, 1000, dtype=dtype)
        squares = sums_of_squares(q, k)
        for shared in (None, squares):
            wide_norm(q, k, q[0], k[0], shared, 4096, 1000, 1e-5)


def compile_gate() -> None:
    for dtype in DTYPES:
        gate_up = torch.zeros(2, 2 * 14336, dtype=dtype)
        for activation in range(4):
            gate(gate_up, activation, 1.5, 7.0, False)
            gate(gate_up[:, : 2 * 20], activation, 1.5, 7.0, True)


def compile_latents() -> None:
    for dtype in DTYPES:
        q_rope, vectors = torch.zeros(2, 16, 64, dtype=dtype), torch.zeros(2, 576, dtype=dtype)
        q, cache = torch.zeros(2, 16, 576, dtype=dtype), torch.zeros(3, 16, 576, dtype=dtype)
        slots, table = torch.zeros(2, dtype=torch.int64), torch.zeros(8, 2, 32)
        norm = torch.zeros(512, dtype=dtype)
        latents(q_rope, vectors, q, norm, 1e-5, slots, table, cache, slots)
        latents(q_rope, vectors, q, None, 1e-5, None, None, None, None)


def compile_logits() -> None:
    for dtype in DTYPES:
        for cap in (None, 30.0):
            logits(torch.zeros(2, 50_304, dtype=dtype), 50_257, 0.5, cap)


def compile_argmax() -> None:
    for vocab_size in (128_256, 50_257):
        argmax(torch.zeros(2, vocab_size))


def compile_layer_norm() -> None:
    for dtype in DTYPES:
        x = torch.zeros(2, 1280, dtype=dtype)
        layer_norm(x, None, x[0], x[0], 1e-5)
        layer_norm(x, x.clone(), x[0], x[0], 1e-5)


PACKINGS: Final = (
    packing.INT4.grouped(128),
    packing.INT8.grouped(128),
    packing.FP8.grouped(128),
    packing.MXFP4,
    packing.Q4_0,
    packing.Q4_K,
    packing.Q6_K,
    packing.Q8_0,
)


def compile_packed_linear() -> None:
    for dtype in DTYPES:
        for form in PACKINGS if dtype == torch.bfloat16 else PACKINGS[:1]:
            # One tiling each; sizes that end with a whole block and others.
            for num_rows, columns in (
                (1, 4096),
                (1, 4096 + form.span),
                (32, 4096),
                (64, 4096),
                (128, 4096),
            ):
                for rounds_inputs in {False, form.name == "fp8"}:
                    matrix = DeviceMatrix(
                        form, 64, columns, dtype, CPU, rounds_inputs=rounds_inputs
                    )
                    matrix.product(torch.zeros(num_rows, columns, dtype=dtype))


def compile_round_rows() -> None:
    for dtype in DTYPES:
        for span in (32, 128):
            round_rows(torch.zeros(2, 5 * span, dtype=dtype), span)


def compile_embedding() -> None:
    for dtype in DTYPES:
        embed_part(torch.zeros(2, dtype=torch.int32), torch.zeros(8, 4096, dtype=dtype), 16, 8)


def compile_route() -> None:
    scores = torch.zeros(2, 256)
    route(scores, None, 8, 1, 1, 1.0, False, True)
    route(scores, scores[0], 8, 8, 4, 2.5, True, True)
    route(scores[:, :20].contiguous(), None, 3, 4, 2, 1.0, False, False)


def compile_experts() -> None:
    for dtype in DTYPES:
        zeros = partial(torch.zeros, dtype=dtype)
        # One tiling each; sizes that end with a whole block and others.
        tilings = ((1, 128, 64), (60, 72, 40), (120, 128, 64), (250, 72, 40), (250, 128, 64))
        for num_tokens, size, width in tilings if dtype == torch.bfloat16 else tilings[:2]:
            for activation in range(4) if num_tokens == 1 else (3,):
                is_odd = activation % 2 == 1
                experts(
                    zeros(num_tokens, size),
                    torch.zeros(num_tokens, 2),
                    torch.zeros(num_tokens, 2, dtype=torch.int64),
                    *(zeros(4, 2 * width, size), None, None, 0, -1),
                    *(zeros(4, size, width), None, None, 0, -1),
                    zeros(4, 2 * width) if is_odd else None,
                    zeros(4, size) if is_odd else None,
                    zeros(num_tokens, size) if is_odd else None,
                    *(4, width, activation),
                    1.5,
                    float("inf"),
                    is_odd,
                    activation == 2,
                )
    for form in PACKINGS:
        size, width = 2 * form.span, max(form.span, 128)
        for num_tokens in (1, 60, 120, 250):
            experts(
                torch.zeros(num_tokens, size, dtype=torch.bfloat16),
                torch.zeros(num_tokens, 2),
                torch.zeros(num_tokens, 2, dtype=torch.int64),
                *DeviceMatrix(form, 4 * 2 * width, size, torch.bfloat16, CPU).parts,
                *DeviceMatrix(form, 4 * size, width, torch.bfloat16, CPU).parts,
                *(None, None, None, 4, width, 0, 1.5, float("inf"), False, False),
            )
    for num_tokens in (1, 60, 120, 250):
        for span in (32, 128):
            experts_of_fp8(
                torch.zeros(num_tokens, 256, dtype=torch.uint8),
                torch.zeros(num_tokens, 256 // span),
                torch.zeros(num_tokens, 2),
                torch.zeros(num_tokens, 2, dtype=torch.int64),
                *(torch.zeros(4 * 2 * 128, 256, dtype=torch.uint8), torch.zeros(1024, 256 // span)),
                *(torch.zeros(4 * 256, 128, dtype=torch.uint8), torch.zeros(1024, 128 // span)),
                *(None, None, None, 4, 128, 0, 1.5, float("inf"), False, span == 32),
                torch.bfloat16,
            )


def _paged(size: int, dtype: torch.dtype, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    cache = torch.zeros(3, 1, 2, block_size, size, dtype=dtype)
    keys, values = cache.unbind(2)
    return keys, values


ATTENTION: Final = [
    # head_dim, value_dim, query heads, block size, window, chunk, softcap, has sinks, is fp8
    (128, 128, 4, 16, 0, 0, 0.0, False, False),  # Llama 3 8B
    (128, 128, 8, 64, 0, 0, 0.0, False, True),  # Llama 3 70B
    (64, 64, 4, 64, 0, 0, 0.0, False, False),
    (64, 64, 8, 16, 128, 0, 0.0, True, False),  # gpt-oss
    (256, 256, 2, 16, 0, 0, 50.0, False, False),  # Gemma 2
    (256, 256, 2, 64, 1024, 0, 0.0, False, False),
    (80, 80, 1, 7, 0, 96, 0.0, False, False),
    (192, 192, 1, 64, 0, 0, 0.0, False, False),  # expanded latents
    (576, 512, 128, 16, 0, 0, 0.0, False, False),  # latents, one rank
    (576, 512, 16, 64, 0, 0, 0.0, False, False),  # and one of eight
]


def compile_attention() -> None:
    for dtype in DTYPES:
        cells = ATTENTION if dtype == torch.bfloat16 else ATTENTION[:1]
        for size, value_dim, num_heads, block_size, window, chunk, softcap, sinks, fp8 in cells:
            keys, values = _paged(size, torch.float8_e4m3fn if fp8 else dtype, block_size)
            if value_dim != size:
                values = keys[..., :value_dim]
            table = torch.zeros(2, 4, dtype=torch.int32)
            q = torch.zeros(2, num_heads, size, dtype=dtype)
            ints = torch.zeros(2, dtype=torch.int64)
            rest = (window, chunk, softcap, 1.0, 1.0)
            sink = torch.zeros(num_heads) if sinks else None
            is_latent = value_dim != size
            decode_attention(q, keys, values, table, ints, ints, sink, 0.1, *rest, 5, is_latent)
            chunks = torch.zeros(1, 4, dtype=torch.int64)
            prefill_attention(
                q, keys, values, table, chunks, None, sink, 2000, 0.1, *rest, is_latent
            )
            if window or chunk:
                continue
            prefill_attention(
                q, keys, values, table, chunks, ints, sink, 2000, 0.1, *rest, is_latent
            )
            cascade_attention(
                q[:1].expand(64, -1, -1),
                keys,
                values,
                table,
                ints,
                ints,
                ints,
                sink,
                0.1,
                softcap,
                1.0,
                1.0,
                1,
                4,
                is_latent,
            )


def compile_write_kv() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for size, is_fp8 in ((128, False), (80, True), (576, False)):
            keys, values = _paged(size, torch.float8_e4m3fn if is_fp8 else dtype, 16)
            k, slots = torch.zeros(2, 1, size, dtype=dtype), torch.zeros(2, dtype=torch.int64)
            q, norm = torch.zeros(2, 4, size, dtype=dtype), torch.zeros(size, dtype=dtype)
            table = torch.zeros(8, 2, size // 4)
            write_kv(k, k, keys, values, slots, 1.0, 2.0, None, None, None, None, None, 0.0)
            for norms in ((None, None), (norm, norm), (norm.float(), None)):
                write_kv(k, k, keys, values, slots, 1.0, 2.0, q, slots, table, *norms, 1e-5)
                rotary(q, k, slots, table, *norms, 1e-5)


def compile_heads_of_any_size() -> None:
    for size in (192, 224, 320):
        cache = torch.zeros(3, 4, 2, 16, size, dtype=torch.bfloat16)
        k, slots = torch.zeros(2, 4, size, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
        nothing = (None,) * 5 + (0.0,)
        write_kv(k, k, *cache.unbind(2), slots, 1.0, 1.0, *nothing)


def _placed(
    shape: tuple[int, ...], unit_bytes: int
) -> tuple[torch.Tensor, tuple[int, ...], list[int], int, int]:
    """Three blocks of two units."""
    buffer = torch.zeros(3, 2 * unit_bytes, dtype=torch.uint8)
    return buffer, shape, [0, 1], unit_bytes, 2


def compile_state_step() -> None:
    for dtype in DTYPES:
        for num_heads, head_dim, num_groups, state_size, unit_bytes in (
            (8, 64, 1, 128, 16 << 10),
            (6, 20, 2, 12, 64),
        ):
            num_channels = num_heads * head_dim + 2 * num_groups * state_size
            placed = _placed((num_heads, head_dim, state_size), unit_bytes)
            weight, of_heads = torch.zeros(4, num_channels), torch.zeros(num_heads)
            ints, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
            for bias in (None, weight[0]):
                state_step(
                    torch.zeros(2, num_channels, dtype=dtype),
                    torch.zeros(2, num_heads, dtype=dtype),
                    *(*placed, table, ints, ints, weight, bias, of_heads, of_heads, of_heads),
                    num_groups,
                )


def compile_delta_step() -> None:
    for dtype in DTYPES:
        for num_heads, num_key_heads, key_dim, value_dim, unit_bytes in (
            (32, 16, 128, 128, 16 << 10),
            (6, 2, 20, 12, 64),
        ):
            num_channels = 2 * num_key_heads * key_dim + num_heads * value_dim
            placed = _placed((num_heads, key_dim, value_dim), unit_bytes)
            weight, of_heads = torch.zeros(4, num_channels), torch.zeros(num_heads)
            ints, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
            gates = torch.zeros(2, num_heads, dtype=dtype)
            delta_step(
                torch.zeros(2, num_channels, dtype=dtype),
                *(gates, gates, *placed, table, ints, ints, weight, of_heads, of_heads),
                num_key_heads,
                1e-6,
            )


def compile_conv_step() -> None:
    for dtype in DTYPES:
        for num_channels, unit_bytes in ((2048, 16 << 10), (20, 64)):
            buffer, _, (_, first_unit), *sizes = _placed((num_channels, 0), unit_bytes)
            weight = torch.zeros(3, num_channels)
            ints, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int32)
            for bias in (None, weight[0]):
                inputs = torch.zeros(2, num_channels, dtype=dtype)
                conv_step(*(inputs, buffer, first_unit, *sizes, table, ints, ints, weight, bias))


def compile_carry_state() -> None:
    for size in ((64, 128), (5, 3)):
        ints = torch.zeros(2, dtype=torch.int64)
        carry_state(
            torch.zeros(2, 8, *size), torch.zeros(4, 8, *size), torch.zeros(4, 8), ints, ints
        )


def compile_gated_norm() -> None:
    for dtype in DTYPES:
        for size, num_groups in ((4096, 1), (1000, 4)):
            gate = torch.zeros(2, size, dtype=dtype)
            gated_norm(torch.zeros(2, size), gate, torch.zeros(size), num_groups, 1e-5, False)
        heads = torch.zeros(2, 4096, dtype=dtype)
        gated_norm(torch.zeros(2, 4096), heads, torch.zeros(128), 32, 1e-6, True)


def compile_draw_tokens() -> None:
    ints, reals = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    for vocab_size, split in ((5, 2048), (152_000, 2048), (262_144, 4096)):
        draw_tokens(torch.zeros(2, vocab_size), *[ints] * 5, *[reals] * 2, split)


def compile_extras() -> None:
    ints, reals, logits = torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2, 152_000)
    penalise(logits, torch.zeros(2, 99, dtype=torch.int32), *[ints] * 4, *[reals] * 3, 90)
    for best in (None, torch.zeros(2, 20, dtype=torch.int64)):
        score(logits, ints.int(), best)
    bits = torch.zeros(2, 19_000, dtype=torch.uint8)
    for unedited in (None, logits):
        forbid_tokens(logits, ints, bits, unedited)


def compile_copies() -> None:
    ints, reals = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    copy_arrays(ints, ints, reals, reals)
    copy_arrays(ints.int(), ints, ints.int(), ints.int())


def compile_one_row() -> None:
    for dtype in DTYPES[1:]:
        for size in (1024, 12_288, 2880):
            weight = torch.zeros(4096, size, dtype=dtype)
            for bias in (None, torch.zeros(4096, dtype=dtype)):
                one_row(weight[:1], weight, bias)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernels", nargs="*", help="compile only these")
    parser.add_argument("--write", action="store_true", help="write compiled.json")
    options = parser.parse_args()
    assert not triton.knobs.runtime.interpret
    compilers = {
        name.removeprefix("compile_"): function
        for name, function in globals().items()
        if name.startswith("compile_")
    }
    with compiling() as launches:
        for kernel in options.kernels or compilers:
            compilers[kernel]()
    check_attention(launches)
    check_states(launches)
    print(*sorted(launches), sep="\n")
    if options.write and not options.kernels:
        record = {"inputs": digest_of_inputs(), "launches": sorted(launches)}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def check_attention(launches: dict[str, Launch]) -> None:
    """In bfloat16, keys and values are copied to shared memory 16 bytes at a time while others are
    multiplied, and large tiles use the products of whole groups of warps."""
    for launch in launches.values():
        if "attention._attend" not in launch.name or "float32" in launch.sizes:
            continue
        assert re.search(r"cp\.async\.cg\.shared\.global .*, (0x10|16)", launch.ptx), launch
        has_large_tiles = re.search(r"TILE_Q=(64|128)|TILE_H=64", launch.sizes) is not None
        assert ("wgmma.mma_async" in launch.ptx) is has_large_tiles, launch


def check_states(launches: dict[str, Launch]) -> None:
    """Where a unit is several rows of a state, parts of a row are read and written 16 bytes at a
    time, although their pages are looked up."""
    for launch in launches.values():
        if "step._update" in launch.name and "UNIT=4096" in launch.sizes:
            num_reads, num_writes = (
                len(re.findall(rf"{kind}\.global\.v4\.b32", launch.ptx)) for kind in ("ld", "st")
            )
            assert num_reads >= num_writes >= 4, launch


if __name__ == "__main__":
    main()
