"""The progress bar of `LLM`'s methods."""

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from tqdm import tqdm

Progress: TypeAlias = "bool | Callable[..., tqdm[Any]]"
"""Whether to show a bar, or how to make one: a class like `tqdm`."""


def progress_bar(what: str, num_requests: int, use_tqdm: Progress) -> "tqdm[Any]":
    kind: Callable[..., tqdm[Any]] = use_tqdm if callable(use_tqdm) else tqdm
    return kind(total=num_requests, desc=what, unit="req", disable=not use_tqdm, file=sys.stderr)
