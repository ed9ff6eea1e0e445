"""`LLM.beam_search`: its settings, and several searches at a time on one engine, from synchronous
code."""

from dataclasses import dataclass
from typing import Literal

from longshore.deploy.gateway.text.answer_text import whole_text
from longshore.deploy.gateway.text.detokenizer import TokenDecoder
from longshore.deploy.llm.blocking_client import BlockingClient
from longshore.deploy.llm.outputs import BeamSearchSequence
from longshore.deploy.requests.beam_search import BeamSearch, FinishedBeam
from longshore.deploy.requests.engine_run import EngineRun
from longshore.deploy.requests.errors import RequestError
from longshore.deploy.requests.refused import refusing


@refusing
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


def run_searches(run: EngineRun[BeamSearch], client: BlockingClient) -> dict[BeamSearch, str]:
    """Run all searches to their ends; returns the errors of failed ones."""
    errors = {}
    while not run.is_over:
        while run.can_start:
            run.start_next()
        if (outputs := client.engine.receive()) is None:
            continue
        client.requests.apply(outputs)
        while (search := run.take_changed()) is not None:
            try:
                run.advance(search)
            except RequestError as error:
                errors[search] = str(error)
                search.close()
    return errors


def beam_sequence(
    tokenizer: TokenDecoder | None, search: BeamSearch, finished: FinishedBeam
) -> BeamSearchSequence:
    beam, prompt = finished.beam, search.prompt_token_ids
    return BeamSearchSequence(
        [*prompt, *beam.token_ids],
        whole_text(tokenizer, (), [*prompt, *finished.text_token_ids]),
        float(beam.logprob),
        finished.score,
        finished.reason.api_name,
    )
