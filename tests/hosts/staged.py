"""The pull connectors, with a reader that waits at a stage of a pull while a test does something.

A test makes the file `hold-STAGE` in the folder STAGES_DIR. A reader that reaches the stage makes
`at-STAGE`, and continues when `hold-STAGE` is gone. Its thread waits, so it does nothing else.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

from longshore.connectors.pull.scheduler import (
    MooncakeConnector,
    NixlConnector,
    P2PNcclConnector,
)

STAGES: Final = ("handshake", "claim", "read", "check", "done")
"""Before the first message to an owner; before the claim of its blocks; after the reads have begun;
after they have ended, before the owner is asked if the lease held; before the lease is ended."""

STAGES_DIR: Final = "TESTS_STAGES_DIR"
MODULE: Final = "tests.hosts.staged"
CONNECTORS: Final = {
    "nixl": f"{MODULE}:StagedNixl",
    "mooncake": f"{MODULE}:StagedMooncake",
    "p2p_nccl": f"{MODULE}:StagedP2PNccl",
}
LIMIT_S: Final = 120.0


class StagedNixl(NixlConnector):
    worker_half: ClassVar[str] = "tests.hosts.staged_worker:StagedNixlWorker"


class StagedMooncake(MooncakeConnector):
    worker_half: ClassVar[str] = "tests.hosts.staged_worker:StagedMooncakeWorker"


class StagedP2PNccl(P2PNcclConnector):
    worker_half: ClassVar[str] = "tests.hosts.staged_worker:StagedP2PNcclWorker"


def reached(stage: str) -> None:
    """On the reader's thread: wait as long as a test wants."""
    folder = Path(os.environ[STAGES_DIR])
    held = folder / f"hold-{stage}"
    if not held.exists():
        return
    (folder / f"at-{stage}").touch()
    deadline = time.monotonic() + LIMIT_S
    while held.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


class Stages:
    """A test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    @contextmanager
    def held(self, stage: str) -> Iterator[Path]:
        """The file that shows that a reader waits at the stage; at the end it goes on."""
        hold, shown = self.folder / f"hold-{stage}", self.folder / f"at-{stage}"
        shown.unlink(missing_ok=True)
        hold.touch()
        try:
            yield shown
        finally:
            hold.unlink()
