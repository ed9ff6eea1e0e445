"""One object per request, and the queue of those that wait."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from longshore.protocol.client import AddRequest
from tests.oracle.block_pool import Block


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class TextbookRequest:
    """A request from arrival to end.

    max_tokens:       output tokens at most; what the model's length allows if nothing else was set.
    num_computed:     tokens whose KV exists once every plan so far has run.
    num_placeholders: outputs that unanswered plans of this life will bring.
    num_cached:       prefix hits of the first admission, in tokens; None before it.
    num_named:        leading blocks that were named, or found by name.
    """

    request_id: str
    client: int
    handle: int
    prompt: list[int]
    outputs: list[int]
    max_tokens: int
    min_tokens: int
    stop_ids: frozenset[int]
    priority: int
    arrival_time: float
    salt: str | None
    reads_prefix_cache: bool
    status: Status = Status.WAITING
    num_computed: int = 0
    num_placeholders: int = 0
    num_preemptions: int = 0
    num_cached: int | None = None
    num_named: int = 0
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def from_message(
        cls,
        message: AddRequest,
        *,
        client: int,
        now: float,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> "TextbookRequest":
        """The request as it arrives at `now`, in seconds."""
        sampling = message.sampling
        prompt = message.prompt_token_ids.tolist()
        stop_ids = frozenset(sampling.stop_token_ids)
        longest = max_model_len - len(prompt)
        return cls(
            request_id=message.request_id,
            client=client,
            handle=message.handle,
            prompt=prompt,
            outputs=message.output_token_ids.tolist(),
            max_tokens=longest if sampling.max_tokens is None else sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_ids=stop_ids if sampling.ignore_eos else stop_ids | eos_token_ids,
            priority=message.priority,
            arrival_time=now - message.age_s,
            salt=message.cache_salt,
            reads_prefix_cache=not message.skip_reading_prefix_cache,
        )

    @property
    def token_ids(self) -> list[int]:
        """Prompt and verified outputs."""
        return self.prompt + self.outputs

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)

    @property
    def urgency(self) -> tuple[int, float, str]:
        """Orders requests under the priority policy: the smallest is the most urgent."""
        return (self.priority, self.arrival_time, self.request_id)


class WaitingQueue:
    """First come first served, or most urgent first."""

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._by_urgency = policy == "priority"
        self._requests: list[TextbookRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TextbookRequest]:
        return iter(self._requests)

    def append(self, request: TextbookRequest) -> None:
        self._requests.append(request)

    def prepend(self, request: TextbookRequest) -> None:
        """To the front; under the priority policy nobody jumps the order, so just add it."""
        self._requests.insert(0, request)

    def head(self) -> TextbookRequest:
        """The next to be admitted, which stays in the queue."""
        if self._by_urgency:
            return min(self._requests, key=lambda request: request.urgency)
        return self._requests[0]

    def remove(self, request: TextbookRequest) -> None:
        self._requests.remove(request)
