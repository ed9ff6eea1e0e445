"""`nixl`, `mooncake` and `p2p_nccl` pass the conformance suite. A peer computes each prompt first,
and every third request is also offered to a reader that never comes."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.requests import AddRequest
from longshore.testing.connectors import ConnectorConformance
from tests.connectors.engine import Engine

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(600)]

PEER: Final = {"block_size": 8, "num_blocks": 600, "max_model_len": 64}
"""Another block size than that of the suite."""


@pytest.fixture(scope="class")
def peer(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """With the connector of the class, in processes of its own, as in a deployment: the transfer
    library then has one engine per process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        patch.setenv("UCX_LOG_LEVEL", "fatal")
        options = {"lease_s": 5.0, "max_leased_share": 0.9}
        connector = request.cls.connector
        with Engine(DEMO_MODEL_DIR, connector, options, in_process=False, **PEER) as engine:
            yield engine


class PullConformance(ConnectorConformance):
    numbers: ClassVar[Iterator[int]] = count()
    num_seeds = 1

    @pytest.fixture(autouse=True)
    def has_peer(self, peer: Engine) -> None:
        self.peer = peer

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"lease_s": 1.0}

    def prepare(self, message: AddRequest) -> AddRequest:
        number = next(self.numbers)
        first = self.peer.add(
            message.prompt_token_ids.tolist(),
            max_tokens=1,
            request_id=f"{message.request_id} on the peer, {number}",
            kv_transfer_params={"do_remote_decode": True},
        )
        self.peer.wait(first)
        assert first.end is not None
        params = dict(first.end.kv_transfer_params or {})
        if number % 3 == 0:
            params["do_remote_decode"] = True
        options = msgspec.structs.replace(message.options, kv_transfer_params=params)
        return msgspec.structs.replace(message, options=options)


@pytest.mark.req("CRG-06")
@pytest.mark.req("CON-08")
@pytest.mark.req("MET-08")
class TestNixl(PullConformance):
    connector = "nixl"
    is_variant = True


@pytest.mark.long
class TestNixlWithEveryFault(TestNixl):
    is_variant = False


@pytest.mark.req("CRG-11")
class TestMooncake(PullConformance):
    connector = "mooncake"
    is_variant = True


@pytest.mark.long
@pytest.mark.req("CRG-03")
class TestP2PNccl(PullConformance):
    connector = "p2p_nccl"
    is_variant = True
