"""What names a request's session."""

from typing import Any

import pytest

from longshore.deploy.gateway.api.session_key import session_key


@pytest.mark.parametrize(
    ("headers", "others", "expected"),
    [
        ([], (None, None), None),
        ([], (None, "a user"), "a user"),
        ([], ("a key", "a user"), "a key"),
        ([(b"x-session-id", b"a header")], ("a key", "a user"), "a header"),
        ([(b"x-session-id", b"")], ("", "a user"), "a user"),
        ([(b"x-other", b"a header"), (b"x-session-id", b"\xff")], (None,), "\xff"),
    ],
)
def test_the_header_precedes_the_parameters(
    headers: Any, others: tuple[str | None, ...], expected: str | None
) -> None:
    assert session_key({"headers": headers}, "x-session-id", *others) == expected


def test_without_the_policy_no_request_has_a_session() -> None:
    assert session_key({"headers": [(b"x-session-id", b"a")]}, None, "a key") is None
