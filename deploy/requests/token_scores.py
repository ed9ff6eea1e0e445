"""Log probabilities as a client sees them: per token, out of the columns of the wire."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from longshore.protocol.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one position: natural logarithm, and 1 if no other token is likelier."""

    logprob: float
    rank: int


class TokenScore(msgspec.Struct, frozen=True):
    """What the model thought of one token of a prompt or an output.

    rank: 1 if no other token is likelier.
    best: (id, log probability) of the most likely tokens, in falling order; as many as were asked
          for.
    """

    token_id: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]

    def by_token(self) -> dict[int, Logprob]:
        """The token itself, then the most likely ones."""
        ranked = {self.token_id: Logprob(self.logprob, self.rank)}
        rank, before = 1, None
        for place, (token_id, logprob) in enumerate(self.best, start=1):
            rank = rank if logprob == before else place
            before = logprob
            ranked.setdefault(token_id, Logprob(logprob, rank))
        return ranked


def scores_of(entries: TokenLogprobs) -> Iterator[tuple[int, int, TokenScore]]:
    """Owner, position, and score of each entry."""
    token_ids, logprobs = entries.token_ids.tolist(), entries.logprobs.tolist()
    columns = (entries.owners, entries.positions, entries.ranks, entries.num_listed)
    start = 0
    for owner, position, rank, num_listed in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        best = slice(start + 1, start + num_listed)
        listed = tuple(zip(token_ids[best], logprobs[best], strict=True))
        yield owner, position, TokenScore(token_ids[start], logprobs[start], rank, listed)
        start += num_listed
