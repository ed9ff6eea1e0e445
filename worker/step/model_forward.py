"""The forward pass of a model: kernel by kernel, or as a replayed graph where that is faster.

On a CPU, a step of few tokens is hundreds of microseconds of arithmetic in dozens of calls, and the
interpreter between the calls takes longer than the calls.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.kernels.graph import Graph, NotCapturable, capture
from longshore.worker.kernels.native import native
from longshore.worker.models.decoder_model import DecoderModel

logger = logging.getLogger(__name__)

GRAPH_TOKENS: Final = (256, 64, 16)
"""Step sizes for which a graph is tried, largest first."""

LONG_STEP_S: Final = 0.05
"""A step that takes this long or longer does not profit from a graph. Those of the fewest tokens
are tried however long they take, because steps of one token do."""

NUM_TIMINGS: Final = 3


def least_seconds(function: Callable[[], object], num_runs: int) -> float:
    """The shortest of several runs; other load on the machine only makes runs longer."""
    best = float("inf")
    for _ in range(num_runs):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return best


class ModelForward:
    """Computes the hidden states of a step. All calls are on the compute queue.

    is_eager: steps run kernel by kernel, never as a graph.
    seconds: runs a function the given number of times and returns its time.
    is_capturable: whether to try to capture a graph; the same on all ranks of a model.
    max_graph_tokens: the largest step, in tokens, that replays the graph; 0 if none does.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        is_eager: bool = False,
        seconds: Callable[[Callable[[], object], int], float] = least_seconds,
    ) -> None:
        self._model = model
        self._seconds = seconds
        self._layers: _LayerGraph | None = None
        self.max_graph_tokens = 0
        self._is_not_capturable = False
        self.is_capturable = (
            type(model).forward is DecoderModel.forward  # `replay` repeats what it does
            and not model.taps
            and model.parallel.num_shards == 1
            and native() is not None
            and not is_eager
        )

    def __call__(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """See DecoderModel.forward."""
        if self._layers is not None and len(positions) <= self.max_graph_tokens:
            return self._layers.replay(inputs, positions, attention)
        return self._model.forward(inputs, positions, attention)

    @property
    def has_graph(self) -> bool:
        return self._layers is not None

    def capture(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> None:
        """Capture a graph for steps of up to as many tokens as this one, unless such a step takes
        long or the model runs an operation that cannot be captured."""
        if self._layers is not None or self._is_not_capturable:
            return
        made: list[_LayerGraph] = []

        def make() -> None:
            made.append(_LayerGraph(self._model, inputs, positions, attention))

        try:
            taken_s = self._seconds(make, 1)
            if taken_s <= LONG_STEP_S or len(positions) <= GRAPH_TOKENS[-1]:
                self._layers = made[0]
        except NotCapturable as reason:
            logger.debug("small steps do not use a graph: %s", reason)
            self._is_not_capturable = True

    def verify(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> None:
        """Discard the graph unless a replay gives the same bits as running its kernels one by one.

        Call it with other inputs than the captured ones, and no two tokens in one slot of the
        cache. A step larger than the captured one is ignored, and so are further calls.
        """
        layers = self._layers
        if layers is None or layers.is_verified or len(positions) > layers.max_tokens:
            return
        layers.is_verified = True
        if not layers.is_right(inputs, positions, attention):
            logger.warning(
                "the graph for small steps gives wrong results and is not used; steps run kernel "
                "by kernel. Please report this."
            )
            self._layers = None

    def time(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> None:
        """Use the graph for steps of up to as many tokens as this one, if that is faster."""
        layers = self._layers
        if layers is None or len(positions) > layers.max_tokens or self.max_graph_tokens:
            return
        plain = self._seconds(
            lambda: self._model.forward(inputs, positions, attention), NUM_TIMINGS
        )
        graph = self._seconds(lambda: layers.replay(inputs, positions, attention), NUM_TIMINGS)
        if graph < plain:
            self.max_graph_tokens = len(positions)
            logger.debug(
                "steps of up to %d tokens replay a graph of %d calls: %.2f ms instead of %.2f ms",
                len(positions),
                layers.num_calls,
                graph * 1e3,
                plain * 1e3,
            )


class _LayerGraph:
    """The captured layers of a model, with the memory of their inputs and outputs."""

    def __init__(
        self, model: DecoderModel, inputs: Tensor, positions: Tensor, attention: AttentionStep
    ) -> None:
        kernels = native()
        assert kernels is not None
        self._kernels = kernels
        self._model = model
        self.max_tokens = len(positions)
        self.is_verified = False
        self._positions = positions.clone()
        hidden = model.embed(inputs) if model.parallel.is_first_stage else inputs
        self._hidden = hidden.clone()
        (self._x, self._residual), self._graph = self._capture(self.max_tokens, attention)

    @property
    def num_calls(self) -> int:
        return self._graph.num_calls

    def replay(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        num_tokens = self._take(inputs, positions)
        self._graph.replay(num_tokens, attention.native_steps)
        return _sum(self._x[:num_tokens], self._residual, num_tokens)

    def is_right(self, inputs: Tensor, positions: Tensor, attention: AttentionStep) -> bool:
        num_tokens = self._take(inputs, positions)
        try:
            (x, residual), _ = self._capture(num_tokens, attention)
        except NotCapturable:
            return False
        expected = _sum(x, residual, num_tokens)
        return torch.equal(self.replay(inputs, positions, attention), expected)

    def _take(self, inputs: Tensor, positions: Tensor) -> int:
        num_tokens = len(positions)
        model = self._model
        hidden = model.embed(inputs) if model.parallel.is_first_stage else inputs
        self._hidden[:num_tokens].copy_(hidden)
        self._positions[:num_tokens].copy_(positions)
        return num_tokens

    def _capture(
        self, num_tokens: int, attention: AttentionStep
    ) -> tuple[tuple[Tensor, Tensor | None], Graph]:
        x, positions = self._hidden[:num_tokens], self._positions[:num_tokens]
        return capture(
            self._kernels,
            lambda: self._model.run_layers(x, positions, attention),
            num_tokens,
            attention.native_steps,
        )


def _sum(x: Tensor, residual: Tensor | None, num_tokens: int) -> Tensor:
    """x + residual as a copy, because the next replay overwrites both."""
    return x.clone() if residual is None else x + residual[:num_tokens]
