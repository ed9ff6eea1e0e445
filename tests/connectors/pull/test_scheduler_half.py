"""The scheduler half alone: what several ranks report, and prompts that are not pulled."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.connectors.base import (
    AdmittedRequest,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Matched,
    RequestView,
    StepView,
)
from longshore.connectors.pull.layout import RankLayout
from longshore.connectors.pull.messages import Commands, PullOutcome, RankInfo, Report
from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheGroup, KVCacheSpec
from longshore.protocol.outputs import FinishReason
from longshore.protocol.requests import PromptEmbeds
from tests.connectors.holds import Holds
from tests.connectors.pull.local import LocalConnector

SPEC = FullAttentionSpec(16, 2, 8, 4)
TOKENS = int32_array(range(33))
BLOCKS = (int32_array([1, 2, 3]),)
EMBEDS = PromptEmbeds(np.zeros(32 * 4, np.uint8), 1, "float32")


def half_of(
    num_ranks: int,
    *,
    specs: Sequence[KVCacheSpec] = (SPEC,),
    num_blocks: int = 40,
    **options: Any,
) -> LocalConnector:
    """All of whose ranks are ready."""
    identity = EngineIdentity("model", "float32", 16, 256, 4, 64, "")
    half = LocalConnector(
        ConnectorConfig(
            options,
            num_blocks=num_blocks,
            specs=tuple(specs),
            num_ranks=num_ranks,
            engine_id="engine.1",
            identity=identity,
        )
    )
    half.bind_blocks(Holds())
    layout = RankLayout((KVCacheGroup(("layer.0",), SPEC),), SPEC.page_size_bytes, 40)
    for rank in range(num_ranks):
        report(half, rank, Report(info=RankInfo(layout, b"agent", 5000)))
    return half


def report(half: LocalConnector, rank: int, of_rank: Report, *received: str) -> None:
    metadata = (msgspec.msgpack.encode(of_rank),)
    half.update_connector_output(
        ConnectorOutput(rank=rank, finished_receiving=received, metadata=metadata)
    )


def offer(half: LocalConnector, **fields: Any) -> FinishAction:
    view = RequestView(
        "first",
        TOKENS,
        32,
        (),
        {"do_remote_decode": True},
        finish_reason=FinishReason.LENGTH_CAPPED,
        **fields,
    )
    return half.request_finished(view, BLOCKS)


@pytest.mark.req("CON-11")
def test_a_pull_counts_once_and_as_its_worst_rank() -> None:
    half = half_of(3)
    report(half, 2, Report(pulls={"r": PullOutcome.COMPLETE, "s": PullOutcome.COMPLETE}))
    report(half, 0, Report(pulls={"r": PullOutcome.UNREACHABLE, "s": PullOutcome.COMPLETE}), "s")
    assert half.pulls_by_outcome[PullOutcome.UNREACHABLE] == 0  # rank 1 has not reported
    report(half, 1, Report(pulls={"r": PullOutcome.PARTIAL}), "r")
    report(half, 1, Report(), "r", "unknown")  # repeated
    pulls = half.get_kv_connector_stats().pulls
    assert pulls is not None
    found = {name: number for name, number in pulls.pulls_by_outcome.items() if number}
    assert found == {"complete": 1, "unreachable": 1}


def test_a_prompt_of_embeddings_is_not_pulled(caplog: pytest.LogCaptureFixture) -> None:
    """Its token ids say nothing about its KV."""
    half = half_of(1)
    params = offer(half).params
    assert params is not None
    assert offer(half, prompt_embeds=EMBEDS).params is None
    half = half_of(1)  # the reader
    view = RequestView("second", TOKENS, 32, (), params, prompt_embeds=EMBEDS)
    half.on_new_request(view)
    assert half.get_num_new_matched_tokens(view, 0) == Matched(0)
    assert caplog.text.count("a prompt of embeddings is not pulled") == 2
    half.on_new_request(RequestView("third", TOKENS, 32, (), params))
    third = RequestView("third", TOKENS, 32, (), params)
    assert half.get_num_new_matched_tokens(third, 0) == Matched(32, is_async=True)


@pytest.mark.parametrize("num_computed", [0, 8, 32])
def test_a_lease_without_a_pull_ends_when_its_request_is_admitted(num_computed: int) -> None:
    """It may be asked for a match and not pull, because its blocks are partly computed, or because
    another connector loads them."""
    half = half_of(1)
    view = RequestView("second", TOKENS, 32, (), offer(half).params)
    half.on_new_request(view)
    half.get_num_new_matched_tokens(view, num_computed)
    half.build_connector_meta(StepView(1, 0))
    admitted = AdmittedRequest("second", BLOCKS)
    data = half.build_connector_meta(StepView(2, 1, admitted=(admitted,)))
    (drop,) = msgspec.msgpack.decode(data, type=Commands).drops
    assert drop.request_id == "first"
    assert half._remote == {}


def test_leases_that_share_blocks_are_counted_once() -> None:
    half = half_of(1)
    for _ in range(2):
        assert offer(half).params is not None
    half._leased = {number: next(iter(half._leased.values())) for number in (1, 2)}
    for hold_id, num_blocks in ((1, 3), (2, 0)):
        report(half, 0, Report(ended=[hold_id]))
        pulls = half.get_kv_connector_stats().pulls
        assert pulls is not None
        assert pulls.num_leased_blocks == num_blocks


def test_leases_are_counted() -> None:
    half = half_of(1)
    offer(half)
    pulls = half.get_kv_connector_stats().pulls
    assert pulls is not None
    assert (pulls.num_leases, pulls.num_leased_blocks) == (1, 3)
    report(half, 0, Report(expired=[1]))
    pulls = half.get_kv_connector_stats().pulls
    assert pulls is not None
    assert (pulls.num_leases, pulls.num_leased_blocks, pulls.num_expired_leases) == (0, 0, 1)
