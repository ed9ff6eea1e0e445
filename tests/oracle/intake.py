"""Which requests are accepted."""

from typing import TYPE_CHECKING

from longshore.protocol.outputs import FinishReason
from tests.oracle.request import TextbookRequest

if TYPE_CHECKING:
    from tests.oracle.textbook import TextbookScheduler


def rejection(scheduler: "TextbookScheduler", request: TextbookRequest) -> FinishReason | None:
    """Why the request is not accepted, if so."""
    if not request.prompt:
        return FinishReason.ERROR
    if scheduler.cross is not None:
        limit = scheduler.cross.max_encoder_tokens
        if len(request.items) != 1 or request.items[0].num_tokens > limit:
            return FinishReason.ERROR
    for item in request.items if scheduler.cross is None else ():
        if item.num_tokens > min(
            scheduler.config.max_num_encoder_input_tokens, scheduler.encoder.capacity
        ):
            return FinishReason.ERROR
    if request.num_tokens + (not request.is_pooling) > scheduler.config.max_model_len:
        return FinishReason.IGNORED
    if scheduler.transfers.is_under_way(request.request_id):
        return FinishReason.ERROR
    for other in scheduler.live:
        if other.request_id == request.request_id:
            return FinishReason.ERROR
        if (other.client, other.handle) == (request.client, request.handle):
            return FinishReason.ERROR
    if request.lora_name is not None and scheduler.config.max_loras == 0:
        return FinishReason.ERROR
    return None
