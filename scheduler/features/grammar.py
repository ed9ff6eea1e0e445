"""Structured output: requests wait until their grammar is compiled, and masks restrict tokens.

Grammars are compiled elsewhere and polled. With two steps in flight the mask of a step exists only
after the tokens before it, so it follows its plan in a message of its own (`SampleMask`).
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from longshore.protocol.arrays import BoolArray, UInt8Array, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.plan import SampleMask
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.request import Request, RequestChange
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight

TokenMasks: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
"""(masks, cdiv(vocabulary, 8)): packed bits, the lowest token id in the lowest bit."""


class GrammarError(LongshoreError):
    """A grammar has failed; the message is for the client."""


class InvalidGrammar(GrammarError):
    """A grammar cannot be compiled."""


class Grammar(Protocol):
    """The grammar of one request, and its state after the tokens so far. No method blocks."""

    def is_compiled(self) -> bool:
        """Whether the request can run. Raises InvalidGrammar, or GrammarError if its state is
        lost."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by verified tokens; False, without advancing, if they are not allowed. Tokens
        before the first mask may be checked later: then `fill_masks` raises."""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many leading drafts to verify: at most those that the grammar allows, if it knows.
        Does not advance."""

    def fill_masks(self, draft_token_ids: Sequence[int], masks: TokenMasks) -> bool:
        """Set the bits of the tokens that are allowed next, and after each draft, in `masks`:
        one mask and one per draft, zeroed by the caller. False,
        with `masks` unchanged, if they are still being computed: then it is called again. Raises
        GrammarError if the grammar has no mask: the request cannot continue."""

    def release(self) -> None:
        """The request has ended."""


class GrammarCompiler(Protocol):
    """Compiles in the background."""

    def compile(self, spec: StructuredOutput) -> Grammar:
        """Start to compile the grammar of one more request. Never blocks."""

    def flush(self) -> None:
        """All masks of a step have been asked for."""


class Grammars:
    """Requests with a grammar: checked before admission, and masked after planning.

    failed: requests whose grammar has failed since they run, with the reason; to be ended before
            a token of them is applied.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        in_flight: StepsInFlight,
        *,
        vocab_size: int,
        epoch: int,
    ) -> None:
        self._compiler = compiler
        self._in_flight = in_flight
        self._vocab_size = vocab_size
        self._grammars: dict[Request, Grammar] = {}
        self.failed: dict[Request, str] = {}
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Plans count from 1 again."""
        self._epoch = epoch
        self._last_masked_step = 0

    def try_promote(self, request: Request) -> bool:
        """Whether the grammar of a waiting request is compiled; the first call starts that. Raises
        GrammarError."""
        assert request.structured_output is not None
        grammar = self._grammars.get(request)
        if grammar is None:
            grammar = self._compiler.compile(request.structured_output)
            self._grammars[request] = grammar
        if not grammar.is_compiled():
            return False
        if request.num_output_tokens:  # it continues output emitted elsewhere
            outputs = request.token_ids[request.num_prompt_tokens :].tolist()
            if not grammar.accept_tokens(outputs):
                raise GrammarError("the output emitted so far does not match the grammar")
        request.change(RequestChange.GRAMMAR_COMPILED)
        return True

    def accept(self, request: Request, token_id: int) -> bool:
        """Advance by a verified token. False if the request's grammar does not allow it."""
        grammar = self._grammars.get(request)
        return grammar is None or grammar.accept_tokens([token_id])

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many leading drafts the request's grammar allows."""
        grammar = self._grammars.get(request)
        return len(token_ids) if grammar is None else grammar.num_valid(token_ids)

    def drop(self, request: Request) -> None:
        """The request has ended."""
        self.failed.pop(request, None)
        grammar = self._grammars.pop(request, None)
        if grammar is not None:
            grammar.release()

    def take_masks(self) -> list[SampleMask]:
        """The mask of the oldest unanswered plan, once, as soon as it is computed: all tokens
        before it are known."""
        if not self._in_flight.steps:
            return []
        planned = self._in_flight.steps[0]
        if planned.is_masked is None or planned.step == self._last_masked_step:
            return []
        mask = self._make_mask(planned, planned.is_masked)
        if mask is None:
            self._compiler.flush()
            return []
        self._last_masked_step = planned.step
        return [mask]

    def _make_mask(self, planned: PlannedStep, is_masked: BoolArray) -> SampleMask | None:
        """None if the mask of a row is still being computed; all rows have been asked for then."""
        width = -(-self._vocab_size // 8)
        rows: list[int] = []
        masks: list[UInt8Array] = []
        sampling = planned.sampling
        is_complete = True
        for index in np.flatnonzero(is_masked).tolist():
            row, drafts = int(sampling.rows[index]), planned.draft_token_ids(index)
            bits = np.zeros((1 + len(drafts), width), np.uint8)
            occupant = self._in_flight.occupant(row, int(sampling.generations[index]))
            if occupant.expects_output_of(planned.step):
                is_complete &= self._fill(occupant.request, drafts, bits)
            else:
                bits[:] = 0xFF  # its tokens are void, but the worker waits for a mask
            rows += [row] * len(bits)
            masks.append(bits.reshape(-1))
        if not is_complete:
            return None
        return SampleMask(self._epoch, planned.step, int32_array(rows), np.concatenate(masks))

    def _fill(self, request: Request, drafts: Sequence[int], bits: TokenMasks) -> bool:
        try:
            return self._grammars[request].fill_masks(drafts, bits)
        except GrammarError as error:
            self.failed[request] = str(error)
            bits[:] = 0xFF  # the request ends before what is sampled is applied
            return True
