"""Forms are decoded to what the client encoded, and invalid forms are rejected."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.deploy.gateway.api.errors import status_of
from longshore.deploy.gateway.http.multipart import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    parse_form,
)
from longshore.deploy.requests.errors import RequestError
from tests.deploy.gateway.forms import encode_form

FILE = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nsound\r\n'
KIND = b"multipart/form-data; boundary=x"


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary(max_size=3000)
    | st.lists(st.sampled_from([b"\r", b"\n", b"-", b"--x", b"\r\n--"])).map(b"".join),
    fields=st.dictionaries(st.text("abcdef[]", min_size=1), st.text(max_size=50), max_size=5),
)
def test_form_comes_back_as_it_was_sent(content: bytes, fields: dict[str, str]) -> None:
    kind, body = encode_form(fields, {"file": content})
    form = parse_form(kind.encode(), body)
    assert form.files == {"file": content}
    assert dict(form.fields) == fields


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (b"", b"", "not multipart/form-data"),
        (b"application/json", b"{}", "not multipart/form-data"),
        (b"multipart/form-data", FILE, "not multipart/form-data"),
        (KIND, b"", "ends within"),
        (KIND, FILE, "ends within"),
        (KIND, b"no boundary", "not multipart/form-data"),
        (KIND, FILE + FILE + b"--x--\r\n", "several files 'file'"),
        (KIND, FILE.replace(b'name="file"', b"") + b"--x--\r\n", "has no name"),
        (KIND, FILE.replace(b"file", b"\xff") + b"--x--\r\n", "not multipart/form-data"),
    ],
    ids=range(9),
)
def test_what_is_no_form_is_rejected(kind: bytes, body: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        parse_form(kind, body)
    assert status_of(caught.value) == 400


def test_fields_are_few_and_small() -> None:
    field = b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\n%s\r\n'
    with pytest.raises(RequestError, match=f"more than {MAX_FIELDS} fields"):
        parse_form(KIND, field % b"" * (MAX_FIELDS + 1) + b"--x--\r\n")
    with pytest.raises(RequestError, match=f"longer than {MAX_FIELD_BYTES} bytes") as caught:
        parse_form(KIND, field % (b"a" * (MAX_FIELD_BYTES + 1)) + b"--x--\r\n")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("options", "is_file"),
    [
        (rb"name=file; filename*=UTF-8''a%20b.mp3", True),
        (rb"""name="a \"quoted\" name"; FileName*=x""", True),
        (rb'name="prompt; filename*=x"', False),
        (rb'name="prompt"; xfilename=x', False),
    ],
)
def test_part_is_a_file_whatever_charset_its_filename_has(options: bytes, is_file: bool) -> None:
    body = b"--x\r\ncontent-disposition: form-data; %s\r\n\r\nsound\r\n--x--\r\n" % options
    form = parse_form(KIND, body)
    assert list(form.files.values()) == [b"sound"] * is_file
    assert [value for _, value in form.fields] == ["sound"] * (not is_file)


def test_what_is_no_form_leaves_nothing_in_the_log() -> None:
    program = """
from longshore.deploy.requests.errors import InvalidRequest
from longshore.deploy.gateway.http.multipart import parse_form
from longshore.deploy.supervisor.logs import set_up_logging
set_up_logging("info")
try:
    parse_form(b"multipart/form-data; boundary=x", b"no boundary")
except InvalidRequest:
    print("refused")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert (ended.stdout, ended.stderr) == ("refused\n", "")
