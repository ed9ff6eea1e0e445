"""Names of modules, and patterns of names, in a config.json."""

import re
import time

import pytest

from longshore.worker.errors import BrokenCheckpoint
from longshore.worker.loading.module_names import MAX_NAME, ByModule, read_patterns
from longshore.worker.models.json_fields import JsonFields

FIELDS = JsonFields({"ignore": [1]}, "config.json")

# As published models have them.
USUAL = [
    r".*lm_head",
    r".*mlp.gate$",
    r".*self_attn.*",
    r"model\.layers\.[0-9]+\.mlp\.gate$",
    r"^model\.(?!layers\.).*",
    r".*\.(?:1[5-9]|2[0-9])\..*(down|gate)_proj.*",
    r".*experts.*gate.*proj",
    r".*?(?:visual\..*)",
    r".*layers\.0\..*",
    r".*\.\d+\..*",
]


def test_the_patterns_of_published_models_are_accepted() -> None:
    found = read_patterns(FIELDS, "ignore", [(text, True) for text in USUAL])
    assert [pattern.pattern for pattern, _ in found] == USUAL


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([r"(a+)+$"], r"'\(a\+\)\+\$' repeats a choice more than 16 times"),
        ([r"(?:a|aa)*$"], "repeats a choice"),
        ([r"(.)\1*x"], "refers to a group"),
        ([".*" * 5 + "x"], "repeats too much"),
        ([".*a.*b.*cd"] * 20, "repeats too much"),
        (["("], "must be valid patterns"),
        (["a{1,99999999999}"], "must be valid patterns"),
        (["(" * 5000 + ")" * 5000], "must be valid patterns"),
    ],
)
def test_patterns_that_could_take_long_are_rejected(texts: list[str], message: str) -> None:
    with pytest.raises(BrokenCheckpoint, match=message) as error:
        read_patterns(FIELDS, "ignore", [(text, True) for text in texts])
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", [".*a.*a.*a.*", ".*.*.*x", "(?:a|aa){1,13}x", "a*a*a*x"])
def test_a_hostile_name_takes_a_bounded_time(text: str) -> None:
    patterns = read_patterns(FIELDS, "ignore", [(text, True)])
    began = time.process_time()
    ByModule({}, patterns).of("a" * MAX_NAME, False)
    assert time.process_time() - began < 1  # some ten times what it takes


def test_an_exact_name_is_before_patterns_and_the_first_pattern_counts() -> None:
    patterns = tuple((re.compile(text), text) for text in ("b.*", "a.*", "ab.*"))
    names = ByModule({"abc": "exact"}, patterns)
    assert [names.of(name, "default") for name in ("abc", "abd", "cab")] == [
        "exact",
        "a.*",
        "default",
    ]
