"""Messages between a scheduler and its grammar process, which compiles the grammars of structured
output and computes token masks.

A grammar is compiled once for all requests that have it; each request has a matcher of its own,
which the process makes for the first row of the request. The scheduler owns both: the process keeps
them until they are released.
"""

from typing import TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array
from longshore.protocol.requests import StructuredOutput


class CompileGrammar(msgspec.Struct, tag="compile", frozen=True, forbid_unknown_fields=True):
    """Compile a grammar, under a number that is never used again."""

    grammar_id: int
    spec: StructuredOutput


class MaskedRow(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the masks of one request: of its next token, and after each draft.

    token_ids: what it has sampled since it last asked; all of its output in its first row.
    """

    matcher_id: int
    grammar_id: int
    token_ids: Int32Array = EMPTY_INT32
    draft_token_ids: Int32Array = EMPTY_INT32


class FillMasks(msgspec.Struct, tag="fill", frozen=True, forbid_unknown_fields=True):
    """Advance matchers, and compute masks. number: counts up; the answer repeats it."""

    number: int
    rows: tuple[MaskedRow, ...]


class Release(msgspec.Struct, tag="release", frozen=True, forbid_unknown_fields=True):
    """These requests have ended, and these grammars are not needed any more. One that no thread has
    begun to compile is not compiled."""

    matcher_ids: tuple[int, ...] = ()
    grammar_ids: tuple[int, ...] = ()


class GrammarProcessReady(msgspec.Struct, tag="ready", frozen=True, forbid_unknown_fields=True):
    """The process is connected and takes messages."""


class GrammarCompiled(msgspec.Struct, tag="compiled", frozen=True, forbid_unknown_fields=True):
    """The grammar is compiled, or cannot be: `error` says why, for the client.

    num_bytes: estimate of its memory.
    """

    grammar_id: int
    error: str | None = None
    num_bytes: int = 0


class MasksFilled(msgspec.Struct, tag="filled", frozen=True, forbid_unknown_fields=True):
    """The masks that `FillMasks` has asked for.

    errors: by matcher id, why it has no mask.
    bits:   per row, in order, one mask and one per draft: the vocabulary as packed bits, the lowest
            id in the lowest bit of the first byte. Rows with an error have none.
    """

    number: int
    bits: UInt8Array
    errors: dict[int, str] = {}


ToGrammarProcess: TypeAlias = CompileGrammar | FillMasks | Release
FromGrammarProcess: TypeAlias = GrammarProcessReady | GrammarCompiled | MasksFilled
