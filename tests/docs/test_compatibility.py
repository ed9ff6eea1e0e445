"""The table of docs/compatibility.md. tests/clients/ compares it with what works."""

import json
import re

from tests.clients.compatibility import CLIENTS, HERE, PAGE, clients_of, page_with, table


def test_table_is_as_the_script_writes_it() -> None:
    page = PAGE.read_text("utf-8")
    assert page_with(page, table(clients_of(page))) == page


def test_clients_and_versions_are_those_that_are_installed() -> None:
    """Also noticed where no client is installed."""
    pinned = json.loads((HERE / "ai_sdk" / "package.json").read_text())["dependencies"]
    files = {path.stem: path.read_text() for path in HERE.glob("requirements/*.txt")}
    for text in files.values():
        pinned |= re.findall(r"^([\w-]+)(?:\[\w+\])?==(.+)$", text, re.MULTILINE)
    assert {*files, "ai_sdk"} == set(CLIENTS)
    documented = clients_of(PAGE.read_text("utf-8"))
    assert len(documented) == len(CLIENTS)
    assert {client.package: client.version for client in documented}.items() <= pinned.items()


def test_every_client_of_the_table_is_explained() -> None:
    _, _, settings = PAGE.read_text("utf-8").partition("## Settings")
    explained = re.findall(r"^\| `([\w-]+)`", settings, re.MULTILINE)
    assert explained == [client.package for client in clients_of(PAGE.read_text("utf-8"))]
