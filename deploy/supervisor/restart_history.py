"""What a supervisor has restarted and why, in a file of the runtime directory. Gateways show it;
they are restarted, too, and would forget it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

import msgspec

RestartReason: TypeAlias = Literal["death", "hang", "operator"]
RESTART_REASONS: Final[tuple[RestartReason, ...]] = get_args(RestartReason)
_FILE: Final = "restarts.json"


class RestartRecord(msgspec.Struct, frozen=True):
    """The content of the file.

    counts: how often each process was restarted, by the reason of its restart group.
    deaths: why a restart group died that is not ready again, by group.
    """

    counts: dict[str, dict[RestartReason, int]] = {}
    deaths: dict[str, str] = {}


class RestartHistory:
    """The supervisor's end: every change is written to the file at once."""

    def __init__(self, runtime_dir: Path) -> None:
        self._path = runtime_dir / _FILE
        self._record = RestartRecord()

    def begin(self, processes: Iterable[str]) -> None:
        """These processes exist, by name: a rate needs the zero before the first restart."""
        for process in processes:
            self._record.counts[process] = dict.fromkeys(RESTART_REASONS, 0)
        self._write()

    def end(self, group: str, processes: Iterable[str]) -> None:
        """The processes of a group are gone for good."""
        for process in processes:
            self._record.counts.pop(process, None)
        self._record.deaths.pop(group, None)
        self._write()

    def died(self, group: str, death: str) -> None:
        """The processes of a group have died, and are restarted."""
        self._record.deaths[group] = death
        self._write()

    def started(self, process: str, reason: RestartReason) -> None:
        """A process has been started again."""
        self._record.counts[process][reason] += 1
        self._write()

    def became_ready(self, group: str) -> None:
        """All processes of the group are ready again."""
        self._record.deaths.pop(group, None)
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # the disk may be full, or the directory deleted
            new.write_bytes(msgspec.json.encode(self._record))
            new.replace(self._path)  # a gateway may be reading


def read_restarts(runtime_dir: Path | None) -> RestartRecord:
    """The record of the deployment of this directory; empty if there is none."""
    if runtime_dir is None:
        return RestartRecord()
    try:
        return msgspec.json.decode((runtime_dir / _FILE).read_bytes(), type=RestartRecord)
    except OSError:
        return RestartRecord()
