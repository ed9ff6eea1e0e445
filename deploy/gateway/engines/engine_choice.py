"""Which of several equal engines takes the next prompt: the one with the least to do, as far as
this gateway knows.

**Own requests** are counted exactly. While one waits for its first token its prompt counts too, as
one request more for every TOKENS_PER_REQUEST tokens: prompts are what an engine's steps are long
for, and lengths differ far more than numbers do. The time to the first token at p99 was 251 and 196
ms so (2 and 4 simulated engines), 381 and 340 ms by requests alone, 411 and 440 ms in turn; of
prompts about as long as each other 34, 41 and 30 ms.

**What other gateways have** at an engine is what it said last (once a second), less what was this
gateway's own when that came: what was given up just before counts as others' until the next one. It
counts divided by the number of gateways. Taken whole, all of them would send to the engine that was
empty a second ago: with 4 gateways and 4 engines that is 483 ms, worse than at random (450),
against 353 so and 339 without any reports (each gateway's own are spread evenly, so their sum is).
With one engine 2.5 times slower it is 571 ms whole, 414 so and 482 without.

`benchmarks/engine_choice.py` has the conditions.

Engines that are equally loaded take turns, and each gateway begins with another one.
"""

from collections.abc import Sequence
from typing import Final

from longshore.deploy.requests.live_requests import LiveRequest

TOKENS_PER_REQUEST: Final = 256
"""So many tokens of prompts without an answer weigh as much as one request."""


class EngineChoice:
    """The knowledge of one gateway.

    number: of this gateway among `num_gateways`. If it is the only one, all that an engine reports
            is its own.
    """

    def __init__(self, num_engines: int, *, number: int = 0, num_gateways: int = 1) -> None:
        self._num_gateways = num_gateways
        self._num_others = [0] * num_engines
        self._unanswered: dict[LiveRequest, int] = {}  # the engines they were sent to
        self._num_prompt_tokens = [0] * num_engines
        self._turn = number % num_engines

    def note_report(self, engine: int, *, num_requests: int, num_own: int) -> None:
        """An engine has told how many requests run and wait there; `num_own` are this gateway's."""
        if self._num_gateways > 1:
            self._num_others[engine] = max(0, num_requests - num_own)

    def note_prompt(self, engine: int, request: LiveRequest) -> None:
        """A prompt has been sent there, which shares no blocks with another one."""
        self._unanswered[request] = engine
        self._num_prompt_tokens[engine] += len(request.prompt_token_ids)

    def note_answer(self, request: LiveRequest) -> None:
        """Its first token has come, or its end, or nobody waits for it any more. May be called
        again."""
        engine = self._unanswered.pop(request, None)
        if engine is not None:
            self._num_prompt_tokens[engine] -= len(request.prompt_token_ids)

    @property
    def num_others(self) -> int:
        """Requests of other gateways at all engines."""
        return sum(self._num_others)

    def load(self, engine: int, num_own: int) -> float:
        """In requests. num_own: of this gateway there."""
        num_others = self._num_others[engine] / self._num_gateways
        return num_own + num_others + self._num_prompt_tokens[engine] / TOKENS_PER_REQUEST

    def choose(self, num_own: Sequence[int], is_usable: Sequence[bool]) -> int | None:
        """The engine for the next prompt; None if there is none that is usable.

        num_own:   requests of this gateway, by engine.
        is_usable: whether it lives and is ready, by engine.
        """
        num_engines = len(num_own)
        turns = ((self._turn + i) % num_engines for i in range(num_engines))
        usable = [engine for engine in turns if is_usable[engine]]
        if not usable:
            return None
        chosen = min(usable, key=lambda engine: self.load(engine, num_own[engine]))
        self._turn = (chosen + 1) % num_engines
        return chosen
