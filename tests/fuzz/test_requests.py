"""HTTP: a mutated request is answered, refused or cut off, and the gateway goes on."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from functools import partial
from typing import Any, Final

import pytest

from longshore.deploy.gateway.api.requests import ChatRequest, GenerationRequest, parse_request
from longshore.deploy.gateway.http import connection
from longshore.deploy.gateway.openai.requests import CompletionRequest
from longshore.deploy.requests.errors import InvalidRequest, RequestError
from tests.deploy.gateway.conftest import StartGateway
from tests.fuzz.mutations import mutated_bytes, mutated_json, refusal

NUM_BODIES = 12_000
NUM_HEADS = 1500
COMPLETION: Final[dict[str, Any]] = {
    "model": "tiny", "prompt": [[4], [1, 2, 3]], "max_tokens": 3, "temperature": 0.5, "n": 2,
    "stop": ["x", "yz"], "logprobs": 2, "echo": True, "seed": 1, "logit_bias": {"3": -1.5},
    "stream": True, "stream_options": {"include_usage": True}, "bad_words": ["bad"],
    "top_p": 0.9, "priority": 1, "cache_salt": "salt",
}  # fmt: skip
CHAT: Final[dict[str, Any]] = {
    "model": "tiny", "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2, "user": "me",
    "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), [(CompletionRequest, COMPLETION), (ChatRequest, CHAT)])
def test_a_mutated_body_is_a_request_or_a_400(
    kind: type[GenerationRequest], body: dict[str, Any], long_run: bool
) -> None:
    good = json.dumps(body).encode()
    parse_request(kind, good)
    rng = random.Random(0)
    num_refused = 0
    for number in range(NUM_BODIES * (20 if long_run else 1)):
        if number % 3:
            data = json.dumps(mutated_json(body, rng)).encode()
        else:
            data = mutated_bytes(good, rng)
        error = refusal(partial(parse_request, kind, data), RequestError)
        assert error is None or isinstance(error, InvalidRequest)
        num_refused += error is not None
    assert 0 < num_refused < number


@pytest.mark.slow
@pytest.mark.timeout(1800)  # with --long, 600 times half a second and more
async def test_a_mutated_http_request_leaves_the_gateway_serving(
    start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, long_run: bool
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.5)
    body = json.dumps({"prompt": "one", "max_tokens": 2}).encode()
    good = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Accept: */*\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    rng = random.Random(0)
    async with start_gateway() as gateway:

        async def answer_to(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            answer = b""
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                writer.write(data)
                answer = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            return answer

        statuses: Counter[int] = Counter()
        for _ in range(NUM_HEADS // 50 * (20 if long_run else 1)):
            requests = [answer_to(mutated_bytes(good, rng)) for _ in range(50)]
            async with asyncio.timeout(60):
                for answer in filter(None, await asyncio.gather(*requests)):
                    assert answer.startswith(b"HTTP/1.1 "), answer
                    statuses[int(answer.split(b" ", 2)[1])] += 1
        assert {200, 400} <= statuses.keys()
        assert max(statuses) < 500, statuses
        assert (await answer_to(good)).startswith(b"HTTP/1.1 200")
