"""The clients of a chaos run: 16 streams at a time, whose prompts share prefixes.

Half of the prompts are answered greedily, half with random draws from the best tokens, whose seed
determines them; all in float32. Rounding depends on what is computed together, so a token may
differ from the calm run's where two of the calm run's best tokens are almost equally likely, or
where the draw is almost at the border of two tokens.
"""

import asyncio
import itertools
import json
import random
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import numpy as np

from longshore.worker.sampling.uniform import uniform
from tests.integration.deployment import PATIENCE_S

NUM_STREAMS: Final = 16
NUM_PROMPTS: Final = 24
NUM_PREFIXES: Final = 4
PREFIX_TOKENS: Final = 96
MAX_TOKENS: Final = 120
TOP_K: Final = 4
"""Number of tokens that are drawn from, at temperature 1."""

TIE: Final = 1e-3
"""Difference of log probabilities, or of a draw and a border, up to which rounding may choose."""

COMPLETE: Final = "complete"
RETRY_S: Final = 0.05
STREAM_TIMEOUT_S: Final = 3 * PATIENCE_S


@dataclass(frozen=True)
class Prompt:
    """seed: of random draws; None: greedy. regex: what the output follows; None: anything."""

    token_ids: list[int]
    max_tokens: int
    seed: int | None
    regex: str | None = None

    def margin(self, position: int, logprobs: Iterable[float]) -> float:
        """How far the choice of an output token is from another one. logprobs: of the best tokens,
        one more than are drawn from."""
        best = np.array(sorted(logprobs, reverse=True))
        margin = float(-np.diff(best).max())
        if self.seed is None:
            return margin
        mass = np.exp(best[:TOP_K]).cumsum()
        (draw,) = uniform(np.array([self.seed], np.uint64), np.array([position], np.int64))
        return min(margin, float(np.abs(mass / mass[-1] - draw).min()))

    @property
    def num_best(self) -> int:
        """The number of log probabilities that `margin` needs."""
        return 2 if self.seed is None else TOP_K + 1


