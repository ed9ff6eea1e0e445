"""tokenizer.json of the model in a GGUF file, from the vocabulary and the settings in its metadata.

Three kinds are known, as llama.cpp names them: `gpt2` (byte-level BPE), `llama` (SentencePiece with
merges by score) and `bert` (WordPiece). How a text is divided before byte-level BPE, a file says
only by name (`tokenizer.ggml.pre`); `_PRE` has what these names mean.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from longshore.protocol.errors import ConfigError, shortened

JsonObject = dict[str, Any]

_KEY: Final = "tokenizer.ggml."
# Types of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE: Final = "\u2581"
_WORDS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _split(pattern: str) -> JsonObject:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(*, use_regex: bool) -> JsonObject:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": use_regex,
    }


def _patterns(*patterns: str) -> list[JsonObject]:
    return [*map(_split, patterns), _byte_level(use_regex=False)]


_GPT2: Final = [_byte_level(use_regex=True)]
_DIGITS: Final = [{"type": "Digits", "individual_digits": True}, *_GPT2]
_LLAMA3: Final = _patterns(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}")
_QWEN2: Final = _patterns(rf"{_WORDS}|\p{{N}}|{_REST}")
_QWEN35: Final = _patterns(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O: Final = _patterns(
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
_TEKKEN: Final = _patterns(
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
)
_DEEPSEEK3: Final = _patterns(
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER: Final = [
    *map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+")),
    {"type": "Digits", "individual_digits": True},
    _byte_level(use_regex=False),
]
_PRE: Final[Mapping[str, list[JsonObject]]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "mellum", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(("granite-docling", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("command-r", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-coder": _DEEPSEEK_CODER,
}
_IGNORES_MERGES: Final = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2", "tekken"}
)
"""A word that is a token is that token, even if merges do not lead to it."""
_NORMALIZED: Final = frozenset({"qwen2", "qwen35", "command-r"})
"""Texts are normalised to NFC, which a file does not say."""
_BEGINS: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "pixtral", "tekken"})
"""A text begins with the beginning-of-sequence token unless the file says otherwise."""

_ENDS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
    | {"<|end_of_text|>", "<|return|>", "<|call|>", "<EOT>", "<｜end▁of▁sentence｜>"}
)
"""Control tokens that end an answer, by what they are called: files name only one or two."""


class GgufVocabulary:
    """The vocabulary in the metadata of a file.

    source: for messages. Raises ConfigError if a part is missing or has a wrong type.
    """

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata, self._source = metadata, source
        self.kind: str = self._typed("model", str, "")
        self.pre: str = self._typed("pre", str, "")
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int) or [1] * len(self.tokens)
        self.scores: list[float] = self._list("scores", float)
        self.merges: list[str] = self._list("merges", str)
        if len(self.types) != len(self.tokens):
            raise self.wrong(f"{len(self.tokens):,} tokens and {len(self.types):,} types of them")

    def flag(self, name: str, default: bool) -> bool:
        flag: bool = self._typed(name, bool, default)
        return flag

    def token(self, name: str) -> str | None:
        """The token whose id is `tokenizer.ggml.NAME_token_id`."""
        number = self.token_id(name)
        return None if number is None else self.tokens[number]

    def token_id(self, name: str) -> int | None:
        number = self._metadata.get(f"{_KEY}{name}_token_id")
        is_valid = type(number) is int and 0 <= number < len(self.tokens)
        return number if is_valid else None

    def wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._source} has {problem}. Fetch the file again.")

    def unsupported(self, problem: str) -> ConfigError:
        return ConfigError(
            f"{self._source}: {problem}. Use the model in Hugging Face format, with its "
            "tokenizer.json."
        )

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(_KEY + name, default)
        if not isinstance(value, kind):
            raise self.wrong(f"{_KEY}{name}={shortened(repr(value))}")
        return value

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self._typed(name, list, [])
        if not all(isinstance(value, kind) for value in values):
            raise self.wrong(f"{_KEY}{name} with values of another type")
        return list(values)


def tokenizer_of(vocabulary: GgufVocabulary) -> JsonObject | None:
    """tokenizer.json; None if the file has no vocabulary. Raises ConfigError for a kind that is not
    supported."""
    if vocabulary.kind in ("", "none") or not vocabulary.tokens:
        return None
    makers = {"gpt2": _byte_level_bpe, "llama": _sentence_piece, "bert": _word_piece}
    if vocabulary.kind not in makers:
        raise vocabulary.unsupported(
            f"the tokenizer {shortened(repr(vocabulary.kind))} is not supported; supported are "
            f"{', '.join(makers)}"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(vocabulary)),
        **makers[vocabulary.kind](vocabulary),
    }


def tokenizer_settings(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> JsonObject:
    """tokenizer_config.json: special tokens by name, and the chat templates."""
    names = {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "sep_token": "seperator",
        "pad_token": "padding",
        "cls_token": "cls",
        "mask_token": "mask",
    }
    settings: JsonObject = {
        name: vocabulary.token(key)
        for name, key in names.items()
        if vocabulary.token(key) is not None
    }
    key = "tokenizer.chat_template"
    named = {
        name.removeprefix(f"{key}."): template
        for name, template in metadata.items()
        if name.startswith(f"{key}.") and isinstance(template, str)
    }
    default = metadata.get(key)
    if isinstance(default, str):
        named = {"default": default, **named}
    if named:
        settings["chat_template"] = (
            default
            if list(named) == ["default"]
            else [{"name": name, "template": template} for name, template in named.items()]
        )
    return settings


def end_token_ids(vocabulary: GgufVocabulary) -> list[int]:
    """Of the tokens that end an answer: those that the file names, and control tokens that are
    called so."""
    named = [vocabulary.token_id(name) for name in ("eos", "eot", "eom")]
    called = [
        number
        for number, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _CONTROL and text in _ENDS
    ]
    texts = {vocabulary.tokens[number] for number in called}
    if {
        "<|return|>",
        "<|call|>",
    } <= texts:  # of Harmony, where <|end|> ends one of several messages
        called = [number for number in called if vocabulary.tokens[number] != "<|end|>"]
    return list(dict.fromkeys(number for number in (*named, *called) if number is not None))


def _added_tokens(vocabulary: GgufVocabulary) -> Iterable[JsonObject]:
    special = {_CONTROL, _UNKNOWN}
    for number, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind in special or kind == _USER_DEFINED:
            yield {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind in special,
            }


def _ids(vocabulary: GgufVocabulary, texts: Iterable[str]) -> dict[str, int]:
    """Ids by text, without those that stand for no token."""
    ids: dict[str, int] = {}
    for number, text in enumerate(texts):
        if vocabulary.types[number] != _UNUSED:
            ids.setdefault(text, number)
    return ids


def _byte_level_bpe(vocabulary: GgufVocabulary) -> JsonObject:
    pre = vocabulary.pre
    if pre not in _PRE:
        raise vocabulary.unsupported(
            f"tokenizer.ggml.pre={shortened(repr(pre))} is not supported, so texts cannot be "
            f"divided as for this model; supported are {', '.join(sorted(_PRE))}"
        )
    ids = _ids(vocabulary, vocabulary.tokens)
    pairs = [merge.split(" ") for merge in vocabulary.merges]
    if not all(len(pair) == 2 and {*pair, "".join(pair)} <= ids.keys() for pair in pairs):
        raise vocabulary.wrong("merges of tokens that it does not have")
    return {
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE[pre]},
        "post_processor": _affixes(vocabulary, begins=pre in _BEGINS),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORES_MERGES,
            "vocab": ids,
            "merges": pairs,
        },
    }


def _sentence_piece(vocabulary: GgufVocabulary) -> JsonObject:
    ids = _ids(vocabulary, vocabulary.tokens)
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise vocabulary.wrong(
            f"{len(vocabulary.tokens):,} tokens and {len(vocabulary.scores):,} scores of them"
        )
    has_prefix = vocabulary.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = vocabulary.token("unknown")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": _affixes(vocabulary, begins=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": _merges_by_score(vocabulary, ids),
        },
    }


def _merges_by_score(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose token has the highest score, so a token's score is the
    rank of each pair that it can be divided into, as transformers converts such models."""
    found = []
    for text, number in ids.items():
        score = vocabulary.scores[number]
        pairs = ((text[:place], text[place:]) for place in range(1, len(text)))
        known = [(ids[one], ids[two], one, two) for one, two in pairs if one in ids and two in ids]
        found += [(score, one, two) for _, _, one, two in sorted(known)]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(one, two) for _, one, two in found]


