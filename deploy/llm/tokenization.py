"""`tokenization_kwargs` of `LLM` and `AsyncLLM`: how texts become tokens, and how long prompts are
truncated, with vLLM's names."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec


class Tokenization(msgspec.Struct, frozen=True):
    """None: as usual.

    add_special_tokens: whether a prompt begins with the tokenizer's special tokens. Usually texts
                        do; the template of a chat adds its own.
    truncate_prompt_tokens: maximum length of a prompt, the rest is removed; -1: as many as the
                        model allows.
    truncation_side:    where it is removed. Usually `left`, and for vectors as the tokenizer is
                        configured.
    """

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None


AS_USUAL: Final = Tokenization()


def as_tokenization(given: Mapping[str, Any] | None) -> Tokenization:
    """Raises ValueError for keys and values that are not supported."""
    if given is None:
        return AS_USUAL
    keys = Tokenization.__struct_fields__
    for name in sorted(given.keys() - set(keys)):
        raise ValueError(
            f"tokenization_kwargs: {name} is not supported; the keys are {', '.join(keys)}"
        )
    try:
        return msgspec.convert(given, Tokenization)
    except msgspec.ValidationError as error:
        raise ValueError(f"tokenization_kwargs: {error}") from error
