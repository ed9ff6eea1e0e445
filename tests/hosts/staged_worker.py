"""The worker halves of `staged`."""

from collections.abc import Sequence

from longshore.connectors.pull import worker
from longshore.connectors.pull.layout import Piece
from longshore.connectors.pull.messages import Claim, Done, Hello, Renew, ToOwner
from longshore.connectors.pull.reader import Reader, _Connection, _Pull
from tests.hosts.staged import reached


class _StagedReader(Reader):
    def _send(self, owner: _Connection, message: ToOwner) -> None:
        match message:
            case Hello():
                reached("handshake")
            case Claim():
                reached("claim")
            case Renew(number=number):
                if any(pull.check == number for pull in self._pulls.values()):
                    reached("check")
            case Done():
                reached("done")
        super()._send(owner, message)

    def _post(self, pull: _Pull, pieces: Sequence[Piece]) -> None:
        super()._post(pull, pieces)
        reached("read")


worker.Reader = _StagedReader  # type: ignore[misc]


class StagedNixlWorker(worker.NixlWorker):
    pass


class StagedMooncakeWorker(worker.MooncakeWorker):
    pass


class StagedP2PNcclWorker(worker.P2PNcclWorker):
    pass
