"""Prompts of models that fill in the middle of a text (Bavarian et al., 2022): the text before and
after the gap, each behind a special token."""

from typing import Final, NamedTuple

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer


class _Markers(NamedTuple):
    """The special tokens of one family of models. middle: None: the prompt ends with the prefix,
    which follows the suffix."""

    prefix: str
    suffix: str
    middle: str | None


_FAMILIES: Final = (
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek
    _Markers("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    _Markers("[PREFIX]", "[SUFFIX]", None),  # Codestral
)


def can_infill(tokenizer: ModelTokenizer) -> bool:
    """The model's tokenizer has the special tokens of a known family."""
    return _markers(tokenizer) is not None


def infilling_prompt(
    tokenizer: ModelTokenizer, prefix: str, suffix: str, *, with_special: bool
) -> list[int]:
    """The tokens of a prompt for the text between `prefix` and `suffix`.

    with_special: begin with the special tokens that the model's text begins with.
    """
    markers = _markers(tokenizer)
    assert markers is not None
    start = tokenizer.encode("") if with_special else []
    token_of = tokenizer.added_tokens
    before = [token_of[markers.prefix], *tokenizer.encode_rendered(prefix)]
    after = [token_of[markers.suffix], *tokenizer.encode_rendered(suffix)]
    if markers.middle is None:
        return [*start, *after, *before]
    return [*start, *before, *after, token_of[markers.middle]]


def _markers(tokenizer: ModelTokenizer) -> _Markers | None:
    for markers in _FAMILIES:
        if all(name in tokenizer.added_tokens for name in markers if name is not None):
            return markers
    return None
