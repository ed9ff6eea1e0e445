"""The libraries that compile grammars and compute token masks. Each is imported when it is used,
in the grammar process only: xgrammar imports torch.

A backend enforces all that a schema says, or rejects it: see `schema_support`.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np

from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import shortened
from longshore.protocol.requests import CONSTRAINT_TOO_COMPLEX, StructuredOutput
from longshore.scheduler.features.grammar import GrammarError
from longshore.scheduler.process.structured_output.free_text import PartialGrammar
from longshore.scheduler.process.structured_output.matcher import CompiledGrammar, allow
from longshore.scheduler.process.structured_output.schema_support import (
    NOT_INSTALLED,
    BackendName,
    read_schemas,
    supporting_backends,
    with_options,
)
from longshore.scheduler.process.structured_output.vocabulary import Vocabulary

MAX_ERROR_CHARACTERS: Final = 500

_CHOICES: Final = msgspec.json.Decoder(
    Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
)
_XGRAMMAR_PREFIX: Final = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # time and line of its source

_MAX_INDENT: Final = 32
"""Limit of white space between two tokens of JSON: a model that has begun to write some often goes
on without end."""

_JSON_OPTIONS: Final[Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": rf"[ \t]|\r?\n[ \t]{{0,{_MAX_INDENT}}}",
}
_MAX_LEXER_STATES: Final = 50_000  # of 1 to 2 kB each
_MAX_ROW_ITEMS: Final = 20_000  # an optional property is four; the library's default is 2000
_LIMIT_EXCEEDED: Final = re.compile(r"too many (?:states|expressions)|\d+ items; max is")
_NUM_COMPILE_THREADS: Final = max(1, min(4, (os.cpu_count() or 1) // 2))


class Backend(Protocol):
    """A library that compiles grammars. It may be called by several threads."""

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """The compiled grammar. Raises GrammarError."""


class Backends:
    """Chooses the backend of each grammar.

    names: to try, in this order.
    """

    def __init__(self, names: Sequence[BackendName], vocabulary: Vocabulary) -> None:
        makers: dict[BackendName, Callable[[Vocabulary], Backend]] = {
            "llguidance": LLGuidance,
            "xgrammar": XGrammar,
        }
        self._makers = {name: makers[name] for name in names}
        self._vocabulary = vocabulary
        self._loaded: dict[BackendName, Backend] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether all libraries are imported."""
        return len(self._loaded) == len(self._makers)

    def load_first(self) -> None:
        """Import the library that is tried first."""
        for name in list(self._makers)[:1]:
            self._load(name)

    def _load(self, name: BackendName) -> Backend:
        backend = self._loaded.get(name)
        if backend is None:
            backend = self._loaded[name] = self._makers[name](self._vocabulary)
        return backend

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """The grammar, compiled by the first backend that supports all of it. Raises
        GrammarError."""
        names = tuple(self._makers)
        if not names:
            raise GrammarError(NOT_INSTALLED)
        for schema in read_schemas(spec):
            names = supporting_backends(schema, names)
        problems = []
        for name in names:
            backend = self._load(name)
            try:
                grammar = backend.compile(spec)
                self._check_first_token(grammar)
                return self._after_free_text(grammar, spec)
            except GrammarError as error:
                problems.append(f"{name}: {error}")
        raise GrammarError(f"the {spec.kind} cannot be compiled ({'; '.join(problems)})")

    def _after_free_text(self, grammar: CompiledGrammar, spec: StructuredOutput) -> CompiledGrammar:
        if spec.free is None:
            return grammar
        vocabulary = self._vocabulary
        size, ends = len(vocabulary.tokens), vocabulary.eos_token_ids
        return PartialGrammar(grammar, spec.free, vocab_size=size, ends=ends)

    def _check_first_token(self, grammar: CompiledGrammar) -> None:
        """Raise GrammarError if no token can begin an output, as with a schema that refers to
        nothing but itself."""
        mask = np.zeros(-(-len(self._vocabulary.tokens) // 32), np.int32)
        try:
            grammar.matcher().fill(mask)
        except GrammarError as error:
            raise GrammarError(f"no output matches it: {error}") from error
        if not mask.any():
            raise GrammarError("no output matches it, or the vocabulary cannot spell it")


def choices_of(text: str) -> list[str]:
    """The strings of a choice."""
    try:
        choices: list[str] = _CHOICES.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GrammarError(
            f"a choice must be a JSON array of strings, none of which is empty: {error}"
        ) from error
    return choices


def is_lark(text: str) -> bool:
    """Whether a grammar is written for Lark, not in EBNF: EBNF has `::=` in each rule."""
    return "::=" not in text


class LLGuidance:
    """The backend `llguidance` (https://github.com/guidance-ai/llguidance)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        self._eos_token_ids = vocabulary.eos_token_ids
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos_token_ids),
        )
        self._limits = LLParserLimits(
            max_items_in_row=_MAX_ROW_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, spec: StructuredOutput) -> "_LLGrammar":
        from llguidance import LLMatcher

        try:
            source = self._source(spec)
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        except ValueError as error:
            raise GrammarError(_first_lines(error)) from error
        if matcher.is_error():
            raise GrammarError(_first_lines(matcher.get_error()))
        return _LLGrammar(matcher, self._eos_token_ids, num_bytes=len(source) * 32 + (64 << 10))

    @staticmethod
    def _source(spec: StructuredOutput) -> str:
        from llguidance import LLMatcher, grammar_from, regex_to_lark

        match spec.kind:
            case "json_schema":
                # A schema must not switch off what it asks for.
                return LLMatcher.grammar_from_json_schema(spec.text, overrides=_JSON_OPTIONS)
            case "regex":
                # Classes such as \d are of ASCII, as in xgrammar.
                regex = regex_to_lark(_unanchored(spec.text), "dw")
                return LLMatcher.grammar_from_lark(f"start: /{regex}/")
            case "choice":
                return grammar_from("choice", json.dumps(choices_of(spec.text)))
            case "tool_calls":
                return LLMatcher.grammar_from_lark(with_options(spec.text, _JSON_OPTIONS))
            case "grammar":
                return grammar_from("lark" if is_lark(spec.text) else "gbnf", spec.text)


class _Tokens:
    """What llguidance reads of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(vocabulary.special_ids)
        special = frozenset(vocabulary.special_ids)
        self.tokens = [  # a special one needs a name
            (token or b"<|no token %d|>" % token_id) if token_id in special else token
            for token_id, token in enumerate(vocabulary.tokens)
        ]
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


class _LLGrammar:
    def __init__(self, matcher: Any, eos_token_ids: tuple[int, ...], *, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def matcher(self) -> "_LLMatcher":
        return _LLMatcher(self._matcher.deep_copy(), self._eos_token_ids)


class _LLMatcher:
    def __init__(self, matcher: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_ends = 0  # accepted after the end, which the library does not count

    def accept(self, token_id: int) -> bool:
        if self.is_over():
            is_end = token_id in self._eos_token_ids
            self._num_ends += is_end
            return is_end
        # Its `consume_token` fails for good with a token that is not allowed.
        num_consumed: int = self._matcher.try_consume_tokens([token_id])
        self._raise_error()
        return num_consumed == 1

    def fill(self, mask: Int32Array) -> None:
        if self.is_over():
            allow(mask, self._eos_token_ids)
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._raise_error()

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        self._matcher.rollback(num_tokens - num_ends)

    def is_over(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            text = _first_lines(self._matcher.get_error())
            if _LIMIT_EXCEEDED.search(text):
                text = f"{CONSTRAINT_TOO_COMPLEX}: {text}"
            raise GrammarError(text)


class XGrammar:
    """The backend `xgrammar` (https://github.com/mlc-ai/xgrammar)."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        special = frozenset(vocabulary.special_ids)
        tokens = [
            b"" if token_id in special else token
            for token_id, token in enumerate(vocabulary.tokens)
        ]
        self._info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(tokens),
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(
            self._info, max_threads=_NUM_COMPILE_THREADS, cache_enabled=False
        )

    def compile(self, spec: StructuredOutput) -> "_XGGrammar":
        try:
            compiled = self._compiled(spec)
        except GrammarError:
            raise
        except Exception as error:  # the library raises bare errors of its bindings
            raise GrammarError(_first_lines(_XGRAMMAR_PREFIX.sub("", str(error)))) from error
        return _XGGrammar(compiled, self._info)

    def _compiled(self, spec: StructuredOutput) -> Any:
        match spec.kind:
            case "json_schema":
                # Its strict mode forbids properties that the schema does not forbid.
                return self._compiler.compile_json_schema(
                    spec.text, strict_mode=False, max_whitespace_cnt=_MAX_INDENT
                )
            case "regex":
                return self._compiler.compile_regex(_unanchored(spec.text))
            case "tool_calls":
                raise GrammarError("it does not support tool calls; install llguidance")
            case "choice":
                options = (json.dumps(one, ensure_ascii=False) for one in choices_of(spec.text))
                return self._compiler.compile_grammar(f"root ::= {' | '.join(options)}")
            case "grammar" if is_lark(spec.text):
                return self._compiler.compile_lark(spec.text)
            case "grammar":
                return self._compiler.compile_grammar(spec.text)


class _XGGrammar:
    def __init__(self, compiled: Any, info: Any) -> None:
        self.num_bytes = int(compiled.memory_size_bytes)
        self._compiled = compiled
        self._info = info

    def matcher(self) -> "_XGMatcher":
        from xgrammar import GrammarMatcher

        return _XGMatcher(GrammarMatcher(self._compiled), self._info)


class _XGMatcher:
    def __init__(self, matcher: Any, info: Any) -> None:
        self._matcher = matcher
        self._eos_token_ids: list[int] = info.stop_token_ids
        self._num_bits: int = info.vocab_size
        self._num_ends = 0  # accepted after the end, which the library does not count

    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        if self.is_over():
            is_end = token_id in self._eos_token_ids
            self._num_ends += is_end
            return is_end
        return bool(self._matcher.accept_token(token_id))

    def fill(self, mask: Int32Array) -> None:
        if self.is_over():
            allow(mask, self._eos_token_ids)
            return
        self._matcher.fill_next_token_bitmask(mask.reshape(1, -1))
        if num_rest := self._num_bits % 32:  # it sets the bits behind the vocabulary
            mask.view(np.uint32)[-1] &= np.uint32((1 << num_rest) - 1)

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        self._matcher.rollback(num_tokens - num_ends)


def _unanchored(regex: str) -> str:
    """A regex always matches the whole output."""
    if regex.startswith("^"):
        regex = regex[1:]
    num_escapes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and num_escapes % 2 == 0 else regex


def _first_lines(error: object) -> str:
    return shortened(" ".join(str(error).split()), MAX_ERROR_CHARACTERS)
