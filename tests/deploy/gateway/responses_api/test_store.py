"""The files of stored responses: owners, limits, expiry, and who ends a computation."""

import os
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.gateway.api_keys import NO_KEY, ApiKey
from longshore.deploy.gateway.responses_api import store as store_module
from longshore.deploy.gateway.responses_api.bodies import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    ResponseBody,
    StoredResponse,
)
from longshore.deploy.gateway.responses_api.store import (
    LIST_INTERVAL_S,
    ResponseStore,
    new_response_id,
)
from longshore.deploy.requests.chat_messages import ChatMessage

ALICE, BOB = (ApiKey(name=name, digest=name).owner for name in ("alice", "bob"))


def record(text: str = "hello", status: str = COMPLETED) -> StoredResponse:
    response = ResponseBody(
        id=new_response_id(),
        created_at=0,
        status=status,
        background=False,
        instructions=None,
        max_output_tokens=None,
        model="tiny",
        previous_response_id=None,
        store=True,
        temperature=1.0,
        text={},
        top_p=1.0,
        metadata={},
        parallel_tool_calls=True,
        tools=(),
        tool_choice="auto",
    )
    return StoredResponse(response, [], [ChatMessage("user", text)])


async def put(store: ResponseStore, owner: str, text: str = "hello") -> str:
    stored = record(text)
    await store.put(owner, stored)
    return stored.response.id


def age(directory: Path, response_id: str, age_s: float) -> None:
    (path,) = directory.glob(f"*-{response_id}.json")
    written_s = path.stat().st_mtime - age_s
    os.utime(path, (written_s, written_s))


async def test_another_gateway_finds_what_one_stored(tmp_path: Path) -> None:
    one, other = (ResponseStore(tmp_path, number=n, num_gateways=2) for n in range(2))
    stored = record()
    await one.put(ALICE, stored)
    found = await other.get(ALICE, stored.response.id)
    assert msgspec.json.encode(found) == msgspec.json.encode(stored)
    assert await other.delete(ALICE, stored.response.id)
    assert await one.get(ALICE, stored.response.id) is None
    assert not await one.delete(ALICE, stored.response.id)


async def test_a_response_belongs_to_its_key(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path)
    mine = await put(store, ALICE)
    assert len({ALICE, BOB, NO_KEY.owner}) == 3
    assert await store.get(BOB, mine) is None
    assert not await store.delete(BOB, mine)
    assert not await store.end(BOB, mine)
    assert await store.get(ALICE, mine) is not None


@pytest.mark.parametrize("response_id", ["", "resp_1", "../../etc/passwd", "resp_" + "g" * 32])
async def test_an_id_that_was_never_given_names_no_file(tmp_path: Path, response_id: str) -> None:
    store = ResponseStore(tmp_path)
    assert await store.get(ALICE, response_id) is None
    assert not await store.delete(ALICE, response_id)


async def test_files_are_private(tmp_path: Path) -> None:
    await put(ResponseStore(tmp_path / "responses"), ALICE)
    (path,) = (tmp_path / "responses").glob("*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "responses" / "running").stat().st_mode) == 0o700


async def test_an_old_response_expires_and_its_file_goes(tmp_path: Path) -> None:
    now_s = time.time()
    store = ResponseStore(tmp_path, ttl_s=100, clock=lambda: now_s)
    old = await put(store, ALICE)
    age(tmp_path, old, 101)
    assert await store.get(ALICE, old) is None
    now_s += LIST_INTERVAL_S
    await put(store, ALICE)
    assert len(list(tmp_path.glob("*.json"))) == 1


async def test_the_owner_that_has_most_loses_its_oldest(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, max_bytes=10_000)
    bobs = await put(store, BOB, "b")
    age(tmp_path, bobs, 50)
    first = await put(store, ALICE, "a" * 4000)
    age(tmp_path, first, 20)
    second = await put(store, ALICE, "a" * 4000)
    third = await put(store, ALICE, "a" * 1000)
    found = [await store.get(ALICE, each) is not None for each in (first, second, third)]
    assert found == [False, True, True]
    assert await store.get(BOB, bobs) is not None


async def test_the_number_of_responses_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 3)
    store = ResponseStore(tmp_path)
    bobs = await put(store, BOB)
    for _ in range(5):
        await put(store, ALICE)
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert await store.get(BOB, bobs) is not None


async def test_storing_does_not_look_at_all_files_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway lists the files of the others at an interval, and knows its own."""
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 6)
    listings = []
    scandir = os.scandir

    def listed(directory: Path) -> Any:
        listings.append(directory)
        return scandir(directory)

    now_s = time.time()
    one, other = (
        ResponseStore(tmp_path, number=n, num_gateways=2, clock=lambda: now_s) for n in range(2)
    )
    monkeypatch.setattr(os, "scandir", listed)

    def num_stored() -> int:
        return sum(name.endswith(".json") for name in os.listdir(tmp_path))

    for _ in range(20):
        await put(one, ALICE)
    assert len(listings) == 1
    assert num_stored() == 6
    for _ in range(3):
        await put(other, BOB)  # lists the files of the first gateway once
    assert len(listings) == 2
    assert num_stored() == 6
    now_s += LIST_INTERVAL_S
    ours = [await put(one, ALICE) for _ in range(2)]
    assert len(listings) == 3
    assert num_stored() == 6
    assert await one.delete(ALICE, ours[0])
    await put(one, ALICE)
    assert await one.get(ALICE, ours[1]) is not None
    assert num_stored() == 6


async def test_a_response_larger_than_the_store_is_rejected(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, max_bytes=1000)
    with pytest.raises(ValueError, match="can be stored"):
        await store.put(ALICE, record("x" * 1000))
    assert list(tmp_path.glob("*.*")) == []


async def test_a_computation_is_ended_once_by_any_gateway(tmp_path: Path) -> None:
    one, other = (ResponseStore(tmp_path, number=n, num_gateways=2) for n in range(2))
    stored = record(status=IN_PROGRESS)
    await one.begin(ALICE, stored)
    assert await one.is_running(ALICE, stored.response.id)
    assert await other.end(ALICE, stored.response.id)
    assert not await one.is_running(ALICE, stored.response.id)
    assert not await one.end(ALICE, stored.response.id)


async def test_a_gateway_that_starts_again_fails_what_it_left(tmp_path: Path) -> None:
    stored = record(status=IN_PROGRESS)
    await ResponseStore(tmp_path, number=1, num_gateways=2).begin(ALICE, stored)
    other = ResponseStore(tmp_path, number=0, num_gateways=2)
    left = await other.get(ALICE, stored.response.id)
    assert left is not None
    assert left.response.status == IN_PROGRESS
    ResponseStore(tmp_path, number=1, num_gateways=2)
    failed = await other.get(ALICE, stored.response.id)
    assert failed is not None
    assert failed.response.status == FAILED
    assert failed.response.error is not None
    assert not await other.end(ALICE, stored.response.id)
