"""How likely and how soon kept states are used again, by what they are after."""

from math import exp, log
from typing import Final, NamedTuple

MAX_TURN: Final = 4
NUM_ENDINGS: Final = 16
MAX_USES: Final = 3


class StateKind(NamedTuple):
    """Of states that are as likely to be used again.

    name:   "end" of a turn, "insurance", "consumed" or "used"; "answer" of no state.
    turn:   of the conversation, at most MAX_TURN; of states that are no ends, how often used.
    ending: how the answer ended, less than NUM_ENDINGS; -1: it has not, or does not matter.
    """

    name: str
    turn: int = 0
    ending: int = -1


INSURANCE: Final = StateKind("insurance")
CONSUMED: Final = StateKind("consumed")
FIRST_TO_GO: Final = (INSURANCE, CONSUMED)
_ALL_TURNS: Final = -1
_OF_TURNS: Final = ("end", "answer")
_NOTHING: Final = (0.0, 0.0, 0.0, 0.0)


def turn_kind(turn: int, ending: int = -1) -> StateKind:
    """The end of a turn, counted from 0: what comes next is the next turn."""
    return StateKind("end", min(turn, MAX_TURN), ending)


def answer_kind(turn: int, ending: int = -1) -> StateKind:
    """A turn that has a next one, made then, and used if that repeats its answer."""
    return StateKind("answer", min(turn, MAX_TURN), ending)


def used_kind(num_uses: int) -> StateKind:
    """States where several requests depart, by how often they were found."""
    return StateKind("used", min(num_uses, MAX_USES))


class Habits:
    """How likely and how soon states of a kind are used. A kind begins with what is known about a
    wider one: an ending with the turn, and a turn with all turns."""

    FIRST_GUESS_S: Final = 60.0
    WEIGHT: Final = 4.0
    """Of what is known about the wider kind, as so many states."""

    def __init__(self) -> None:
        self._counts: dict[StateKind, list[float]] = {}  # made, used, gaps, sum of their logarithms

    def make(self, kind: StateKind) -> None:
        """One more is there to be used."""
        self._add(kind, 0, 1.0)

    def use(self, kind: StateKind) -> None:
        """One was used."""
        self._add(kind, 1, 1.0)

    def wait(self, kind: StateKind, gap_s: float) -> None:
        """A use came after this time."""
        self._add(kind, 2, 1.0)
        self._add(kind, 3, log(max(gap_s, 0.01)))

    def probability(self, kind: StateKind) -> float:
        made, used, _, _ = self._of(kind)
        return min(1.0, used / made)

    def gap_s(self, kind: StateKind) -> float:
        """Geometric mean of the times to the next use."""
        _, _, gaps, logarithms = self._of(kind)
        return exp(logarithms / gaps)

    def _of(self, kind: StateKind) -> tuple[float, float, float, float]:
        made, used, gaps, logarithms = self._counts.get(kind, _NOTHING)
        wider = _wider(kind)
        if wider is None:
            return made + 2.0, used + 1.0, gaps + 1.0, logarithms + log(self.FIRST_GUESS_S)
        of_wider = self._of(wider)
        return (
            made + self.WEIGHT,
            used + self.WEIGHT * min(1.0, of_wider[1] / of_wider[0]),
            gaps + self.WEIGHT,
            logarithms + self.WEIGHT * of_wider[3] / of_wider[2],
        )

    def _add(self, kind: StateKind, index: int, value: float) -> None:
        each: StateKind | None = kind
        while each is not None:
            self._counts.setdefault(each, list(_NOTHING))[index] += value
            each = _wider(each)


def _wider(kind: StateKind) -> StateKind | None:
    if kind.ending >= 0:
        return kind._replace(ending=-1)
    is_widest = kind.name not in _OF_TURNS or kind.turn == _ALL_TURNS
    return None if is_widest else kind._replace(turn=_ALL_TURNS)
