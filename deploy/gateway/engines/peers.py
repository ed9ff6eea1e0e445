"""Queries between the gateways of a deployment, over private sockets in the runtime directory.

A scrape or a probe of the shared port reaches one gateway, which answers for all. A query is a
line; its answer ends with the connection. Queries have a short timeout: a gateway that is stopped
or hangs is omitted and reported as missing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from longshore.deploy.gateway.sample_label import (
    Family,
    families_of,
    joined,
    labelled,
    sample_label,
)
from longshore.deploy.gateway.vllm_metrics import OF_ENGINES
from longshore.protocol.logs.limits import LogLimit

ANSWER_TIMEOUT_S: Final = 1.0
MAX_QUESTION_BYTES: Final = 64

SHARED_FAMILIES: Final = (
    *(name.encode() for name in OF_ENGINES),
    b"longshore_scheduler_",
    b"longshore_worker_",
    b"longshore_kv_",
    b"longshore_process_restarts",
)
"""Metrics that are the same in every gateway, so one gateway's are used."""

READY: Final = b"ready"

logger = logging.getLogger(__name__)


class PeerGateways:
    """The gateways of a deployment, for one of them.

    number:  number of this gateway.
    paths:   socket paths of all gateways, by number; empty or one path: there are no others.
    answers: functions that answer the queries `metrics`, `ready` (READY, or the reason why not) and
             `uncached-clients` (a list in JSON); answers are never empty.
    """

    def __init__(
        self, number: int, paths: Sequence[str], answers: Mapping[str, Callable[[], bytes]]
    ) -> None:
        self.number = number
        self._paths = paths if len(paths) > 1 else ()
        self._answers = {name.encode(): answer for name, answer in answers.items()}
        self._server: asyncio.Server | None = None
        self._warnings = LogLimit(logger)  # /ready needs no API key

    async def listen(self) -> None:
        """Start to answer the others."""
        if self._paths:
            path = self._paths[self.number]
            self._server = await asyncio.start_unix_server(self._answer, path)

    def close(self) -> None:
        """Stop answering."""
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
            logger.debug("another gateway disconnected before its answer")
        finally:
            writer.close()

    async def ask(self, question: str) -> list[bytes | None]:
        """The answers by gateway number, this gateway's own without a connection; None for a
        gateway that does not answer in time."""
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
            self._warnings.warning("query `%s` to gateway %d failed: %s", question, number, why)
            return None

    def __len__(self) -> int:
        """Number of gateways on this host."""
        return max(1, len(self._paths))

    async def metrics(self) -> bytes:
        """Metrics of the deployment, in Prometheus' text format."""
        answers = await self.ask("metrics")
        own = answers[self.number if self._paths else 0]
        assert own is not None
        return merged_metrics(answers, self.number) if self._paths else own

    async def not_ready_reason(self) -> str | None:
        """The reason of the first gateway that is not ready; None if all are."""
        for number, answer in enumerate(await self.ask("ready")):
            if answer is None:
                return f"gateway {number} does not answer"
            if answer != READY:
                reason = answer.decode()
                return f"gateway {number}: {reason}" if self._paths else reason
        return None


def merged_metrics(texts: Sequence[bytes | None], own: int) -> bytes:
    """Merge texts in Prometheus' format. Samples get the label `gateway`; those of SHARED_FAMILIES
    are taken from `own` unchanged. `longshore_gateway_up` shows which gateways are included."""
    up = [
        b'longshore_gateway_up{gateway="%d"} %d' % (n, t is not None) for n, t in enumerate(texts)
    ]
    head = (
        b"# HELP longshore_gateway_up Whether this gateway's metrics are included\n"
        b"# TYPE longshore_gateway_up gauge"
    )
    merged = [Family(b"longshore_gateway_up", head, up)]
    for number, text in enumerate(texts):
        label = sample_label("gateway", str(number))
        for family in families_of(text or b""):
            if not family.name.startswith(SHARED_FAMILIES):
                own_samples = [labelled(line, label) for line in family.samples]
                merged.append(family._replace(samples=own_samples))
            elif number == own:
                merged.append(family)
    return joined(merged)
