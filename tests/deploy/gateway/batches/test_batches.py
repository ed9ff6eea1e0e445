"""Files and batches, used by OpenAI's client: what is run, kept, limited and continued."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest

from longshore.deploy.gateway.api_keys import NO_KEY, plain_keys
from longshore.deploy.gateway.batches import routes, runner
from longshore.deploy.gateway.batches import store as store_module
from longshore.deploy.gateway.batches.store import BatchStore
from longshore.protocol.requests import AddRequest
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway
from tests.deploy.gateway.fake_engine import FakeEngine, echo, never_answer

COMPLETIONS = "/v1/completions"


def line(custom_id: object, prompt: str = "p", **changes: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 9, **changes}
    return {"custom_id": str(custom_id), "method": "POST", "url": COMPLETIONS, "body": body}


def content_of(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@pytest.fixture
def start(
    start_gateway: StartGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """As `start_gateway`, with a state directory; yields also a client."""
    monkeypatch.setattr(runner, "SCAN_INTERVAL_S", 0.05)
    monkeypatch.setattr(runner, "SAVE_INTERVAL_S", 0.05)

    @asynccontextmanager
    async def started(
        script: Any = echo, *, key: str = "none", **settings: Any
    ) -> AsyncIterator[tuple[RunningGateway, openai.AsyncOpenAI]]:
        settings = {"files_dir": str(tmp_path / "state"), "max_body_bytes": 1 << 20} | settings
        async with start_gateway(script, **settings) as gateway:
            url = f"http://127.0.0.1:{gateway.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                yield gateway, client

    return started


async def upload(client: openai.AsyncOpenAI, lines: list[dict[str, Any]]) -> str:
    file = ("requests.jsonl", content_of(lines))
    return (await client.files.create(file=file, purpose="batch")).id


async def begin(client: openai.AsyncOpenAI, lines: list[dict[str, Any]], **settings: Any) -> str:
    batch = await client.batches.create(
        **{
            "input_file_id": await upload(client, lines),
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
            **settings,
        }
    )
    assert batch.status == "validating"
    return batch.id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.02)


async def lines_of(client: openai.AsyncOpenAI, file_id: str) -> list[dict[str, Any]]:
    content = await client.files.content(file_id)
    return [json.loads(data) for data in content.content.splitlines()]


async def test_a_batch_answers_the_lines_of_a_file(start: Any) -> None:
    lines = [line(number, f"prompt {number}") for number in range(20)]
    async with start() as (_, client):
        batch = await ended(client, await begin(client, lines, metadata={"of": "me"}))
        answers = await lines_of(client, batch.output_file_id)
        listed = [each.id async for each in client.batches.list()]
        output = await client.files.retrieve(batch.output_file_id)
    assert (batch.status, batch.error_file_id, batch.metadata) == ("completed", None, {"of": "me"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert batch.created_at <= batch.in_progress_at <= batch.completed_at
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(20)]
    for number, answer in enumerate(answers):
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        text = answer["response"]["body"]["choices"][0]["text"]
        assert text
        assert f"prompt {number}".startswith(text)
    assert listed == [batch.id]
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_lines_that_are_rejected_are_in_a_file_of_their_own(start: Any) -> None:
    lines = [line("good"), line("bad", n=0), line("other", model="other")]
    async with start() as (_, client):
        batch = await ended(client, await begin(client, lines))
        (good,) = await lines_of(client, batch.output_file_id)
        bad, other = await lines_of(client, batch.error_file_id)
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 1, 2)
    assert good["custom_id"] == "good"
    assert (bad["response"]["status_code"], other["response"]["status_code"]) == (400, 404)
    assert bad["response"]["body"]["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a") | {"url": "/v1/embeddings"}], "mismatched_url", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([], "empty_file", None),
    ],
)
async def test_a_file_with_a_wrong_line_fails_the_batch(
    start: Any, lines: list[dict[str, Any]], code: str, number: int | None
) -> None:
    async with start() as (gateway, client):
        batch = await ended(client, await begin(client, lines))
        assert gateway.engine.requests == []
    assert batch.status == "failed"
    (fault,) = batch.errors.data
    assert (fault.code, fault.line) == (code, number)


async def test_a_batch_goes_on_after_a_restart_with_the_lines_that_are_left(start: Any) -> None:
    lines = [line(number, f"x{number}") for number in range(12)]

    calls = count(1)

    def answers_some(engine: FakeEngine, request: AddRequest) -> None:
        if next(calls) <= 5:
            echo(engine, request)

    async with start(answers_some) as (gateway, client):
        batch_id = await begin(client, lines)
        async with asyncio.timeout(PATIENCE_S):
            while (await client.batches.retrieve(batch_id)).request_counts.completed < 5:
                await asyncio.sleep(0.02)
        assert (await client.batches.retrieve(batch_id)).status == "in_progress"
    async with start() as (gateway, client):
        batch = await ended(client, batch_id)
        answers = await lines_of(client, batch.output_file_id)
        assert len(gateway.engine.requests) == 7
    assert (batch.status, batch.request_counts.completed) == ("completed", 12)
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(12)]


async def test_a_cancelled_batch_keeps_its_answers(start: Any) -> None:
    calls = count(1)

    def answers_one(engine: FakeEngine, request: AddRequest) -> None:
        if next(calls) == 1:
            echo(engine, request)

    async with start(answers_one) as (gateway, client):
        batch_id = await begin(client, [line(number) for number in range(9)])
        async with asyncio.timeout(PATIENCE_S):
            while not (await client.batches.retrieve(batch_id)).request_counts.completed:
                await asyncio.sleep(0.02)
        assert (await client.batches.cancel(batch_id)).status == "cancelling"
        batch = await ended(client, batch_id)
        assert len(await lines_of(client, batch.output_file_id)) == 1
        num_asked = len(gateway.engine.requests)
        await gateway.engine.wait_for(lambda: len(gateway.engine.aborted) == num_asked - 1)
        with pytest.raises(openai.BadRequestError, match="it has ended"):
            await client.batches.cancel(batch_id)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None


async def test_a_batch_whose_time_is_over_expires(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(never_answer) as (gateway, client):
        batch_id = await begin(client, [line("a")], completion_window="1h")
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 1)
        store = gateway.process._gateway.batches._store
        now_s = store.clock()
        store.clock = lambda: now_s + 3601
        assert (await ended(client, batch_id)).status == "expired"


async def test_a_batch_leaves_sequences_free(start: Any) -> None:
    async with start(never_answer, batch_priority=7) as (gateway, client):
        engine = gateway.engine
        batch_id = await begin(client, [line(number) for number in range(50)])
        await engine.wait_for(lambda: len(engine.requests) == 6)  # of 8 at a time
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 6
        assert {each.options.priority for each in engine.requests} == {7}
        await client.batches.cancel(batch_id)


@pytest.mark.parametrize(
    ("num_live", "num_asked", "most"),
    [(0, 0, 6), (4, 4, 6), (6, 6, 6), (6, 4, 4), (20, 3, 3), (20, 0, 1), (5, 0, 1)],
)
def test_other_requests_come_first(num_live: int, num_asked: int, most: int) -> None:
    """But a batch has one line at a time in any case. most: of a batch that has asked all."""
    ready = SimpleNamespace(identity=SimpleNamespace(max_num_seqs=8))
    client = SimpleNamespace(clients={0: SimpleNamespace(ready=ready)}, num_live_requests=num_live)
    service = SimpleNamespace(client=client)
    services: Any = SimpleNamespace(all=[service], num_live_requests=num_live)
    store: Any = None
    app: Any = None
    batches = runner.BatchRunner(store, app, lambda: services, lambda: (), model="tiny")
    batches._num_asked = num_asked
    assert batches.num_at_a_time(num_asked) == most


async def test_a_line_waits_while_its_key_is_at_its_limit(start: Any) -> None:
    (key,) = plain_keys(["secret"], "key")
    limited = msgspec.structs.replace(key, max_live_requests=1)
    async with start(never_answer, key="secret", api_keys=(limited,)) as (gateway, client):
        engine = gateway.engine
        other = asyncio.create_task(client.completions.create(model="tiny", prompt="other"))
        await engine.wait_for(lambda: len(engine.requests) == 1)
        batch_id = await begin(client, [line("a")])
        await asyncio.sleep(0.1)
        assert len(engine.requests) == 1
        engine.script = echo
        echo(engine, engine.requests[0])
        await other
        batch = await ended(client, batch_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_each_key_has_its_own_files_and_batches(start: Any) -> None:
    keys = plain_keys(["alice", "bob"], "key")
    async with start(api_keys=keys, key="alice") as (gateway, alice):
        batch = await ended(alice, await begin(alice, [line("a")]))
        assert batch.status == "completed"
        bob = alice.with_options(api_key="bob")
        assert [file.id async for file in bob.files.list()] == []
        assert [each.id async for each in bob.batches.list()] == []
        for use in (
            bob.files.retrieve(batch.input_file_id),
            bob.files.content(batch.output_file_id),
            bob.files.delete(batch.input_file_id),
            bob.batches.retrieve(batch.id),
            bob.batches.cancel(batch.id),
            bob.batches.create(
                input_file_id=batch.input_file_id,
                endpoint=COMPLETIONS,
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await use
        assert (await gateway.get("/v1/files")).status == 401
        tenants = {request.options.tenant.name for request in gateway.engine.requests}
        assert tenants == {"key-1"}
    async with start(api_keys=keys[1:], key="bob") as (_, bob):
        with pytest.raises(openai.NotFoundError):
            await bob.batches.retrieve(batch.id)


async def test_files_are_listed_read_and_deleted(start: Any) -> None:
    async with start() as (_, client):
        ids = [await upload(client, [line(number)]) for number in range(3)]
        assert {file.id async for file in client.files.list()} == set(ids)
        (first,) = (await client.files.list(limit=1)).data
        for limit in ("0", "x", "1" * 5000):
            with pytest.raises(openai.BadRequestError, match="limit"):
                await client.files.list(extra_query={"limit": limit})
        rest = await client.files.list(after=first.id)
        assert {first.id, *(file.id for file in rest.data)} == set(ids)
        assert (await client.files.content(ids[0])).content == content_of([line(0)])
        assert (await client.files.delete(ids[0])).deleted
        assert {file.id async for file in client.files.list()} == set(ids[1:])
        with pytest.raises(openai.NotFoundError):
            await client.files.content(ids[0])
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve("file-../../etc/passwd")


async def test_what_is_not_supported_is_refused_by_name(start: Any) -> None:
    async with start() as (_, client):
        file_id = await upload(client, [line("a")])
        good = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        for changes, says in (
            ({"endpoint": "/v1/moderations"}, "endpoint='/v1/moderations' must be one of"),
            ({"completion_window": "soon"}, "completion_window='soon' must be a number of hours"),
            ({"metadata": {str(number): "" for number in range(17)}}, "metadata has more than 16"),
        ):
            with pytest.raises(openai.BadRequestError, match=says):
                await client.batches.create(**{**good, **changes})
        with pytest.raises(openai.BadRequestError, match="use batch"):
            await client.files.create(file=b"x", purpose="fine-tune")
    async with start(stored_files_mib=0) as (_, client):
        with pytest.raises(openai.NotFoundError, match="--stored-files-mib above 0"):
            await upload(client, [])


async def test_an_upload_beyond_the_limit_of_the_key_is_refused(start: Any, tmp_path: Path) -> None:
    async with start(stored_files_mib=1) as (_, client):
        await client.files.create(file=bytes(600_000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            await client.files.create(file=bytes(600_000), purpose="batch")
        assert caught.value.status_code == 413
        assert "--stored-files-mib" in str(caught.value)
        owned = tmp_path / "state" / "files" / NO_KEY.owner
        assert sum(path.stat().st_size for path in owned.iterdir()) < 700_000


async def test_uploads_at_the_same_time_share_the_limit(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "CHECK_BYTES", 1000)
    async with start() as (gateway, client):
        store = gateway.process._gateway.batches._store
        store.max_bytes = 60_000
        file_id, file = store.create(NO_KEY.owner)  # another upload, which goes on
        with file:
            file.write(b"x" * 30_000)
            file.flush()
            for size, is_refused in ((20_000, False), (40_000, True)):
                upload = client.files.create(file=("a", b"y" * size), purpose="batch")
                if not is_refused:
                    await client.files.delete((await upload).id)
                    continue
                with pytest.raises(openai.APIStatusError, match="more than 60000 bytes"):
                    await upload
        store.discard(NO_KEY.owner, file_id)
        assert store.used_bytes(NO_KEY.owner) == 0


async def test_files_and_batches_of_a_key_are_limited_in_number(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_BATCHES", 1)
    async with start(never_answer) as (_, client):
        await begin(client, [line(1)])
        with pytest.raises(openai.RateLimitError, match="has 1 batches, which is the limit"):
            await begin(client, [line(2)])
        monkeypatch.setattr(store_module, "MAX_FILES", 2)
        with pytest.raises(openai.RateLimitError, match="has 2 files, which is the limit"):
            await upload(client, [line(3)])


async def test_answers_beyond_the_limit_of_the_key_fail_the_batch(start: Any) -> None:
    async with start(stored_files_mib=1) as (gateway, client):
        batch_id = await begin(client, [line(number) for number in range(400)])
        gateway.process._gateway.batches._store.max_bytes = 60_000
        batch = await ended(client, batch_id)
        assert (await lines_of(client, batch.output_file_id))[0]["custom_id"] == "0"
    (fault,) = batch.errors.data
    assert (batch.status, fault.code) == ("failed", "storage_limit_exceeded")


def test_what_has_expired_is_deleted_unless_a_batch_needs_it(tmp_path: Path) -> None:
    now_s = 1e9
    store = BatchStore(tmp_path, max_bytes=1 << 20, ttl_s=100, clock=lambda: now_s)
    file_id, file = store.create("me")
    file.close()
    store.publish("me", file_id, filename="f", purpose="batch")
    assert [each.id for each in store.files("me")] == [file_id]
    now_s += 101
    assert store.files("me") == []
    store.clock = lambda: 9e9  # files have the times of the disk
    store.delete_expired()
    assert list((tmp_path / "files" / "me").iterdir()) == []


def test_one_process_runs_a_batch(tmp_path: Path) -> None:
    (tmp_path / "batches" / "me").mkdir(parents=True)
    store = BatchStore(tmp_path, max_bytes=1, ttl_s=1)
    with store.claim("me", "batch_1") as first, store.claim("me", "batch_1") as second:
        assert (first, second) == (True, False)
    with store.claim("me", "batch_1") as again:
        assert again
