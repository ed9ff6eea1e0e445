"""Vectors of real models equal those of transformers, for every way of computing the prompt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import PoolingParams
from tests.models import make_tiny_model
from tests.worker.models.cases import CASES, Case
from tests.worker.models.conftest import prompt_of
from tests.worker.models.served_model import CLIENT, ServedModel

FAMILIES: Final = list({case.family: case for case in reversed(CASES)}.values())
KINDS: Final = ("last", "mean", "cls")
LENGTHS: Final = (37, 1, 70, 16)
EVERY: Final = [PoolingParams(kind, normalize) for kind in KINDS for normalize in (True, False)]


def reference_vector(
    model: Any, prompt: Sequence[int], pooling: PoolingParams
) -> npt.NDArray[np.float64]:
    """Computed from the hidden states of transformers."""
    body = model.backbone if hasattr(model, "backbone") else model.model
    with torch.inference_mode():
        states = body(torch.tensor([list(prompt)])).last_hidden_state[0].double()
    of_kind = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}
    vector = of_kind[pooling.kind][: pooling.dimensions]
    return (vector / vector.norm() if pooling.normalize else vector).numpy()


def assert_vector(served: ServedModel, handle: int, expected: npt.NDArray[np.float64]) -> None:
    end = served.ended[handle]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 0)
    assert served.tokens[handle] == []
    assert end.pooled.dtype == np.float32
    np.testing.assert_allclose(end.pooled, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.req("FEA-04")
@pytest.mark.parametrize(
    "step_tokens",
    [pytest.param(256, id="whole", marks=pytest.mark.long), pytest.param(16, id="chunked")],
)
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_kind_of_vector_is_that_of_transformers(
    case: Case, step_tokens: int, tmp_path: Path
) -> None:
    reference = make_tiny_model(case.family, tmp_path, **case.settings)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    with ServedModel(tmp_path, num_tokens=4, max_num_batched_tokens=step_tokens) as served:
        for prompt in prompts:
            served.add(prompt)
            for pooling in EVERY:
                served.add(prompt, pooling=pooling)
        alone = served.answers(prompts)  # and those
        for index, prompt in enumerate(prompts):
            first = index * (1 + len(EVERY))
            assert served.tokens[first] == alone[index]
            for offset, pooling in enumerate(EVERY):
                expected = reference_vector(reference, prompt, pooling)
                assert_vector(served, first + 1 + offset, expected)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, make_tiny_model("Llama", path)


def test_the_last_state_uses_the_prefix_cache_and_other_poolings_compute_all(
    llama: tuple[Path, Any],
) -> None:
    path, reference = llama
    prompt = prompt_of(70, seed=3)
    with ServedModel(path, num_tokens=2) as served:
        served.answers([prompt])
        for pooling in EVERY:
            served.add(prompt, pooling=pooling)
        served.answers([])
        for handle, pooling in enumerate(EVERY, 1):
            assert served.ended[handle].num_cached_tokens == (64 if pooling.kind == "last" else 0)
            assert_vector(served, handle, reference_vector(reference, prompt, pooling))


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_preemptions_and_chunks_change_no_vector(
    kind: Any, enable_prefix_caching: bool, llama: tuple[Path, Any]
) -> None:
    path, reference = llama
    pooling = PoolingParams(kind)
    prompts = [prompt_of(90 + seed, seed) for seed in range(6)]
    with ServedModel(
        path,
        num_tokens=100,
        max_num_batched_tokens=17,
        num_blocks=None,
        enable_prefix_caching=enable_prefix_caching,
    ) as served:
        for prompt in prompts[:2]:
            served.add(prompt)
            served.step()
        for prompt in prompts:
            served.add(prompt, pooling=pooling)
        served.answers([])
        ends = [served.ended[handle] for handle in range(2, 8)]
        assert sum(end.num_preemptions for end in ends) > 0
        for handle, prompt in enumerate(prompts, 2):
            assert_vector(served, handle, reference_vector(reference, prompt, pooling))


@pytest.mark.parametrize("step_tokens", [256, 48], ids=["whole", "chunked"])
def test_a_prompt_of_the_maximum_length_has_a_vector(
    step_tokens: int, llama: tuple[Path, Any]
) -> None:
    """It needs no position for a token after it."""
    path, reference = llama
    prompts = [prompt_of(256, seed) for seed in range(3)]
    with ServedModel(
        path, num_tokens=1, max_num_batched_tokens=step_tokens, num_blocks=None
    ) as served:
        for prompt in prompts:
            for pooling in EVERY:
                served.add(prompt, pooling=pooling)
        served.answers([])
        for handle in range(len(prompts) * len(EVERY)):
            index, kind = divmod(handle, len(EVERY))
            expected = reference_vector(reference, prompts[index], EVERY[kind])
            assert_vector(served, handle, expected)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dimensions", [1, 24, 64])
def test_a_vector_is_cut_before_it_gets_its_length(
    dimensions: int, normalize: bool, llama: tuple[Path, Any]
) -> None:
    path, reference = llama
    prompt = prompt_of(20, seed=1)
    with ServedModel(path, num_tokens=1) as served:
        for kind in KINDS:
            served.add(prompt, pooling=PoolingParams(kind, normalize, dimensions))
        served.answers([])
        for handle, kind in enumerate(KINDS):
            pooling = PoolingParams(kind, normalize, dimensions)
            assert len(served.ended[handle].pooled) == dimensions
            assert_vector(served, handle, reference_vector(reference, prompt, pooling))


def test_an_aborted_row_leaves_nothing_in_the_vector_of_the_next(llama: tuple[Path, Any]) -> None:
    path, reference = llama
    pooling = PoolingParams("mean")
    with ServedModel(path, num_tokens=1, max_num_batched_tokens=16) as served:
        served.add(prompt_of(90, seed=1), pooling=pooling)
        served.step()
        served.scheduler.abort_requests(CLIENT, int32_array([0]), 0.0)
        prompt = prompt_of(50, seed=2)
        served.add(prompt, pooling=pooling)
        served.answers([])
        assert_vector(served, 1, reference_vector(reference, prompt, pooling))
