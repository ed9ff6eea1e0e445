"""`longshore batch` and `run-batch`: what is asked, written, continued and refused."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.cli import batch as command
from longshore.deploy.cli.batch import BatchFailed, batch, default_output, run_batch
from longshore.deploy.cli.client_options import BatchOptions, RunBatchOptions
from longshore.deploy.gateway.api_keys import plain_keys
from longshore.deploy.settings.options import ServeOptions
from longshore.protocol.errors import ConfigError
from tests.deploy.gateway.conftest import RunningGateway, start_gateway

__all__ = ["start_gateway"]  # a fixture


def requests_file(folder: Path, num_lines: int, **changes: Any) -> Path:
    body = {"prompt": "p", "max_tokens": 3, **changes}
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(num_lines)
    ]
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


async def run(gateway: RunningGateway, file: Path, **settings: Any) -> bool:
    options = BatchOptions(url=f"http://127.0.0.1:{gateway.port}", **settings)
    return await asyncio.to_thread(batch, file, options)


async def test_the_answers_are_beside_the_file_and_a_second_run_asks_the_rest(
    start_gateway: Any, tmp_path: Path
) -> None:
    file = requests_file(tmp_path, 8)
    output = default_output(file)
    async with start_gateway() as gateway:
        assert await run(gateway, file, max_concurrency=2)
        assert output.name == "requests.out.jsonl"
        whole = output.read_bytes()
        assert ids_in(output) == [f"r{number}" for number in range(8)]
        output.write_bytes(b"".join(whole.splitlines(keepends=True)[:5]) + whole[:20])
        assert await run(gateway, file)
        assert ids_in(output) == [f"r{number}" for number in range(8)]
        assert len(gateway.engine.requests) == 8 + 3
        assert await run(gateway, file)
        assert len(gateway.engine.requests) == 8 + 3


async def test_a_rejected_request_is_in_the_output(start_gateway: Any, tmp_path: Path) -> None:
    file = requests_file(tmp_path, 1, n=0)
    async with start_gateway() as gateway:
        assert not await run(gateway, file)
    (line,) = default_output(file).read_text().splitlines()
    assert json.loads(line)["response"]["status_code"] == 400


async def test_a_server_with_another_key_is_named_before_anything_is_written(
    start_gateway: Any, tmp_path: Path
) -> None:
    file = requests_file(tmp_path, 3)
    async with start_gateway(api_keys=plain_keys(["secret"], "key")) as gateway:
        with pytest.raises(BatchFailed, match="unknown API key"):
            await run(gateway, file, api_key="wrong")
        assert default_output(file).read_bytes() == b""
        assert await run(gateway, file, api_key="secret")


def test_a_server_that_cannot_be_reached_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_UNREACHABLE_S", 0.0)
    file = requests_file(tmp_path, 3)
    with pytest.raises(BatchFailed, match=r"'r0' was not answered: .*run the command again"):
        batch(file, BatchOptions(url="http://127.0.0.1:1", max_concurrency=1))


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = requests_file(tmp_path, 3)
    other = tmp_path / "other.jsonl"
    other.write_text('{"custom_id": "x", "response": null}\n')
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(file.read_text() + "{\n")
    for source, output, says in (
        (file, file, "is the file of the requests"),
        (file, other, "the last of which is to 'x', where the file has 'r0'"),
        (wrong, None, "wrong.jsonl: line 4: "),
        (tmp_path / "none", None, "cannot be read: No such file"),
        (file, tmp_path / "none" / "out", "cannot be written: No such file"),
    ):
        with pytest.raises(ConfigError, match=says):
            batch(source, BatchOptions(output=output))


async def test_run_batch_starts_a_server_for_the_file_and_stops_it(
    start_gateway: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    options = RunBatchOptions(input_file=requests_file(tmp_path, 3), output_file=output)
    stopped = threading.Event()
    served: list[Any] = []
    async with start_gateway(api_keys=plain_keys(["secret"], "key")) as gateway:

        def serve(
            model: object, node: Any, announce: object, on_ready: Callable[[str], None]
        ) -> None:
            served.append(node.options)
            on_ready(f"http://127.0.0.1:{gateway.port}")
            assert stopped.wait(60)

        monkeypatch.setattr(command.secrets, "token_hex", lambda: "secret")
        monkeypatch.setattr(command.os, "kill", lambda *_: stopped.set())
        monkeypatch.setattr(command, "serve", serve)
        monkeypatch.setattr(command, "set_up_logging", lambda *_: None)
        server = ServeOptions(max_num_seqs=3)
        assert await asyncio.to_thread(run_batch, options, server)
    assert ids_in(output) == ["r0", "r1", "r2"]
    (used,) = served
    assert (used.host, used.port, used.api_key, used.max_num_seqs) == (
        *("127.0.0.1", 0, ("secret",)),
        3,
    )


def test_run_batch_starts_nothing_for_a_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "serve", lambda *_, **__: pytest.fail("it was started"))
    options = RunBatchOptions(input_file=tmp_path / "none", output_file=tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_batch(options, ServeOptions())
