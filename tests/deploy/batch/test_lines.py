"""The lines of a batch, its output, and running them in order."""

import asyncio
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.batch import run
from longshore.deploy.batch.lines import (
    BadLine,
    BatchAnswer,
    BatchLine,
    OutputFile,
    check_lines,
    raw_lines,
    read_line,
)
from longshore.deploy.batch.run import run_lines
from longshore.protocol.errors import ConfigError

CHAT = "/v1/chat/completions"


def line(custom_id: str = "a", **changes: Any) -> bytes:
    given = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"n": 1}}
    return json.dumps(given | changes).encode() + b"\n"


def answer_to(asked: BatchLine, body: bytes = b"{}") -> BatchAnswer:
    return BatchAnswer.of(asked, 200, None, body)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "line 3: "),
        (line(method="GET"), "GET"),
        (line(url="/v1/models"), "url is '/v1/models'; use /v1/chat/completions or"),
        (line(body={"stream": True}), "stream is not supported in a batch"),
        (b'{"url": "/v1/completions", "body": {}}', "custom_id"),
        (line(body=[]), "body"),
    ],
)
def test_a_line_that_is_no_request_is_rejected_with_its_number(data: bytes, says: str) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(3, data)
    assert caught.value.number == 3
    assert says in str(caught.value)


def test_lines_are_counted_and_checked() -> None:
    content = line("a") + b"\n \n" + line("b") + line("a").rstrip()
    assert check_lines(io.BytesIO(content)) == 3
    assert [number for number, _ in raw_lines(io.BytesIO(content))] == [1, 4, 5]
    with pytest.raises(BadLine, match="line 5: custom_id 'a' is that of another line"):
        check_lines(io.BytesIO(content), max_lines=9)
    with pytest.raises(BadLine, match="line 4: a batch has at most 1 requests"):
        check_lines(io.BytesIO(content), max_lines=1)
    with pytest.raises(BadLine, match="line 1: it has more than 20 bytes"):
        check_lines(io.BytesIO(content), max_bytes=20)


def test_an_output_goes_on_after_its_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = (answer_to(read_line(1, line(name))) for name in ("a", "b"))
    output = OutputFile(path)
    assert (output.num_lines, output.last_id) == (0, None)
    output.write([first, second])
    output.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:10])  # the process was killed while it wrote
    output = OutputFile(path)
    assert (output.num_lines, output.last_id, output.size_bytes) == (2, "b", len(whole))
    output.write([first])
    output.close()
    ids = [json.loads(data)["custom_id"] for data in path.read_bytes().splitlines()]
    assert ids == ["a", "b", "a"]
    assert path.stat().st_mode & 0o77 == 0


def test_another_file_is_no_output(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("some text\n")
    with pytest.raises(ConfigError, match="line 1 is no answer of a batch"):
        OutputFile(path)
    assert path.read_text() == "some text\n"


def lines(num_lines: int, taken: list[int]) -> Iterator[BatchLine]:
    for number in range(num_lines):
        taken.append(number)
        yield BatchLine(custom_id=str(number), url=CHAT, body={})


async def test_answers_are_written_in_order_and_lines_are_taken_as_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "MAX_WINDOW", 8)
    taken: list[int] = []
    written: list[str] = []
    num_now = most = 0
    first_may_end = asyncio.Event()

    async def ask(asked: BatchLine) -> BatchAnswer:
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        if asked.custom_id == "0":
            await first_may_end.wait()
        elif asked.custom_id == "7":  # the last one before the window is full
            assert (len(taken), written) == (8, [])
            first_may_end.set()
        await asyncio.sleep(0)
        num_now -= 1
        return answer_to(asked)

    async def write(answers: Sequence[BatchAnswer]) -> None:
        written.extend(answer.custom_id for answer in answers)

    await run_lines(lines(30, taken), ask, write, lambda num_own: 3)
    assert written == [str(number) for number in range(30)]
    assert 1 < most <= 3


async def test_answers_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MAX_HELD_BYTES", 1000)
    monkeypatch.setattr(run, "RECHECK_S", 0.01)
    taken: list[int] = []
    num_answered = 0

    async def ask(asked: BatchLine) -> BatchAnswer:
        nonlocal num_answered
        if asked.custom_id == "0":
            while num_answered < 4:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # in which no other line is begun
            assert len(taken) <= 6
        num_answered += 1
        return answer_to(asked, b"1" * 300)

    async def write(answers: Sequence[BatchAnswer]) -> None:
        pass

    await run_lines(lines(30, taken), ask, write, lambda num_own: 2)
    assert len(taken) == 30


async def test_a_failure_ends_all_lines() -> None:
    async def ask(asked: BatchLine) -> BatchAnswer:
        if asked.custom_id == "1":
            raise OSError("no space")
        await asyncio.Event().wait()
        raise AssertionError

    async def write(answers: Sequence[BatchAnswer]) -> None:
        raise AssertionError

    with pytest.raises(OSError, match="no space"):
        await run_lines(lines(30, []), ask, write, lambda num_own: 4)
