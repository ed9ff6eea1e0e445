"""`LLM.beam_search`: its settings, and several searches at a time on one engine, from synchronous
code."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.llm.outputs import BeamSearchSequence, answer_text
from longshore.deploy.llm.refused_settings import Refused, refusing
from longshore.deploy.requests.beam_search import (
    BeamSearch,
    BeamSearchFailed,
    FinishedBeam,
)
from longshore.protocol.outputs import FinishReason

UNSUPPORTED_IN_BEAM_SEARCH: Final[Refused] = {
    "include_stop_str_in_output": ((False, True), "a search has no stop strings"),
    "skip_special_tokens": ((True,), "decode tokens with get_tokenizer()"),
    "structured_outputs": ((), "use LLM.generate"),
    "temperature": ((0,), "the most likely answers do not depend on it"),
}
"""Settings of vLLM's `BeamSearchParams` that are not supported."""


@refusing(UNSUPPORTED_IN_BEAM_SEARCH)
@dataclass(kw_only=True)
class BeamSearchParams:
    """Settings of `LLM.beam_search`.

    beam_width:     number of answers per prompt.
    max_tokens:     maximum number of output tokens; the model's length limits them too.
    ignore_eos:     the model's own end-of-sequence ids do not end an answer.
    length_penalty: an answer's score is cum_logprob / length ** length_penalty.
    early_stopping: as in transformers: True ends the search when `beam_width` answers have ended,
                    False when no other one is better now, "never" when none can become better.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


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


def beam_sequence(
    tokenizer: TokenDecoder | None, search: BeamSearch, finished: FinishedBeam
) -> BeamSearchSequence:
    beam = finished.beam
    reason = FinishReason.STOPPED if beam.has_ended else FinishReason.LENGTH_CAPPED
    tokens = [*search.prompt_token_ids, *beam.token_ids]
    return BeamSearchSequence(
        tokens,
        answer_text(tokenizer, [], tokens, reason),
        float(beam.logprob),
        finished.score,
        reason.api_name,
    )
