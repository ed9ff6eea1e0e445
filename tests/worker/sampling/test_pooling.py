"""Pooling rows in plans: with sampling rows, cut into any chunks, and plans that are rejected."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.handshake import Feature
from longshore.protocol.plan import Rewind, RowStart
from longshore.protocol.requests import PoolingKind, PoolingParams
from longshore.protocol.sampling import SamplingParams
from longshore.worker.config import WorkerConfig
from longshore.worker.sampling.pooling import PoolingRows
from longshore.worker.step.model_runner import ModelRunner
from longshore.worker.step.step_batch import StepBatch
from longshore.worker.worker import Worker
from tests.models import make_tiny_llama
from tests.worker.plans import Entry, Planner

PROMPT = [3 + (7 * n) % 120 for n in range(40)]
KINDS: tuple[PoolingKind, ...] = ("last", "mean", "cls")


@pytest.fixture
def worker(checkpoint: tuple[Path, Any]) -> Iterator[Worker]:
    with open_worker(checkpoint[0]) as opened:
        yield opened


def open_worker(path: Path) -> Worker:
    return Worker(
        WorkerConfig(model=str(path), num_blocks=100, max_num_seqs=8, show_progress=False)
    )


def planner() -> Planner:
    return Planner(num_blocks=100, block_size=16)


def states_of(model: Any, prompt: list[int]) -> Any:
    with torch.inference_mode():
        return model.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()


def expected_vector(model: Any, prompt: list[int], pooling: PoolingParams) -> Any:
    states = states_of(model, prompt)
    vector = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[pooling.kind]
    return vector / np.linalg.norm(vector) if pooling.normalize else vector


def assert_close(vector: Any, expected: Any) -> None:
    np.testing.assert_allclose(vector, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_tokens_are_in_row_order_with_zeros_for_pooling_rows(
    worker: Worker, checkpoint: tuple[Path, Any]
) -> None:
    runner, plans = worker.start(), planner()
    pooling = PoolingParams()
    asks_much = SamplingParams(temperature=0.7, prompt_logprobs=3, logprobs=2, seed=1)
    entries = [
        Entry(0, PROMPT[:9], pooling=pooling, sampling=asks_much),
        Entry(1, PROMPT[:20]),
        Entry(2, PROMPT, pooling=pooling),
        Entry(5, PROMPT[:5]),
    ]
    counts = {0: 9, 1: 20, 2: 40, 5: 5}
    output = runner.execute(plans.plan(counts, added=entries))
    alone = Planner(num_blocks=100, block_size=16)
    with open_worker(checkpoint[0]) as other:
        plain = other.start().execute(
            alone.plan({1: 20, 5: 5}, added=[Entry(1, PROMPT[:20]), Entry(5, PROMPT[:5])])
        )
    first, second = plain.sampled_tokens.tolist()
    assert output.sampled_tokens.tolist() == [0, first, 0, second]
    assert output.logprobs is None  # sampling settings of a pooling row have no effect
    assert output.pooled_rows.tolist() == [0, 2]
    for vector, prompt in zip(output.pooled, (PROMPT[:9], PROMPT), strict=True):
        assert vector.dtype == np.float32
        assert_close(vector, expected_vector(checkpoint[1], prompt, pooling))
    later = runner.execute(plans.plan())  # rows 1 and 5 decode
    assert len(later.sampled_tokens) == 2
    assert later.pooled == ()


@pytest.fixture(scope="module")
def shared(checkpoint: tuple[Path, Any]) -> Iterator[tuple[ModelRunner, Planner]]:
    with open_worker(checkpoint[0]) as worker:
        yield worker.start(), planner()


@pytest.mark.req("FEA-04")
@given(
    cuts=st.lists(st.integers(1, 39), max_size=6, unique=True).map(sorted),
    kind=st.sampled_from(KINDS),
    normalize=st.booleans(),
)
def test_however_a_prompt_is_cut_its_vector_is_the_same(
    cuts: list[int],
    kind: PoolingKind,
    normalize: bool,
    shared: tuple[ModelRunner, Planner],
    checkpoint: tuple[Path, Any],
) -> None:
    runner, plans = shared
    pooling = PoolingParams(kind, normalize)
    added, finished = [Entry(3, PROMPT, pooling=pooling)], [3] if 3 in plans.blocks else []
    for start, end in zip([0, *cuts], [*cuts, 40], strict=True):
        output = runner.execute(plans.plan({3: end - start}, added=added, finished=finished))
        assert output.pooled_rows.tolist() == ([3] if end == 40 else [])
        added, finished = [], []
    assert_close(output.pooled[0], expected_vector(checkpoint[1], PROMPT, pooling))


@pytest.mark.parametrize("kind", ["mean", "cls"])
def test_a_row_of_all_states_must_begin_at_its_first_token(
    kind: PoolingKind, worker: Worker
) -> None:
    runner, plans = worker.start(), planner()
    entry = Entry(
        0, PROMPT, pooling=PoolingParams(kind), blocks=[plans.free.pop()], num_computed_tokens=16
    )
    with pytest.raises(
        PlanMismatch, match=rf"\({kind}\).*16 computed; the scheduler must not let it read"
    ):
        runner.submit(plans.plan({0: 24}, added=[entry]), print)


@pytest.mark.parametrize(("start", "end"), [(0, 39), (8, 40)])
def test_tokens_that_attend_to_later_ones_must_be_in_one_step(start: int, end: int) -> None:
    rows = PoolingRows(4)
    entry = RowStart(
        row=2,
        generation=1,
        request_id="a",
        last_computed=40,
        block_ids=(),
        prompt_token_ids=int32_array(PROMPT),
        sampling=SamplingParams(),
        pooling=PoolingParams("last"),
        num_computed_tokens=start,
    )
    rows.start(entry)
    batch = StepBatch(np.array([2]), np.array([start]), np.array([end - start]), num_decodes=0)
    assert rows.take(batch, 64, pin_memory=False) is not None
    with pytest.raises(PlanMismatch, match=f"the tokens {start} to {end} of a prompt of 40"):
        rows.take(batch, 64, is_bidirectional=True, pin_memory=False)


def test_a_rewound_row_begins_its_sum_again_or_is_rejected(
    worker: Worker, checkpoint: tuple[Path, Any]
) -> None:
    runner, plans = worker.start(), planner()
    pooling = PoolingParams("mean")
    runner.execute(plans.plan({0: 30}, added=[Entry(0, PROMPT, pooling=pooling)]))
    runner.execute(plans.plan({0: 10}, rewound=[Rewind(0, 0, 40)]))
    output = runner.execute(plans.plan({0: 30}))
    assert_close(output.pooled[0], expected_vector(checkpoint[1], PROMPT, pooling))
    runner.execute(plans.plan({1: 30}, added=[Entry(1, PROMPT, pooling=pooling)]))
    with pytest.raises(PlanMismatch, match="continues at 16, but 30 of them are already summed"):
        runner.submit(plans.plan({1: 24}, rewound=[Rewind(1, 16, 40)]), print)


def test_a_vector_that_is_not_finite_is_reported_with_how_much_of_it(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.save_pretrained(tmp_path)
    with open_worker(tmp_path) as worker:
        runner, plans = worker.start(), planner()
        entries = [
            Entry(0, PROMPT[:4], pooling=PoolingParams(normalize=False)),
            Entry(1, PROMPT[:4], pooling=PoolingParams(normalize=False, dimensions=2)),
        ]
        output = runner.execute(plans.plan({0: 4, 1: 4}, added=entries))
    assert output.nan_rows.tolist() == [0]
    assert output.num_nans.tolist() == [1]
    assert output.pooled_rows.tolist() == [1]
    assert len(output.pooled[0]) == 2


def test_a_worker_offers_vectors_and_structured_output(worker: Worker) -> None:
    assert worker.features == (Feature.POOLING, Feature.STRUCTURED_OUTPUT)
