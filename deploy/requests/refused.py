"""What the settings of `LLM` may not have: other programs know these names, so they are rejected by
name, with advice. `FIELD_RULES` has those of requests."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec

TRUNCATE: Final = 'pass tokenization_kwargs={"truncate_prompt_tokens": ...} to the method'
"""What to do instead of a setting that truncates prompts."""
_ACTIVATION: Final = "use use_activation"


class Refusal(NamedTuple):
    """neutral: values that change nothing, beside None. advice: what to do instead of another.
    code: of the error, for programs."""

    neutral: tuple[object, ...] = ()
    advice: str = ""
    code: str = "unsupported_parameter"


Refused: TypeAlias = Mapping[str, Refusal]
KindT = TypeVar("KindT")


def of_values(neutral: Mapping[str, tuple[object, ...]]) -> dict[str, Refusal]:
    """Refusals whose advice is to remove the name, or to give it a neutral value."""
    return {name: Refusal(values) for name, values in neutral.items()}


def _advised(refused: Mapping[str, tuple[tuple[object, ...], str]]) -> dict[str, Refusal]:
    return {name: Refusal(*refusal) for name, refusal in refused.items()}


# Of the classes of LLM: the settings of vLLM's classes of that name, in all its versions.
REFUSED: Final[Mapping[str, dict[str, Refusal]]] = {
    "SamplingParams": _advised(
        {
            "allowed_token_ids": ((), "use logit_bias to prefer tokens"),
            "best_of": ((1,), "set n, and choose among the answers by cumulative_logprob"),
            "extra_args": (({},), "no sampler here reads it"),
            "flat_logprobs": ((False,), "logprobs is a list with a dict per token"),
            "guided_decoding": ((), "use structured_outputs=StructuredOutputsParams(...)"),
            "logits_processors": (
                ([],),
                "samplers run in the worker process, which takes no functions",
            ),
            "logprob_token_ids": (([],), "logprobs returns the most likely tokens"),
            "prompt_logprob_start": ((0,), "prompt_logprobs has all tokens of the prompt"),
            "prompt_logprob_token_ids": (([],), "prompt_logprobs returns the most likely tokens"),
            "skip_clone": ((False, True), "settings are read when a request begins"),
            "stream_interval": (
                (1,),
                "each output of a stream has all tokens since the one before",
            ),
            "trace_decode_token_ids": ((), "sampled tokens cannot be prescribed"),
            "truncate_prompt_tokens": ((), TRUNCATE),
            "use_beam_search": ((False,), "call LLM.beam_search"),
        }
    ),
    "PoolingParams": _advised(
        {
            "activation": ((), _ACTIVATION),
            "normalize": ((), _ACTIVATION),
            "returned_token_ids": ((), "all elements are returned"),
            "softmax": ((), _ACTIVATION),
            "step_tag_id": ((), "one vector is pooled from the whole prompt"),
            "task": (("embed", "classify"), "use the method of LLM with that name"),
            "truncate_prompt_tokens": ((), TRUNCATE),
        }
    ),
    "BeamSearchParams": _advised(
        {
            "include_stop_str_in_output": ((False, True), "a search has no stop strings"),
            "skip_special_tokens": ((True,), "decode tokens with get_tokenizer()"),
            "structured_outputs": ((), "use LLM.generate"),
            "temperature": ((0,), "the most likely answers do not depend on it"),
        }
    ),
}


def why_refused(refused: Refused, name: str, value: object) -> str | None:
    """None: the name is not refused, or the value changes nothing."""
    if name not in refused:
        return None
    neutral, advice, _ = refused[name]
    if is_neutral(neutral, value):
        return None
    if not advice:
        values = " or ".join(msgspec.json.encode(item).decode() for item in neutral)
        advice = f"remove it or set it to {values}" if values else "remove it"
    return f"{name} is not supported; {advice}"


def is_neutral(neutral: tuple[object, ...], value: object) -> bool:
    """Whether a value asks for nothing: None, or one of these."""
    return value is None or any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
    )


def refusing(kind: type[KindT]) -> type[KindT]:
    """A decorator of classes whose constructors take keywords. Their constructors then raise
    ValueError for a setting that is refused."""
    init: Callable[..., None] = kind.__init__
    refused = REFUSED[kind.__name__]

    @functools.wraps(init)
    def __init__(self: KindT, **settings: Any) -> None:
        for name in refused.keys() & settings.keys():
            if (reason := why_refused(refused, name, settings.pop(name))) is not None:
                raise ValueError(f"{kind.__name__}: {reason}")
        init(self, **settings)

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind
