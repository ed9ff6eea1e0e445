"""A plan in the making, and plans that are not answered yet."""

from dataclasses import dataclass, field

from tests.oracle.block_pool import Block
from tests.oracle.encoder import EncoderCache, Use
from tests.oracle.plan import Admission
from tests.oracle.request import TextbookRequest


@dataclass
class Step:
    """What one step has given away so far.

    new_blocks: appended to a request's table in this step.
    drafts:     ids that a request verifies.
    encoded:    items whose outputs are made in this step.
    waits_for_transfers: the last running request lacks blocks that transfers own.
    """

    budget: int
    encoder_budget: int
    encoder: EncoderCache
    scheduled: dict[TextbookRequest, int] = field(default_factory=dict)
    new_blocks: dict[TextbookRequest, list[Block]] = field(default_factory=dict)
    drafts: dict[TextbookRequest, list[int]] = field(default_factory=dict)
    encoded: list[Use] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[TextbookRequest] = field(default_factory=list)
    waits_for_transfers: bool = False

    def schedule(
        self,
        request: TextbookRequest,
        num_tokens: int,
        new_blocks: list[Block],
        items: list[int],
    ) -> None:
        """Give a request its tokens and charge the budgets. `items`: as from `plan_items`."""
        self.scheduled[request] = num_tokens
        self.new_blocks[request] = new_blocks
        self.budget -= num_tokens
        for index in items:
            num_encoded = self.encoder.use(request, index, self.encoder_budget)
            assert num_encoded is not None, "what fitted before a preemption fits after it"
            if num_encoded:
                self.encoder_budget -= num_encoded
                self.encoded.append((request, index))

    def withdraw(self, request: TextbookRequest) -> None:
        """PRE-03: undo `schedule`; nothing of the request will be computed after all."""
        self.budget += self.scheduled.pop(request)
        del self.new_blocks[request]
        self.drafts.pop(request, None)
        for use in [use for use in self.encoded if use[0] is request]:
            self.encoded.remove(use)
            heir = self.encoder.withdraw(*use)
            if heir is not None:
                self.encoded.append(heir)
            else:
                self.encoder_budget += request.items[use[1]].num_tokens


@dataclass
class Entry:
    """One request in an unanswered plan.

    part, life: of the request when it was planned; tokens of another part are void, and counters
                of another life are not touched.
    computes:   positions [first, last), if all drafts before were right.
    table:      its blocks, each with the number that tells the content of that time.
    is_void:    computed on KV that proved wrong: what it samples reaches nobody.
    """

    request: TextbookRequest
    part: int
    life: int
    samples: bool
    num_drafts: int
    computes: tuple[int, int]
    table: list[tuple[Block, int]]
    is_void: bool = False

    @property
    def counts(self) -> bool:
        """Its answer means something to the client."""
        return self.samples and not self.is_void and self.part == self.request.part


@dataclass
class UnansweredPlan:
    """A plan on its way."""

    step: int
    entries: list[Entry]

    @property
    def sampling(self) -> list[Entry]:
        """In the order of the answer."""
        return [entry for entry in self.entries if entry.samples]
