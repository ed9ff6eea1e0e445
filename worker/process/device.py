"""The compute device: its name, its free memory, and the dtypes that a model runs in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from longshore.protocol.errors import ConfigError
from longshore.worker.process.byte_size import byte_size
from longshore.worker.process.host_resources import available_host_bytes, host_memory

_ALLOCATION_FAILURES: Final = (
    "DefaultCPUAllocator",
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
    "CUDA error: out of memory",  # of a call that does not use torch's allocator
    "[CUDA]: out of memory",  # Triton, when it loads a kernel
    "CUBLAS_STATUS_ALLOC_FAILED",
)
TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def open_device(name: str) -> torch.device:
    """The torch device called `name`. Raises ConfigError if this machine does not have it."""
    kind, _, index_text = name.partition(":")
    if kind not in ("cpu", "cuda") or (
        index_text and not (kind == "cuda" and index_text.isdigit())
    ):
        raise ConfigError(f"device={name!r} is unknown. Use cpu, cuda or cuda:N.")
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device={name!r}, but torch {torch.__version__} finds no CUDA device here. "
                "Use device='cpu', or a CUDA build of torch on a machine with a GPU."
            )
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise ConfigError(f"device={name!r}, but this machine has CUDA devices 0..{count - 1}.")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def resolve_dtype(name: str, checkpoint_dtype: str) -> torch.dtype:
    """The dtype to compute in: "auto" is the checkpoint's own."""
    return TORCH_DTYPES[checkpoint_dtype if name == "auto" else name]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`: the name used in messages and configuration."""
    return str(dtype).removeprefix("torch.")


def check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Raise ConfigError if `what` needs more memory than this process may ever use. Allocating it
    could succeed, and the process would be killed when it fills the memory."""
    memory = host_memory() if device.type == "cpu" else None
    if memory is not None and num_bytes > memory.usable_bytes:
        raise ConfigError(
            f"{what} needs {byte_size(num_bytes)} on {device}, but {memory.description}. Use a "
            "smaller model or dtype, raise the limit, or use a machine with more memory."
        )


@contextmanager
def fits_in_memory(what: str, device: torch.device) -> Iterator[None]:
    """Turn a failed allocation in the block into a ConfigError that names `what` and the device."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        memory = host_memory() if device.type == "cpu" else None
        limit = "" if memory is None else f" ({memory.description})"
        raise ConfigError(
            f"{what} cannot be allocated on {device}: {_first_line(error)}{limit}. "
            "Use a smaller setting, a smaller dtype, or a device with more memory."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed. torch has an exception for its allocator of GPU memory; for
    a CPU, and from libraries, it raises RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    is_known = any(text in str(error) for text in _ALLOCATION_FAILURES)
    return isinstance(error, RuntimeError) and is_known


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def wait_for_device(device: torch.device) -> None:
    """Block until everything launched so far, on any stream, has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_unused_memory(device: torch.device) -> None:
    """Return what torch keeps for reuse to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def held_bytes(device: torch.device) -> int:
    """Bytes of GPU memory that torch has reserved in this process; 0 for a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    For a CPU: MemAvailable of the kernel, limited by the control groups.
    """
    if device.type == "cuda":
        release_unused_memory(device)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes
    return available_host_bytes()
