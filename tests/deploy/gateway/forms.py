"""Forms as clients send them."""

import secrets
from collections.abc import Mapping


def encode_form(
    fields: Mapping[str, str | list[str]], files: Mapping[str, bytes]
) -> tuple[str, bytes]:
    """The content type and the body. A field with a list of values occurs several times."""
    boundary = secrets.token_hex(16)
    parts = [
        (f'name="{name}"', value.encode())
        for name, values in fields.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    parts += [(f'name="{name}"; filename="sound.wav"', data) for name, data in files.items()]
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {name}\r\n\r\n".encode() + data + b"\r\n"
        for name, data in parts
    )
    return f"multipart/form-data; boundary={boundary}", body + f"--{boundary}--\r\n".encode()
