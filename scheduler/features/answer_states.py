"""States at the ends of answers, in models with recurrent states.

What a request leaves when it ends is kept, and a later request that begins with all of its tokens
begins there: see `kv_cache.ends`.
"""

from dataclasses import dataclass
from typing import Final

from longshore.protocol.outputs import FinishReason
from longshore.scheduler.features.turns import Turns
from longshore.scheduler.hooks import Admitter, Attempt, SchedulerFeature
from longshore.scheduler.kv_cache.blocks import ComputedBlocks, HeldBlocks
from longshore.scheduler.kv_cache.chains import ChainLink
from longshore.scheduler.kv_cache.ends import Ends
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.request import Hold, HoldKind, Outcome, Request
from longshore.scheduler.step.in_flight import StepsInFlight

_COMPLETE: Final = (FinishReason.STOPPED, FinishReason.LENGTH_CAPPED)


@dataclass(slots=True, eq=False)
class AnswerStates(SchedulerFeature):
    """Keeps the ends of answers, and starts requests with them.

    kept:    what the request has left that is just ending.
    started: what the request begins with that is just starting.
    """

    ends: Ends
    turns: Turns
    holds: Holds
    in_flight: StepsInFlight
    kept: ChainLink | None = None
    started: ChainLink | None = None

    def begin(
        self, admission: Admitter, request: Request, prefix: ComputedBlocks, now: float
    ) -> Attempt | None:
        """Start a request with an earlier one's end, if that is more than its cached prefix. Until
        the plan that computes it is answered, the request waits. It takes more blocks than a start
        without it, which is tried next if these are too many. What another engine has computed for
        the request is loaded instead."""
        if request.skips_prefix_cache or request.options.kv_transfer_params or request.is_swapped:
            return None
        link = self.ends.find(request, prefix.num_tokens)
        if link is None:
            return None
        if link.step > self.in_flight.last_answered_step:
            request.resume_after_step = link.step
            return Attempt.SET_ASIDE
        self.started, blocks = link, self.ends.hold(link, request)
        hold = Hold(HoldKind.ANSWER, blocks, link.num_tokens, self.holds.next_order())
        self.holds.add(request, hold)
        attempt = admission.start(request, hold)
        self.started = None
        if attempt is Attempt.ADMITTED:
            self.ends.kept_states.num_found += 1
        else:
            self.holds.release(request)
        return None if attempt is Attempt.NO_BLOCKS else attempt

    def output_ended(
        self,
        request: Request,
        outcome: Outcome,
        blocks: HeldBlocks | None,
        now: float,
        *,
        ran: bool,
    ) -> bool:
        """Keep what a complete answer leaves. Its row has computed all of its tokens, perhaps
        without the last one, but nothing after them."""
        self.kept = None
        num_tokens = request.num_computed_on_row
        if (
            ran
            and blocks is not None
            and outcome.reason in _COMPLETE
            and not request.options.resumable
            and request in self.turns
            and num_tokens <= request.num_tokens
            and (end := self.ends.name(request, num_tokens)) is not None
        ):
            self.kept = self.ends.keep(request, blocks, end, step=self.in_flight.newest_step)
        return False
