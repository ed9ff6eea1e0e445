"""One object per request, and the queues of those that wait."""

import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longshore.protocol.requests import AddRequest, ContinueSession, MultimodalFeature
from longshore.protocol.sampling import SamplingParams
from tests.oracle.block_pool import Block

if TYPE_CHECKING:
    from tests.oracle.fairness import Fairness
    from tests.oracle.loads import Load


class Status(enum.Enum):
    """Where a request stands. LOADED requests have their blocks and wait for a row."""

    WAITING = enum.auto()
    WAITING_FOR_GRAMMAR = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    WAITING_FOR_INPUT = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class TextbookRequest:
    """A request from arrival to end.

    client, handle:   whom to tell.
    is_resumable:     a session; `chunks` are the inputs that wait for their turn.
    max_tokens:       output tokens at most; what the model's length allows if nothing else was set.
    num_computed:     tokens whose KV exists once every plan so far has run, if drafts are right.
    num_placeholders: outputs that unanswered plans of this life will bring, if drafts are right.
    num_cached:       computed at the first admission, in tokens; None before it.
    num_cached_blocks:        leading blocks that were named, or found by name.
    encoder_blocks:   of what cross attention reads; all from its row to its end.
    part:             counts the outputs of a session.
    life:             counts how often it lost its row and may come back.
    was_preempted:    since it ran last.
    asked_at:         when the connector was asked what it does not know yet.
    asks_connector:   until a load in the background has begun.
    is_delayed:       its load waits until others have ended. Of these, a step tries the first, and
                      the next ones as long as loads begin.
    """

    message: AddRequest
    client: int
    prompt: list[int]
    outputs: list[int]
    arrival_time: float
    status: Status = Status.WAITING
    is_resumable: bool = False
    chunks: deque[ContinueSession] = field(default_factory=deque)
    max_tokens: int = 0
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    final_ids: frozenset[int] = frozenset()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    drafts: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_placeholders: int = 0
    num_preemptions: int = 0
    num_cached: int | None = None
    num_cached_blocks: int = 0
    part: int = 0
    life: int = 0
    was_preempted: bool = False
    asks_connector: bool = True
    is_delayed: bool = False
    asked_at: float | None = None
    blocks: list[Block] = field(default_factory=list)
    encoder_blocks: list[Block] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    load: "Load | None" = None

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
        request = cls(
            message=message,
            client=client,
            prompt=message.prompt_token_ids.tolist(),
            outputs=message.output_token_ids.tolist(),
            arrival_time=now - message.age_s,
            is_resumable=message.options.resumable,
        )
        request.set_limits(message.sampling, max_model_len, eos_token_ids)
        if message.options.structured_output is not None:
            request.status = Status.WAITING_FOR_GRAMMAR
        return request

    def set_limits(
        self, sampling: SamplingParams, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        """When to stop, for this prompt."""
        longest = max_model_len - len(self.prompt)
        stop_ids = frozenset(sampling.stop_token_ids)
        self.sampling = sampling
        self.max_tokens = longest if sampling.max_tokens is None else sampling.max_tokens
        self.min_tokens = sampling.min_tokens
        self.stop_ids = stop_ids if sampling.ignore_eos else stop_ids | eos_token_ids
        self.final_ids = eos_token_ids if self.is_structured else frozenset()

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def handle(self) -> int:
        return self.message.handle

    @property
    def is_pooling(self) -> bool:
        return self.message.options.pooling is not None

    @property
    def is_structured(self) -> bool:
        return self.message.options.structured_output is not None

    @property
    def lora_name(self) -> str | None:
        return self.message.options.lora.name if self.message.options.lora is not None else None

    @property
    def items(self) -> tuple[MultimodalFeature, ...]:
        """Multimodal items, in order of offset."""
        return self.message.options.multimodal

    @property
    def load_is_over(self) -> bool:
        """All ranks have reported the load of this request, and it has not run since."""
        return self.load is not None and self.load.is_over

    @property
    def token_ids(self) -> list[int]:
        """Prompt and verified outputs."""
        return self.prompt + self.outputs

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.outputs)

    def last_computed(self, max_model_len: int) -> int:
        """Nothing is computed beyond so many tokens: the last token is only sampled, and a vector
        needs none."""
        if self.is_pooling:
            return len(self.prompt)
        return min(len(self.prompt) + self.max_tokens, max_model_len) - 1

    def extra_key(self, first: int, last: int) -> Hashable:
        """HSH-06: what the KV of positions [first, last) depends on beside tokens."""
        items = tuple(
            (item.hash, item.offset)
            for item in self.items
            if item.offset < last and item.offset + item.num_tokens > first
        )
        return (self.message.options.cache_salt if first == 0 else None, self.lora_name, items)


