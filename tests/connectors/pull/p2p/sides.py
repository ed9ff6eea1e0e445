"""Two ranks in one process, with real links between them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np

from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.p2p.transport import P2PTransport
from longshore.connectors.pull.transport import BlockReads, Memory, ReadState
from longshore.protocol.arrays import Int64Array
from tests.connectors.pull.owner_process import content

NUM_BLOCKS: Final = 16
BLOCK_BYTES: Final = 1 << 12
LIMIT_S: Final = 30.0


def ids(*values: int) -> Int64Array:
    return np.array(values, np.int64)


WHOLE: Final = Pattern(ids(0), ids(0), ids(BLOCK_BYTES))


class Rank:
    """device: index of the GPU that a fake stands for; None: a CPU."""

    def __init__(
        self,
        transport: Callable[..., P2PTransport] = P2PTransport,
        *,
        device: int | None = None,
        num_blocks: int = NUM_BLOCKS,
        block_bytes: int = BLOCK_BYTES,
        **options: Any,
    ) -> None:
        self.transport = transport(read_options("p2p_nccl", options))
        self.blocks = np.zeros((num_blocks, block_bytes), np.uint8)
        memory = Memory(self.blocks.ctypes.data, self.blocks.nbytes, block_bytes, device)
        self.metadata = self.transport.register(memory)

    def fill(self) -> None:
        self.blocks[:] = content(*self.blocks.shape)

    def read(self, owner: "Rank", *reads: BlockReads) -> ReadState:
        return wait(self.transport.post(self.transport.connect(owner.metadata), reads))

    @property
    def reason(self) -> str:
        """Why its link has ended."""
        (link,) = self.transport._links.values()
        assert link.failure is not None
        return link.failure


@contextmanager
def two_ranks(**settings: Any) -> Iterator[tuple[Rank, Rank]]:
    """Reader and owner."""
    with ExitStack() as stack:
        ranks = [Rank(**settings) for _ in range(2)]
        for rank in ranks:
            stack.callback(rank.transport.close)
        ranks[1].fill()
        yield ranks[0], ranks[1]


def wait(reads: Sequence[Any]) -> ReadState:
    (read,) = reads
    until(lambda: read.poll() is not ReadState.IN_PROGRESS)
    state = read.poll()
    assert isinstance(state, ReadState)
    return state


def until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_over():
        assert time.monotonic() < deadline
        time.sleep(0.001)
