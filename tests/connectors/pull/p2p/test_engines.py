"""Engines that pull by `p2p_nccl`, which uses gloo here: the tokens are those of one engine, and no
block leaks, also if a process is stopped in the middle of a transfer."""

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, Final

import pytest

from longshore.connectors.pull.layout import Piece
from longshore.connectors.pull.p2p.link import SendingLink
from longshore.connectors.pull.reader import Reader, _Pull
from longshore.deploy.llm.remote_engine import RemoteEngine
from longshore.testing.engines import settle
from tests.connectors.conftest import KINDS
from tests.connectors.engine import Engine
from tests.connectors.pull.test_two_engines import PROMPTS, ModelOf, Pair, wanted

pytestmark = [pytest.mark.req("CRG-03"), pytest.mark.timeout(300)]

NAME: Final = "p2p_nccl"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_engine(
    kind: str, model_of: ModelOf, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    caplog.set_level("INFO", "longshore")
    with Pair(model, NAME) as pair:
        assert "KV blocks are transferred by gloo" in caplog.text
        assert [pair.run(prompt) for prompt in PROMPTS] == expected
        pair.settle()
        assert pair.num_pulled == sum(map(len, PROMPTS))
        assert pair.num_failed == 0


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("kind", ["full", pytest.param("latents", marks=pytest.mark.slow)])
def test_block_sizes_may_differ(kind: str, sizes: tuple[int, int], model_of: ModelOf) -> None:
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    prefill, decode = ({"block_size": size, "num_blocks": 120} for size in sizes)
    with Pair(model, NAME, prefill=prefill, decode=decode) as pair:
        assert [pair.run(prompt) for prompt in PROMPTS] == expected
        pair.settle()
        assert pair.num_pulled > 0
        assert pair.num_failed == 0


def processes(engine: Engine) -> Sequence[Any]:
    assert isinstance(engine.engine, RemoteEngine)
    return engine.engine._processes._supervisor.processes


def test_a_process_group_that_times_out_fails_the_load(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The processes of the owner are stopped when it has granted its blocks, and the reader begins
    to receive them. Nothing is written when they go on."""
    model, _ = model_of("full")
    expected = wanted(model, *PROMPTS)
    options = {"lease_s": 60.0, "read_timeout_s": 2.0}
    post = Reader._post
    with Pair(model, NAME, options, prefill={"in_process": False}) as pair:

        def stop_and_post(self: Reader, pull: _Pull, pieces: Sequence[Piece]) -> None:
            for process in processes(pair.prefill):
                os.kill(process.pid, signal.SIGSTOP)
            post(self, pull, pieces)

        first_tokens = pair.run(PROMPTS[0])
        assert first_tokens == expected[0]
        assert pair.num_failed == 0
        first = pair.begin(PROMPTS[1])
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "_post", stop_and_post)
            answer = pair.go_on(PROMPTS[1], first)
            pair.decode.wait(answer)
        assert [*first.token_ids, *answer.token_ids] == expected[1]
        assert pair.num_failed == 1
        assert settle(pair.decode.engine, lambda: 0) == 0
        outcomes = pair.half(pair.decode).pulls_by_outcome
        assert {str(each): number for each, number in outcomes.items() if number} == {
            "complete": 1,
            "failed": 1,
        }
        for process in processes(pair.prefill):
            os.kill(process.pid, signal.SIGCONT)
        assert pair.run(PROMPTS[2]) == expected[2]
        assert settle(pair.prefill.engine) == 0
        assert "reading from its owner failed" in caplog.text


def test_blocks_of_a_late_transfer_are_in_quarantine_until_its_link_has_ended(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits no longer than `load_timeout_s`, and its tokens are computed."""
    model, _ = model_of("full")
    (expected,) = wanted(model, PROMPTS[0])
    may_send = threading.Event()
    begin = SendingLink._begin

    def late(self: SendingLink, request: Any) -> None:
        assert may_send.wait(60)
        begin(self, request)

    monkeypatch.setattr(SendingLink, "_begin", late)
    options = {"lease_s": 60.0, "read_timeout_s": 4.0}
    with Pair(model, NAME, options, decode={"load_timeout_s": 0.2}) as pair:
        first = pair.begin(PROMPTS[0])
        answer = pair.go_on(PROMPTS[0], first)
        pair.decode.wait(answer)
        assert [*first.token_ids, *answer.token_ids] == expected
        assert settle(pair.decode.engine) == len(PROMPTS[0]) // 16 + 1
        assert settle(pair.decode.engine, lambda: 0) == 0
        may_send.set()
        pair.settle()
