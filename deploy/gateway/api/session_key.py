"""What names the session of a request, for the routing policy `session_affinity`."""

from starlette.types import Scope


def session_key(scope: Scope, header: str | None, *others: str | None) -> str | None:
    """The value of the header, else the first of `others` that is given.

    header: its name in lower case; None: sessions do not matter.
    """
    if header is None:
        return None
    name = header.encode()
    for key, value in scope["headers"]:
        if key == name and value:
            given: str = value.decode("latin-1")
            return given
    return next((other for other in others if other), None)
