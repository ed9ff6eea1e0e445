"""Log probabilities per token, read from the columns of a message."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from longshore.protocol.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log probability of one token at one position; rank 1 is the most likely token.

    decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenScore(msgspec.Struct, frozen=True):
    """The score of one token of a prompt or an output.

    rank: 1 is the most likely token.
    best: (id, log probability) of the requested number of most likely tokens, descending.
    """

    token_id: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]

    def by_token(
        self, decode: Callable[[Sequence[int]], str | None] = lambda _: None
    ) -> dict[int, Logprob]:
        """The token itself, then the most likely ones."""
        ranked = {self.token_id: Logprob(self.logprob, self.rank, decode([self.token_id]))}
        rank, before = 1, None
        for position, (token_id, logprob) in enumerate(self.best, start=1):
            rank = rank if logprob == before else position
            before = logprob
            if token_id not in ranked:
                ranked[token_id] = Logprob(logprob, rank, decode([token_id]))
        return ranked


def scores_of(entries: TokenLogprobs) -> Iterator[tuple[int, int, TokenScore]]:
    """Owner, position and score of each entry."""
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
