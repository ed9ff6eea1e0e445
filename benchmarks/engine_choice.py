"""Which engine gets the next prompt: `least_loaded` compared with other rules, in a simulation.

    python benchmarks/engine_choice.py [--requests 2000] [--repeats 2] [--json F]

Time is simulated, so only the rule matters. An engine computes steps of at most 2,048 tokens: one
for each decoding request, then prompt chunks of the others, oldest first. A step takes 6 ms plus
0.03 ms per token (a slow engine: 2.5 times that). Requests arrive at random times at random
gateways. Prompt lengths are log-normal with a median of 245 tokens and a sigma of 1.3 (alike: 0.3),
answer lengths exponential with a mean of 150 tokens. Engines report once a second. Rules:

`choice`   the policy.                    `requests` the same, without prompt lengths.
`own`      the same, without reports.     `whole`    the same, with reports at full weight.
`turn`     round robin.                   `random`   random.

`spread` is the mean difference between the most and the fewest requests at an engine.
"""

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import report

from longshore.deploy.gateway.router.engine_loads import TOKENS_PER_REQUEST
from longshore.deploy.gateway.router.policies import Decision, RoutedPrompt
from longshore.deploy.gateway.router.router import Router
from longshore.deploy.requests.live_requests import LiveRequest
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams

BUDGET: Final = 2048
MAX_ROWS: Final = 256
STEP_S: Final = 0.006
TOKEN_S: Final = 0.00003
REPORT_EVERY_S: Final = 1.0
RULES: Final = ("choice", "requests", "own", "whole", "turn", "random")
CASES: Final = (
    # gateways, engines, sigma of the prompts, requests per second and engine, a slow engine
    ("unlike prompts", 1, 2, 1.3, 18.0, False),
    ("unlike prompts", 1, 4, 1.3, 18.0, False),
    ("alike prompts", 1, 4, 0.3, 30.0, False),
    ("4 gateways", 4, 4, 1.3, 18.0, False),
    ("4 gateways, alike", 4, 4, 0.3, 30.0, False),
    ("4 gateways, a slow engine", 4, 4, 1.3, 15.0, True),
)

NO_PROMPT: Final = RoutedPrompt(())
NO_MESSAGE: Final = AddRequest("", 0, EMPTY_INT32, SamplingParams())


@dataclass(eq=False)
class Request:
    """A request, as far as an engine knows it."""

    live: LiveRequest
    gateway: int
    arrived_s: float
    num_left: int
    num_prompt_left: int
    first_token_s: float = math.nan


@dataclass
class Engine:
    slowness: float = 1.0
    requests: list[Request] = field(default_factory=list)
    is_busy: bool = False

    def step(self) -> tuple[float, list[Request]]:
        """Duration of the next step, and the requests that get a token."""
        num_tokens, sampling = 0, []
        for request in self.requests[:MAX_ROWS]:
            count = min(max(request.num_prompt_left, 1), BUDGET - num_tokens)
            num_tokens += count
            request.num_prompt_left = max(0, request.num_prompt_left - count)
            if count and not request.num_prompt_left:
                sampling.append(request)
        return self.slowness * (STEP_S + TOKEN_S * num_tokens), sampling


class Gateway:
    """Applies its rule, and counts its requests."""

    def __init__(self, rule: str, number: int, num_gateways: int, num_engines: int) -> None:
        self.num_own = [0] * num_engines
        self._rule = rule
        self._num_sent = number
        self.router = Router(num_engines, number=number, num_gateways=num_gateways)
        self._weight = num_gateways if rule == "whole" else int(rule != "own")

    def hear(self, engine: int, num_requests: int) -> None:
        num_own = self.num_own[engine]
        others = self._weight * (num_requests - num_own)
        self.router.loads.note_report(engine, num_requests=num_own + others, num_own=num_own)

    def choose(self, rng: random.Random) -> int:
        self._num_sent += 1
        if self._rule in ("turn", "random"):
            draw = self._num_sent if self._rule == "turn" else rng.randrange(len(self.num_own))
            return draw % len(self.num_own)
        decision = self.router.choose(NO_PROMPT, self.num_own, [True] * len(self.num_own), 0.0)
        assert decision is not None
        return decision.engine

    def send(self, engine: int, live: LiveRequest) -> None:
        self.num_own[engine] += 1
        if self._rule != "requests":
            self.router.note_sent(Decision(engine, "load"), live)


