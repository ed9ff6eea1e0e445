"""Drafts, grammars, forks, hints and preemption at once: every request gets its own tokens, and its
grammar exactly these."""

import random
import zlib

import pytest

from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import CacheHint
from tests.harness.clients import RequestKey
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler, grammar_for
from tests.harness.random_runs import run_until_seen
from tests.harness.tokens import expected_output, prompt_of, steady_token

ODD = 5  # every grammar allows it, and no request ever samples it
EVEN = 6  # nor this, which no grammar allows
NUM_DRAFTS = 3


def propose(request_id: str, position: int) -> list[int]:
    """Some right tokens, then one that the grammar allows or not."""
    chosen = zlib.crc32(f"{request_id}?{position}".encode())
    right = [steady_token(request_id, position + index) for index in range(NUM_DRAFTS)]
    wrong = [ODD if chosen % 2 else EVEN] * NUM_DRAFTS
    return [*right[: chosen % (NUM_DRAFTS + 1)], *wrong][:NUM_DRAFTS]


class SampledFamilies:
    """Requests that sample several outputs of one prompt, each with its grammar, in a pool that is
    too small for them."""

    def __init__(self, seed: int, steps_in_flight: int) -> None:
        self.chance = chance = random.Random(seed)
        self.compiler = FakeCompiler({"all"})
        self.driver = Driver(
            num_blocks=chance.randrange(13, 20),
            max_model_len=40,
            max_num_seqs=chance.randrange(2, 7),
            max_num_batched_tokens=chance.choice([9, 20, 64]),
            max_steps_in_flight=steps_in_flight,
            enable_prefix_caching=chance.random() < 0.7,
            policy=chance.choice(["fcfs", "priority"]),
            num_speculative_tokens=NUM_DRAFTS,
            num_lookahead_tokens=chance.choice([0, NUM_DRAFTS]),
            draft=propose,
            grammars=self.compiler,
        )
        self.max_tokens: dict[RequestKey, int] = {}
        self.forks: set[RequestKey] = set()

    def add_family(self) -> None:
        chance, number = self.chance, len(self.max_tokens)
        prompt = prompt_of(chance.randrange(2, 15), chance.choice([0, 0, number % 40]))
        has_grammar, priority = chance.random() < 0.8, chance.randrange(3)
        hint = chance.choice([None, CacheHint(3.0), CacheHint(100.0, "s")])
        parent: RequestKey | None = None
        for index in range(chance.randrange(1, 4)):
            name, max_tokens = f"r{number + index}", chance.randrange(4, 26)
            key = self.driver.add(
                name,
                prompt,
                max_tokens=max_tokens,
                priority=priority,
                cache_hint=hint,
                structured_output=grammar_for(name) if has_grammar else None,
                fork_of=None if parent is None else parent[1],
            )
            self.max_tokens[key] = max_tokens
            if parent is not None and has_grammar:
                self.forks.add(key)
            parent = parent or key

    def play(self) -> None:
        for _ in range(8):
            self.add_family()
            for _ in range(self.chance.randrange(8)):
                self.driver.step()
            if self.chance.random() < 0.3:
                self.driver.abort(self.chance.choice(list(self.max_tokens)))
        self.driver.run()

    def check(self) -> None:
        driver = self.driver
        for key, max_tokens in self.max_tokens.items():
            name, tokens = driver.names[key], driver.received[key]
            assert tokens == expected_output(name, len(tokens))
            if driver.reason(key) is not FinishReason.ABORTED:
                assert len(tokens) == max_tokens
            if name in self.compiler.grammars:
                assert self.compiler.grammars[name].tokens == tokens
                assert self.compiler.grammars[name].is_released
        assert driver.num_free_blocks == driver.num_blocks - 1

    def seen(self) -> dict[str, int]:
        ends = [self.driver.finished[key] for key in self.forks]
        return {
            "copied blocks": self.driver.num_copies,
            "preempted forks": sum(end.num_preemptions > 0 for end in ends),
            "accepted drafts": sum(end.num_accepted_tokens for end in ends),
            "wrong drafts": sum(end.num_draft_tokens - end.num_accepted_tokens for end in ends),
            "drafts against a grammar": sum(end.num_invalid_draft_tokens for end in ends),
            "preempted forks with drafts": sum(
                end.num_preemptions > 0 and end.num_accepted_tokens > 0 for end in ends
            ),
        }


@pytest.mark.req("FEA-01", "SPD-04", "SPD-05")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_drafts_under_grammars_change_no_token_of_forks_that_are_preempted(
    steps_in_flight: int,
) -> None:
    def run(seed: int) -> dict[str, int]:
        families = SampledFamilies(seed, steps_in_flight)
        families.play()
        families.check()
        return families.seen()

    least = {"copied blocks": 5, "preempted forks": 5}
    if steps_in_flight == 1:  # otherwise requests with a grammar have no drafts
        least |= {
            "accepted drafts": 50,
            "wrong drafts": 50,
            "drafts against a grammar": 50,
            "preempted forks with drafts": 5,
        }
    seen = run_until_seen(run, range(30), least)
    assert steps_in_flight == 1 or not seen["accepted drafts"]
