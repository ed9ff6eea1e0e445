"""The clients of a scheduler, which know their answers in advance."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from longshore.protocol.outputs import (
    EngineOutputs,
    FinishedRequest,
    FinishReason,
    TokenLogprobs,
)
from tests.harness.tokens import Sample

RequestKey: TypeAlias = tuple[int, int]
"""Client and handle."""


class Clients:
    """By request key.

    names:      request ids.
    max_tokens: as asked for; of a session, for its first output.
    received:   output tokens in the order of arrival.
    finished:   how requests ended; continued: likewise, outputs after which a session went on.
    scored:     (position, its listed tokens) in the order of arrival.
    """

    def __init__(self, sample: Sample) -> None:
        self.names: dict[RequestKey, str] = {}
        self.max_tokens: dict[RequestKey, int | None] = {}
        self.received: defaultdict[RequestKey, list[int]] = defaultdict(list)
        self.finished: dict[RequestKey, FinishedRequest] = {}
        self.continued: defaultdict[RequestKey, list[FinishedRequest]] = defaultdict(list)
        self.scored: defaultdict[RequestKey, list[tuple[int, list[int]]]] = defaultdict(list)
        self._sample = sample
        self._num_given: dict[RequestKey, int] = {}
        self._first_of_part: defaultdict[RequestKey, int] = defaultdict(int)

    def add(
        self, key: RequestKey, name: str, outputs: Sequence[int], max_tokens: int | None
    ) -> None:
        """A request is sent, with the outputs that it had elsewhere."""
        self.names[key], self.max_tokens[key] = name, max_tokens
        self._num_given[key] = len(outputs)

    def collect(self, outputs: Iterable[tuple[int, EngineOutputs]], *, is_ours: bool) -> None:
        """Record the outputs that the clients are sent. is_ours: all tokens come from the workers,
        so each is the next one of its request."""
        for client, each in outputs:
            for handle, token in zip(each.handles.tolist(), each.tokens.tolist(), strict=True):
                self._add_token((client, handle), token, is_ours=is_ours)
            if each.logprobs is not None:
                self._collect_scores(client, each.logprobs)
            for end in each.finished:
                self._end((client, end.handle), end)

    def _add_token(self, key: RequestKey, token: int, *, is_ours: bool) -> None:
        assert key not in self.finished, "a token after the end"
        received = self.received[key]
        position = len(received) - self._first_of_part[key] + self._num_given[key]
        received.append(token)
        if is_ours:
            expected = self._sample(self.names[key], position)
            assert token == expected, f"token {position} of {self.names[key]} is {token}"

    def _end(self, key: RequestKey, end: FinishedRequest) -> None:
        assert key not in self.finished, "two ends"
        if end.session_continues:
            self.continued[key].append(end)
            self._first_of_part[key] = len(self.received[key])
            self._num_given[key] = 0
            return
        self.finished[key] = end
        if end.reason is FinishReason.LENGTH_CAPPED and not self.continued[key]:
            num_tokens = self._num_given[key] + len(self.received[key])
            assert num_tokens == end.num_output_tokens, "tokens are missing at the end"

    def _collect_scores(self, client: int, entries: TokenLogprobs) -> None:
        ends = np.cumsum(entries.num_listed).tolist()
        for index, handle in enumerate(entries.owners.tolist()):
            assert (client, handle) not in self.finished, "log probabilities after the end"
            listed = slice(ends[index] - int(entries.num_listed[index]), ends[index])
            ids = entries.token_ids[listed].tolist()
            assert entries.logprobs[listed].tolist() == [-token / 8 for token in ids]
            assert entries.ranks[index] == 1 + ids[0] % 7
            self.scored[client, handle].append((int(entries.positions[index]), ids))

    def check_complete(self, keys: Iterable[RequestKey]) -> None:
        """These requests, which are no sessions, got all their tokens."""
        for key in keys:
            name, num_given = self.names[key], self._num_given[key]
            max_tokens = self.max_tokens[key]
            assert max_tokens is not None
            assert self.finished[key].reason is FinishReason.LENGTH_CAPPED, name
            expected = [self._sample(name, position) for position in range(max_tokens)]
            assert self.received[key] == expected[num_given:], name
