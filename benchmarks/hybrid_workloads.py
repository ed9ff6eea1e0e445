"""Requests of the workloads of `hybrid_hits.py`: traces, and agents whose template keeps or drops
the reasoning of earlier turns.

What matters of a prompt is where it equals others, so it is a path of segments: a segment has a key
and a length, and paths with equal keys up to a place have equal tokens up to there.
"""

import gzip
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Final

import numpy as np

from longshore.deploy.bench.agents import AgentJob, make_jobs
from longshore.deploy.bench.options import AgentsOptions

TRACES: Final = Path(__file__).resolve().parent / "traces"
TRACE_BLOCK: Final = 512
TOKEN_S: Final = 0.02
"""Time of an output token of an agent's turn."""
CALLS_PER_QUESTION: Final = 8
QUESTION_GAP_S: Final = 30.0
REASONING_SHARE: Final = 0.5

Segment = tuple[int, int]
"""Key and number of tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    now:         its arrival, in seconds.
    path:        segments of prompt and answer.
    num_prompt:  tokens of the prompt.
    stable_end:  where a next turn departs at the earliest that continues this prompt: of a trace,
                 the end of its last full block, because it does not say what the rest is; of
                 others, the end of the prompt.
    answer_end:  where a next turn departs that repeats the answer; None: none does, because the
                 template drops its reasoning, or because the trace does not say so.
    turn_start:  where the next turn after a user's message departs, if the template drops the
                 reasoning: the prompt's end of the first request after the last such message.
    system_end:  end of what the gateway knows to be system prompt and tools; 0: it knows nothing.
    turn:        answers in the prompt, as the messages of a chat show.
    is_asked:    a user wrote the last message, not a tool.
    has_call:    the answer ends with the call of a tool.
    idle_s:      since the end of the turn before; of a trace, since its arrival.
    """

    now: float
    path: tuple[Segment, ...]
    num_prompt: int
    stable_end: int
    answer_end: int | None = None
    turn_start: int | None = None
    system_end: int = 0
    turn: int = 0
    is_asked: bool = True
    has_call: bool = False
    idle_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.path)


def read_trace(path: Path, limit: int | None = None) -> Iterator[Request]:
    """The requests of a trace in Mooncake's format. The tokens after the last full block, and the
    answer, are of the request alone. A trace has no messages; a request has one turn more than the
    last one whose full blocks, at least two, its own begin with."""
    turns: dict[int, tuple[int, float]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, text in enumerate(lines):
            if limit is not None and number >= limit:
                return
            line = json.loads(text)
            num_prompt = line["input_length"]
            full = line["hash_ids"][: num_prompt // TRACE_BLOCK]
            shared = [(key, TRACE_BLOCK) for key in full]
            stable_end = len(full) * TRACE_BLOCK
            rest = num_prompt + line["output_length"] - stable_end
            now = line["timestamp"] / 1e3
            before, ended_at = next(
                (turns[key] for key in reversed(full) if key in turns), (-1, now)
            )
            if len(full) > 1:
                turns[full[-1]] = before + 1, now
            yield Request(
                now=now,
                path=(*shared, (-1 - number, rest)),
                num_prompt=num_prompt,
                stable_end=stable_end,
                turn=before + 1,
                idle_s=now - ended_at,
            )


@dataclass(slots=True)
class _Agent:
    """A job on its way. history: what its next prompt begins with. loop_start: the number of
    segments up to the end of the user's last message."""

    job: AgentJob
    history: list[Segment]
    system_end: int
    loop_start: int = 0
    turn_start: int = 0


def agents(
    num_jobs: int, job_rate: float, *, is_dropped: bool, seed: int = 0, num_systems: int = 8
) -> Iterator[Request]:
    """The turns of agents' jobs of `longshore bench agents`, in the order in which they arrive.

    After about every eighth answer a user writes instead of a tool, half a minute later in the
    median. is_dropped: from then on the prompt has the answers before it without their reasoning,
    half of their tokens. num_systems: different system prompts; each job has one of them.
    """
    options = AgentsOptions(out=Path("unused"), num_jobs=num_jobs, job_rate=job_rate, seed=seed)
    generator = np.random.default_rng((seed, 1))
    keys = itertools.count(1)
    systems = [next(keys) for _ in range(num_systems)]
    waiting: list[tuple[float, int, int, bool, float]] = []
    active: list[_Agent] = []
    for number, job in enumerate(make_jobs(options)):
        system_end = 0 if job.shared_prefix is None else job.shared_prefix.num_tokens
        system = [(systems[int(generator.integers(num_systems))], system_end)]
        active.append(_Agent(job, system if system_end else [], system_end))
        waiting.append((job.arrival_s, number, 0, True, 0.0))
    heapify(waiting)
    while waiting:
        now, number, index, is_question, idle_s = heappop(waiting)
        agent, turn = active[number], active[number].job.turns[index]
        if is_question and is_dropped and index:
            _drop_reasoning(agent, keys)
        agent.history.append((next(keys), turn.num_new_tokens))
        num_prompt = sum(length for _, length in agent.history)
        if is_question:
            agent.loop_start, agent.turn_start = len(agent.history), num_prompt
        agent.history.append((next(keys), turn.num_output_tokens))
        is_asked_next = bool(generator.random() < 1 / CALLS_PER_QUESTION)
        yield Request(
            now=now,
            path=tuple(agent.history),
            num_prompt=num_prompt,
            stable_end=num_prompt,
            answer_end=None if is_dropped and is_asked_next else num_prompt + agent.history[-1][1],
            turn_start=agent.turn_start if is_dropped else None,
            system_end=agent.system_end,
            turn=index,
            is_asked=is_question,
            has_call=not is_asked_next and turn.tool is not None,
            idle_s=idle_s,
        )
        if index + 1 < len(agent.job.turns):
            pause_s = QUESTION_GAP_S * float(np.exp(generator.standard_normal()))
            gap_s = pause_s if is_asked_next else turn.gap_s
            ended_at = now + TOKEN_S * turn.num_output_tokens
            heappush(waiting, (ended_at + gap_s, number, index + 1, is_asked_next, gap_s))


def _drop_reasoning(agent: _Agent, keys: Iterator[int]) -> None:
    """After the user's last message, answers and results of tools take turns. They are at other
    places now, so that all of them have new keys."""
    loop = agent.history[agent.loop_start :]
    agent.history[agent.loop_start :] = [
        (next(keys), length if position % 2 else max(1, round(length * (1 - REASONING_SHARE))))
        for position, (_, length) in enumerate(loop)
    ]
