"""Prompts of an `LLM`: texts or token ids."""

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from longshore.deploy.gateway.text.tokenizer import ModelTokenizer
from longshore.deploy.requests.validation import prompt_problem

Prompt: TypeAlias = str | Mapping[str, Sequence[int]]

TOKEN_IDS_KEY: Final = "prompt_token_ids"


def prompt_token_ids(
    prompt: Prompt,
    index: int,
    tokenizer: ModelTokenizer | None,
    model_dir: Path,
    *,
    vocab_size: int,
    max_model_len: int,
    gives_tokens: bool,
) -> list[int]:
    """The prompt's token ids. index: its index in the list. gives_tokens: an output token must fit
    too. Raises ValueError."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f'{model_dir} has no tokenizer.json: pass prompts as {{"{TOKEN_IDS_KEY}": [...]}}'
            )
        prompt.encode()  # raises ValueError for a lone surrogate
        token_ids = tokenizer.encode(prompt)
    elif not isinstance(prompt, Mapping):
        raise ValueError(
            f'prompts[{index}] must be a text or {{"{TOKEN_IDS_KEY}": [...]}}, '
            f"not a {type(prompt).__name__}"
        )
    elif set(prompt) == {TOKEN_IDS_KEY}:
        token_ids = _as_ids(prompt[TOKEN_IDS_KEY], index)
    else:
        raise ValueError(
            f'prompts[{index}] must be a text or {{"{TOKEN_IDS_KEY}": [...]}}, '
            f"not a mapping with the keys {sorted(prompt)}"
        )
    problem = prompt_problem(
        token_ids, vocab_size=vocab_size, max_model_len=max_model_len, gives_tokens=gives_tokens
    )
    if problem is not None:
        raise ValueError(f"prompts[{index}]: {problem}")
    return token_ids


def _as_ids(values: Sequence[int], index: int) -> list[int]:
    """Token ids from a list or array of Python's or numpy's integers."""
    try:
        return list(map(operator.index, values))
    except TypeError as error:
        raise ValueError(f"prompts[{index}]: token ids must be integers: {error}") from error
