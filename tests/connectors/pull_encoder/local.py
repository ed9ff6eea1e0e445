"""Encoder connectors of one process, over the transport of `tests.connectors.pull.local`."""

from typing import ClassVar

from longshore.connectors.pull_encoder.scheduler import PullEncoderConnector
from longshore.connectors.pull_encoder.worker import PullEncoderWorker
from tests.connectors.pull.local import network

__all__ = ["LocalEncoderConnector", "LocalEncoderWorker", "network"]


class LocalEncoderConnector(PullEncoderConnector):
    transport = "local"
    worker_half: ClassVar[str] = "tests.connectors.pull_encoder.local:LocalEncoderWorker"


class LocalEncoderWorker(PullEncoderWorker):
    transport = "local"