def _word_piece(vocabulary: GgufVocabulary) -> JsonObject:
    texts = [
        text
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        else text.removeprefix(_SPACE)
        if text.startswith(_SPACE)
        else f"##{text}"
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    is_lowercase = vocabulary.flag("normalizer.lowercase", True)
    cls = vocabulary.token_id("cls")
    cls = vocabulary.token_id("bos") if cls is None else cls
    sep = vocabulary.token_id("seperator")
    unknown = vocabulary.token("unknown")
    if cls is None or sep is None or unknown is None:
        raise vocabulary.wrong("no token that begins, separates or replaces words")
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": vocabulary.flag("normalizer.strip_accents", is_lowercase),
            "lowercase": is_lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(vocabulary, [cls], [sep], pair_end=[sep]),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": _ids(vocabulary, texts),
        },
    }


def _affixes(vocabulary: GgufVocabulary, *, begins: bool) -> JsonObject | None:
    """What is added around a text. begins: the default of the beginning."""
    first, last = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    start = [first] if first is not None and vocabulary.flag("add_bos_token", begins) else []
    end = [last] if last is not None and vocabulary.flag("add_eos_token", False) else []
    return (
        _template(vocabulary, start, end, pair_start=start, pair_end=end) if start or end else None
    )


def _template(
    vocabulary: GgufVocabulary,
    start: list[int],
    end: list[int],
    *,
    pair_start: Iterable[int] = (),
    pair_end: Iterable[int] = (),
) -> JsonObject:
    def special(numbers: Iterable[int], text: int) -> list[JsonObject]:
        names = [vocabulary.tokens[number] for number in numbers]
        return [{"SpecialToken": {"id": name, "type_id": text}} for name in names]

    def sequence(name: str, text: int) -> list[JsonObject]:
        return [{"Sequence": {"id": name, "type_id": text}}]

    single = [*special(start, 0), *sequence("A", 0), *special(end, 0)]
    pair = [*single, *special(pair_start, 1), *sequence("B", 1), *special(pair_end, 1)]
    tokens = {vocabulary.tokens[number]: number for number in (*start, *end)}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in tokens.items()
        },
    }
