"""Graphs of whole models: the same bits as kernel by kernel, or no graph."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longshore.worker.kernels import linear
from longshore.worker.step.model_forward import LONG_STEP_S, ModelForward
from tests.models import make_tiny_model
from tests.worker.models.paged_model import BLOCK_SIZE, PagedModel

pytestmark = pytest.mark.skipif(
    not linear.supports(torch.zeros(2, 2, dtype=torch.bfloat16)),
    reason="this processor multiplies bfloat16 in another way",
)

MAX_TOKENS = 40
SHORT_S, SHORTER_S = LONG_STEP_S / 5, LONG_STEP_S / 10


class Sequential:
    """A sequence over a paged cache, step by step."""

    def __init__(self, path: Path) -> None:
        self.paged = PagedModel(path, dtype=torch.bfloat16)
        self.model = self.paged.model

    def step(
        self, num_tokens: int, take: Callable[[Tensor, Tensor, Any], Any], *, start: int = 0
    ) -> Any:
        """What `take` makes of random tokens from position `start` on."""
        ids = torch.randint(128, (num_tokens,), dtype=torch.int32)
        positions, attention = self.paged.begin_step(start, num_tokens)
        with torch.inference_mode():
            return take(ids, positions, attention)

    def prepare(self, times: Sequence[float]) -> ModelForward:
        """times: seconds of the captured step, then of both ways, for the choice."""
        clock: Iterator[float] = iter(times)

        def seconds(function: Callable[[], object], num_runs: int) -> float:
            function()
            return next(clock)

        forward = ModelForward(self.model, seconds=seconds)
        self.step(MAX_TOKENS, forward.capture)
        self.step(BLOCK_SIZE, forward.verify)
        self.step(MAX_TOKENS, forward.time)
        return forward


@pytest.fixture
def sequential(tmp_path: Path) -> Sequential:
    make_tiny_model("Qwen3", tmp_path)
    return Sequential(tmp_path)


@pytest.mark.parametrize(
    "family",
    [
        "Llama",
        "Mistral",
        "Qwen2",
        "Qwen3",
        "Phi3",
        "Gemma2",
        "Gemma3",
        "Mixtral",
        "Qwen3Moe",
        "GptOss",
    ],
)
def test_a_replayed_step_has_the_bits_of_its_kernels_one_by_one(
    family: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path)
    sequential = Sequential(tmp_path)
    forward = sequential.prepare([SHORT_S, SHORT_S, SHORTER_S])
    assert forward.max_graph_tokens == MAX_TOKENS

    def check(*inputs: Any) -> None:
        hidden = forward(*inputs)
        kept = hidden.clone()
        assert torch.equal(sequential.model.forward(*inputs), hidden)
        forward(*inputs)
        assert torch.equal(hidden, kept), "a result is overwritten by the next step"

    start = 0
    for num_tokens in (MAX_TOKENS, 1, 1, 17, 1, MAX_TOKENS + 3):
        sequential.step(num_tokens, check, start=start)
        start += num_tokens


def test_a_model_that_computes_in_torch_has_no_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("Olmo2", tmp_path)
    sequential = Sequential(tmp_path)
    with caplog.at_level("DEBUG"):
        forward = sequential.prepare([])
    assert forward.max_graph_tokens == 0
    assert "aten.add_.Tensor is not a recorded kernel" in caplog.text
    sequential.step(
        3,
        lambda *inputs: torch.testing.assert_close(
            forward(*inputs), sequential.model.forward(*inputs), rtol=0, atol=0
        ),
    )


def test_a_graph_that_misses_a_part_of_the_model_is_discarded(
    sequential: Sequential, caplog: pytest.LogCaptureFixture
) -> None:
    layer = sequential.model.layers[0]

    def with_a_secret(*inputs: Any) -> Any:
        x, residual = layer(*inputs)
        x.view(torch.int16).numpy()[...] ^= 1  # neither a kernel nor an operation of torch
        return x, residual

    sequential.model.layers[0] = with_a_secret  # type: ignore[assignment]
    forward = sequential.prepare([SHORT_S])
    assert forward.max_graph_tokens == 0
    assert "the graph for small steps gives wrong results" in caplog.text


@pytest.mark.parametrize(
    "times", [[SHORT_S, SHORTER_S, SHORT_S], [2 * LONG_STEP_S]], ids=["slower", "long step"]
)
def test_a_graph_that_gains_nothing_is_not_used(
    sequential: Sequential, times: Sequence[float]
) -> None:
    assert sequential.prepare(times).max_graph_tokens == 0
