"""The end of a step: the books as if it had run, and the plan in words."""

from typing import TYPE_CHECKING

from longshore.connectors.base import StepView
from tests.oracle.plan import OraclePlan, ScheduledRequest
from tests.oracle.request import TextbookRequest
from tests.oracle.step import Entry, Step, UnansweredPlan

if TYPE_CHECKING:
    from tests.oracle.textbook import TextbookScheduler


def settle(scheduler: "TextbookScheduler", step: Step) -> OraclePlan:
    """Settle the books as if the step had run, and put it into words."""
    scheduler.num_steps += 1
    finished_ids, rewound = scheduler.take_news()
    assert step.budget >= 0
    assert step.encoder_budget >= 0
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    entries = [_enter(scheduler, request, num, step) for request, num in step.scheduled.items()]
    admitted = {admission.request_id for admission in step.admitted}
    scheduler.unanswered.append(UnansweredPlan(scheduler.num_steps, entries))
    plan = OraclePlan(
        step=scheduler.num_steps,
        scheduled=tuple(
            ScheduledRequest(
                request_id=entry.request.request_id,
                num_tokens=step.scheduled[entry.request],
                samples=entry.samples,
                new_block_ids=tuple(b.block_id for b in step.new_blocks[entry.request]),
                block_ids=tuple(block.block_id for block in entry.request.blocks),
                drafts=tuple(step.drafts.get(entry.request, ())),
            )
            for entry in entries
        ),
        admitted=tuple(step.admitted),
        preempted=tuple(sorted(request.request_id for request in step.preempted)),
        finished=tuple(sorted(finished_ids)),
        rewound=tuple(sorted((r.request_id, num) for r, num in rewound.items())),
        encoder_inputs=tuple(sorted((r.request_id, index) for r, index in step.encoded)),
        encoder_tables=tuple(
            (r.request_id, tuple(block.block_id for block in r.encoder_blocks))
            for r in step.scheduled
            if scheduler.cross is not None and r.request_id in admitted
        ),
        freed_hashes=tuple(sorted(scheduler.encoder.evicted)),
        num_invalid_drafts=scheduler.num_invalid_drafts,
        has_structured_output=any(e.samples and e.request.is_structured for e in entries),
    )
    scheduler.encoder.evicted = []
    scheduler.num_invalid_drafts = 0
    scheduler.note_masks()
    if scheduler.connector is not None:
        scheduler.connector.build_connector_meta(
            StepView(scheduler.num_steps, scheduler.answered_step)
        )
    return plan


def _enter(
    scheduler: "TextbookScheduler", request: TextbookRequest, num_tokens: int, step: Step
) -> Entry:
    """The request, as if its part of the step had run."""
    start = request.num_computed
    num_drafts = len(step.drafts.get(request, ()))
    request.num_computed += num_tokens
    samples = request.num_computed >= request.num_tokens + request.num_placeholders
    if samples:
        request.num_placeholders += 1 + num_drafts
        if scheduler.config.max_steps_in_flight > 1 and not (
            request.is_structured or request.is_pooling
        ):
            request.drafts = [-1] * scheduler.config.num_speculative_tokens
    scheduler.encoder.drop(request, request.num_computed)
    return Entry(
        request=request,
        part=request.part,
        life=request.life,
        samples=samples,
        num_drafts=num_drafts,
        computes=(start, request.num_computed),
        table=[(block, block.num_taken) for block in request.blocks],
    )
