"""What an answer does to the requests of its plan."""

from typing import TYPE_CHECKING

from longshore.protocol.outputs import FinishReason
from tests.oracle.block_pool import Block
from tests.oracle.plan import Answer
from tests.oracle.request import Status, TextbookRequest
from tests.oracle.step import Entry, UnansweredPlan

if TYPE_CHECKING:
    from tests.oracle.textbook import TextbookScheduler


def apply_answer(scheduler: "TextbookScheduler", answer: Answer) -> None:
    """Answer the oldest unanswered plan. Raises ValueError, with nothing changed, if step or tokens
    are not those of that plan."""
    if not scheduler.unanswered or scheduler.unanswered[0].step != answer.step:
        raise ValueError(f"step {answer.step} is not the oldest unanswered one")
    plan = scheduler.unanswered[0]
    request_ids = [entry.request.request_id for entry in plan.sampling]
    if set(answer.tokens) != set(request_ids):
        raise ValueError(
            f"step {answer.step} samples {request_ids}, the answer is for {[*answer.tokens]}"
        )
    if answer.failed_block_ids:
        _handle_failed_blocks(scheduler, set(answer.failed_block_ids))
    del scheduler.unanswered[0]
    scheduler.answered_step = plan.step
    for entry in plan.sampling:
        if entry.counts and entry.request.status is not Status.FINISHED:
            _apply_entry(scheduler, entry, answer)


def _apply_entry(scheduler: "TextbookScheduler", entry: Entry, answer: Answer) -> None:
    request = entry.request
    if request.is_pooling:
        pooled = answer.pooled[request.request_id]
        scheduler.end_output(request, FinishReason.STOPPED, pooled)
        return
    tokens = answer.tokens[request.request_id]
    is_same_life = entry.life == request.life
    if is_same_life:
        num_rejected = entry.num_drafts + 1 - len(tokens)  # SPD-03
        request.num_computed -= num_rejected
        request.num_placeholders -= num_rejected + len(tokens)
    for token in tokens:
        scheduler.deliver(request, token)
        reason = _stop_reason(scheduler, request, token)
        if reason is not None:
            scheduler.end_output(request, reason)
            return
    if is_same_life and request.request_id in answer.drafts:
        _attach_drafts(scheduler, request, answer.drafts[request.request_id])


def _stop_reason(
    scheduler: "TextbookScheduler", request: TextbookRequest, token: int
) -> FinishReason | None:
    may_stop = len(request.outputs) >= request.min_tokens
    if (may_stop and token in request.stop_ids) or token in request.final_ids:
        return FinishReason.STOPPED
    if len(request.outputs) >= request.max_tokens:
        return FinishReason.LENGTH_CAPPED
    if request.num_tokens >= scheduler.config.max_model_len:
        return FinishReason.LENGTH_CAPPED
    if _repeats(request):
        return FinishReason.REPETITION
    return None


def _repeats(request: TextbookRequest) -> bool:
    """The output ends with one pattern, often enough in a row."""
    detection = request.sampling.repetition
    if detection is None:
        return False
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        num_tokens = size * detection.min_count
        pattern = request.outputs[-size:]
        if len(request.outputs) >= num_tokens and (
            request.outputs[-num_tokens:] == pattern * detection.min_count
        ):
            return True
    return False


def _attach_drafts(
    scheduler: "TextbookScheduler", request: TextbookRequest, drafts: tuple[int, ...]
) -> None:
    """SPD-04, for one step in flight."""
    request.drafts = [*drafts][: scheduler.config.num_speculative_tokens]
    spec = request.message.options.structured_output
    if spec is not None and scheduler.grammars is not None:
        num_valid = scheduler.grammars.num_valid(spec, len(request.outputs), request.drafts)
        scheduler.num_invalid_drafts += len(request.drafts) - num_valid
        request.drafts = request.drafts[:num_valid]


def _handle_failed_blocks(scheduler: "TextbookScheduler", failed_ids: set[int]) -> None:
    """DESIGN 9.8: blocks that the oldest plan loads were not filled. What was computed on them, in
    this plan and those behind it, is void and loses its names."""
    oldest = scheduler.unanswered[0]
    bad = {
        (block, content)
        for entry in oldest.entries
        for block, content in entry.table
        if block.block_id in failed_ids
    }
    _spread(scheduler.unanswered, scheduler.tables.block_size, bad)
    for block, content in sorted(bad, key=lambda pair: pair[0].block_id):
        if block.num_taken == content:
            scheduler.tables.pool.remove_name(block)
    for request in scheduler.running[:]:
        table = [(block, block.num_taken) for block in request.blocks]
        first = _first_bad(table, bad)
        if first is None:
            continue
        if scheduler.config.load_failure_policy == "fail":
            scheduler.finish(request, FinishReason.ERROR)
        else:
            scheduler.rewind(request, first)
    for request in scheduler.queues.requests():
        if _first_bad([(block, block.num_taken) for block in request.blocks], bad) is not None:
            scheduler.fail_load(request)


def _spread(plans: list[UnansweredPlan], block_size: int, bad: set[tuple[Block, int]]) -> None:
    """Add every block that was computed on a bad one, and mark the entries that did."""
    num_bad = -1
    while num_bad < len(bad):
        num_bad = len(bad)
        for entry in (entry for plan in plans for entry in plan.entries):
            first = _first_bad(entry.table, bad)
            if first is not None:
                entry.is_void = True
                start, end = entry.computes
                first_computed = max(first, start // block_size)
                bad |= set(entry.table[first_computed : -(-end // block_size)])


def _first_bad(table: list[tuple[Block, int]], bad: set[tuple[Block, int]]) -> int | None:
    """The index of the first bad block of a table."""
    return next((index for index, content in enumerate(table) if content in bad), None)
