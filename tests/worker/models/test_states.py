"""Models with states and the real scheduler: snapshots, and the memory of long prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.protocol.arrays import int32_array
from longshore.protocol.kv_cache_spec import StateSpec
from longshore.protocol.plan import KeptState, SchedulerOutput
from longshore.scheduler.kv_cache.blocks import ComputedBlocks
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.step import decode_graphs, step_launcher
from tests.models import make_tiny_model
from tests.reference import assert_greedy_equal, greedy_reference
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import Checkpoint, prompt_of
from tests.worker.models.served_model import ServedModel
from tests.worker.step.test_decode_graphs import RerunMaker

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


class KeptOnce:
    """Lets the workers keep the state after `num_tokens` tokens of the first request, on row 0, in
    blocks that nothing else uses, and then lets all requests begin there."""

    def __init__(self, served: ServedModel, num_tokens: int, monkeypatch: pytest.MonkeyPatch):
        self._served, self._num_tokens = served, num_tokens
        self._schedule = served.scheduler.schedule
        self.kept: KeptState | None = None
        self.tables: tuple[Any, ...] = ()
        monkeypatch.setattr(served.scheduler, "schedule", self._with_kept_state)
        self._monkeypatch = monkeypatch

    def _with_kept_state(self, now: float) -> SchedulerOutput | None:
        plan, kv_cache = self._schedule(now), self._served.scheduler.kv_cache
        num_computed = int(self._served.scheduler.running.num_computed[0])
        if plan is None or self.kept is not None or num_computed < self._num_tokens:
            return plan
        assert kv_cache.kept_states is not None
        pages = int32_array(kv_cache.pool.get_new_blocks(kv_cache.kept_states.num_pages))
        self.kept = KeptState(0, self._num_tokens, pages)
        self.tables = kv_cache.block_ids(0)
        return msgspec.structs.replace(plan, kept_states=(self.kept,))

    def check_equals_row(self) -> None:
        """The pages of row 0 are copied whole. Only while its state is the one that was kept."""
        assert self.kept is not None
        buffer = self._served._runner._launcher.state.cache.buffer
        assert bool((buffer[self.kept.block_ids] == buffer[self.tables[-1]]).all())

    def begin_there(self) -> None:
        assert self.kept is not None
        found = ComputedBlocks((*self.tables[:-1], []), self._num_tokens, self.kept.block_ids)
        kv_cache = self._served.scheduler.kv_cache
        self._monkeypatch.setattr(kv_cache, "get_computed_blocks", lambda request: found)


@pytest.mark.parametrize("uses_graphs", [False, True], ids=["kernel by kernel", "graphs"])
@pytest.mark.parametrize("num_tokens", [13, 20, 21, 25, 32])
@pytest.mark.parametrize("case", WITH_STATES[1:4], ids=str)
def test_a_state_is_kept_after_any_number_of_tokens(
    case: Case,
    num_tokens: int,
    uses_graphs: bool,
    checkpoint_of: CheckpointOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a chunk, at its end, after the single token that is left of the prompt, and after
    decodes, at borders of blocks and between them."""
    checkpoint, maker = checkpoint_of(case), RerunMaker()
    if uses_graphs:
        monkeypatch.setattr(step_launcher, "graph_maker", lambda device: maker)
        monkeypatch.setattr(GroupedAttention, "is_replayable", True)
        # Here the rows of a capture advance each time that it is computed.
        monkeypatch.setattr(decode_graphs, "_has_equal_bits", lambda one, other: True)
    prompt, num_outputs = prompt_of(21, seed=5), 20
    with ServedModel(
        checkpoint.path,
        num_tokens=num_outputs,
        max_num_seqs=1,
        max_num_batched_tokens=20,
        max_steps_in_flight=1,
    ) as served:
        keeping = KeptOnce(served, num_tokens, monkeypatch)
        served.add(prompt)
        while keeping.kept is None:
            served.step()
        if num_tokens >= 20:
            keeping.check_equals_row()
        while served.step():
            pass
        keeping.begin_there()
        second = [*prompt, *served.tokens[0]][:num_tokens] + prompt_of(6, seed=9)
        served.add(second)
        while served.step():
            pass
        assert served.ended[1].num_cached_tokens == num_tokens
    assert not uses_graphs or len(maker.replayed) > num_outputs
    references = [greedy_reference(checkpoint.reference, p, num_outputs) for p in (prompt, second)]
    assert_greedy_equal(served.tokens, references)
