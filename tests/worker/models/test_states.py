"""Models with states and the real scheduler: snapshots, and the memory of long prompts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from longshore.protocol.kv_cache_spec import StateSpec
from tests.models import make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import Checkpoint, prompt_of
from tests.worker.models.served_model import ServedModel

CheckpointOf = Callable[[Case], Checkpoint]
NUM_TOKENS = 8
WITH_STATES = [
    next(case for case in CASES if case.family == family)
    for family in (
        "Mamba2",
        "Bamba",
        "GraniteMoeHybrid",
        "Qwen3Next",
        "Qwen3_5Moe",
        "Lfm2",
        "FalconH1",
        "NemotronH",
    )
]


def hits(prompts: list[list[int]], border: int, *, has_attention: bool) -> list[int]:
    """By brute force, the tokens that each prompt finds, one served after the other."""
    computed: set[tuple[int, ...]] = set()
    kept: set[tuple[int, ...]] = set()
    found = []
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(border, len(prompt), border)]
        found.append(max((len(each) for each in prefixes if each in kept), default=0))
        if has_attention:
            kept.update(sorted((each for each in prefixes if each in computed), key=len)[-1:])
        kept.update(prefixes[-1:])
        computed.update(prefixes)
    return found


@pytest.mark.req("SCH-24")
@pytest.mark.parametrize("budget", [70, 256])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_prefix_is_found_up_to_the_last_state_that_was_kept_in_it(
    case: Case, checkpoint_of: CheckpointOf, budget: int
) -> None:
    """States are kept at the end of a prompt, wherever its chunks end, and where a prefix that an
    earlier request has computed ends."""
    checkpoint = checkpoint_of(case)
    first = prompt_of(200, seed=5)
    shared = [10, 31, 63, 64, 65, 127, 128, 140, 191, 193]
    prompts = [first[:count] + prompt_of(12, seed=count) for count in shared]
    prompts += [first, prompts[4], first[:128] + prompt_of(30, seed=9)]
    with ServedModel(
        checkpoint.path, num_tokens=NUM_TOKENS, max_num_batched_tokens=budget
    ) as served:
        answers = served.answers([first])
        for prompt in prompts:
            answers += served.answers([prompt])
        found = [served.ended[request].num_cached_tokens for request in range(1, len(prompts) + 1)]
        kinds = [type(group.spec) for group in served.worker.kv_cache.groups]
        wanted = hits([first, *prompts], served.border, has_attention=len(kinds) > 1)
    assert found == wanted[1:]
    references = [greedy_reference(checkpoint.reference, p, NUM_TOKENS) for p in [first, *prompts]]
    assert_greedy_equal(answers, references)


@pytest.mark.req("STM-10")
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_states_of_long_prompts_take_a_few_blocks(tmp_path: Path, max_steps_in_flight: int) -> None:
    """The pool holds exactly `max_blocks` of the longest request."""
    model = make_tiny_model("Mamba2", tmp_path, **WITH_STATES[0].settings, initializer_range=0.2)
    prompts = [prompt_of(length, seed=length) for length in (1000, 17, 990)]
    with ServedModel(
        tmp_path,
        num_tokens=NUM_TOKENS,
        max_model_len=1024,
        max_num_batched_tokens=100,
        num_blocks=None,
        max_steps_in_flight=max_steps_in_flight,
    ) as served:
        (group,) = served.worker.kv_cache.groups
        assert isinstance(group.spec, StateSpec)
        assert served.scheduler.kv_cache.num_blocks == 1 + 1, "one is the null block"
        answers = served.answers(prompts)
    assert_greedy_equal(answers, [greedy_reference(model, p, NUM_TOKENS) for p in prompts])
