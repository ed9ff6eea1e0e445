"""A prefill and a decode engine with real processes, mostly with NIXL: answers equal those of one
engine, KV is copied and not computed again, and whatever dies, streams go on and no lease is left.
"""

import http.client
import json
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.conftest import ROOT
from tests.deploy.span_receiver import ReceivedSpan, SpanReceiver, span_receiver
from tests.integration.deployment import PATIENCE_S, Deployment, wait_until
from tests.integration.test_admin import admin

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(900)]

KEY: Final = "the-key-of-the-router"
LEASE_S: Final = 45.0  # longer than tests take: leases that end are ended by a reader
SAMPLE: Final = re.compile(r"^longshore_(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)
ASKS: Final = {"do_remote_decode": True, "do_remote_prefill": False}
ALL: Final = {"ignore_eos": True, "return_token_ids": True}


class Pair(Deployment):
    """Prefill and decode engines: one of each unless more are started or added."""

    def sample(self, name: str, **labels: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as response:
            text: str = response.read().decode()
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(
            float(value)
            for found, given, value in SAMPLE.findall(text)
            if found == name and wanted <= set(given.split(","))
        )

    @property
    def num_pulled_blocks(self) -> float:
        return self.num_blocks_pulled_by(1)

    def num_blocks_pulled_by(self, engine: int) -> float:
        labels = {"engine": str(engine), "transfer_type": "REMOTE_to_GPU"}
        return self.sample("kv_offload_blocks", **labels)

    def report(self, engine: int) -> dict[str, Any]:
        url = f"{self.url}/engine/report?engine={engine}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def is_free(self, engine: int) -> bool:
        try:
            report = self.report(engine)
        except urllib.error.HTTPError:  # it is being restarted
            return False
        return bool(report["num_free_blocks"] == report["num_blocks"] - 1)

    def assert_all_is_free(self) -> None:
        """All but the null block, soon; and no lease has ended by itself."""
        for engine in (0, 1):
            wait_until(lambda engine=engine: self.is_free(engine))  # type: ignore[misc]
        assert "leases were not renewed" not in self.output

    def has_replaced(self, name: str, process: psutil.Process) -> bool:
        self.find_members()
        return self.members.get(name, process).pid != process.pid

    def member(self, name: str) -> psutil.Process:
        self.find_members()  # it may have been restarted
        return self.members[name]


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanReceiver]:
    with span_receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def pair(
    tiny_model: tuple[Path, Any],
    tmp_path_factory: pytest.TempPathFactory,
    collector: SpanReceiver,
) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("pair")
    (path / "key").touch(0o600)
    (path / "key").write_text(KEY)
    with Pair(
        tiny_model[0],
        path,
        *("--prefill", "1", "--decode", "1", "--dtype", "float32"),
        *("--kv-connector", "nixl", "--kv-connector-config", json.dumps({"lease_s": LEASE_S})),
        *("--state-dir", str(path / "state"), "--router-key-file", str(path / "key")),
        *("--otlp-traces-endpoint", collector.url),
        environment={"UCX_TLS": "tcp", "OTEL_BSP_SCHEDULE_DELAY": "100"},
    ) as deployment:
        yield deployment.wait_until_ready()  # type: ignore[misc]
        deployment.find_members()
        assert deployment.stop() == 0, deployment.output
        deployment.assert_nothing_is_left()


@pytest.fixture(scope="module")
def unified(
    tiny_model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    path = tmp_path_factory.mktemp("unified")
    with Deployment(tiny_model[0], path, "--dtype", "float32") as deployment:
        yield deployment.wait_until_ready()
        assert deployment.stop() == 0


def post(
    deployment: Deployment,
    body: Mapping[str, Any],
    path: str = "/v1/completions",
    headers: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Raises HTTPError."""
    request = urllib.request.Request(
        f"{deployment.url}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def prompt(number: int, length: int = 150) -> list[int]:
    """Prompts that differ from the first token on."""
    return [3 + (7 * number + 5 * i) % 90 for i in range(length)]


class Stream:
    """A streamed completion."""

    def __init__(self, deployment: Deployment, body: Mapping[str, Any]) -> None:
        host = deployment.url.removeprefix("http://")
        self.connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
        self.connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**ALL, "temperature": 0, "stream": True, **body}),
            {"content-type": "application/json"},
        )

    @cached_property
    def response(self) -> http.client.HTTPResponse:
        return self.connection.getresponse()

    def next_tokens(self) -> list[int] | None:
        """Those of the next event; None at the end."""
        assert self.response.status == 200
        while line := self.response.readline():
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens: list[int] = event["choices"][0]["token_ids"]
                return tokens
            if line.startswith(b"data: [DONE]"):
                return None
        raise AssertionError("the stream has broken off")

    def rest(self) -> list[int]:
        tokens: list[int] = []
        while (some := self.next_tokens()) is not None:
            tokens += some
        self.close()
        return tokens

    def close(self) -> None:
        self.response.close()
        self.connection.close()


CASES: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "samples": {"temperature": 1.0, "seed": 6, "n": 3},
    "top": {"temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "echo": {"temperature": 0, "logprobs": 2, "echo": True, "prompt_logprobs": 2},
    "penalties": {
        "temperature": 0,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "biases": {"temperature": 0, "logit_bias": {"40": 3.0, "41": -100.0}, "min_tokens": 4},
    "one token": {"temperature": 0, "max_tokens": 1},
    "two tokens": {"temperature": 0, "max_tokens": 2},
    "priority": {"temperature": 0, "priority": -3},
}


def comparable(answer: dict[str, Any]) -> Any:
    """Without what differs between two answers. Log probabilities are rounded."""

    def rounded(value: Any) -> Any:
        match value:
            case float():
                return round(value, 3)
            case list():
                return [rounded(each) for each in value]
            case dict():
                return {key: rounded(each) for key, each in value.items()}
        return value

    return rounded({key: answer[key] for key in ("choices", "usage", "object")})


@pytest.mark.req("CRG-06")
def test_answers_equal_those_of_one_engine_and_the_kv_is_copied(
    pair: Pair, unified: Deployment
) -> None:
    for number, (name, settings) in enumerate(CASES.items()):
        body = {"prompt": prompt(number), "max_tokens": 12, **ALL, **settings}
        assert comparable(post(pair, body)) == comparable(post(unified, body)), name
    # A prompt of 150 tokens has 10 blocks. One with a single token to compute is not split.
    num_split = len(CASES) - 1
    wait_until(lambda: pair.num_pulled_blocks == 10 * num_split)
    assert pair.sample("remote_prefills", outcome="offered") == num_split
    assert pair.sample("remote_prefills") == num_split
    assert pair.sample("remote_prefill_gap_seconds_count") == num_split
    pair.assert_all_is_free()


def test_both_engines_have_spans_in_the_trace_of_the_request(
    pair: Pair, collector: SpanReceiver
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    post(pair, {"prompt": prompt(90), "max_tokens": 12, **ALL}, headers=headers)

    def found() -> list[ReceivedSpan]:
        return [span for span in collector.spans if span.trace_id == trace_id]

    wait_until(lambda: any(span.name.startswith("POST") for span in found()))
    (request,) = (span for span in found() if span.name == "llm_request")
    phases = collector.below(request)
    assert [(phase.name, phase.attributes.get("longshore.engine")) for phase in phases] == [
        ("queue", None),
        ("queue", 0),
        ("prefill", 0),
        ("queue", 1),
        ("transfer", 1),
        ("decode", 1),
    ]
    _, _, prefill, queue, transfer, decode = phases
    assert prefill.end_s <= queue.begin_s <= transfer.begin_s
    assert transfer.end_s <= queue.end_s == decode.begin_s < decode.end_s


@pytest.mark.req("CRG-03")
def test_process_groups_copy_the_kv_as_well(
    unified: Deployment, tiny_model: tuple[Path, Any], tmp_path: Path
) -> None:
    """With the connector `p2p_nccl`, and so gloo on CPUs."""
    flags = ("--prefill", "1", "--decode", "1", "--dtype", "float32", "--kv-connector", "p2p_nccl")
    with Pair(tiny_model[0], tmp_path, *flags, "--state-dir", str(tmp_path / "state")) as pair:
        pair.wait_until_ready()
        for number in range(3):
            # Prompts of no other test: what `unified` has cached would be in `usage`.
            body = {"prompt": prompt(40 + number), "max_tokens": 12, "temperature": 0, **ALL}
            assert comparable(post(pair, body)) == comparable(post(unified, body))
        wait_until(lambda: pair.num_pulled_blocks == 3 * 10)
        pair.assert_all_is_free()
        assert "KV blocks are transferred by gloo" in pair.output
        assert pair.stop() == 0, pair.output


def test_stop_strings_and_stop_tokens_end_answers_as_on_one_engine(
    pair: Pair, unified: Deployment
) -> None:
    """Also those that end an answer with its first token, whose KV nothing pulls."""
    body = {"prompt": prompt(50), "max_tokens": 12, "temperature": 0, **ALL}
    whole = post(unified, body)["choices"][0]
    for number in (0, 3):
        token_id = whole["token_ids"][number]
        text = post(unified, {**body, "max_tokens": number + 1})["choices"][0]["text"]
        for settings in ({"stop_token_ids": [token_id]}, {"stop": text[-1]} if text else {}):
            case = {**body, **settings}
            assert (
                comparable(post(pair, case))["choices"]
                == comparable(post(unified, case))["choices"]
            )
    pair.assert_all_is_free()


def test_chats_are_split_and_short_prompts_are_not(pair: Pair, unified: Deployment) -> None:
    before = pair.sample("remote_prefills"), pair.sample("remote_prefill_skips")
    chat = {
        "messages": [{"role": "user", "content": "word " * 40}],
        "max_tokens": 5,
        "temperature": 0,
    }
    path = "/v1/chat/completions"
    answers = [post(each, chat, path)["choices"] for each in (pair, unified)]
    assert answers[0] == answers[1]
    short = {"prompt": prompt(60, 20), "max_tokens": 5, "temperature": 0, **ALL}
    answers = [post(each, short)["choices"] for each in (pair, unified)]
    assert answers[0] == answers[1]
    assert pair.sample("remote_prefills") == before[0] + 1
    assert pair.sample("remote_prefill_skips", reason="short_prompt") == before[1] + 1


def test_the_commands_of_the_page_start_both_engines_and_answer(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "disaggregation.md").read_text()
    serve, curl = (
        re.findall(rf"^```sh\n({program}.*?)\n```", page, re.MULTILINE | re.DOTALL)[0]
        for program in ("longshore serve ", "curl ")
    )
    flags = serve.removeprefix("longshore serve ").split()
    with Pair(DEMO_MODEL_DIR, tmp_path, *flags, num_blocks=None) as served:
        served.wait_until_ready()
        command = curl.replace("http://127.0.0.1:8000", served.url)
        asked = subprocess.run(["bash", "-c", command], capture_output=True, timeout=PATIENCE_S)
        assert json.loads(asked.stdout)["choices"][0]["message"]["content"] == "C417 B42 red"
        assert served.sample("remote_prefills", outcome="offered") == 1
        wait_until(lambda: served.num_pulled_blocks > 0)
        assert served.stop() == 0, served.output


def test_a_client_that_leaves_between_the_legs_frees_both_sides(pair: Pair) -> None:
    """The decode engine is stopped until the client has gone."""
    scheduler = pair.member("scheduler-1")
    scheduler.send_signal(signal.SIGSTOP)
    try:
        stream = Stream(pair, {"prompt": prompt(70), "max_tokens": 20})
        assert stream.next_tokens()
        assert pair.report(0)["num_free_blocks"] < pair.report(0)["num_blocks"] - 1
        stream.close()
        wait_until(lambda: pair.sample("live_requests") == 0)
    finally:
        scheduler.send_signal(signal.SIGCONT)
    pair.assert_all_is_free()


def num_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def key(**params: Any) -> dict[str, Any]:
    """A request's parameters, as a router sends them."""
    return {"temperature": 0, **ALL, "kv_transfer_params": params}


def test_a_router_with_the_key_drives_both_legs(pair: Pair, unified: Deployment) -> None:
    """Also if it sends only the prompt again, as vLLM's do. What is used twice, or changed, is
    refused by the owner, and computed."""
    headers = {"X-Longshore-Router-Key": KEY}
    body = {"prompt": prompt(80), "max_tokens": 8}
    expected = post(unified, {**body, **ALL, "temperature": 0})["choices"][0]["token_ids"]
    first = post(pair, {**body, **key(**ASKS), "max_tokens": 1}, headers=headers)
    params = first["kv_transfer_params"]
    assert first["choices"][0]["token_ids"] == expected[:1]
    answer = post(pair, {**body, **key(**params)}, headers=headers)
    assert answer["choices"][0]["token_ids"] == expected
    assert "kv_transfer_params" not in answer
    assert num_cached(answer) >= 144  # the decode engine has not seen the prompt before
    again = post(pair, {**body, **key(**params)}, headers=headers)
    assert again["choices"][0]["token_ids"] == expected
    other = post(pair, {"prompt": prompt(81), **key(**ASKS), "max_tokens": 1}, headers=headers)[
        "kv_transfer_params"
    ]
    foreign = {**other, "remote_block_ids": [[1, 2, 3]]}
    answer = post(pair, {**body, "prompt": prompt(82), **key(**foreign)}, headers=headers)
    expected = post(unified, {**body, "prompt": prompt(82), **ALL, "temperature": 0})
    assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert num_cached(answer) == 0
    pair.assert_all_is_free()


@pytest.mark.parametrize(
    ("params", "headers", "reason"),
    [
        (ASKS, {}, "is accepted from a router only"),
        (ASKS, {"X-Longshore-Router-Key": "guessed"}, "is accepted from a router only"),
        (
            {"do_remote_prefill": True, "remote_host": "10.9.8.7"},
            {"X-Longshore-Router-Key": KEY},
            "remote_host='10.9.8.7', which is none of the hosts",
        ),
    ],
)
def test_others_may_not_transfer(
    pair: Pair, params: dict[str, Any], headers: dict[str, str], reason: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(pair, {"prompt": prompt(90), "max_tokens": 1, **key(**params)}, headers=headers)
    assert raised.value.code == 400
    assert reason in raised.value.read().decode()


def test_a_prefill_engine_is_restarted_when_its_kv_has_been_pulled(pair: Pair) -> None:
    """The decode engine's worker is stopped until the restart waits for the lease."""
    num_pulled = pair.num_pulled_blocks
    prefill, decode = pair.member("scheduler-0"), pair.member("worker-1.0")
    printed: list[str] = []
    restart = threading.Thread(
        target=lambda: printed.append(admin(pair, "restart", "--engine", "0", "--timeout-s", "60"))
    )
    decode.send_signal(signal.SIGSTOP)
    try:
        stream = Stream(pair, {"prompt": prompt(110, 300), "max_tokens": 20})
        tokens = stream.next_tokens() or []
        restart.start()
        wait_until(lambda: "draining for a restart" in admin(pair, "status"))
        restart.join(1.0)
        assert restart.is_alive()
        assert not pair.is_free(0)
    finally:
        decode.send_signal(signal.SIGCONT)
    tokens += stream.rest()
    restart.join(PATIENCE_S)
    assert len(tokens) == 20
    assert "did not finish" not in printed[0]
    assert pair.has_replaced("scheduler-0", prefill)
    wait_until(lambda: pair.num_pulled_blocks == num_pulled + 19)  # those of 300 tokens
    pair.assert_all_is_free()


@pytest.mark.parametrize("victim", ["scheduler-1", "scheduler-0"])
def test_a_stream_goes_on_when_an_engine_is_killed(pair: Pair, victim: str) -> None:
    """The decode engine in the middle of a stream, and the prefill engine before its answer."""
    body = {"prompt": prompt(100, 300), "max_tokens": 150}
    expected = Stream(pair, body).rest()
    is_prefill = victim == "scheduler-0"
    process = pair.member(victim)
    if is_prefill:
        process.send_signal(signal.SIGSTOP)
    stream = Stream(pair, body)
    tokens = [] if is_prefill else stream.next_tokens() or []
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    assert tokens + stream.rest() == expected
    wait_until(lambda: pair.has_replaced(victim, process))
    for engine in (0, 1):  # a lease of the reader that was killed expires
        wait_until(lambda engine=engine: pair.is_free(engine), 4 * LEASE_S)  # type: ignore[misc]
