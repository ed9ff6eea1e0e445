"""A row as the workers know it, and a step as they got it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.protocol.outputs import ModelRunnerOutput, TokenLogprobs
from longshore.protocol.plan import Rewind, RowStart, SchedulerOutput
from longshore.protocol.requests import MultimodalFeature
from tests.harness.tokens import Content, Prefixes
from tests.harness.transfers import Commands


@dataclass
class WorkerRow:
    """One row after the latest executed step: rejected drafts are known here before the scheduler
    knows them.

    tokens:   known ids; num_computed: tokens whose KV is right.
    prefixes: the KV of its positions.
    proposed: drafts for the next step.
    """

    start: RowStart
    tokens: list[int]
    num_computed: int
    prefixes: Prefixes
    proposed: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.start.request_id

    @property
    def num_prompt(self) -> int:
        return len(self.start.prompt_token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def items(self) -> tuple[MultimodalFeature, ...]:
        return self.start.multimodal

    def prefixes_up_to(self, end: int, drafts: Sequence[int]) -> list[int]:
        """The KV of `end` positions, the last of which compute `drafts`."""
        known = self.prefixes.up_to(min(end, len(self.tokens)), self.tokens)
        with_drafts = Prefixes(self.prefixes.content, list(known))
        return with_drafts.up_to(end, [*self.tokens, *drafts])

    def rewind(self, rewind: Rewind) -> None:
        """Discard the last tokens, and the KV from a position on."""
        num_known = rewind.num_known_tokens
        assert rewind.num_computed_tokens < num_known <= len(self.tokens)
        del self.tokens[num_known:]
        self.prefixes.cut(num_known)
        self.num_computed = rewind.num_computed_tokens

    def scores(
        self, row: int, start: int, end: int, first_sampled: int | None
    ) -> Iterator[tuple[int, int, int, int]]:
        """Log probabilities that a step over [start, end) brings, as `token_logprobs` takes them.
        first_sampled: position of the first sampled token, if the row samples."""
        sampling = self.start.sampling
        if sampling.prompt_logprobs is not None:
            for position in range(start + 1, min(end + 1, self.num_prompt)):
                yield row, position, self.tokens[position], sampling.prompt_logprobs
        if sampling.logprobs is not None and first_sampled is not None:
            for position in range(first_sampled, len(self.tokens)):
                yield row, position, self.tokens[position], sampling.logprobs


def token_logprobs(scores: Sequence[tuple[int, int, int, int]]) -> TokenLogprobs:
    """(owner, position, token, number listed beside it) as a worker reports them: the tokens listed
    follow from the position, rank and log probability from the token."""
    listed = [[token, *range(position, position + more)] for _, position, token, more in scores]
    return TokenLogprobs(
        int32_array([owner for owner, *_ in scores]),
        int32_array([position for _, position, *_ in scores]),
        int32_array([1 + token % 7 for _, _, token, _ in scores]),
        int32_array([len(ids) for ids in listed]),
        int32_array([token for ids in listed for token in ids]),
        np.array([-token / 8 for ids in listed for token in ids], np.float32),
    )


@dataclass
class Step:
    """A plan as the workers got it, with the state of rows after its changes.

    tables, num_scheduled: by row; samples: rows that sample.
    masked:     rows whose tokens a mask restricts.
    references: (num_blocks,) references to each block when it was planned.
    held:       blocks that waiting requests and sends held then.
    rewritten:  by row, blocks of which it writes every token although others hold them: their KV
                turned out to be wrong before the row got them.
    contents:   by request id, of the added rows: an id may be used again before the step runs.
    failing:    blocks that the synchronous loads of this step will not fill.
    nan_rows:   rows that will sample from logits that are not finite.
    sampled:    by row, once it is executed; as is `output`.
    """

    plan: SchedulerOutput
    commands: Commands
    tables: dict[int, list[list[int]]]
    request_ids: dict[int, str]
    num_scheduled: dict[int, int]
    samples: list[int]
    masked: set[int]
    references: Int64Array
    held: set[int]
    rewritten: dict[int, set[int]]
    contents: dict[str, Content]
    failing: set[int] = field(default_factory=set)
    nan_rows: set[int] = field(default_factory=set)
    sampled: dict[int, list[int]] = field(default_factory=dict)
    output: ModelRunnerOutput | None = None


def check_tables_agree(ids: list[int], table: Int32Array) -> None:
    """The block table of a row at a worker has everything that the scheduler's still has."""
    assert len(ids) == len(table)
    kept = np.flatnonzero(table)
    np.testing.assert_array_equal(np.array(ids, np.int64)[kept], table[kept])
