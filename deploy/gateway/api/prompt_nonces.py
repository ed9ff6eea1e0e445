"""Parts of a system prompt that change with every request, such as a request's id or the time.

The cached prefix of a prompt ends where such a part begins. So a part that this server knows, or
that a setting describes, is left out of the prompt, or moved behind all that stays the same.
"""

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, cast, get_args

import msgspec

from longshore.deploy.gateway.api.unknown_fields import ignore_fields
from longshore.deploy.requests.chat_messages import ChatMessage, ContentPart
from longshore.protocol.errors import ConfigError, shortened
from longshore.protocol.pattern_cost import max_steps

Action = Literal["drop", "move"]

_ROLES: Final = ("system", "developer")


MAX_SEARCHED_CHARACTERS: Final = 16 << 10
"""Nonces are found in this much of a request's system messages: behind it, they end the cached
prefix late."""
MAX_STEPS: Final = 1024
"""Of all patterns of the setting, at each character: with MAX_SEARCHED_CHARACTERS, a bound of the
time that a request can take of the event loop, some 20 ms and in the worst case 200."""


class Nonce(NamedTuple):
    """name: what the response calls it. pattern: its text. action: `drop`: the prompt is without
    it, `move`: the prompt has it at the end of its last message that is not an answer."""

    name: str
    pattern: re.Pattern[str]
    action: Action


KNOWN: Final = (
    # Claude Code's first block of `system`, for billing. Its `cch` differs in each request. The
    # pattern is tried at one position only, so its repeats need no limit.
    Nonce(
        "x-anthropic-billing-header",
        re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*"),
        "drop",
    ),
)


def read_nonces(given: Sequence[str]) -> list[Nonce]:
    """The setting `prompt_nonces`: each is `ACTION:REGEX`. Raises ConfigError."""
    nonces: list[Nonce] = []
    num_steps = 0
    for each in given:
        try:
            nonces.append(_read_nonce(each))
        except ValueError as error:
            raise ConfigError(f"prompt_nonces={shortened(each)!r} {error}") from error
        try:
            num_steps += max_steps(nonces[-1].pattern.pattern)
        except ValueError as error:
            raise ConfigError(
                f"prompt_nonces={each!r} {error}; a text could hold up the server for long. Give "
                "each repeat a limit, such as {1,40}, and leave out choices within repeats"
            ) from error
        if num_steps > MAX_STEPS:
            raise ConfigError(
                f"prompt_nonces={each!r} makes {num_steps} steps possible at each character of a "
                f"system message; at most {MAX_STEPS} are allowed for all patterns together. Use "
                "shorter repeats, or those that take back nothing, such as [^;]{1,99}+"
            )
    return nonces


def _read_nonce(given: str) -> Nonce:
    """Raises ValueError, whose text goes on after the value."""
    action, colon, text = given.partition(":")
    if not colon or action not in get_args(Action):
        raise ValueError(
            "is not drop:REGEX or move:REGEX; drop leaves the matching text of system messages out "
            "of the prompt, move puts it at the end"
        )
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"has an invalid regular expression: {error}") from error
    if pattern.match(""):
        raise ValueError("matches the empty text; describe the part that changes")
    return Nonce(text, pattern, cast(Action, action))


class PromptNonces:
    """The known ones, and those of the setting `prompt_nonces`."""

    def __init__(self, given: Sequence[str] = ()) -> None:
        self._nonces = (*KNOWN, *read_nonces(given))

    def settle(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """The messages without the dropped nonces, which the response names, and with those to move
        at their new place. Raises RequestError for dropped ones in strict mode."""
        search = _Search(self._nonces)
        settled = [
            search.settle(message) if message.role in _ROLES else message for message in messages
        ]
        if search.moved:
            last = max(i for i, message in enumerate(settled) if message.role != "assistant")
            settled[last] = _with_text(settled[last], "\n".join(search.moved))
        return settled


class _Search:
    """The search of one request's messages. moved: the texts to move."""

    def __init__(self, nonces: Sequence[Nonce]) -> None:
        self.moved: list[str] = []
        self._nonces = nonces
        self._num_left = MAX_SEARCHED_CHARACTERS

    def settle(self, message: ChatMessage) -> ChatMessage:
        """The message without its nonces, and without parts that were nothing else."""
        content = message.content
        if not isinstance(content, list):
            return msgspec.structs.replace(message, content=self._cut(content or ""))
        parts = []
        for part in content:
            text = part.text or ""
            kept = self._cut(text)
            if kept == text:
                parts.append(part)
            elif kept.strip():
                parts.append(ContentPart(part.type, kept))
        return msgspec.structs.replace(message, content=parts)

    def _cut(self, text: str) -> str:
        limit = self._num_left
        self._num_left -= min(limit, len(text))
        for nonce in self._nonces:
            begin, kept = 0, []
            for match in nonce.pattern.finditer(text, 0, limit):
                if match.end() == limit < len(text):
                    break  # it may go on behind the limit
                kept.append(text[begin : match.start()])
                begin = match.end()
                if nonce.action == "move":
                    self.moved.append(match[0])
                else:
                    ignore_fields((f"prompt.{nonce.name}",))
            text = "".join((*kept, text[begin:]))
        return text


def _with_text(message: ChatMessage, text: str) -> ChatMessage:
    content = message.content
    if isinstance(content, list):
        return msgspec.structs.replace(message, content=[*content, ContentPart("text", text)])
    return msgspec.structs.replace(message, content=f"{content}\n{text}" if content else text)
