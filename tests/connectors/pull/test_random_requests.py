"""Random requests with shared prefixes, through two engines with small pools: reads that fail or
are slow, and aborts at every moment of both legs. Every answer has the tokens of one engine, and
every block is free at the end."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.connectors.pull.transport import ReadState
from longshore.protocol.outputs import FinishReason
from tests.connectors.engine import Answer, prompts_of
from tests.connectors.pull.local import network
from tests.connectors.pull.test_two_engines import (
    MAX_TOKENS,
    Pair,
    fresh_network,
    wanted,
)

ModelOf = Callable[[str], tuple[Path, Any]]

__all__ = ["fresh_network"]
pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS: Final = 24
MAX_AT_ONCE: Final = 5


@dataclass
class _Request:
    """aborts_after: rounds until it is aborted; negative: it is not."""

    number: int
    prompt: list[int]
    aborts_after: int
    first: Answer
    second: Answer | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.first.token_ids, *(self.second.token_ids if self.second else [])]


class _Life:
    def __init__(self, pair: Pair, chance: random.Random, prompts: list[list[int]]) -> None:
        self.pair, self.chance = pair, chance
        self.waiting = list(enumerate(prompts))
        self.live: list[_Request] = []
        self.ended: dict[int, list[int]] = {}
        self.num_aborted = 0

    def is_over(self) -> bool:
        """Whether all requests have ended; until then each call is a round."""
        while self.waiting and len(self.live) < MAX_AT_ONCE:
            self.start(*self.waiting.pop(0))
        for request in list(self.live):
            self.advance(request)
        return not (self.waiting or self.live)

    def start(self, number: int, prompt: list[int]) -> None:
        params = {"do_remote_decode": True}
        answer = self.pair.prefill.add(prompt, max_tokens=1, kv_transfer_params=params)
        aborts_after = self.chance.choice((-1, -1, self.chance.randrange(12)))
        self.live.append(_Request(number, prompt, aborts_after, answer))

    def advance(self, request: _Request) -> None:
        engine, answer = self.pair.decode, request.second
        if answer is None:
            engine, answer = self.pair.prefill, request.first
        if answer.end is None:
            if request.aborts_after == 0:
                engine.abort(answer)
            request.aborts_after -= 1
        elif answer.end.reason is FinishReason.ABORTED:
            self.live.remove(request)
            self.num_aborted += 1
        elif request.second is None:
            request.second = self.pair.go_on(request.prompt, request.first)
        else:
            self.live.remove(request)
            self.ended[request.number] = request.tokens


@pytest.mark.req("CRG-06")
@pytest.mark.req("MET-08")
@pytest.mark.parametrize("kind", ["full", "windows", "states"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_answer_is_right_and_no_block_leaks(kind: str, seed: int, model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    chance = random.Random(seed)
    bases = prompts_of(150, 150, seed=seed)
    prompts = [
        chance.choice(bases)[: chance.randrange(20, 120)] + prompts_of(8, seed=1000 + number)[0]
        for number in range(NUM_REQUESTS)
    ]
    expected = wanted(model, *prompts)
    fates = [chance.choice(("done", "done", "slow", "failed")) for _ in range(1000)]
    polls = [0] * 1000

    def state(number: int) -> ReadState:
        polls[number] += 1
        if fates[number] == "slow" and polls[number] < 300:
            return ReadState.IN_PROGRESS
        return ReadState.FAILED if fates[number] == "failed" else ReadState.DONE

    network.state = state
    small = {"num_blocks": 45, "max_num_batched_tokens": 64}
    options = {"lease_s": 2.0, "max_leased_share": 1.0}
    with Pair(model, options=options, prefill=small, decode=small) as pair:
        life = _Life(pair, chance, prompts)
        pair.until(life.is_over)
        pair.settle()
        assert pair.half(pair.decode)._remote == {}
        assert network.num_posted > 0
    assert life.num_aborted > 0
    assert len(life.ended) + life.num_aborted == NUM_REQUESTS
    for number, tokens in life.ended.items():
        assert tokens == expected[number], number
    assert all(len(tokens) == MAX_TOKENS for tokens in life.ended.values())
