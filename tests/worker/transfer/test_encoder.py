"""The hooks of an encoder connector's worker half."""

import pytest

from longshore.connectors.base import EncoderWorker
from longshore.worker.transfer.connector import HookFailed
from longshore.worker.transfer.encoder import EncoderRunner


class Stuck(EncoderWorker[None]):
    """A connector that cannot end its transfers."""

    def __init__(self) -> None:
        self.num_shutdowns = 0

    def shutdown(self) -> None:
        self.num_shutdowns += 1
        raise RuntimeError("a read goes on")


def test_a_connector_that_could_not_end_its_transfers_is_not_shut_down_again() -> None:
    connector = Stuck()
    runner = EncoderRunner(connector, epoch=1, rank=0, wake=lambda: None)
    for _ in range(2):
        with pytest.raises(HookFailed, match="a read goes on"):
            runner.close()
    assert connector.num_shutdowns == 1
