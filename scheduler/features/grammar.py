"""Structured output: requests wait until their grammar is compiled, and masks restrict tokens.

Grammars are compiled elsewhere and polled. With two steps in flight the mask of a step exists only
after the tokens before it, so it follows its plan in a message of its own (`SampleMask`).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from longshore.protocol.arrays import BoolArray, UInt8Array, int32_array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.plan import SampleMask
from longshore.protocol.requests import StructuredOutput
from longshore.scheduler.request import Request, RequestChange
from longshore.scheduler.step.in_flight import PlannedStep, StepsInFlight


class GrammarError(LongshoreError):
    """A grammar cannot be compiled, or does not match; the message is for the client."""


class Grammar(Protocol):
    """The grammar of one request, and its state after the tokens so far."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advance by verified tokens; False, without advancing, if they are not allowed."""

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """How many leading tokens the grammar allows; does not advance."""

    def fill_masks(self, draft_token_ids: Sequence[int], masks: np.ndarray) -> None:
        """Set the bits of the tokens that are allowed next, and after each draft, in `masks`:
        (1 + drafts, cdiv(vocabulary, 8)) uint8, little-endian bits, zeroed by the caller."""


class GrammarCompiler(Protocol):
    """Compiles in the background."""

    def poll(self, spec: StructuredOutput) -> Grammar | None:
        """A new grammar, or None until it is compiled. The first call starts the compilation. Never
        blocks. Raises GrammarError."""


class Grammars:
    """Requests with a grammar: checked before admission, and masked after planning."""

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
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Plans count from 1 again."""
        self._epoch = epoch
        self._last_masked_step = 0

    def try_promote(self, request: Request) -> bool:
        """Whether the grammar of a waiting request is compiled; the request gets it then. Raises
        GrammarError."""
        assert request.structured_output is not None
        grammar = self._compiler.poll(request.structured_output)
        if grammar is None:
            return False
        if request.num_output_tokens:  # it continues output emitted elsewhere
            outputs = request.token_ids[request.num_prompt_tokens :].tolist()
            if not grammar.accept_tokens(outputs):
                raise GrammarError("the output emitted so far does not match the grammar")
        self._grammars[request] = grammar
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
        self._grammars.pop(request, None)

    def take_masks(self) -> list[SampleMask]:
        """The mask of the oldest unanswered plan, once: all tokens before it are known."""
        if not self._in_flight.steps:
            return []
        planned = self._in_flight.steps[0]
        if planned.is_masked is None or planned.step == self._last_masked_step:
            return []
        self._last_masked_step = planned.step
        return [self._make_mask(planned, planned.is_masked)]

    def _make_mask(self, planned: PlannedStep, is_masked: BoolArray) -> SampleMask:
        width = -(-self._vocab_size // 8)
        rows: list[int] = []
        masks: list[UInt8Array] = []
        for index in np.flatnonzero(is_masked).tolist():
            row, drafts = int(planned.rows[index]), planned.draft_token_ids(index)
            bits = np.zeros((1 + len(drafts), width), np.uint8)
            occupant = self._in_flight.occupant(row, int(planned.generations[index]))
            if occupant.expects_output_of(planned.step):
                self._grammars[occupant.request].fill_masks(drafts, bits)
            else:
                bits[:] = 0xFF  # its tokens are void, but the worker waits for a mask
            rows += [row] * len(bits)
            masks.append(bits.reshape(-1))
        return SampleMask(self._epoch, planned.step, int32_array(rows), np.concatenate(masks))
