"""What is sent to the simulated engines: the requests of a trace, agent jobs, or random requests.

All of them are jobs. A job has turns; the next one arrives some time after the one before has ended
(closed loop). A request of a trace is a job with one turn.

Only equality of tokens matters, so they are numbers of three ranges: the content of a block id of a
trace (or of a shared prefix), content of one turn only, and the output of a turn.
"""

import gzip
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError

TRACE_BLOCK_TOKENS: Final = 512
"""Tokens per block id in Mooncake's traces."""

_UNIQUE: Final = 1 << 29
_OUTPUT: Final = 1 << 30
VOCAB_SIZE: Final = 2**31 - 1

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 28)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=_UNIQUE)]
Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]


class Turn(msgspec.Struct, frozen=True):
    """One request of a job: what follows the conversation so far.

    tool:  that it calls at its end.
    gap_s: from its end to the arrival of the next turn.
    """

    num_new_tokens: Count
    num_output_tokens: Count
    tool: str | None = None
    gap_s: Duration = 0.0


@dataclass(kw_only=True)
class Job(ABC):
    """
    number:      of its first turn, among the turns of all jobs.
    job_id:      None for a request that is not part of a job.
    session_key: for routing by session.
    """

    number: int
    job_id: str | None
    arrival_s: float
    turns: Sequence[Turn]
    session_key: str | None

    @abstractmethod
    def prompt(self, turn: int) -> Int32Array:
        """All tokens of the prompt."""

    def num_prompt_tokens(self, turn: int) -> int:
        """Length of the prompt: new tokens, and all tokens of earlier turns."""
        earlier = sum(each.num_new_tokens + each.num_output_tokens for each in self.turns[:turn])
        return earlier + self.turns[turn].num_new_tokens

    def output_token(self, turn: int) -> int:
        """The token that the output of the turn consists of."""
        return _OUTPUT + self.number + turn

    def unique_token(self, turn: int) -> int:
        """A token that no other turn has."""
        return _UNIQUE + self.number + turn


def turn_of_output(token: int) -> int:
    """The number of the turn that has this `output_token`."""
    return token - _OUTPUT


@dataclass(kw_only=True)
class TraceJob(Job):
    """One request; its turn has all of its tokens. block_tokens: tokens per block id."""

    hash_ids: Sequence[int]
    block_tokens: int

    def prompt(self, turn: int) -> Int32Array:
        num_tokens = self.turns[turn].num_new_tokens
        blocks = np.repeat(np.array(self.hash_ids, np.int32), self.block_tokens)[:num_tokens]
        # A last block that is not full, and what has no id, is of this request only.
        num_full = min(len(blocks), num_tokens // self.block_tokens * self.block_tokens)
        prompt = np.full(num_tokens, self.unique_token(turn), np.int32)
        prompt[:num_full] = blocks[:num_full]
        return prompt


@dataclass(kw_only=True)
class AgentJob(Job):
    """A conversation, which begins with `num_shared` tokens that other jobs begin with as well.

    shared_token: what those consist of.
    """

    shared_token: int
    num_shared: int

    def num_prompt_tokens(self, turn: int) -> int:
        return self.num_shared + super().num_prompt_tokens(turn)

    def prompt(self, turn: int) -> Int32Array:
        tokens, counts = [self.shared_token], [self.num_shared]
        for index, each in enumerate(self.turns[: turn + 1]):
            tokens += [self.unique_token(index), self.output_token(index)]
            counts += [each.num_new_tokens, each.num_output_tokens]
        return np.repeat(np.array(tokens[:-1], np.int32), counts[:-1])


# Files


class _TraceLine(msgspec.Struct):
    timestamp: Duration
    input_length: Count
    output_length: Count
    hash_ids: list[Number]


class _SharedPrefix(msgspec.Struct):
    id: Number
    num_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 28)]


class _AgentLine(msgspec.Struct):
    job_id: str
    arrival_s: Duration
    turns: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    shared_prefix: _SharedPrefix | None = None


class _Kind(msgspec.Struct):
    turns: msgspec.Raw = msgspec.Raw()


_LineT = TypeVar("_LineT")


