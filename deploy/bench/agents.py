"""Workloads of agents: jobs of many turns, with the gaps that their tools make between the turns.

A file has one job per line, as JSON (`AgentJob`). `longshore bench agents` makes one from published
statistics of coding agents, see docs/agents.md; `longshore bench jobs` runs one against a server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from longshore.deploy.bench.options import AgentsOptions
from longshore.protocol.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class SharedPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that the prompts of all jobs with this id begin with."""

    id: int
    num_tokens: Count


class AgentTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. Its prompt is the conversation so far, and new tokens.

    tool, gap_s: what the turn calls, and the time from its end to the arrival of the next turn;
                 None and 0 in the last turn.
    """

    num_new_tokens: Positive
    num_output_tokens: Positive
    tool: str | None = None
    gap_s: Seconds = 0.0


class AgentJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """arrival_s: of the first turn; each later turn arrives a gap after the end of the one before,
    however long that took."""

    job_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    arrival_s: Seconds
    turns: Annotated[tuple[AgentTurn, ...], msgspec.Meta(min_length=1)]
    shared_prefix: SharedPrefix | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the last turn, with its output."""
        prefix = 0 if self.shared_prefix is None else self.shared_prefix.num_tokens
        return prefix + sum(turn.num_new_tokens + turn.num_output_tokens for turn in self.turns)


@dataclass(frozen=True)
class LogNormal:
    """A distribution by its median and the deviation of its logarithm."""

    median: float
    sigma: float

    def draw(self, generator: np.random.Generator) -> float:
        return self.median * float(np.exp(self.sigma * generator.standard_normal()))


@dataclass(frozen=True)
class Tool:
    """share: of all calls. gap_s: how long a call takes."""

    name: str
    share: float
    gap_s: LogNormal


# Of 610 runs of an agent on SWE-bench Pro: 33 calls per run (median 30, p90 57, p99 90), 12,367
# tokens of context at the beginning and 84,482 at the end, 17,239 output tokens per run.
NUM_TURNS: Final = LogNormal(30, 0.50)
SHARED_PREFIX_TOKENS: Final = 10_000
FIRST_TOKENS: Final = LogNormal(2_350, 0.15)
NEW_TOKENS: Final = LogNormal(950, 1.1)
OUTPUT_TOKENS: Final = LogNormal(300, 1.05)
# Most calls read and edit files, in a fraction of a second; commands have a long tail.
TOOLS: Final = (
    Tool("read", 0.42, LogNormal(0.3, 0.6)),
    Tool("edit", 0.18, LogNormal(0.4, 0.6)),
    Tool("bash", 0.28, LogNormal(1.5, 1.2)),
    Tool("test", 0.10, LogNormal(10.0, 0.9)),
    Tool("web", 0.02, LogNormal(6.0, 0.8)),
)


def make_jobs(options: AgentsOptions) -> Iterator[AgentJob]:
    """The jobs of the built-in profile, by arrival."""
    generator = np.random.default_rng(options.seed)
    shares = [tool.share for tool in TOOLS]
    arrival_s = 0.0

    def tokens(distribution: LogNormal) -> int:
        return max(round(distribution.draw(generator) * options.token_scale), 1)

    for number in range(options.num_jobs):
        num_turns = options.turns or max(round(NUM_TURNS.draw(generator)), 1)
        num_prefix = round(SHARED_PREFIX_TOKENS * options.token_scale)
        num_left = options.max_tokens - num_prefix
        turns: list[AgentTurn] = []
        for index in range(num_turns):
            num_new = tokens(NEW_TOKENS if index else FIRST_TOKENS)
            num_output = tokens(OUTPUT_TOKENS)
            tool = TOOLS[int(generator.choice(len(TOOLS), p=shares))]
            gap_s = tool.gap_s.draw(generator)
            num_left -= num_new + num_output
            if num_left < 0 and not turns:
                raise ConfigError(
                    f"max_tokens={options.max_tokens} are too few for the first turn of job "
                    f"{number}, which has {options.max_tokens - num_left:,} tokens. Raise it, or "
                    "lower token_scale."
                )
            if num_left < 0:  # the context is full
                break
            turns.append(AgentTurn(num_new, num_output, tool.name, round(gap_s, 3)))
        turns[-1] = msgspec.structs.replace(turns[-1], tool=None, gap_s=0.0)
        prefix = SharedPrefix(0, num_prefix) if num_prefix else None
        yield AgentJob(f"job-{number}", round(arrival_s, 3), tuple(turns), prefix)
        if options.job_rate < float("inf"):
            arrival_s += float(generator.exponential(1 / options.job_rate))


def run(options: AgentsOptions) -> None:
    """Write a workload. Raises ConfigError if max_tokens are too few, or it cannot be written."""
    lines = b"".join(msgspec.json.encode(job) + b"\n" for job in make_jobs(options))
    try:
        options.out.write_bytes(lines)
    except OSError as error:
        raise ConfigError(f"out={str(options.out)!r} cannot be written: {error.strerror}") from None


def read_jobs(path: Path) -> Sequence[AgentJob]:
    """The jobs of a file, by arrival. Raises ConfigError naming the line that is not a job."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    decoder = msgspec.json.Decoder(AgentJob)
    jobs: list[AgentJob] = []
    for number, line in enumerate(lines, 1):
        try:
            jobs.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    if not jobs:
        raise ConfigError(f"{path} has no jobs")
    return sorted(jobs, key=lambda job: job.arrival_s)
