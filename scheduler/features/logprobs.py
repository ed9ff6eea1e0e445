"""Log probabilities, from workers to clients, by the same rules as tokens.

An entry belongs to a (row, generation) of its plan. It is delivered to a request that has been
preempted since, and dropped for one that has ended or was rewound. Output positions after the token
that ended the output are dropped.
"""

from collections.abc import Callable

import numpy as np

from longshore.protocol.arrays import BoolArray, Int64Array
from longshore.protocol.outputs import TokenLogprobs
from longshore.scheduler.step.client_outputs import ClientOutputs
from longshore.scheduler.step.running import Occupant, RunningTable


class ScoredRows:
    """Running rows whose requests ask for log probabilities, when a plan has just been built.

    rows, generations: (n,) rows ascending; `requests` are their occupants.
    first, last: (n,) the prompt positions [first, last) that the plan scores; a chunk that computes
                 [start, end) scores start + 1 to end. May be empty.
    """

    def __init__(self, running: RunningTable, num_scheduled: Int64Array) -> None:
        self.rows: Int64Array = np.array(sorted(running.scored), np.int64)
        self.generations: Int64Array = running.generation[self.rows]
        self.requests = [running.scored[row] for row in self.rows.tolist()]
        end = running.num_computed[self.rows]
        self._num_prompt: Int64Array = running.num_prompt[self.rows]
        self._first = end - num_scheduled[self.rows] + 1
        self._last = np.minimum(end + 1, self._num_prompt)
        self._last[num_scheduled[self.rows] == 0] = 0
        asked = [(one.sampling.prompt_logprobs, one.sampling.logprobs) for one in self.requests]
        self._most_listed = np.array(
            [[0 if count is None else 1 + count for count in pair] for pair in asked], np.int64
        )

    def current(
        self, running: RunningTable, occupant: Callable[[int, int], Occupant], step: int
    ) -> tuple[BoolArray, Int64Array]:
        """Of each row, now: whether its output of plan `step` counts, and how many verified tokens
        its request has. occupant: see `StepsInFlight.occupant`."""
        is_current = running.generation[self.rows] == self.generations
        is_live = is_current & (running.void_through[self.rows] < step)
        num_tokens: Int64Array = running.num_tokens[self.rows]
        for index in np.flatnonzero(~is_current).tolist():
            held_by = occupant(int(self.rows[index]), int(self.generations[index]))
            is_live[index] = held_by.expects_output_of(step)
            num_tokens[index] = held_by.request.num_tokens
        return is_live, num_tokens

    def flaw(
        self,
        entries: TokenLogprobs,
        num_sampled: Int64Array,
        is_live: BoolArray,
        num_tokens: Int64Array,
    ) -> str | None:
        """What is wrong with entries whose lengths agree. num_sampled: (max_num_seqs,) tokens that
        each row sampled; the other arguments are from `current`."""
        owners, positions = entries.owners, entries.positions
        index = np.minimum(np.searchsorted(self.rows, owners), len(self.rows) - 1)
        if np.count_nonzero(self.rows[index] != owners):
            return "of a row that requested none"
        is_prompt = positions < self._num_prompt[index]
        most_listed = self._most_listed[index, 1 - is_prompt]
        if np.count_nonzero((entries.num_listed < 1) | (entries.num_listed > most_listed)):
            return "that list more or fewer tokens than requested"
        first = np.where(is_prompt, self._first[index], num_tokens[index])
        last = np.where(
            is_prompt, self._last[index], num_tokens[index] + num_sampled[self.rows[index]]
        )
        is_outside = is_live[index] & ((positions < first) | (positions >= last))
        if np.count_nonzero(is_outside):
            return "of positions that it did not compute"
        return None

    def deliver(
        self,
        entries: TokenLogprobs,
        is_live: BoolArray,
        num_tokens: Int64Array,
        outputs: ClientOutputs,
    ) -> None:
        """Deliver the entries of live rows. num_tokens: (n,) from `current`, after the tokens of
        the output were appended."""
        index = np.searchsorted(self.rows, entries.owners)
        is_in = is_live[index] & (entries.positions < num_tokens[index])
        handles = np.array([request.handle for request in self.requests], np.int32)[index]
        clients = np.array([request.client_index for request in self.requests])[index]
        for client in np.unique(clients[is_in]).tolist():
            outputs.add_logprobs(client, _part(entries, is_in & (clients == client), handles))
        for position in np.flatnonzero((self._first < self._last) & is_live).tolist():
            mine = entries.positions[(index == position) & is_in]
            prompt = mine[mine < self._num_prompt[position]]
            if len(prompt):
                self.requests[position].prompt_was_scored(int(prompt.max()) + 1)


def lengths_agree(entries: TokenLogprobs) -> bool:
    """Whether the columns of `entries` have matching lengths."""
    counts = (entries.positions, entries.ranks, entries.num_listed)
    listed = (entries.token_ids, entries.logprobs)
    return all(len(column) == len(entries.owners) for column in counts) and all(
        len(column) == int(entries.num_listed.sum()) for column in listed
    )


def _part(entries: TokenLogprobs, is_in: BoolArray, owners: np.ndarray) -> TokenLogprobs:
    is_listed = np.repeat(is_in, entries.num_listed)
    return TokenLogprobs(
        owners[is_in],
        entries.positions[is_in],
        entries.ranks[is_in],
        entries.num_listed[is_in],
        entries.token_ids[is_listed],
        entries.logprobs[is_listed],
    )
