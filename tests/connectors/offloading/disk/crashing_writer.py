"""A process that writes batches until it is killed: `crashing_writer.py PATH SEED IO CALLS`.

It writes a line to standard output when a batch has been acknowledged. With CALLS > 0 it kills
itself in its CALLS-th system call that writes, of which it may do only a part.
"""

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from longshore.connectors.offloading.disk.results import Outcome
from tests.connectors.offloading.disk.stores import SLOT_BYTES, content, key, open_store, write

NUM_SLOTS = 24
NUM_KEYS = 60


def batches(seed: int) -> Iterator[dict[bytes, tuple[int, bytes]]]:
    """Slot and content by key. Slots and keys repeat, so that entries are replaced and move."""
    rng = random.Random(seed)
    for number in range(1_000_000):
        count = rng.randint(1, 8)
        keys = [key(n) for n in rng.sample(range(NUM_KEYS), count)]
        slots = rng.sample(range(NUM_SLOTS), count)
        yield {
            k: (slot, content(k + bytes(f"{seed} {number}", "ascii")).tobytes())
            for k, slot in zip(keys, slots, strict=True)
        }


def kill_in_call(calls: int, rng: random.Random) -> None:
    """Replace the system calls that write, in this process."""
    left = calls

    def killing(name: str) -> Callable[..., int]:
        call: Callable[..., int] = getattr(os, name)

        def write_or_die(fd: int, data: object, offset: int) -> int:
            nonlocal left
            left -= 1
            if left:
                return call(fd, data, offset)
            content = data if name == "pwrite" else b"".join(data)
            done = rng.choice([0, len(content), rng.randrange(len(content))])
            torn = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)  # without O_DIRECT
            os.pwrite(torn, bytes(content)[:done], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("alive")

        return write_or_die

    os.pwrite = killing("pwrite")
    os.pwritev = killing("pwritev")


def main() -> None:
    path, seed, io, calls = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if calls:
        kill_in_call(calls, random.Random(seed))
    with open_store(path, num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES, io=io) as store:
        for batch in batches(seed):
            outcomes = write(
                store,
                {k: slot for k, (slot, _) in batch.items()},
                {k: data for k, (_, data) in batch.items()},
            )
            assert outcomes == [Outcome.OK] * len(batch)
            os.write(1, b".\n")


if __name__ == "__main__":
    main()
