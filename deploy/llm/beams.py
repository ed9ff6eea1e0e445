"""`LLM.beam_search`: runs several searches at a time on one engine, from synchronous code."""

from collections import deque
from collections.abc import Sequence

from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.llm.outputs import BeamOutput, answer_text
from longshore.deploy.requests.beam_search import (
    BeamSearch,
    BeamSearchFailed,
    FinishedBeam,
)
from longshore.protocol.outputs import FinishReason


def run_searches(
    searches: Sequence[BeamSearch], client: BlockingClient, *, max_live: int
) -> dict[BeamSearch, str]:
    """Run at most `max_live` searches at a time; returns the errors of failed searches."""
    waiting = deque(searches)
    live: list[BeamSearch] = []
    errors = {}
    while waiting or live:
        while waiting and len(live) < max_live:
            live.append(waiting.popleft())
            live[-1].start()
        if (outputs := client.engine.receive()) is None:
            continue
        client.requests.apply(outputs)
        for search in live:
            try:
                search.advance()
            except BeamSearchFailed as error:
                errors[search] = str(error)
            if search.is_over or search in errors:
                search.close()
        live = [search for search in live if not (search.is_over or search in errors)]
    return errors


def beam_output(
    tokenizer: TokenDecoder | None, search: BeamSearch, finished: FinishedBeam
) -> BeamOutput:
    beam = finished.beam
    reason = FinishReason.STOPPED if beam.has_ended else FinishReason.LENGTH_CAPPED
    return BeamOutput(
        list(beam.token_ids),
        answer_text(tokenizer, search.prompt_token_ids, beam.token_ids, reason),
        finished.score,
        reason.api_name,
    )
