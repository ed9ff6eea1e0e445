"""The contract of drafters, and how a drafter is found by its name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.worker.drafting.config import DRAFT_MODEL, EAGLE3, MTP, SpeculativeConfig

ENTRY_POINT_GROUP: Final = "longshore.drafters"

_LATER: Final = ("eagle", "medusa")
_BUILT_IN: Final = {
    "ngram": "longshore.worker.drafting.lookup:NgramDrafter",
    "suffix": "longshore.worker.drafting.lookup:SuffixDrafter",
}


class Drafter(ABC):
    """Proposes tokens from the tokens of rows. A wrong proposal costs time and changes no token.

    The rank that samples has one; all calls are on one thread, which answers steps: a call
    that takes long delays all requests. A row is an index below max_num_seqs.
    """

    @abstractmethod
    def __init__(self, config: SpeculativeConfig) -> None: ...

    @abstractmethod
    def start(self, row: int, token_ids: Int32Array, num_prompt: int) -> None:
        """A request begins on an empty row, or again after it was preempted, with these tokens, of
        which the first `num_prompt` are its prompt."""

    @abstractmethod
    def append(self, row: int, token_ids: Sequence[int]) -> None:
        """Tokens of the row were sampled."""

    @abstractmethod
    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        """The row's next tokens, probably: at most `max_tokens`, which is at least 1, or none."""

    @abstractmethod
    def rewind(self, row: int, num_tokens: int) -> None:
        """Only the first `num_tokens` tokens of the row are still valid."""

    @abstractmethod
    def end(self, row: int, *, is_finished: bool) -> None:
        """The row is empty. is_finished: its request has ended; else it was preempted, and starts
        again."""


def load_drafter(config: SpeculativeConfig) -> type[Drafter]:
    """The drafter of a method without weights. Raises ConfigError if there is none of that name."""
    module, colon, name = config.method.partition(":")
    places = {each.name: each.value for each in entry_points(group=ENTRY_POINT_GROUP)} | _BUILT_IN
    if colon and module and name:
        places[config.method] = config.method
    if config.method not in places:
        known = ", ".join(sorted({*places, DRAFT_MODEL, EAGLE3, MTP}))
        later = " Of drafters from the model's last hidden state, only mtp is supported."
        later *= config.method in _LATER
        raise ConfigError(
            f"speculative_config: there is no method {config.method!r}; there are {known}, and "
            f"package.module:Class.{later}"
        )
    try:
        drafter = EntryPoint(config.method, places[config.method], ENTRY_POINT_GROUP).load()
    except Exception as error:
        raise ConfigError(
            f"speculative_config: the drafter {config.method!r} cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(drafter, type) and issubclass(drafter, Drafter)):
        raise ConfigError(
            f"speculative_config: {config.method!r} is no class that inherits from "
            "longshore.worker.drafting.drafter.Drafter"
        )
    return drafter
