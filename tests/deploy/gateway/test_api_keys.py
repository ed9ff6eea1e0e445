"""API keys by digest, and the cache salts that keep their prefixes apart."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.deploy.gateway.api_keys import (
    NO_KEY,
    ApiKey,
    CacheSharing,
    digest_of,
    find_key,
    plain_keys,
)
from longshore.protocol.requests import MAX_NAME_CHARACTERS
from tests.deploy.gateway.conftest import PATIENCE_S, RunningGateway, StartGateway

texts = st.text(st.characters(codec="utf-8"), max_size=12)


@given(one=st.tuples(texts, st.none() | texts), other=st.tuples(texts, st.none() | texts))
def test_only_the_same_key_and_the_same_salt_make_the_same_salt(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    salts = [ApiKey(cache_id=name).cache_salt(salt) for name, salt in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)


def test_what_one_name_lacks_the_salt_cannot_add() -> None:
    assert ApiKey(cache_id="ab").cache_salt("c") != ApiKey(cache_id="a").cache_salt("bc")
    assert ApiKey(cache_id="a").cache_salt(None) != ApiKey(cache_id="a").cache_salt("")


def test_a_salt_is_short_and_the_same_in_every_process() -> None:
    salt = ApiKey(cache_id="alice").cache_salt("s" * MAX_NAME_CHARACTERS)
    assert salt is not None
    assert len(salt) <= MAX_NAME_CHARACTERS
    assert (
        ApiKey(cache_id="alice").cache_salt(None)
        == "128e37258270b61210437abec4a1ce905354778fe21dac8dc7cd477eef92cf7c"
    )


def test_without_a_key_of_its_own_a_request_has_the_salt_that_it_was_sent_with() -> None:
    for key in (NO_KEY, *plain_keys(["a"], "all")):
        assert key.cache_salt(None) is None
        assert key.cache_salt("mine") == "mine"


def test_a_key_is_found_by_its_digest() -> None:
    keys = plain_keys(["first", "second"], "key")
    assert find_key(keys, b"second") is keys[1]
    assert find_key(keys, b"third") is None
    assert find_key(keys, digest_of(b"first").encode()) is None
    assert "first" not in repr(keys)


async def ask(gateway: RunningGateway, path: str, key: str, **body: Any) -> None:
    answer = await gateway.client.request(
        "POST",
        path,
        json.dumps(body).encode(),
        timeout_s=PATIENCE_S,
        headers={"authorization": f"Bearer {key}"},
    )
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("sharing", ["key", "all"])
async def test_requests_of_two_keys_have_two_salts_unless_all_share(
    start_gateway: StartGateway, sharing: CacheSharing
) -> None:
    text = {"prompt": "p", "max_tokens": 1}
    async with start_gateway(api_keys=plain_keys(["a", "b"], sharing)) as gateway:
        for key in ("a", "b", "a"):
            await ask(gateway, "/v1/completions", key, **text)
            await ask(gateway, "/v1/completions", key, **text, cache_salt="s")
        plain, salted = (
            [request.options.cache_salt for request in gateway.engine.requests[first::2]]
            for first in (0, 1)
        )
    assert plain[0] == plain[2]
    assert salted[0] == salted[2]
    if sharing == "all":
        assert set(plain) == {None}
        assert set(salted) == {"s"}
    else:
        assert len({*plain, *salted}) == 4
        assert None not in plain


async def test_no_store_shares_with_no_request_of_its_own_key(start_gateway: StartGateway) -> None:
    async with start_gateway(api_keys=plain_keys(["a"], "key")) as gateway:
        for _ in range(2):
            await ask(gateway, "/v1/completions", "a", prompt="p", max_tokens=1, no_store=True)
        assert len({request.options.cache_salt for request in gateway.engine.requests}) == 2
