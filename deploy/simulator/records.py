"""What a simulation records: of each request, of each job, and of the engines over time."""

from dataclasses import dataclass
from typing import NamedTuple

from longshore.deploy.simulator.cost_model import CostModel
from longshore.deploy.simulator.options import SimulateOptions
from longshore.protocol.statistics import SchedulerStats


@dataclass(slots=True)
class RequestRecord:
    """What a client sees of one request, in seconds of virtual time; None: it never happened.

    engine: that ended it. prefill_engine: that computed its prompt, if it is another one.
    finish_reason: as in the API; "rejected" if the engine did not accept the request.
    """

    request_id: str
    job_id: str | None
    turn: int
    engine: int | None
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prefill_engine: int | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    finish_reason: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the end."""
        return None if self.end_s is None else self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between two tokens; None for an output of one token."""
        if self.first_token_s is None or self.end_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)


class JobRecord(NamedTuple):
    """A job that has ended. is_complete: no turn was rejected."""

    job_id: str
    arrival_s: float
    end_s: float
    num_turns: int
    is_complete: bool


class Sample(NamedTuple):
    """The state of all engines at a time: a number per engine."""

    time_s: float
    num_running: list[int]
    num_waiting: list[int]
    kv_usage: list[float]


class EngineRecord(NamedTuple):
    busy_s: float
    num_steps: int
    stats: SchedulerStats


class SplitRecord(NamedTuple):
    """How requests were split among prefill and decode engines.

    outcomes, skips: counts by what the metrics of a gateway have as labels.
    gaps_s: from the token of the prefill engine to the first one of the decode engine.
    """

    outcomes: dict[str, int]
    skips: dict[str, int]
    gaps_s: list[float]


@dataclass(frozen=True)
class SimulationResult:
    """route_counts: decisions of the router, by reason. split: None without prefill engines."""

    options: SimulateOptions
    cost: CostModel
    num_blocks: int
    requests: list[RequestRecord]
    jobs: list[JobRecord]
    samples: list[Sample]
    engines: list[EngineRecord]
    route_counts: dict[str, int]
    split: SplitRecord | None
