"""The gateways of one deployment ask each other, over private sockets in the runtime directory.

A scrape or a probe of the shared port reaches one of them, which answers for all. A question is a
line, its answer everything up to the end of the connection. Nobody waits long: a gateway that is
stopped or hangs is left out, and said to be.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from longshore.protocol.logs.limits import LogLimit

ANSWER_TIMEOUT_S: Final = 1.0
MAX_QUESTION_BYTES: Final = 64

ENGINE_FAMILIES: Final = (b"longshore_scheduler_", b"longshore_worker_")
"""Metrics of engines: every gateway has them all, so those of one are given."""

READY: Final = b"ready"

logger = logging.getLogger(__name__)


class Siblings:
    """All gateways of a deployment as one of them sees them.

    number:  of this one.
    paths:   of their sockets, in order of their numbers; empty or one path: it is alone.
    answers: to the questions, which are `metrics` and `ready` (READY, or why not); never empty.
    """

    def __init__(
        self, number: int, paths: Sequence[str], answers: Mapping[str, Callable[[], bytes]]
    ) -> None:
        self.number = number
        self._paths = paths if len(paths) > 1 else ()
        self._answers = {name.encode(): answer for name, answer in answers.items()}
        self._server: asyncio.Server | None = None
        self._warnings = LogLimit(logger)  # anybody may ask for /ready

    async def listen(self) -> None:
        """From now on the others get answers."""
        if self._paths:
            path = self._paths[self.number]
            self._server = await asyncio.start_unix_server(self._answer, path)

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                question = await reader.read(MAX_QUESTION_BYTES)
                answer = self._answers.get(question.rstrip())
                writer.write(b"" if answer is None else answer())
                await writer.drain()
        except (OSError, TimeoutError):
            logger.debug("another gateway did not wait for its answer")
        finally:
            writer.close()

    async def ask(self, question: str) -> list[bytes | None]:
        """The answers in order of the gateways' numbers, this one's without a connection; None
        from one that does not answer in time."""
        if not self._paths:
            return [self._answers[question.encode()]()]
        return await asyncio.gather(
            *(self._ask_one(number, question) for number in range(len(self._paths)))
        )

    async def _ask_one(self, number: int, question: str) -> bytes | None:
        if number == self.number:
            return self._answers[question.encode()]()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._paths[number])
                try:
                    writer.write(question.encode() + b"\n")
                    return await reader.read() or None
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            why = "does not answer" if isinstance(error, TimeoutError) else str(error)
            self._warnings.warning("gateway %d was asked for %s: %s", number, question, why)
            return None

    async def metrics(self) -> bytes:
        """Of the deployment, in Prometheus' text format."""
        answers = await self.ask("metrics")
        own = answers[self.number if self._paths else 0]
        assert own is not None
        return merged_metrics(answers, self.number) if self._paths else own

    async def not_ready_reason(self) -> str | None:
        """The first gateway's that would take no request; None if all of them would."""
        for number, answer in enumerate(await self.ask("ready")):
            if answer is None:
                return f"gateway {number} does not answer"
            if answer != READY:
                reason = answer.decode()
                return f"gateway {number}: {reason}" if self._paths else reason
        return None


def merged_metrics(texts: Sequence[bytes | None], own: int) -> bytes:
    """One text of several in Prometheus' format: samples get the label `gateway`, and those of
    engines are taken from `own` as they are. `longshore_gateway_up` tells who is in it."""
    heads: dict[bytes, bytes] = {}
    samples: dict[bytes, list[bytes]] = {}
    for number, text in enumerate(texts):
        for family in (text or b"").split(b"# HELP ")[1:]:
            name = family.split(b" ", 1)[0]
            is_of_engine = name.startswith(ENGINE_FAMILIES)
            if is_of_engine and number != own:
                continue
            lines = family.splitlines()
            heads.setdefault(name, b"# HELP " + b"\n".join(lines[:2]))
            label = partial(_labelled, label=b'gateway="%d"' % number)
            samples.setdefault(name, []).extend(
                lines[2:] if is_of_engine else [label(line) for line in lines[2:]]
            )
    up = [
        b'longshore_gateway_up{gateway="%d"} %d' % (n, t is not None) for n, t in enumerate(texts)
    ]
    merged = [
        b"# HELP longshore_gateway_up Whether this gateway's numbers are among these",
        b"# TYPE longshore_gateway_up gauge",
        *up,
    ]
    for name, head in heads.items():
        merged += [head, *samples[name]]
    return b"\n".join(merged) + b"\n"


def _labelled(line: bytes, label: bytes) -> bytes:
    """A name ends with its labels' brace or, without any, a space."""
    name, _, value = line.partition(b" ")
    if b"{" not in name:
        return b"%s{%s} %s" % (name, label, value)
    name, _, rest = line.partition(b"{")
    return b"%s{%s,%s" % (name, label, rest)
