"""The first half of a step: requests that run already."""

from typing import TYPE_CHECKING

from tests.oracle.encoder import plan_items
from tests.oracle.request import Status, TextbookRequest
from tests.oracle.step import Step

if TYPE_CHECKING:
    from tests.oracle.textbook import TextbookScheduler


def schedule_running(scheduler: "TextbookScheduler", step: Step) -> None:
    """Serve running requests in their order of admission, and preempt where blocks run out."""
    limit = step.budget
    if scheduler.fairness is not None:
        limit = scheduler.fairness.chunk_limit(step.budget)
    for request in list(scheduler.running):  # victims leave the list while it is walked
        if step.budget == 0:
            return
        if request.status is not Status.RUNNING:
            continue
        need = min(_need(scheduler, request, step.budget), limit)
        num_tokens, items = plan_items(
            scheduler.encoder, request, request.num_computed, need, step.encoder_budget
        )
        if num_tokens == 0 < need:  # it is stuck; what it keeps for its drafter may be in the way
            scheduler.encoder.drop(request, request.num_computed + scheduler.encoder.lookahead)
            num_tokens, items = plan_items(
                scheduler.encoder, request, request.num_computed, need, step.encoder_budget
            )
        if num_tokens <= 0:
            continue
        end = scheduler.with_lookahead(request.num_computed + num_tokens)
        new_blocks = scheduler.tables.allocate(request, [], end)
        while new_blocks is None:
            is_last = len(scheduler.running) == 1
            if not is_last or not scheduler.release_youngest_load(keep=request):
                if is_last and (scheduler.transfers.loads or scheduler.transfers.sends):
                    step.waits_for_transfers = True
                    return
                victim = scheduler.queues.victim(scheduler.running)
                scheduler.preempt(victim, step)
                if victim is request:
                    break
            new_blocks = scheduler.tables.allocate(request, [], end)
        if new_blocks is not None:
            step.schedule(request, num_tokens, new_blocks, items)
            num_known = request.num_tokens + request.num_placeholders - request.num_computed
            step.drafts[request] = request.drafts[: max(0, num_tokens - num_known)]  # SPD-02
            request.drafts = []


def _need(scheduler: "TextbookScheduler", request: TextbookRequest, budget: int) -> int:
    """SCH-04, in its order of caps. Nothing is computed that no accepted token can need."""
    wanted = request.num_tokens + request.num_placeholders + len(request.drafts)
    need = min(wanted, request.last_computed(scheduler.config.max_model_len)) - request.num_computed
    if scheduler.config.long_prefill_token_threshold > 0:
        need = min(need, scheduler.config.long_prefill_token_threshold)
    return min(need, budget)
