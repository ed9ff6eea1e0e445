"""What the capture of experts costs a step: nothing when it is off, two copies when it is on."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.worker.kernels.graph import capture
from longshore.worker.kernels.native import native
from longshore.worker.kernels.operators import num_launches
from tests.models import make_tiny_model
from tests.worker.bigram import InlineQueue
from tests.worker.kernels.variants import TRITON, using
from tests.worker.models.paged_model import PagedModel
from tests.worker.models.served_model import ServedModel

needs_native = pytest.mark.skipif(native() is None, reason="the CPU kernels are not built")

NEITHER_KERNEL_NOR_COPY = {"aten.empty.memory_format", "aten.zeros.default", "aten.detach.default"}


class Operators(TorchDispatchMode):
    """Counts the operators that are not views and not allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and str(func) not in NEITHER_KERNEL_NOR_COPY:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtral")
    make_tiny_model("Mixtral", path)
    return path


@pytest.fixture
def fd() -> Iterator[int]:
    memory = os.memfd_create("experts")
    yield memory
    os.close(memory)


def operators_of_five_steps(path: Path, routed_experts_fd: int | None = None) -> Counter[str]:
    """Of a prefill of two requests, and four decodes."""
    with (
        ServedModel(
            path, num_tokens=5, routed_experts_fd=routed_experts_fd, queue=InlineQueue()
        ) as served,
        Operators() as operators,
    ):
        served.answers([[5, 9, 2], [7] * 20])
    return operators.counts


@needs_native
@pytest.mark.req("FEA-08")
def test_a_step_has_two_more_copies_with_the_capture_and_none_per_layer(
    mixtral: Path, fd: int
) -> None:
    off = operators_of_five_steps(mixtral)
    on = operators_of_five_steps(mixtral, fd)
    assert on - off == {"aten.copy_.default": 5 * 2}
    assert off - on == Counter()


@pytest.mark.req("FEA-08")
def test_a_router_runs_as_many_kernels_with_the_capture_in_triton(mixtral: Path) -> None:
    (router, _) = PagedModel(mixtral).model.routers
    counts = []
    for chosen in (None, torch.zeros(8, 2, dtype=torch.int64)):
        router.chosen = chosen
        with using(TRITON), Operators() as operators:
            router(torch.randn(8, 64))
        counts.append(operators.counts)
    assert counts[0] - counts[1] == {"longshore.route.default": 1}
    assert counts[1] - counts[0] == {"longshore.route_into.default": 1}
    assert num_launches("route") == num_launches("route_into")


@needs_native
@pytest.mark.req("FEA-08")
def test_a_graph_has_as_many_calls_with_the_capture_as_without(mixtral: Path) -> None:
    (router, _) = PagedModel(mixtral).model.routers
    kernels = native()
    assert kernels is not None
    num_calls, x = [], torch.zeros(8, 64)
    for chosen in (None, torch.zeros(8, 2, dtype=torch.int64)):
        router.chosen = chosen
        _, graph = capture(kernels, lambda: router(x), 8, ())
        num_calls.append(graph.num_calls)
    assert num_calls == [1, 1]


@pytest.mark.req("FEA-08")
def test_without_the_setting_no_memory_is_taken(mixtral: Path) -> None:
    with ServedModel(mixtral, num_tokens=2) as served:
        state = served._runner._launcher.state
        assert state.experts is None
        assert all(router.chosen is None for router in state.model.routers)
        assert "experts" not in served._runner._launcher._inputs._ring.acquire().tensors
