"""Whether the weights fit the memory that is free now, before a process that loads them starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from longshore.deploy.supervisor.engine_config import EnginePlan
from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import exists, read_json
from longshore.worker.kv_cache.plan import DTYPE_BYTES
from longshore.worker.loading.tensor_names import INDEX_FILE, SINGLE_FILE
from longshore.worker.process.byte_size import byte_size
from longshore.worker.process.host_resources import available_host_bytes


def check_host_memory(
    plan: EnginePlan, num_copies: int, available_bytes: Callable[[], int] = available_host_bytes
) -> None:
    """Raise ConfigError if `num_copies` of the weights exceed the free memory. Workers on a GPU
    check theirs."""
    if plan.device != "cpu":
        return
    model, dtype = plan.model, plan.identity.dtype
    stored_bytes = weight_file_bytes(model.path)
    needed = num_copies * stored_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[model.checkpoint_dtype]
    if needed > (available := available_bytes()):
        copies = f"{num_copies} copies of the weights" if num_copies > 1 else "the weights"
        raise ConfigError(
            f"{copies} of {model.name} in {dtype} need {byte_size(needed)}, and "
            f"{byte_size(available)} of memory is free. Stop other programs, raise the limit of "
            "the control group, or use a smaller model or --dtype bfloat16."
        )


def weight_file_bytes(model_dir: Path) -> int:
    """Size of the weight files; 0 if they cannot be read, which a worker reports."""
    try:
        if exists(model_dir / SINGLE_FILE):
            return (model_dir / SINGLE_FILE).stat().st_size
        index: Any = read_json(model_dir / INDEX_FILE)
        return sum((model_dir / name).stat().st_size for name in set(index["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0
