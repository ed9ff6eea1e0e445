"""Whether the cost of a model's tokenizer is known: at most linear in the text.

tokenizer.json is a program that comes with a model. A backtracking regex in it may take exponential
time or panic, and replacements may multiply a text. Nearly all tokenizers are made of the parts
that are known here, and run in the gateway. Others run in a process of their own, which can be
killed (`IsolatedEncoder`).
"""

import base64
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.model_files import read_bytes

MAX_GROWTH: Final = 8
"""How much longer than a text, in bytes, its normalization may be, apart from Unicode's own."""

MAX_PARTS: Final = 64
MAX_PIECE_CHARACTERS: Final = 1024  # models search all pieces that begin at a character
MAX_WORD_CHARACTERS: Final = 1000  # WordPiece is quadratic in a word
MAX_TOKEN_CHARACTERS: Final = 16_384  # what one token may add to an answer
MAX_DECODER_GROWTH: Final = 16
MAX_REPEATED: Final = 16  # of a bounded repetition in a regex

_LINEAR_NORMALIZERS: Final = frozenset(
    {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Strip"}
    | {"StripAccents"}
)
_LINEAR_PRE_TOKENIZERS: Final = frozenset(
    {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation"}
    | {"UnicodeScripts", "Whitespace", "WhitespaceSplit"}
)
_LINEAR_DECODERS: Final = frozenset(
    {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "WordPiece"}
)

_ATOM: Final = (
    r"(?:\[\^?(?:\\[pP]\{\^?\w+\}|\\.|[^\[\]\\&]|&(?!&))+\]"  # a class
    r"|\\[pP]\{\^?\w+\}|\\[^\w]|\\[dDhHnrsStwW]|[^\\.^$*+?{}\[\]()|]|\."
    r"|\((?:\?:|\?i:)[^\\.^$*+?{}\[\]()]+\))"  # a group of texts
)
_TIMES: Final = r"[*+?]|\{\d*(?:,\d*)?\}"
_ITEM: Final = re.compile(rf"(?P<atom>{_ATOM})(?P<times>{_TIMES})?(?![*+?{{])", re.S)
_NESTED: Final = r"(?:[^()]|\([^()]*\))*"
_LOOKAHEAD: Final = re.compile(rf"\(\?[=!]({_NESTED})\)(?![*+?{{])", re.S)
_UNDIVIDED: Final = re.compile(rf"\\.|\[(?:\\.|[^\]\\])*\]|\({_NESTED}\)|[^|]", re.S)

# Branches that scan more than they match, and the branch that matches what they have scanned.
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_COVERED: Final = {
    r"\s+(?!\S)": r"\s+",
    r"\s*[\r\n]+": r"\s+",
    f"{_UPPER}*{_LOWER}+": f"{_UPPER}+{_LOWER}*",
}
_BEFORE_WORD: Final = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


class _Model(msgspec.Struct):
    """Only what costs depend on; other fields are not decoded."""

    type: str | None = None
    dropout: float | None = None
    max_input_chars_per_word: int = 0
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class TokenizerSpec(msgspec.Struct):
    """The parts of tokenizer.json."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None

    def token_ids(self) -> dict[str, int]:
        """The id of each token, including those added to the vocabulary."""
        vocab = self.model.vocab
        if isinstance(vocab, list):
            vocab = {token: token_id for token_id, (token, _) in enumerate(vocab)}
        return vocab | {token.content: token.id for token in self.added_tokens}


class _Unknown(Exception):
    """A part whose cost is not known; the message names it."""


def read_tokenizer_spec(file: Path) -> TokenizerSpec:
    """Raises ConfigError if the file is not a tokenizer, or if the cost of decoding with it is not
    bounded."""
    try:
        spec = msgspec.json.decode(read_bytes(file), type=TokenizerSpec)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file} has arrays or objects that are nested too deeply") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error
    try:
        growth = math.prod(map(_decoder_growth, _parts(spec.decoder, "decoders")))
    except _Unknown as error:
        raise ConfigError(f"{file} has a decoder that is not supported: {error}") from error
    if growth > MAX_DECODER_GROWTH:
        raise ConfigError(
            f"{file} has decoders that make a text up to {growth:g} times as long; the limit is "
            f"{MAX_DECODER_GROWTH}"
        )
    longest = max(map(len, _pieces(spec.model)), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{file} has a token of {longest} characters; the limit is {MAX_TOKEN_CHARACTERS}"
        )
    return spec


def unknown_cost(spec: TokenizerSpec) -> str | None:
    """The part of a tokenizer whose cost is not known to be linear; None if there is none."""
    try:
        growth = math.prod(map(_normalizer_growth, _parts(spec.normalizer, "normalizers")))
        if growth > MAX_GROWTH:
            return f"normalizers that make a text up to {growth:g} times as long"
        for part in _parts(spec.pre_tokenizer, "pretokenizers"):
            _check_pre_tokenizer(part)
        _check_model(spec.model)
    except _Unknown as error:
        return str(error)
    return None


def is_linear(regex: str) -> bool:
    """Whether finding all matches of a regex takes a time that is linear in the text.

    A branch is linear if nothing can fail after its first unbounded repetition: then it is not
    tried again with a shorter one. Some branches that models use scan more than they match; they
    are linear if a later branch matches what they have scanned.
    """
    branches, start = [], 0
    position = 0
    while position < len(regex):
        match = _UNDIVIDED.match(regex, position)
        if match is None:  # a |
            branches.append(regex[start:position])
            start = position = position + 1
        else:
            position = match.end()
    branches.append(regex[start:])
    return all(_is_linear_branch(each) or _covering(each) in branches for each in branches)


def _covering(branch: str) -> str | None:
    """The branch that must exist besides one that scans more than it matches; None if unknown."""
    before = _BEFORE_WORD if branch.startswith(_BEFORE_WORD) else ""
    after = _CONTRACTION if branch.endswith(_CONTRACTION) else ""
    covering = _COVERED.get(branch[len(before) : len(branch) - len(after)])
    return None if covering is None else f"{before}{covering}{after}"


def _is_linear_branch(branch: str, *, can_be_unbounded: bool = True) -> bool:
    position, is_unbounded = 0, False
    num_choices = 1  # before the first unbounded repetition
    while position < len(branch):
        lookahead = _LOOKAHEAD.match(branch, position)
        if lookahead is not None and not is_unbounded:
            if not _is_linear_branch(lookahead[1], can_be_unbounded=False):
                return False
            position = lookahead.end()
            continue
        item = _ITEM.match(branch, position)
        if item is None:
            return False
        position = item.end()
        least, most = _times(item["times"])
        if is_unbounded and least > 0:
            return False
        if most is None:
            is_unbounded = True
        elif not is_unbounded:
            num_choices *= max(most - least + 1, 1 + item["atom"].count("|"))
            if most > MAX_REPEATED or num_choices > MAX_REPEATED:
                return False
    return position > 0 and (can_be_unbounded or not is_unbounded)


def _times(quantifier: str | None) -> tuple[int, int | None]:
    """The least and the most repetitions; None: unbounded."""
    match quantifier:
        case None:
            return 1, 1
        case "*":
            return 0, None
        case "+":
            return 1, None
        case "?":
            return 0, 1
    least, comma, most = quantifier[1:-1].partition(",")
    if not comma:
        return int(least or 0), int(least or 0)
    return int(least or 0), int(most) if most else None


def _parts(part: Any, field: str) -> Iterator[dict[str, Any]]:
    """The parts of sequences, in order."""
    pending, num_parts = [part], 0
    while pending:
        part = pending.pop()
        if part is None:
            continue
        num_parts += 1
        if not isinstance(part, dict) or num_parts > MAX_PARTS:
            raise _Unknown(f"more than {MAX_PARTS} parts in sequence, or no object")
        if part.get("type") != "Sequence":
            yield part
        elif isinstance(part.get(field), list):
            pending += reversed(part[field][: MAX_PARTS + 1])
        else:
            raise _Unknown("a sequence without parts")


def _kind(part: dict[str, Any]) -> str:
    return shortened(str(part.get("type")))


def _pattern(part: dict[str, Any]) -> str:
    """The text that a part searches, or one that its linear regex finds at least."""
    match part.get("pattern"):
        case {"String": str(text)} if text:
            return text
        case {"Regex": str(regex)} if is_linear(regex):
            return " "
        case {"Regex": str(regex)}:
            raise _Unknown(f"the regular expression {shortened(regex)!r}")
    raise _Unknown(f"a part of type {_kind(part)} without a pattern")


def _replacement_growth(part: dict[str, Any]) -> float:
    pattern, content = _pattern(part), part.get("content")
    if not isinstance(content, str):
        raise _Unknown(f"a part of type {_kind(part)} without content")
    return max(1.0, len(content.encode()) / len(pattern.encode()))


def _normalizer_growth(part: dict[str, Any]) -> float:
    match part.get("type"):
        case "Replace":
            return _replacement_growth(part)
        case "Prepend" if isinstance(text := part.get("prepend"), str):
            return 1.0 + len(text.encode()) / MAX_GROWTH  # for each text between special tokens
        case "Precompiled":
            return _precompiled_growth(part.get("precompiled_charsmap"))
        case str(kind) if kind in _LINEAR_NORMALIZERS:
            return 1.0
    raise _Unknown(f"a normalizer of type {_kind(part)}")


def _precompiled_growth(charsmap: Any) -> float:
    """Of SentencePiece's table of replacements: a trie, and the replacements that it points to."""
    try:
        table = base64.b64decode(charsmap, validate=True)
    except (TypeError, ValueError):
        raise _Unknown("a precompiled normalizer that cannot be read") from None
    replacements = table[4 + int.from_bytes(table[:4], "little") :]
    longest = max(map(len, replacements.split(b"\0")), default=0)
    return 1.0 if longest <= 64 else float(longest)  # Unicode's own have at most 33 bytes


def _check_pre_tokenizer(part: dict[str, Any]) -> None:
    kind = part.get("type")
    if kind == "Split":
        _pattern(part)
    elif kind not in _LINEAR_PRE_TOKENIZERS:
        raise _Unknown(f"a pre-tokenizer of type {_kind(part)}")


def _decoder_growth(part: dict[str, Any]) -> float:
    match part.get("type"):
        case "Replace":
            return _replacement_growth(part)
        case "Strip" if part.get("stop") == 0:  # the library fails at a short token otherwise
            return 1.0
        case str(kind) if kind in _LINEAR_DECODERS:
            return 1.0
    raise _Unknown(f"a decoder of type {_kind(part)}")


def _check_model(model: _Model) -> None:
    match model.type:
        case "WordPiece" if model.max_input_chars_per_word > MAX_WORD_CHARACTERS:
            raise _Unknown(f"words of {model.max_input_chars_per_word} characters")
        case "BPE" | "WordPiece" | "WordLevel" | "Unigram" if not model.dropout:
            if max(map(len, _pieces(model)), default=0) > MAX_PIECE_CHARACTERS:
                raise _Unknown(f"a token of more than {MAX_PIECE_CHARACTERS} characters")
        case _:
            raise _Unknown(f"a model of type {shortened(str(model.type))}")


def _pieces(model: _Model) -> Iterator[str]:
    for entry in model.vocab:
        yield entry if isinstance(entry, str) else entry[0]
