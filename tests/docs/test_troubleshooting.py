"""The messages that docs/troubleshooting.md explains exist in the code."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain

import pytest

from longshore.deploy.cli.main import main
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ELLIPSIS = "…"
HOLE = "\0"
_PERCENT = re.compile(r"%(?:\.\d+)?[sdgrf]")


def quoted_messages() -> list[str]:
    """The messages in block quotes, and those in the second column of the table of statuses."""
    text = PAGE.read_text(encoding="utf-8")
    quotes = re.findall(r"^> (.+)$", text, re.M)
    cells = [row.split(" | ")[1] for row in re.findall(r"^\| \d{3} .*$", text, re.M)]
    return quotes + [message for cell in cells for message in re.findall(r"`([^`]{25,})`", cell)]


@cache
def texts_of_the_code() -> list[str]:
    """Every string literal of the product, with a HOLE for each inserted value."""
    folders = ("protocol", "scheduler", "worker", "connectors", "deploy")
    files = chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders)
    return [text for path in files for text in literals(ast.parse(path.read_text("utf-8")))]


def literals(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _PERCENT.sub(HOLE, node.value)


def test_messages_are_found_on_the_page() -> None:
    messages = quoted_messages()
    assert len(messages) > 25
    assert all(len(message.replace(ELLIPSIS, "").strip()) > 10 for message in messages)


@pytest.mark.parametrize("message", quoted_messages())
def test_message_stands_in_the_code(message: str) -> None:
    parts = (re.escape(part) for part in message.split(ELLIPSIS))
    pattern = re.compile(f"[^{HOLE}]*?".join(parts).replace(f"[^{HOLE}]*?", f"(?:.*{HOLE}.*)?"))
    assert any(pattern.search(text) for text in texts_of_the_code()), (
        "no string literal of the code reads so any more; write on the page what it says now"
    )


def test_the_variable_that_a_kubernetes_service_makes_is_rejected_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGSHORE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setattr(sys, "argv", ["longshore", "serve"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Invalid value for LONGSHORE_PORT" in said
    assert "tcp://10.0.0.1:8000" in said