class Simulation:
    """One rule in one case."""

    def __init__(
        self, rule: str, seed: int, gateways: int, engines: int, sigma: float, is_slow: bool
    ) -> None:
        self._rng, self._sigma = random.Random(seed), sigma
        self._draws = random.Random(seed)  # for the rule only, so that all get the same requests
        self._gateways = [Gateway(rule, n, gateways, engines) for n in range(gateways)]
        self._engines = [Engine() for _ in range(engines)]
        if is_slow:
            self._engines[0].slowness = 2.5
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._num_unfinished = 0
        self.ttft_s: list[float] = []
        self.spread: list[int] = []

    def run(self, num_requests: int, rate: float) -> None:
        time_s = 0.0
        for _ in range(num_requests):
            time_s += self._rng.expovariate(rate)
            self._at(time_s, self._arrive)
        for engine in range(len(self._engines)):
            self._at(self._rng.random(), lambda now, engine=engine: self._report(engine, now))
        self._num_unfinished = num_requests
        while self._num_unfinished:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, event))

    def _arrive(self, now: float) -> None:
        number = self._rng.randrange(len(self._gateways))
        num_prompt = max(1, min(16_000, int(self._rng.lognormvariate(5.5, self._sigma))))
        num_output = max(1, int(self._rng.expovariate(1 / 150)))
        gateway = self._gateways[number]
        engine = gateway.choose(self._draws)
        live = LiveRequest("", 0, range(num_prompt), NO_MESSAGE, lambda: None)
        gateway.send(engine, live)
        self._engines[engine].requests.append(Request(live, number, now, num_output, num_prompt))
        if not self._engines[engine].is_busy:
            self._step(engine, now)
        counts = [len(each.requests) for each in self._engines]
        self.spread.append(max(counts) - min(counts))

    def _step(self, number: int, now: float) -> None:
        engine = self._engines[number]
        engine.is_busy = bool(engine.requests)
        if engine.is_busy:
            took_s, sampling = engine.step()
            self._at(now + took_s, lambda end: self._answer(number, sampling, end))

    def _answer(self, number: int, sampling: list[Request], now: float) -> None:
        for request in sampling:
            if not request.live.num_taken:
                self.ttft_s.append(now - request.arrived_s)
                self._gateways[request.gateway].router.note_answer(request.live, now)
            request.live.taken_token_ids.append(0)
            request.num_left -= 1
            if not request.num_left:
                self._engines[number].requests.remove(request)
                self._gateways[request.gateway].num_own[number] -= 1
                self._num_unfinished -= 1
        self._step(number, now)

    def _report(self, number: int, now: float) -> None:
        for gateway in self._gateways:
            gateway.hear(number, len(self._engines[number].requests))
        self._at(now + REPORT_EVERY_S, lambda later: self._report(number, later))


def measure(
    case: tuple[str, int, int, float, float, bool], rule: str, options: Any
) -> dict[str, Any]:
    name, gateways, engines, sigma, rate, is_slow = case
    ttft_s: list[float] = []
    spread: list[int] = []
    for seed in range(options.repeats):
        simulation = Simulation(rule, seed, gateways, engines, sigma, is_slow)
        simulation.run(options.requests, rate * engines)
        ttft_s += simulation.ttft_s
        spread += simulation.spread
    return {
        "case": name,
        "engines": engines,
        "rule": rule,
        "ttft_ms": float(np.mean(ttft_s)) * 1e3,
        "ttft_p99_ms": float(np.percentile(ttft_s, 99)) * 1e3,
        "spread": float(np.mean(spread)),
    }


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--requests", type=int, default=2000, help="in each repeat")
    arguments.add_argument("--repeats", type=int, default=2)
    options = arguments.parse_args()
    rows = [
        measure(case, rule, options)
        for case in CASES
        for rule in RULES
        if case[1] > 1 or rule not in ("own", "whole")  # which differ with several gateways only
    ]
    report.write(options.json, rows, tokens_per_request=TOKENS_PER_REQUEST)


if __name__ == "__main__":
    main()
