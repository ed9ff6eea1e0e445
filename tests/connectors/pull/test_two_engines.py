"""A request's prompt is computed on one engine, and its output on another: the tokens are those of
one engine, and no block leaks, whatever happens between them."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from longshore.connectors.pull.scheduler import PullConnector
from longshore.connectors.pull.transport import ReadState
from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason
from longshore.testing.engines import settle
from tests.connectors.conftest import KINDS
from tests.connectors.engine import Answer, Engine, prompts_of
from tests.connectors.pull.local import Network, network

ModelOf = Callable[[str], tuple[Path, Any]]
LOCAL: Final = "tests.connectors.pull.local:LocalConnector"
LIMIT_S: Final = 60.0
MAX_TOKENS: Final = 12

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def fresh_network() -> Iterator[None]:
    network.__dict__.update(Network().__dict__)
    yield
    network.may_reset.set()


class Pair:
    """A prefill and a decode engine, and what a router does between them."""

    def __init__(
        self,
        model: Path,
        connector: str = LOCAL,
        options: Mapping[str, Any] | None = None,
        *,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
    ) -> None:
        options = dict(options or {})
        self.prefill = Engine(model, connector, options, **(prefill or {}))
        self.decode = Engine(model, connector, options, **(decode or {}))

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        self.decode.engine.close()
        self.prefill.engine.close()

    def until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_over():
            assert time.monotonic() < deadline
            self.prefill.receive()
            self.decode.receive()

    def begin(self, prompt: list[int], **fields: Any) -> Answer:
        """The first leg; returns its answer."""
        answer = self.prefill.add(
            prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **fields
        )
        self.until(lambda: answer.end is not None)
        return answer

    def go_on(
        self,
        prompt: list[int],
        first: Answer,
        *,
        params: dict[str, Any] | None = None,
        resends_token: bool = True,
    ) -> Answer:
        """The second leg."""
        assert first.end is not None
        fields: dict[str, Any] = {}
        if resends_token:
            fields["output_token_ids"] = int32_array(first.token_ids)
        return self.decode.add(
            prompt,
            max_tokens=MAX_TOKENS,
            kv_transfer_params=first.end.kv_transfer_params if params is None else params,
            **fields,
        )

    def run(self, prompt: list[int], **settings: Any) -> list[int]:
        first = self.begin(prompt)
        answer = self.go_on(prompt, first, **settings)
        self.until(lambda: answer.end is not None)
        assert answer.end is not None
        assert answer.end.reason is FinishReason.LENGTH_CAPPED, answer.end.message
        is_resent = settings.get("resends_token", True)
        return [*(first.token_ids if is_resent else []), *answer.token_ids]

    def half(self, engine: Engine) -> PullConnector:
        half = engine.engine.connector_halves[0]  # type: ignore[union-attr]
        assert isinstance(half, PullConnector)
        return half

    def settle(self) -> None:
        """All leases end, and every block of both engines is free."""
        self.until(lambda: not self.half(self.prefill)._leased)
        assert settle(self.prefill.engine) == 0
        assert settle(self.decode.engine) == 0

    @property
    def num_pulled(self) -> int:
        """Tokens."""
        return self.decode.stats.num_external_hit_tokens

    @property
    def num_failed(self) -> int:
        """Loads."""
        return self.decode.stats.num_failed_loads


def wanted(model: Path, *prompts: list[int]) -> list[list[int]]:
    with Engine(model) as plain:
        return plain.run(*prompts, max_tokens=MAX_TOKENS)


PROMPTS: Final = prompts_of(100, 33, 64, 150)


@pytest.mark.req("CRG-06")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resends_token", [True, False], ids=["token", "prompt"])
def test_tokens_are_those_of_one_engine(
    kind: str, resends_token: bool, model_of: ModelOf
) -> None:
    model, _ = model_of(kind)
    expected = wanted(model, *PROMPTS)
    with Pair(model) as pair:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert pair.run(prompt, resends_token=resends_token) == tokens
        pair.settle()
        if resends_token:
            assert pair.num_pulled == sum(map(len, PROMPTS))
            assert pair.decode.num_computed == len(PROMPTS) * (MAX_TOKENS - 1)
        elif kind != "states":  # which cannot be resumed before their last token
            assert pair.num_pulled > 0
        assert pair.half(pair.prefill).num_expired_leases == 0