def read_jobs(
    path: Path, *, limit: int | None = None, shrink: int = 1, thin: int = 1, spread_s: float = 0.0
) -> list[Job]:
    """The jobs of a trace in Mooncake's format, or of agents, by their first line; sorted by
    arrival.

    limit:  of the number of lines.
    shrink: divide all lengths of a trace by this, also the tokens per block id.
    thin:   keep one of this many sessions, in the order of their first lines.
    spread_s: over which those that arrive at the same time are spread.
    Raises ConfigError, which names the file and the line.
    """
    lines = list(itertools.islice(_lines(path), limit))
    if not lines:
        raise ConfigError(f"trace={path} has no lines")
    kind = _decode(path, *lines[0], _Kind)
    jobs: list[Job]
    if kind.turns:
        if shrink != 1:
            raise ConfigError(f"shrink={shrink} is for traces of requests, and {path} has jobs")
        jobs = list(_agent_jobs([_decode(path, *line, _AgentLine) for line in lines]))
    else:
        jobs = list(_trace_jobs([_decode(path, *line, _TraceLine) for line in lines], shrink))
    _spread(jobs, spread_s)
    return sorted(_thinned(jobs, thin), key=lambda job: job.arrival_s)


def _spread(jobs: Sequence[Job], seconds: float) -> None:
    together: dict[float, list[Job]] = {}
    for job in jobs:
        together.setdefault(job.arrival_s, []).append(job)
    for arrival_s, group in together.items():
        for position, job in enumerate(group):
            job.arrival_s = arrival_s + seconds * position / len(group)


def _thinned(jobs: Sequence[Job], thin: int) -> list[Job]:
    """With new numbers."""
    sessions = {key: index for index, key in enumerate(dict.fromkeys(j.session_key for j in jobs))}
    kept = [job for job in jobs if sessions[job.session_key] % thin == 0]
    number = 0
    for job in kept:
        job.number, number = number, number + len(job.turns)
    return kept


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and texts of the lines that are not empty."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"trace={path} cannot be read: {error}") from error


def _decode(path: Path, number: int, line: bytes, kind: type[_LineT]) -> _LineT:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={path}, line {number}: {error}") from error


def _trace_jobs(lines: Sequence[_TraceLine], shrink: int) -> Iterator[Job]:
    """Sessions are not in a trace: a request belongs to the session of the request with which it
    has the most blocks in common, beyond the first, which may be a system prompt."""
    session_of: dict[int, str] = {}
    block_tokens = max(1, TRACE_BLOCK_TOKENS // shrink)
    for number, line in enumerate(lines):
        ids = line.hash_ids
        known = next((each for each in reversed(ids[1:]) if each in session_of), None)
        session = f"session-{number}" if known is None else session_of[known]
        session_of |= dict.fromkeys(ids[1:], session)
        turn = Turn(max(1, line.input_length // shrink), max(1, line.output_length // shrink))
        yield TraceJob(
            number=number,
            job_id=None,
            arrival_s=line.timestamp / 1e3,
            turns=(turn,),
            session_key=session,
            hash_ids=ids,
            block_tokens=block_tokens,
        )


def _agent_jobs(lines: Sequence[_AgentLine]) -> Iterator[Job]:
    number = 0
    for line in lines:
        prefix = line.shared_prefix or _SharedPrefix(0, 0)
        yield AgentJob(
            number=number,
            job_id=line.job_id,
            arrival_s=line.arrival_s,
            turns=line.turns,
            session_key=line.job_id,
            shared_token=prefix.id,
            num_shared=prefix.num_tokens,
        )
        number += len(line.turns)


def random_jobs(
    num_requests: int,
    *,
    rate: float,
    mean_input: int,
    mean_output: int,
    shared_prefix: int,
    seed: int,
) -> list[Job]:
    """Requests at random (Poisson) times. Input beyond the shared prefix, and output, have
    exponentially distributed lengths. rate: arrivals per second; inf: all arrive at once."""
    generator = np.random.default_rng(seed)
    arrivals_s = np.cumsum(generator.exponential(1 / rate, num_requests)).tolist()
    inputs, outputs = (
        np.ceil(generator.exponential(mean, num_requests)).astype(int).clip(1).tolist()
        for mean in (max(1, mean_input - shared_prefix), mean_output)
    )
    return [
        AgentJob(
            number=number,
            job_id=None,
            arrival_s=arrivals_s[number],
            turns=(Turn(inputs[number], outputs[number]),),
            session_key=None,
            shared_token=0,
            num_shared=shared_prefix,
        )
        for number in range(num_requests)
    ]
