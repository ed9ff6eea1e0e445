"""Bytes of a read that was ended by force never reach blocks that are used again."""

import os
import subprocess
import sys
import time
from typing import Final

import numpy as np
import pytest

from longshore.connectors.pull.layout import Pattern
from longshore.connectors.pull.transport import BlockReads, ReadState
from tests.connectors.pull.owner_process import content
from tests.connectors.pull.test_transports import Owner, Reader, ids, wait
from tests.hosts.network import Network

pytestmark = [pytest.mark.services, pytest.mark.timeout(240)]

NUM_BLOCKS: Final = 64
BLOCK_BYTES: Final = 1 << 20
MEGABITS: Final = 50.0
"""A read of all blocks takes about 10 s."""

LIMIT_S: Final = 60.0


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize("fault", ["partition", pytest.param("slow link", marks=pytest.mark.long)])
def test_a_read_that_was_ended_writes_nothing_any_more(fault: str) -> None:
    """Mooncake cannot end a read: test_pull_faults.py shows that its worker is replaced.

    UCX remembers the network devices that it found first, so the reader has a process of its own.
    """
    ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "all", "UCX_LOG_LEVEL": "fatal"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hosts.test_late_reads", fault],
        env=os.environ | ucx,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def end_a_read(fault: str) -> None:
    with Network() as network:
        near, far = network.host("decode"), network.host("prefill")
        with far.entered():
            owner = Owner("nixl", NUM_BLOCKS, BLOCK_BYTES)
        far.limit(MEGABITS)
        every = np.arange(NUM_BLOCKS)
        whole = Pattern(ids(0), ids(0), ids(BLOCK_BYTES))
        with near.entered(), Reader("nixl", NUM_BLOCKS, BLOCK_BYTES) as reader:
            posted = reader.transport.post(
                reader.transport.connect(owner.metadata), [BlockReads(whole, every, every)]
            )
            deadline = time.monotonic() + LIMIT_S
            while not reader.blocks.any():
                assert [read.poll() for read in posted] == [ReadState.IN_PROGRESS]
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if fault == "partition":
                far.cut()
            reader.transport.reset()
            assert wait(posted) is ReadState.FAILED
            pattern = np.random.default_rng(0).integers(0, 256, reader.blocks.shape, np.uint8)
            reader.blocks[:] = pattern  # other requests use the blocks
            far.heal()
            far.limit(None)
            time.sleep(3)
            np.testing.assert_array_equal(reader.blocks, pattern)
            peer = reader.transport.connect(owner.metadata)  # the same owner can be read again
            assert reader.read(peer, BlockReads(whole, ids(3), ids(5))) is ReadState.DONE
            np.testing.assert_array_equal(reader.blocks[5], content(NUM_BLOCKS, BLOCK_BYTES)[3])
        owner.close()


if __name__ == "__main__":
    end_a_read(sys.argv[1])
