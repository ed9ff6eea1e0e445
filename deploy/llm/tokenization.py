"""`tokenization_kwargs` of `LLM` and `AsyncLLM`: how texts become tokens, and how long prompts are
truncated, with vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from longshore.deploy.gateway.openai.errors import ApiError
from longshore.deploy.gateway.openai.prompt_cut import PromptCut, prompt_cut
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer

TRUNCATE: Final = 'pass tokenization_kwargs={"truncate_prompt_tokens": ...} to the method'
"""What to do instead of a setting that truncates prompts."""

_KEYS: Final = frozenset({"add_special_tokens", "truncate_prompt_tokens", "truncation_side"})


@dataclass(frozen=True)
class Tokenization:
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

    def cut(
        self, tokenizer: ModelTokenizer | None, *, max_model_len: int, gives_tokens: bool
    ) -> PromptCut | None:
        """How a prompt is truncated; None: not at all. Raises ValueError."""
        try:
            # Without output, a prompt may have one token more.
            cut = prompt_cut(
                self, max_model_len=max_model_len + (not gives_tokens), max_output_tokens=None
            )
        except ApiError as error:
            raise ValueError(f"tokenization_kwargs: {error}") from error
        if cut is None or gives_tokens or self.truncation_side is not None or tokenizer is None:
            return cut
        return PromptCut(cut.max_tokens, keeps_end=tokenizer.keeps_end)


AS_USUAL: Final = Tokenization()


def as_tokenization(given: Mapping[str, Any] | None) -> Tokenization:
    """Raises ValueError for keys and values that are not supported."""
    if given is None:
        return AS_USUAL
    for name in sorted(given.keys() - _KEYS):
        raise ValueError(
            f"tokenization_kwargs: {name} is not supported; the keys are {', '.join(sorted(_KEYS))}"
        )
    read = Tokenization(**given)
    if not isinstance(read.add_special_tokens, bool | None):
        raise ValueError("tokenization_kwargs: add_special_tokens must be True or False")
    number = read.truncate_prompt_tokens
    if isinstance(number, bool) or not isinstance(number, int | None):
        raise ValueError("tokenization_kwargs: truncate_prompt_tokens must be an integer")
    if read.truncation_side not in (None, "left", "right"):
        raise ValueError("tokenization_kwargs: truncation_side must be left or right")
    return read
