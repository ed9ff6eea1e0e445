"""Whether the weights fit the memory that is free now, before a process that loads them starts."""

from collections import Counter
from collections.abc import Callable, Iterable

from longshore.deploy.supervisor.engine_plan import EnginePlan
from longshore.protocol.errors import ConfigError
from longshore.worker.process.byte_size import byte_size
from longshore.worker.process.host_resources import available_host_bytes


def check_host_memory(
    plans: Iterable[EnginePlan], available_bytes: Callable[[], int] = available_host_bytes
) -> None:
    """Raise ConfigError if the weights of engines, each with a copy of its own, exceed the free
    memory together. Workers on a GPU check theirs, and of weights that do not exist the size is not
    known."""
    sizes: dict[str, int] = {}
    copies: Counter[str] = Counter()
    for plan in plans:
        if plan.device == "cpu" and plan.options.load_format != "dummy":
            name = f"{plan.model.name} in {plan.identity.dtype}"
            sizes[name] = plan.weight_bytes
            copies[name] += 1
    needed = sum(sizes[name] * count for name, count in copies.items())
    if not needed or needed <= (available := available_bytes()):
        return
    described = [
        f"{f'{count} copies of ' if count > 1 else ''}the weights of {name}"
        + (f" ({byte_size(count * sizes[name])})" if len(copies) > 1 else "")
        for name, count in copies.items()
    ]
    smaller = "a smaller model" if len(copies) == 1 else "fewer or smaller models"
    raise ConfigError(
        f"{' and '.join(described)} need {byte_size(needed)}, and {byte_size(available)} of memory "
        "is free. Stop other programs, raise the limit of the control group, or use "
        f"{smaller} or --dtype bfloat16."
    )
