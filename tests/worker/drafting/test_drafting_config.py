"""--speculative-config: what is taken, and what is refused by name."""

import pytest

from longshore.protocol.errors import ConfigError
from longshore.worker.drafting.config import parse_speculative_config
from longshore.worker.drafting.drafter import Drafter, load_drafter
from longshore.worker.drafting.lookup import NgramDrafter, SuffixDrafter


@pytest.mark.parametrize(
    ("text", "kind", "num_drafts", "lookup"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 4}', NgramDrafter, 4, (5, 5)),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}',
            NgramDrafter,
            3,
            (4, 4),
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}',
            NgramDrafter,
            3,
            (2, 2),
        ),
        ('{"method": "suffix"}', SuffixDrafter, 24, (5, 5)),
        ('{"method": "suffix", "num_speculative_tokens": 9}', SuffixDrafter, 9, (5, 5)),
    ],
)
def test_the_names_and_defaults_of_vllm(
    text: str, kind: type[Drafter], num_drafts: int, lookup: tuple[int, int]
) -> None:
    config = parse_speculative_config(text)
    assert (config.num_drafts, config.lookup) == (num_drafts, lookup)
    assert load_drafter(config) is kind


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSON object such as"),
        ("[]", "Expected `object`"),
        ("{}", "`method`"),
        ('{"method": "ngram"}', "has no num_speculative_tokens"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', ">= 1"),
        ('{"method": "ngram", "num_speculative_tokens": 65}', "<= 64"),
        ('{"method": "suffix", "tree": 1}', "unknown field `tree`"),
        ('{"method": "suffix", "model": "small"}', "'eagle3', and no other ones, have a model"),
        ('{"method": "draft_model", "num_speculative_tokens": 2}', "have a model"),
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "have a model"),
        ('{"method": "mtp"}', "has no num_speculative_tokens"),
        (
            '{"method": "mtp", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}',
            "divided as the model is",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 3, '
            '"prompt_lookup_max": 2}',
            "prompt_lookup_min=3 is more than prompt_lookup_max=2",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_speculative_config(text)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ('{"method": "mtp", "num_speculative_tokens": 2}', "mtp"),
        ('{"method": "deepseek_mtp", "num_speculative_tokens": 2}', "mtp"),
        ('{"method": "draft_model", "num_speculative_tokens": 2, "model": "x"}', "draft_model"),
        ('{"method": "eagle3", "num_speculative_tokens": 2, "model": "x"}', "eagle3"),
    ],
)
def test_drafters_with_weights(text: str, method: str) -> None:
    config = parse_speculative_config(text)
    assert (config.method, config.keeps_kv, config.num_drafts) == (method, True, 2)
    assert not parse_speculative_config('{"method": "suffix"}').keeps_kv


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_what_is_not_supported_yet_is_refused_by_name(method: str) -> None:
    config = parse_speculative_config(f'{{"method": "{method}", "num_speculative_tokens": 2}}')
    with pytest.raises(ConfigError, match=f"no method '{method}'.*only mtp is supported"):
        load_drafter(config)


def test_a_drafter_of_another_package_is_given_by_its_place() -> None:
    place = "tests.worker.drafting.test_proposals:Counting"
    config = parse_speculative_config(f'{{"method": "{place}", "num_speculative_tokens": 2}}')
    assert load_drafter(config).__name__ == "Counting"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nowhere:Drafter", "cannot be loaded"),
        ("tests.worker.plans:Nothing", "cannot be loaded"),
        ("tests.worker.plans:Planner", "no class that inherits"),
        ("other", "no method 'other'"),
    ],
)
def test_what_is_no_drafter_is_refused(place: str, reason: str) -> None:
    config = parse_speculative_config(f'{{"method": "{place}", "num_speculative_tokens": 2}}')
    with pytest.raises(ConfigError, match=reason):
        load_drafter(config)
