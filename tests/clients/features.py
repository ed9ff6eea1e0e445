"""The features that a client program uses, one after the other.

A program runs in the client's environment, with the server's URL and the model's folder as
arguments. On lines that begin with `@`, it prints the client's package and version, then the name
of each feature. It ends with an error at the first feature that fails. A feature has the same name
in all programs.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

URL: Final = sys.argv[1]
MODEL_DIR: Final = Path(sys.argv[2])
MODEL: Final = MODEL_DIR.name
QUESTION: Final = "C417 B42 red\nC009 B07 blue\nWhere is C417?"
ANSWER: Final = "C417 B42 red"
"""The demo model's only correct one."""
UNLISTED: Final = "Where is C417?"
"""Here the model calls `lookup`, if it has the tool, and the answer is the tool's result."""


def lookup(container: str) -> str:
    """The record of a container."""
    assert container == "C417", container
    return ANSWER


LOOKUP: Final[dict[str, Any]] = {
    "name": "lookup",
    "description": lookup.__doc__,
    "parameters": {
        "type": "object",
        "properties": {"container": {"type": "string", "pattern": "^C[0-9]{3}$"}},
        "required": ["container"],
        "additionalProperties": False,
    },
}


class Record(BaseModel):
    """The record of a container. The demo model has not learnt to write JSON, so the schema leaves
    it no choice of values: what is tested is that the client's schema reaches the server, and that
    the client can read the answer."""

    model_config = ConfigDict(extra="forbid")

    container: Literal["C417"]
    berth: Literal["B42"]
    colour: Literal["red"]


RECORD: Final = Record(container="C417", berth="B42", colour="red")


def empty_object_bias() -> dict[str, float]:
    """A `logit_bias` with which an answer in JSON mode is `{}`, because the demo model would begin
    a string that has no end."""
    request = urllib.request.Request(
        f"{URL}/tokenize",
        json.dumps({"prompt": "}", "add_special_tokens": False}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        (token_id,) = json.load(response)["tokens"]
    return {str(token_id): 100}


_features: list[Callable[[], None]] = []


def feature(use: Callable[[], None]) -> Callable[[], None]:
    """The function's name says what it uses, and it raises if that does not work."""
    _features.append(use)
    return use


def use_all(package: str) -> None:
    """Use the features of a client, which this package is."""
    print("@", package, version(package))
    for use in _features:
        use()
        print("@", use.__name__, flush=True)
