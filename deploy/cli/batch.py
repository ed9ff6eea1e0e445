"""`longshore batch` and `longshore run-batch`: answer the requests of a file, a line each."""

import asyncio
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from tqdm import tqdm

from longshore.deploy.batch.lines import (
    BadLine,
    BatchAnswer,
    BatchLine,
    OutputFile,
    check_lines,
    raw_lines,
    read_line,
)
from longshore.deploy.batch.run import run_lines
from longshore.deploy.bench.sse_client import HttpAnswer, HttpEndpoint
from longshore.deploy.cli.client_options import BatchOptions, RunBatchOptions
from longshore.deploy.cli.serve import serve
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.supervisor.log_lines import LINE_FORMATS
from longshore.deploy.supervisor.logs import set_up_logging
from longshore.deploy.topology.node_plan import whole_deployment
from longshore.protocol.errors import ConfigError, LongshoreError

logger = logging.getLogger(__name__)

MAX_RETRY_S: Final = 30.0
MAX_UNREACHABLE_S: Final = 120.0
"""How long a server may not be reached, for example while it is restarted."""
_BUSY: Final = (429, 503)


class BatchFailed(LongshoreError):
    """The server cannot be reached, or rejects all requests."""


def batch(file: Path, options: BatchOptions) -> bool:
    """Answer the requests of a file with a running server. False if one was rejected. Raises
    ConfigError for a file that cannot be used, BatchFailed if the server cannot be used."""
    endpoint = HttpEndpoint(options.url, api_key=options.api_key)
    return asyncio.run(
        _BatchFile(file, options.output or default_output(file)).run(
            endpoint, options.max_concurrency, options.timeout_s
        )
    )


def run_batch(options: RunBatchOptions, server: ServeOptions) -> bool:
    """Answer the requests of a file with a server of its own, which ends with them. As `batch`."""
    file = _BatchFile(options.input_file, options.output_file)  # first of all: serving takes long
    file.check()
    key = secrets.token_hex()
    server = replace(server, host="127.0.0.1", port=0, api_key=(key,), api_key_file=None)
    set_up_logging(server.log_level, LINE_FORMATS[server.log_format])
    results: list[bool | Exception] = []

    def work(url: str) -> None:
        try:
            endpoint = HttpEndpoint(url, api_key=key)
            results.append(
                asyncio.run(file.run(endpoint, options.max_concurrency, options.timeout_s))
            )
        except Exception as error:
            results.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # as an operator would stop the server

    serve(
        [read_model_folder(options.model, server.state_dir)],
        whole_deployment(server),
        announce=lambda line: None,
        on_ready=lambda url: threading.Thread(target=work, args=(url,), daemon=True).start(),
    )
    match results:
        case [bool() as are_all_good]:
            return are_all_good
        case [Exception() as error]:
            raise error
    raise BatchFailed("stopped before all requests were answered; run the command again to go on")


def default_output(file: Path) -> Path:
    """Beside the file: `NAME.out.jsonl`."""
    return file.with_name(f"{file.stem}.out.jsonl")


class _BatchFile:
    """A file of requests, and the file of its answers."""

    def __init__(self, source: Path, output: Path) -> None:
        self._source = source
        self._output = output

    def check(self) -> int:
        """The number of requests. Raises ConfigError for a file that cannot be used."""
        if self._output.exists() and self._source.samefile(self._output):
            raise ConfigError(f"{self._output} is the file of the requests; choose another output")
        try:
            with self._source.open("rb") as source:
                return check_lines(source)
        except OSError as error:
            raise ConfigError(f"{self._source} cannot be read: {error.strerror}") from error
        except BadLine as error:
            raise ConfigError(f"{self._source}: {error}") from error

    async def run(self, endpoint: HttpEndpoint, max_concurrency: int, timeout_s: float) -> bool:
        """Answer what has no answer yet. False if one of these requests was rejected."""
        total = self.check()
        with ExitStack() as stack:
            try:
                output = OutputFile(self._output)
            except OSError as error:
                raise ConfigError(f"{self._output} cannot be written: {error.strerror}") from error
            stack.callback(output.close)
            source = stack.enter_context(self._source.open("rb"))
            lines = _lines_after(source, output)
            bar = stack.enter_context(
                tqdm(
                    total=total,
                    initial=output.num_lines,
                    unit="request",
                    disable=not sys.stderr.isatty(),
                    file=sys.stderr,
                )
            )
            num_rejected = 0

            async def write(answers: Sequence[BatchAnswer]) -> None:
                nonlocal num_rejected
                num_rejected += sum(not answer.is_good for answer in answers)
                output.write(answers)
                bar.update(len(answers))

            await run_lines(
                lines,
                lambda line: _answer(endpoint, line, timeout_s),
                write,
                lambda num_own: max_concurrency,
            )
        print(f"{total} requests, {num_rejected} rejected: {self._output}", file=sys.stderr)
        return num_rejected == 0


def _lines_after(source: BinaryIO, output: OutputFile) -> Iterator[BatchLine]:
    """The requests without an answer. Raises ConfigError if the output is that of another file."""
    numbered = raw_lines(source)
    last_id = None
    for index in range(output.num_lines):
        number, data = next(numbered, (index + 1, None))
        if data is None:
            break
        last_id = read_line(number, data).custom_id
    if last_id != output.last_id:
        raise ConfigError(
            f"the output has {output.num_lines} answers, the last of which is to "
            f"{output.last_id!r}, where the file has {last_id!r}; choose another output"
        )
    for number, data in numbered:
        yield read_line(number, data)


async def _answer(endpoint: HttpEndpoint, line: BatchLine, timeout_s: float) -> BatchAnswer:
    """Waits while the server is busy or restarts. Raises BatchFailed."""
    body = msgspec.json.encode(line.body)
    delay_s, unreachable_s = 1.0, 0.0
    while True:
        try:
            answer = await endpoint.request("POST", line.url, body, timeout_s=timeout_s)
        except (OSError, TimeoutError) as error:
            if unreachable_s >= MAX_UNREACHABLE_S or isinstance(error, TimeoutError):
                raise BatchFailed(
                    f"request {line.custom_id!r} was not answered: {error or 'timeout_s is over'}; "
                    "run the command again to go on"
                ) from error
            unreachable_s += delay_s
        else:
            if answer.status in (401, 403):
                raise BatchFailed(f"the server rejects the requests: {_message(answer)}")
            if answer.status not in _BUSY:
                request_id = answer.headers.get("x-request-id")
                return BatchAnswer.of(line, answer.status, request_id, answer.body)
            unreachable_s = 0.0
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_RETRY_S)


def _message(answer: HttpAnswer) -> str:
    return answer.body.decode(errors="replace")[:300]
