"""Which tokenizers have a known cost, and which are refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.text.tokenizer_bounds import (
    is_linear,
    read_tokenizer_spec,
    unknown_cost,
)
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError
from tests.deploy.tiny_tokenizer import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    unigram_tokenizer,
)

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"

OF_MODELS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    + SPACES,
    "Qwen 2": rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    "GPT-4o": rf"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "Tekken": rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|"
    rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    "DeepSeek 3": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    "digits": r"\p{N}{1,3}",
    "ideographs": "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    "Bloom": r" ?[^(\s|.,!?…。，、।۔،)]+",  # noqa: RUF001
    "spaces": " {2,}",
    "lookahead": r"C[0-9]{3}(?![0-9])| ?(?!C[0-9]{3}(?![0-9]))[A-Za-z]+[0-9]*",
}
UNKNOWN = [
    *(r"(a+)+$", r"(a|aa)+$", "a*b", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+$", r"(?:a|b)*c", "a+a+"),
    *(r"(\w+\s?)+x", "a{1,999}b", "", "a|", "a**", "a{2}{3}", "a{2,}{3,}b", "[a-z&&[b]]", r"\1"),
    *(r"(?i:a|b)+x", "a?a?a?a?a?a?aaaaaa", "a++b", "(?>a)", "(?<=a)b", "(?=a+)b", "a+(?=b)"),
    *(rf"{UPPER}*{LOWER}+", rf"{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*", "(", "[", "a)"),
]


@pytest.mark.parametrize("name", OF_MODELS)
def test_the_regexes_of_models_are_known_to_be_linear(name: str) -> None:
    assert is_linear(OF_MODELS[name])


@pytest.mark.parametrize("regex", UNKNOWN)
def test_a_regex_that_may_be_tried_again_and_again_is_not_known_to_be_linear(regex: str) -> None:
    assert not is_linear(regex)


def spec_of(**parts: Any) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, **parts}


def cost_of(folder: Path, spec: object) -> str | None:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(spec))
    return unknown_cost(read_tokenizer_spec(file))


def test_tokenizers_of_all_kinds_have_a_known_cost(tmp_path: Path) -> None:
    for make in (byte_level_tokenizer, byte_fallback_tokenizer, unigram_tokenizer):
        assert cost_of(tmp_path, json.loads(make().to_str())) is None
    assert unknown_cost(read_tokenizer_spec(DEMO_MODEL_DIR / "tokenizer.json")) is None


def replace(pattern: object, content: object) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def table(*replacements: bytes) -> str:
    return base64.b64encode(b"\0\0\0\0" + b"\0".join(replacements)).decode()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"normalizer": replace({"String": "a"}, "a" * 9)}, "9 times as long"),
        (
            {
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [replace({"String": "a"}, "aa")] * 4,
                }
            },
            "16 times as long",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 99}}, "times as long"),
        ({"normalizer": replace({"String": ""}, "a")}, "without a pattern"),
        ({"normalizer": replace({"Regex": "(a+)+$"}, "a")}, "regular expression '(a+)+$'"),
        ({"normalizer": replace({"String": "a"}, 5)}, "without content"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}}, "cannot be read"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table(b"x" * 99)}},
            "99 times as long",
        ),
        ({"normalizer": {"type": "Later"}}, "a normalizer of type Later"),
        ({"normalizer": {"type": "Sequence"}}, "without parts"),
        ({"normalizer": [1]}, "no object"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
            "more than 64 parts",
        ),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}}},
            "regular expression '(x+x+)+y'",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "type FixedLength"),
        ({"model": {"type": "BPE", "dropout": 0.5, "vocab": {}}}, "model of type BPE"),
        (
            {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {}}},
            "words of 1000000000 characters",
        ),
        ({"model": {"type": "Unigram", "vocab": [["a" * 2000, 0.5]]}}, "more than 1024"),
        ({"model": {"vocab": {}}}, "model of type None"),
    ],
)
def test_a_part_of_unknown_cost_is_named(
    tmp_path: Path, parts: dict[str, Any], reason: str
) -> None:
    found = cost_of(tmp_path, spec_of(**parts))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_of(decoder=replace({"Regex": "(a+)+$"}, "a")), "decoder that is not supported"),
        (spec_of(decoder=replace({"String": "a"}, "a" * 99)), "up to 99 times as long"),
        (spec_of(decoder={"type": "Strip", "content": "a", "start": 0, "stop": 5}), "type Strip"),
        (spec_of(decoder={"type": "Later"}), "decoder of type Later"),
        (spec_of(model={"type": "BPE", "vocab": {"a" * 99_999: 0}}), "a token of 99999 characters"),
        ({}, "cannot be read as a tokenizer"),
        ([], "cannot be read as a tokenizer"),
        (spec_of(model={"vocab": {"a": "b"}}), "cannot be read as a tokenizer"),
    ],
)
def test_what_decoding_might_cost_is_refused(tmp_path: Path, spec: object, reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        cost_of(tmp_path, spec)
    assert reason in str(refusal.value)
