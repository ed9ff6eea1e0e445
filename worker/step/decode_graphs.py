"""Decode steps as CUDA graphs: everything from token ids to logits is one launch.

A decode of a small model is hundreds of kernels of a few microseconds each, and the host needs
longer to launch them than the GPU to run them. A graph is captured per padded number of rows. It
reads all its inputs from fixed addresses (the packed inputs of a step, the token table, the block
tables), so a replay computes other rows, at other positions, on other blocks. Rows of padding have
length 0 and no slot: they write nothing, and nobody reads their logits.

If the connector has hooks around layers, a graph is cut at each of them, and the hooks run between
the replays of the pieces.

Graphs of all sizes share one memory pool, and so do their results: these are valid until the next
replay. The sampling is not captured, because its kernels depend on what the rows ask for.
"""

import gc
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from longshore.worker.attention.backend import LayerHooks

logger = logging.getLogger(__name__)

GRAPH_ROWS: Final = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 513, 32))
"""Padded numbers of rows. Padding costs time; every size costs memory and start-up time."""


SHARING_ROWS: Final = (16, 32, 64, 128, 256, 512)
"""Of the graphs of decodes that share blocks. Padding costs them less time."""


class GraphKey(NamedTuple):
    """num_rows: with padding. shares_blocks: see DeviceStep."""

    num_rows: int
    shares_blocks: bool = False


class Decoded(NamedTuple):
    """hidden: (num_rows, hidden_size), before the final norm. logits: (num_rows, vocab_size)
    float32, of the rows in `last_tokens`."""

    hidden: Tensor
    logits: Tensor


Decode: TypeAlias = Callable[[LayerHooks | None], Decoded]
"""Computes the step whose inputs are in the fixed buffers, with these hooks around its layers."""


class Graph(Protocol):
    """A captured step."""

    def replay(self, hooks: LayerHooks | None) -> Decoded: ...


class GraphMaker(Protocol):
    """Captures steps; tests have one for CPUs."""

    def capture(self, decode: Decode, *, has_layer_hooks: bool) -> Graph:
        """`decode` has run before, so that all kernels are compiled and loaded."""
        ...


def graph_maker(device: torch.device) -> GraphMaker | None:
    """Return the maker, or None: the device has no graphs of torch operations."""
    return CudaGraphMaker() if device.type == "cuda" else None


class DecodeGraphs:
    """The graphs of a rank. All calls but `num_padded` are on the compute queue.

    keys: the graphs to capture, by ascending rows; up to `max_rows`, which may be one of them.
    """

    def __init__(
        self,
        maker: GraphMaker,
        *,
        max_rows: int,
        has_layer_hooks: bool = False,
        shares_blocks: bool = False,
    ) -> None:
        """shares_blocks: also capture graphs of decodes that share blocks."""
        largest = min(max_rows, GRAPH_ROWS[-1])
        sizes = (*(size for size in GRAPH_ROWS if size < largest), largest)
        self.keys = [GraphKey(size) for size in sizes]
        if shares_blocks and largest > 1:
            sizes = (*(size for size in SHARING_ROWS if size < largest), largest)
            self.keys += [GraphKey(size, shares_blocks=True) for size in sizes]
        self.keys.sort()
        self._maker = maker
        self._has_layer_hooks = has_layer_hooks
        self._graphs: dict[GraphKey, Graph] = {}
        self._captured: dict[bool, list[int]] = {False: [], True: []}  # rows, ascending

    def num_padded(self, num_rows: int, *, shares_blocks: bool = False) -> int | None:
        """The rows of the graph for a step of `num_rows`; None if there is none."""
        captured = self._captured[shares_blocks]
        index = bisect_left(captured, num_rows)
        return captured[index] if index < len(captured) else None

    def best(self, num_rows: int, shares_blocks: bool) -> tuple[int | None, bool]:
        """The rows of the graph for a step of `num_rows` that would like to share blocks or not,
        and whether it shares them. A graph that does not is better than none."""
        found = self.num_padded(num_rows, shares_blocks=shares_blocks)
        if found is None and shares_blocks:
            found = self.num_padded(num_rows)
            shares_blocks = found is None
        return found, shares_blocks

    def capture(self, key: GraphKey, decode: Decode) -> None:
        """Capture `decode`, a step of so many rows, and use it from now on, unless a replay gives
        other bits than the step itself."""
        expected = decode(None)
        graph = self._maker.capture(decode, has_layer_hooks=self._has_layer_hooks)
        replayed = graph.replay(None)
        if not all(map(_has_equal_bits, expected, replayed)):
            logger.warning(
                "the CUDA graph for %d rows gives other results than its kernels one by one, and "
                "is not used. Please report this.",
                key.num_rows,
            )
            return
        self._graphs[key] = graph
        insort(self._captured[key.shares_blocks], key.num_rows)

    def replay(self, key: GraphKey, hooks: LayerHooks | None) -> Decoded:
        """key: with rows from `num_padded`. The result is valid until the next replay."""
        return self._graphs[key].replay(hooks)


