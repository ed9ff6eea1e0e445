"""Prompts that share prefixes, and the tokens that an engine without a connector gives for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

from longshore.deploy.llm.blocking_client import BlockingClient, EngineConnection
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.requests.live_requests import LiveRequest, LiveRequests
from longshore.deploy.supervisor.engine_plan import EnginePlan
from longshore.protocol.sampling import SamplingParams
from longshore.testing.engines import MAX_REQUEST_BLOCKS, opened, plan_of

NUM_FAMILIES: Final = 4
NUM_FIRST_TURNS: Final = 40
NUM_SECOND_TURNS: Final = 24
MAX_TOKENS: Final = 10

LEAST_MARGIN: Final = 1e-3
"""Smallest difference between the log probabilities of the two most likely tokens. If they are
closer, rounding could decide between them."""


_known: "dict[tuple[str, Path], list[KnownPrompt]]" = {}


@dataclass(frozen=True)
class KnownPrompt:
    """A prompt, its greedy answer of MAX_TOKENS tokens, and the log probability of each."""

    token_ids: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]


def greedy(num_tokens: int) -> SamplingParams:
    """Settings of all requests. A wrong block changes log probabilities even where it does not
    change the most likely token."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)


def known_prompts(model: Path, settings: Mapping[str, Any]) -> list[KnownPrompt]:
    """First turns, then second turns, which repeat a first turn and its answer.

    settings: as in `plan_of`. They are computed once per process."""
    key = repr(sorted(settings.items())), model
    if key not in _known:
        with TemporaryDirectory() as state_dir:
            _known[key] = _compute(plan_of(model, settings, Path(state_dir)))
    return _known[key]


def _compute(plan: EnginePlan) -> list[KnownPrompt]:
    chance = Random("prompts")
    block_size = plan.cache.block_size
    vocab = range(3, plan.model.vocab_size)
    longest = MAX_REQUEST_BLOCKS * block_size - MAX_TOKENS
    families = [chance.choices(vocab, k=longest) for _ in range(NUM_FAMILIES)]

    def continued(start: Sequence[int]) -> tuple[int, ...]:
        tail = chance.choices(vocab, k=chance.randrange(block_size))
        return (*start, *tail)[:longest]

    first = [
        continued(chance.choice(families)[: chance.randrange(1, longest)])
        for _ in range(NUM_FIRST_TURNS)
    ]
    with opened(InProcessEngine(plan)) as engine:
        known = answer_all(engine, first)
        turns = [turn for turn in known if len(turn.token_ids) + MAX_TOKENS < longest]
        second = [
            continued((*turn.token_ids, *turn.answer[: chance.randrange(1, MAX_TOKENS + 1)]))
            for turn in chance.choices(turns, k=NUM_SECOND_TURNS)
        ]
        return known + answer_all(engine, second)


def answer_all(engine: EngineConnection, prompts: Sequence[tuple[int, ...]]) -> list[KnownPrompt]:
    """The prompts whose answers no rounding can change."""
    client = BlockingClient(LiveRequests(Random(0)), engine)
    lives = [
        client.submit(f"reference {number}", prompt, greedy(MAX_TOKENS), on_change=lambda: None)
        for number, prompt in enumerate(prompts)
    ]
    while any(live.is_live for live in lives):
        outputs = engine.receive()
        if outputs is not None:
            client.requests.apply(outputs)
    return [known for live in lives if (known := _settled(live)) is not None]


def _settled(live: LiveRequest) -> KnownPrompt | None:
    """None if rounding could change the answer."""
    answer = live.take_token_ids()
    scores = live.take_scores(len(answer))
    for score in scores:
        (_, best), (_, second) = score.best[:2]
        if best - second < LEAST_MARGIN:
            return None
    logprobs = tuple(score.logprob for score in scores)
    return KnownPrompt(tuple(live.prompt_token_ids), tuple(answer), logprobs)
