"""Reasoning that clients keep without being able to read or change it, and send back.

OpenAI's clients know it as `encrypted_content` of reasoning, Anthropic's as its `signature`. So a
conversation that is not stored keeps its reasoning, and with it the prompts that are cached.
"""

import base64
import binascii
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES: Final = 12
_CONTEXT: Final = b"longshore reasoning 1"
KEY_BYTES: Final = 32


class ReasoningSeal:
    """AES-256-GCM.

    key: of the deployment, KEY_BYTES long; all gateways must have the same one. None: a new one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = AESGCM(secrets.token_bytes(KEY_BYTES) if key is None else key)

    def seal(self, reasoning: str) -> str:
        """ASCII text of about 4/3 of the length, different at each call."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, reasoning.encode(), _CONTEXT)
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str) -> str | None:
        """The reasoning; None: it was sealed by another deployment, or changed."""
        try:
            data = base64.b64decode(sealed, validate=True)
            nonce, content = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            return self._cipher.decrypt(nonce, content, _CONTEXT).decode()
        except (binascii.Error, InvalidTag, ValueError):
            return None
