"""How long a simulated engine takes for a step, for a transfer, and for what the host does.

A step takes max(compute, memory) + overhead seconds. Each of the three is a sum of terms that are
linear in the work of the step (`StepWork`), as in the roofline model (Williams et al., 2009). A
cost model is a JSON file with the fields of `CostModel`, or one of `rooflines.ROOFLINES`.
"""

from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec

from longshore.deploy.model.json_file import read_json_object
from longshore.protocol.errors import ConfigError

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
BytesPerSecond: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=2)]


class StepWork(NamedTuple):
    """What one step computes.

    num_tokens:   tokens whose KV is computed.
    num_attended: pairs of such a token and a position that it attends to, itself included.
    num_context:  tokens whose KV is read: of each request in the step, all up to its last one.
    num_rows:     requests in the step.
    num_samples:  requests that get a token.
    """

    num_tokens: int
    num_attended: int
    num_context: int
    num_rows: int
    num_samples: int


class StepTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Seconds per step, and per unit of its work."""

    per_step_s: Seconds = 0.0
    per_token_s: Seconds = 0.0
    per_attended_s: Seconds = 0.0
    per_context_s: Seconds = 0.0
    per_row_s: Seconds = 0.0
    per_sample_s: Seconds = 0.0

    def seconds(self, work: StepWork) -> float:
        return (
            self.per_step_s
            + self.per_token_s * work.num_tokens
            + self.per_attended_s * work.num_attended
            + self.per_context_s * work.num_context
            + self.per_row_s * work.num_rows
            + self.per_sample_s * work.num_samples
        )


class HostTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What gateway and scheduler add to a request, and to a step that the device waits for.

    arrival_s: from the client's request to its arrival in the scheduler.
    plan_s:    from what causes a plan (a request, an output) to the start of its step on an idle
               device. Steps that are planned while another one runs are not delayed.
    output_s:  from the end of a step to the arrival of its tokens at the client.
    """

    arrival_s: Seconds = 0.0
    plan_s: Seconds = 0.0
    output_s: Seconds = 0.0


class TransferRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast KV moves between tiers and between engines. Transfers of one kind follow each other.

    latency_s: that each transfer between tiers takes in addition.
    pull_bytes_per_s: from the memory of a prefill engine to that of a decode engine.
    pull_latency_s: that each pull takes in addition: the messages between the two engines.
    """

    load_bytes_per_s: BytesPerSecond = 50e9
    store_bytes_per_s: BytesPerSecond = 50e9
    disk_read_bytes_per_s: BytesPerSecond = 6e9
    disk_write_bytes_per_s: BytesPerSecond = 5e9
    latency_s: Seconds = 20e-6
    pull_bytes_per_s: BytesPerSecond = 45e9
    pull_latency_s: Seconds = 2.5e-3


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Costs of one engine.

    description: where the numbers come from.
    kv_bytes_per_token: of all layers and ranks; even.
    kv_cache_bytes: memory for KV; None: the simulation must be given the number of blocks.
    """

    name: str
    description: str = ""
    kv_bytes_per_token: Size
    kv_cache_bytes: Size | None = None
    compute: StepTerms = StepTerms()
    memory: StepTerms = StepTerms()
    overhead: StepTerms = StepTerms()
    host: HostTimes = HostTimes()
    transfers: TransferRates = TransferRates()

    def step_s(self, work: StepWork) -> float:
        """Seconds that the device takes for a step."""
        return max(self.compute.seconds(work), self.memory.seconds(work)) + self.overhead.seconds(
            work
        )


def read_cost_model(path: Path) -> CostModel:
    """Raises ConfigError, which names the file and the field."""
    content = read_json_object(path)
    content.pop("fit", None)  # a report of `bench fit-cost`, for readers
    try:
        model = msgspec.convert(content, CostModel)
    except msgspec.ValidationError as error:
        raise ConfigError(f"cost_model={path}: {error}") from error
    check_cost_model(model, str(path))
    return model


def check_cost_model(model: CostModel, source: str) -> None:
    """Raise ConfigError for a number that is not finite, or if steps would take no time."""
    for part in (model.compute, model.memory, model.overhead, model.host, model.transfers):
        values: dict[str, Any] = msgspec.structs.asdict(part)
        for name, value in values.items():
            if not isfinite(value):
                raise ConfigError(f"cost_model={source}: {name}={value} is not a finite number")
    if model.kv_bytes_per_token % 2:
        raise ConfigError(
            f"cost_model={source}: kv_bytes_per_token={model.kv_bytes_per_token} is odd, but a "
            "token has as many bytes of keys as of values"
        )
    if model.step_s(StepWork(1, 1, 1, 1, 1)) <= 0:
        raise ConfigError(
            f"cost_model={source}: a step of one token takes no time. Set at least one term of "
            "compute, memory or overhead."
        )
