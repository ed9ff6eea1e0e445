"""The request body of text completions."""

from typing import Final, Literal

from longshore.deploy.gateway.api.requests import (
    _NOT_OF_BEAMS,
    MAX_PROMPTS,
    GenerationRequest,
    Int32,
    TokenIds,
    each_of,
)
from longshore.deploy.requests.errors import invalid

# Neutral values in addition to None.
_OF_BEAMS: Final = {"best_of": 1, "length_penalty": 1, "early_stopping": False}


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. One prompt or a list of them, each as text or as token ids.

    The answer's token ids are part of every choice by default if the model has no tokenizer.
    `logprobs` is the number of most likely tokens to list. `echo` puts the prompt before the
    answer's text and log probabilities; with it `max_tokens` may be 0, to score a prompt. `suffix`
    is the text after the answer, for models that fill in the middle.

    `use_beam_search` returns the `n` most likely answers of a search with `best_of` beams (default:
    `n`); `length_penalty` and `early_stopping` as in transformers.
    """

    logprobs: Int32 | None = None
    echo: bool | None = None
    suffix: str | None = None
    use_beam_search: bool | None = None
    best_of: Int32 | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt: str | list[str | int | TokenIds]

    def check_beams(self) -> None:
        """Raise RequestError for beam parameters without a beam search, and for parameters that a
        beam search does not support."""
        if not self.use_beam_search:
            for name, neutral in _OF_BEAMS.items():
                # All of the best n of n answers are returned.
                also = self.n if name == "best_of" else None
                if getattr(self, name) not in (None, neutral, also):
                    raise invalid(
                        f"{name} is not supported without use_beam_search=true; remove it",
                        param=name,
                        code="unsupported_parameter",
                    )
            return
        constraint = self.constraint()
        if constraint is not None:
            name, _ = constraint
            raise invalid(f"{name} is not supported with use_beam_search; remove it", param=name)
        for name, accepted in _NOT_OF_BEAMS.items():
            if getattr(self, name) not in (None, *accepted):
                raise invalid(
                    f"{name} is not supported with use_beam_search; remove it", param=name
                )

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is only scored, and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | TokenIds]:
        """The list of prompts. Raises RequestError as `each_of` does."""
        return each_of(self.prompt, "prompt", MAX_PROMPTS)
