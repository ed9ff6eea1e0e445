"""Tokenizers of unknown cost: the same tokens as in this process, and an end to what costs too
much."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.gateway.text import tokenizer_process
from longshore.deploy.gateway.text.tokenizer import ModelTokenizer, load_tokenizer
from longshore.deploy.gateway.text.tokenizer_process import IsolatedEncoder, TextRejected
from longshore.protocol.errors import ConfigError
from tests.deploy.gateway.conftest import StartGateway
from tests.deploy.tiny_tokenizer import byte_level_tokenizer, save_tokenizer

TEXT = "the ships, the crates é 🙂\n"
PANIC = "x" * 64
# Less than the library's limit of tries for a match, for each of many matches.
ENDLESS = ("x" * 20 + " ") * 100_000


def save(folder: Path, *pre_tokenizers: Any, **parts: Any) -> None:
    spec = json.loads(byte_level_tokenizer().to_str())
    parts["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [*pre_tokenizers, spec["pre_tokenizer"]],
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec | parts))


def split(regex: str) -> dict[str, Any]:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


@pytest.fixture
def isolated(tmp_path: Path) -> Iterator[ModelTokenizer]:
    save(tmp_path, split("(x+x+)+y"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.max_inline_characters < 0
    yield tokenizer
    tokenizer.close()


def test_the_tokens_are_those_of_this_process(isolated: ModelTokenizer, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    local = load_tokenizer(tmp_path)
    assert local is not None
    text = TEXT * 2000
    assert isolated.encode(text) == local.encode(text)
    assert isolated.encode("") == local.encode("")
    assert isolated.encode_rendered(TEXT) == local.encode_rendered(TEXT)
    assert isolated.encode_each([TEXT, "the"]) == local.encode_each([TEXT, "the"])
    for limit in (1, 10, 30_000):
        for ends in ({"keeps_end": True}, {"keeps_end": False}):
            expected = local.encode_cut(text, limit, with_special=True, **ends)
            assert isolated.encode_cut(text, limit, with_special=True, **ends) == expected
            assert isolated.cut(text, limit, **ends) == local.cut(text, limit, **ends)
    pairs = [each.join(each.part(TEXT), each.part("the", 1)) for each in (isolated, local)]
    assert pairs[0] == pairs[1]
    assert isolated.decode(isolated.encode(TEXT)) == local.decode(local.encode(TEXT))


def test_a_text_at_which_it_panics_is_rejected_and_the_next_one_is_not(
    isolated: ModelTokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        with pytest.raises(TextRejected, match=r"fails: .*retry-limit-in-match over"):
            isolated.encode(PANIC)
        assert isolated.encode("the")
    assert capfd.readouterr().err == ""


def test_a_process_that_takes_too_long_is_killed_and_replaced(
    isolated: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = isolated._encoder
    assert isinstance(encoder, IsolatedEncoder)
    killed = encoder._process
    assert killed is not None
    monkeypatch.setattr(tokenizer_process, "DEADLINE_S", 0.5)
    with pytest.raises(TextRejected, match=r"took longer than 0\.5 s"):
        isolated.encode(ENDLESS)
    assert killed.poll() is not None
    monkeypatch.undo()
    assert isolated.encode("the")
    assert encoder._process is not killed


def test_a_process_that_needs_too_much_memory_dies_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenfold = {"type": "Replace", "pattern": {"String": "\ue000"}, "content": "\ue000" * 10}
    save(tmp_path, normalizer={"type": "Sequence", "normalizers": [tenfold] * 12})
    monkeypatch.setattr(tokenizer_process, "DEADLINE_S", 60.0)
    encoder = IsolatedEncoder(tmp_path / "tokenizer.json")
    with pytest.raises(TextRejected, match="more than 4 GiB of memory"):
        encoder.ids(["\ue000"], with_special=False)
    assert encoder.ids(["the"], with_special=False)
    encoder.close()


def test_the_process_ends_with_its_connection(isolated: ModelTokenizer) -> None:
    encoder = isolated._encoder
    assert isinstance(encoder, IsolatedEncoder)
    process, connection = encoder._process, encoder._socket
    assert process is not None
    assert connection is not None
    connection.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAA"}},
            "Cannot parse precompiled_charsmap",
        ),
        (
            {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
            "chunk size must be non-zero",
        ),
        ({"pre_tokenizer": split("(a")}, "end pattern with unmatched parenthesis"),
        ({"pre_tokenizer": split("(a|aa)+$")}, "retry-limit-in-match over"),
        ({"normalizer": {"type": "Later"}}, "tokenizer fails"),
    ],
    ids=["table", "chunks", "no regex", "exponential", "type"],
)
def test_a_tokenizer_that_fails_at_common_texts_is_refused_in_one_line(
    tmp_path: Path, parts: dict[str, Any], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = json.loads(byte_level_tokenizer().to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | parts))
    with pytest.raises(ConfigError) as refusal:
        load_tokenizer(tmp_path)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_text_that_costs_too_much_is_a_400_and_others_are_served_meanwhile(
    start_gateway: StartGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def body(text: str) -> dict[str, Any]:
        if "chat" in path:
            return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        return {"prompt": text} if path == "/tokenize" else {"prompt": text, "max_tokens": 1}

    save(tmp_path, split("(x+x+)+y"))
    async with start_gateway(tokenizer=False, max_body_bytes=1 << 20) as gateway:
        monkeypatch.setattr(tokenizer_process, "DEADLINE_S", 1.0)
        costly = asyncio.create_task(gateway.post(path, body(ENDLESS[:15_000])))
        num_served = 0
        while not costly.done():
            answer = await gateway.post("/v1/completions", {"prompt": [4, 5], "max_tokens": 2})
            assert answer.status == 200
            num_served += 1
        assert num_served > 1
        monkeypatch.undo()
        for answer, reason in (
            (await costly, "took longer than 1 s"),
            (await gateway.post(path, body(PANIC)), "retry-limit-in-match over"),
        ):
            assert answer.status == 400
            error = json.loads(answer.body)["error"]
            assert error["code"] == "tokenizer_failed"
            assert reason in error["message"]
        assert (await gateway.post(path, body("the"))).status == 200