def make_prompts(seed: int) -> list[Prompt]:
    """Prompts of which many begin with the same blocks."""
    chance = random.Random(seed)

    def token_ids(count: int) -> list[int]:
        return [chance.randrange(10, 500) for _ in range(count)]

    prefixes = [token_ids(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [
        Prompt(
            chance.choice(prefixes) + token_ids(chance.randrange(8, 60)),
            chance.randrange(MAX_TOKENS // 3, MAX_TOKENS),
            seed=number if number % 2 else None,
        )
        for number in range(NUM_PROMPTS)
    ]


@dataclass
class Stream:
    """What a client received.

    margins: `Prompt.margin` of each token, if asked for.
    port:    of the client's end of the connection.
    end:     COMPLETE, or how it ended.
    """

    prompt: int
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    port: int = 0
    end: str = "never ended"

    def difference(self, calm: "Stream") -> str | None:
        """How the tokens differ from the calm run's; None if they are the same as far as they go,
        or up to a tie. A complete stream must be as long."""
        for position, (token_id, expected) in enumerate(
            zip(self.token_ids, calm.token_ids, strict=False)
        ):
            if token_id != expected:
                if calm.margins[position] < TIE:
                    return None
                return f"prompt {self.prompt}: token {position} is {token_id}, not {expected}"
        num_tokens, num_expected = len(self.token_ids), len(calm.token_ids)
        if num_tokens > num_expected or (self.end == COMPLETE and num_tokens < num_expected):
            return f"prompt {self.prompt}: {num_tokens} tokens instead of {num_expected}"
        return None


class Load:
    """NUM_STREAMS clients, each of which asks for one prompt after the other, on a new connection.
    A context manager: they start with it, on a thread of their own.

    streams:  all streams that have ended.
    progress: by client, when it got tokens, by `time.monotonic`.
    """

    def __init__(
        self, url: str, prompts: Sequence[Prompt], *, seed: int = 0, once: bool = False
    ) -> None:
        """once: ask for every prompt once, with margins."""
        self._address = urlsplit(url).netloc.split(":")
        self._prompts = prompts
        self._once = once
        self._chance = random.Random(seed)
        self._queue = list(range(len(prompts)))
        self._stopping = False
        self._done: Future[None] = Future()
        self._live: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.streams: list[Stream] = []
        self.progress: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop_asking()
        if error is not None:
            self.hang_up(NUM_STREAMS)
        self._thread.join(STREAM_TIMEOUT_S)

    def stop_asking(self) -> None:
        """The clients end with their present streams."""
        self._stopping = True

    def finish(self) -> list[Stream]:
        """Wait until all streams have ended, those of all prompts with `once`."""
        if not self._once:
            self.stop_asking()
        self._done.result(STREAM_TIMEOUT_S)
        return self.streams

    def wait_for_tokens(self, num_clients: int = NUM_STREAMS) -> None:
        """Until so many clients have got tokens after this call."""
        begin_s = time.monotonic()
        deadline_s = begin_s + STREAM_TIMEOUT_S
        while sum(bool(p) and p[-1] > begin_s for p in self.progress) < num_clients:
            assert time.monotonic() < deadline_s, "the clients get no tokens"
            time.sleep(0.01)

    def hang_up(self, num_clients: int) -> None:
        """Close the connections of some streams."""

        def cancel() -> None:
            for task in list(self._live)[:num_clients]:
                task.cancel()

        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(cancel)

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time in which a client got no token, up to now or its end, from shortly
        before `since_s` on."""
        gaps = [
            later - max(earlier, since_s)
            for times in self.progress
            for earlier, later in itertools.pairwise(times)
            if later > since_s
        ]
        return max(gaps, default=0.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._run_clients())
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(None)

    async def _run_clients(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.gather(*(self._client(number) for number in range(NUM_STREAMS)))

    async def _client(self, number: int) -> None:
        while not self._stopping and (prompt := self._next_prompt()) is not None:
            stream = Stream(prompt)
            task = asyncio.create_task(self._ask(number, stream))
            self._live.add(task)
            try:
                async with asyncio.timeout(STREAM_TIMEOUT_S):
                    await task
            except asyncio.CancelledError:
                stream.end = "hung up"
            except TimeoutError:
                pass  # it never ended
            except OSError as error:
                stream.end = f"closed: {type(error).__name__}"
            self._live.discard(task)
            self.streams.append(stream)
            if stream.end != COMPLETE:
                await asyncio.sleep(RETRY_S)

    def _next_prompt(self) -> int | None:
        if self._once:
            return self._queue.pop(0) if self._queue else None
        return self._chance.randrange(len(self._prompts))

    async def _ask(self, number: int, stream: Stream) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        stream.port = writer.get_extra_info("sockname")[1]
        body = json.dumps(self._body(self._prompts[stream.prompt])).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._address[0]}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            status = (await reader.readline()).split()
            stream.end = "closed: no end of the answer"
            if status[1:2] != [b"200"]:
                if status:
                    answer = (await reader.read()).partition(b"\r\n\r\n")[2]
                    stream.end = f"status {status[1].decode()}: {answer[:300].decode()}"
                return
            async for line in reader:  # an event is in one chunk, so that no line is divided
                if line.startswith(b"data: "):
                    self._take(line[6:].strip(), number, stream)
        finally:
            writer.close()

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        constraint: dict[str, Any] = {"ignore_eos": True}
        if prompt.regex is not None:
            constraint = {"structured_outputs": {"regex": prompt.regex}}
        return {
            **constraint,
            "prompt": prompt.token_ids,
            "max_tokens": prompt.max_tokens,
            "temperature": 0 if prompt.seed is None else 1,
            "top_k": TOP_K,
            "seed": prompt.seed,
            "stream": True,
            "return_token_ids": True,
            "logprobs": prompt.num_best if self._once else None,
        }

    def _take(self, data: bytes, number: int, stream: Stream) -> None:
        if data == b"[DONE]":
            if stream.end == "finished":
                stream.end = COMPLETE
            return
        event = json.loads(data)
        if "error" in event:
            stream.end = f"error event: {event['error']['message'][:300]}"
            return
        for choice in event["choices"]:
            if token_ids := choice.get("token_ids"):
                if self._once:
                    best = choice["logprobs"]["top_logprobs"]
                    prompt, first = self._prompts[stream.prompt], len(stream.token_ids)
                    stream.margins += [
                        prompt.margin(position, each.values())
                        for position, each in enumerate(best, first)
                    ]
                stream.token_ids += token_ids
                self.progress[number].append(time.monotonic())
            if choice["finish_reason"] is not None:
                stream.end = "finished"


def check_streams(
    streams: Sequence[Stream], calm: Sequence[Stream], may_end: Collection[str] = ()
) -> list[str]:
    """What is wrong with the streams: tokens that differ from the calm run's, and streams that
    ended in a way that is none of `may_end`, given by how their `end` begins."""
    wrong = []
    for stream in streams:
        difference = stream.difference(calm[stream.prompt])
        if difference is not None:
            wrong.append(difference)
        if stream.end != COMPLETE and not stream.end.startswith(tuple(may_end)):
            wrong.append(f"prompt {stream.prompt} after {len(stream.token_ids)}: {stream.end}")
    return wrong
