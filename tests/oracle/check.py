"""What must hold of the textbook's books between any two calls."""

from typing import TYPE_CHECKING

from tests.oracle.request import Status, TextbookRequest

if TYPE_CHECKING:
    from tests.oracle.textbook import TextbookScheduler


def check_books(scheduler: "TextbookScheduler") -> None:
    """Raise AssertionError when the books contradict each other."""
    holders = [block for r in scheduler.live for block in (*r.blocks, *r.encoder_blocks)]
    holders += [block for load in scheduler.transfers.quarantine for block in load.blocks]
    holders += [block for send in scheduler.transfers.sends for block in send.blocks]
    scheduler.tables.pool.check_invariants(holders)
    scheduler.retentions.check_invariants()
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    assert len(scheduler.unanswered) <= scheduler.config.max_steps_in_flight
    waiting = scheduler.queues.requests()
    assert (
        len({*scheduler.running, *waiting})
        == len(scheduler.running) + len(waiting)
        == len(scheduler.live)
    )
    assert {*scheduler.running, *waiting} == set(scheduler.live)
    scheduler.encoder.check_invariants(scheduler.running)
    for request in scheduler.running:
        _check_running(scheduler, request)
    for request in waiting:
        _check_waiting(request)


def _check_running(scheduler: "TextbookScheduler", request: TextbookRequest) -> None:
    assert request.status is Status.RUNNING
    assert len(request.blocks) >= scheduler.tables.num_blocks_for(request.num_computed)
    in_flight = [
        1 + entry.num_drafts
        for plan in scheduler.unanswered
        for entry in plan.entries
        if entry.request is request and entry.samples and entry.life == request.life
    ]
    assert request.num_placeholders == sum(in_flight)
    assert request.num_computed <= request.last_computed(scheduler.config.max_model_len)
    for block in request.blocks[request.num_cached_blocks :]:
        assert block.name is None


def _check_waiting(request: TextbookRequest) -> None:
    is_loading = request.status in (Status.LOADING, Status.LOADED)
    assert (request.load is not None) == is_loading
    assert request.status not in (Status.RUNNING, Status.FINISHED)
    assert is_loading or not request.blocks
    assert not request.encoder_blocks
    assert request.status is Status.LOADED or request.num_computed == 0
    assert request.num_placeholders == 0
    assert not request.drafts