class Jobs:
    """When the first turn of each job arrived; a job is forgotten with its last live turn, if the
    one that arrived last was its last step."""

    def __init__(self) -> None:
        self._first_arrival: dict[str, float] = {}
        self._live: dict[str, list[TextbookRequest]] = {}
        self._is_over: dict[str, bool] = {}

    def add(self, request: TextbookRequest) -> None:
        job_id = request.message.options.job_id
        if job_id is not None:
            self._first_arrival.setdefault(job_id, request.arrival_time)
            self._live.setdefault(job_id, []).append(request)
            self._is_over[job_id] = request.message.options.is_last_step

    def remove(self, request: TextbookRequest) -> None:
        job_id = request.message.options.job_id
        if job_id is not None:
            self._live[job_id].remove(request)
            if not self._live[job_id] and self._is_over[job_id]:
                del self._live[job_id], self._first_arrival[job_id]

    def first_arrival(self, request: TextbookRequest) -> float:
        """Of the request's job; a request without one is its own."""
        if request.message.options.job_id is None:
            return request.arrival_time
        return self._first_arrival[request.message.options.job_id]


class WaitingQueues:
    """`waiting`, and `skipped` for requests that could not be admitted when they were tried.

    Under "fcfs" the lists are the order, and what was skipped is older; under the other policies
    the smallest `urgency` of both is the head, wherever it stands. fairness: for "fair".
    """

    def __init__(self, policy: str, fairness: "Fairness | None" = None) -> None:
        self._policy = policy
        self._fairness = fairness
        self.jobs = Jobs()
        self.waiting: list[TextbookRequest] = []
        self.skipped: list[TextbookRequest] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.skipped)

    def requests(self) -> list[TextbookRequest]:
        """All that wait."""
        return self.skipped + self.waiting

    def append(self, request: TextbookRequest) -> None:
        """A new request, or a session between two parts, which is older than what has never run:
        behind all others of its kind."""
        blocked = (Status.WAITING_FOR_GRAMMAR, Status.WAITING_FOR_INPUT)
        (self.skipped if request.status in blocked else self.waiting).append(request)

    def prepend(self, request: TextbookRequest) -> None:
        """A preempted request, before everybody else (QUE-06)."""
        (self.skipped or self.waiting).insert(0, request)

    def put_back(self, set_aside: list[TextbookRequest]) -> None:
        """SCH-11: what was set aside in a step, in order, to the front of `skipped`."""
        self.skipped = set_aside + self.skipped

    def head(self) -> TextbookRequest | None:
        """The next to be tried, which stays in its queue; None if nobody may have a row."""
        if self._policy == "fcfs":
            return self.requests()[0]
        if self._fairness is not None:
            candidates = filter(self._fairness.may_have_a_row, self.requests())
            return min(candidates, key=self._fairness.urgency, default=None)
        return min(self.requests(), key=self.urgency)

    def remove(self, request: TextbookRequest) -> None:
        (self.waiting if request in self.waiting else self.skipped).remove(request)

    def victim(self, running: list[TextbookRequest]) -> TextbookRequest:
        """PRE-02. Nobody pins jobs yet, so "continuum" takes the tail as well."""
        if self._fairness is not None:
            return self._fairness.victim(running)
        if self._policy == "priority":
            return max(running, key=self.urgency)
        return running[-1]

    def urgency(self, request: TextbookRequest) -> tuple[float, float, str]:
        """The smallest is the most urgent."""
        if self._policy == "priority":
            return (request.message.options.priority, request.arrival_time, request.request_id)
        return (self.jobs.first_arrival(request), request.arrival_time, request.request_id)
