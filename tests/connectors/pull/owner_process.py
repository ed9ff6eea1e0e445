"""A process whose memory others read: `python owner_process.py TRANSPORT NUM_BLOCKS BLOCK_BYTES`.

Byte i of block b is (7 * b + i) % 251. It prints the hex digits of what `connect` needs, and ends
with its input.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.transport import Memory
from longshore.connectors.pull.transports import TRANSPORTS


def content(num_blocks: int, block_bytes: int) -> npt.NDArray[np.uint8]:
    repeated = np.resize(np.arange(251, dtype=np.uint8), block_bytes + 251)
    return np.stack([repeated[7 * block % 251 :][:block_bytes] for block in range(num_blocks)])


def memory_of(blocks: npt.NDArray[np.uint8]) -> Memory:
    return Memory(blocks.ctypes.data, blocks.nbytes, blocks.shape[1])


def main(name: str, *sizes: str) -> None:
    transport: Any = TRANSPORTS[name](read_options(name, {}))
    num_blocks, block_bytes = map(int, sizes)
    blocks = content(num_blocks, block_bytes)
    print("metadata", transport.register(memory_of(blocks)).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
