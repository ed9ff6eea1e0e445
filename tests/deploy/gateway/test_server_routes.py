"""Small routes with vLLM's paths, and several names of one model."""

import asyncio
import json
from html.parser import HTMLParser

import pytest

import longshore
from longshore.deploy.gateway.api_keys import plain_keys
from longshore.deploy.gateway.docs_page import docs_page
from longshore.deploy.gateway.openapi import document
from tests.deploy.gateway.conftest import PATIENCE_S, StartGateway
from tests.deploy.gateway.fake_engine import never_answer
from tests.deploy.gateway.http.test_exchange import error_of

CHAT = [{"role": "user", "content": "Where?"}]


async def test_the_version_is_that_of_the_package(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.get("/version")
        assert json.loads(answer.body) == {"version": longshore.__version__}


async def test_a_ping_asks_whether_requests_are_served(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        for method in ("GET", "POST"):
            answer = await gateway.client.request(method, "/ping", timeout_s=PATIENCE_S)
            assert answer.status == 200
        gateway.engine.fail("out of luck")
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await gateway.get("/ping")).status == 200:
                await asyncio.sleep(0.01)
        assert answer.status == 503
        assert b"out of luck" in answer.body


async def test_the_load_is_the_number_of_live_requests(start_gateway: StartGateway) -> None:
    async with start_gateway(never_answer) as gateway:
        assert json.loads((await gateway.get("/load")).body) == {"server_load": 0}
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        waiting = asyncio.create_task(gateway.post("/v1/completions", body))
        await gateway.engine.wait_for(lambda: len(gateway.engine.requests) == 2)
        assert json.loads((await gateway.get("/load")).body) == {"server_load": 2}
        waiting.cancel()


async def test_the_settings_are_shown_to_those_who_may_ask(start_gateway: StartGateway) -> None:
    keys = plain_keys(["secret"], "key")
    async with start_gateway(server_settings={"port": 8000}, api_keys=keys) as gateway:
        assert (await gateway.get("/server_info")).status == 401
        answer = await gateway.client.request(
            "GET", "/server_info", timeout_s=PATIENCE_S, headers={"x-api-key": "secret"}
        )
    info = json.loads(answer.body)
    assert (info["version"], info["settings"]) == (longshore.__version__, {"port": 8000})
    assert info["engines"]["0"] == {
        "dtype": "float32",
        "block_size": 16,
        "num_blocks": 100,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


async def test_the_page_has_every_path_and_loads_nothing(start_gateway: StartGateway) -> None:
    async with start_gateway() as gateway:
        answer = await gateway.get("/docs")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.body.decode() == docs_page()
    page = _Page()
    page.feed(docs_page())
    for path, item in document()["paths"].items():
        for method in item:
            assert f"{method.upper()} {path}" in page.text
    anchors = {value for name, value in page.attributes if name == "id"}
    links = {str(value) for name, value in page.attributes if name in ("href", "src")}
    assert links - {f"#{anchor}" for anchor in anchors} == {"openapi.json"}
    assert "prompt_logprobs" in page.text


async def test_paths_of_probes_need_no_key(start_gateway: StartGateway) -> None:
    async with start_gateway(api_keys=plain_keys(["first"], "key")) as gateway:
        for path in ("/version", "/ping", "/load", "/docs"):
            assert (await gateway.get(path)).status == 200


@pytest.mark.parametrize("name", ["tiny", "harbour/large", "second", None])
async def test_a_model_has_several_names(start_gateway: StartGateway, name: str | None) -> None:
    async with start_gateway(aliases=("harbour/large", "second")) as gateway:
        listed = json.loads((await gateway.get("/v1/models")).body)["data"]
        assert [model["id"] for model in listed] == ["tiny", "harbour/large", "second"]
        if name is not None:
            one = json.loads((await gateway.get(f"/v1/models/{name}")).body)
            assert one in listed
            assert one["id"] == name
        for path, body in (
            ("/v1/completions", {"prompt": "p"}),
            ("/v1/chat/completions", {"messages": CHAT}),
        ):
            answer = await gateway.post(path, {**body, "model": name, "max_tokens": 1})
            assert json.loads(answer.body)["model"] == "tiny"  # the first name
        other = await gateway.post("/v1/completions", {"prompt": "p", "model": "third"})
        assert (other.status, error_of(other)["code"]) == (404, "model_not_found")