def _has_equal_bits(one: Tensor, other: Tensor) -> bool:
    """Also if both are NaN."""
    word = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(word), other.view(word))


HookCall: TypeAlias = Callable[[LayerHooks], None]


class CudaGraphMaker:
    """Captures on the current stream, with memory from one pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._captured: list[_CudaGraph] = []  # torch ends a pool with the last graph of it

    def capture(self, decode: Decode, *, has_layer_hooks: bool) -> Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        capture = _Capture(self._pool)
        with capture.running():
            decoded = decode(capture if has_layer_hooks else None)
        graph = _CudaGraph(
            capture.pieces, capture.calls, Decoded(*(_unowned(result) for result in decoded))
        )
        self._captured.append(graph)
        return graph


class _Capture:
    """Captures a step piece by piece: its hooks end a piece and begin the next."""

    has_layer_hooks = True

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.pieces: list[torch.cuda.CUDAGraph] = []
        self.calls: list[HookCall] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        torch.cuda.synchronize()
        is_collecting = gc.isenabled()
        gc.disable()  # what it frees on the device could end the capture
        try:
            self._begin()
            try:
                yield
            except Exception:
                with suppress(RuntimeError):  # that an operation of the capture has failed
                    self.pieces[-1].capture_end()
                raise
            self.pieces[-1].capture_end()
        finally:
            if is_collecting:
                gc.enable()

    def _begin(self) -> None:
        piece = torch.cuda.CUDAGraph()
        # Other threads query events meanwhile, which only this mode permits.
        piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.pieces.append(piece)

    def _cut(self, call: HookCall) -> None:
        self.pieces[-1].capture_end()
        self.calls.append(call)
        self._begin()

    def before_layer(self, name: str) -> None:
        self._cut(lambda hooks: hooks.before_layer(name))

    def after_layer(self, name: str) -> None:
        self._cut(lambda hooks: hooks.after_layer(name))


class _CudaGraph:
    """The pieces of a captured step, and the calls between them."""

    def __init__(
        self, pieces: list[torch.cuda.CUDAGraph], calls: list[HookCall], decoded: Decoded
    ) -> None:
        self._first, *self._rest = pieces
        self._calls = calls
        self._decoded = decoded

    def replay(self, hooks: LayerHooks | None) -> Decoded:
        self._first.replay()
        for call, piece in zip(self._calls, self._rest, strict=True):
            if hooks is not None:
                call(hooks)
            piece.replay()
        return self._decoded


class _Memory:
    """An address and how to read it, without a reference to its owner."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _unowned(tensor: Tensor) -> Tensor:
    """The same memory. Once `tensor` is freed, graphs that are captured later use its memory too,
    which the pool keeps for them."""
    words = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor
    return torch.as_tensor(_Memory(words), device=tensor.device).view(tensor.dtype)
