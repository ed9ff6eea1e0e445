"""Runs the batches of a gateway, with what other requests leave of the engines' capacity.

Whichever gateway claims a batch first runs it. One whose gateway has ended is claimed by another,
or by the next process, and goes on after the answers that its files have.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import BinaryIO, Final

import msgspec
from starlette.types import ASGIApp

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
from longshore.deploy.gateway.api.endpoint import Services
from longshore.deploy.gateway.api_keys import NO_KEY, ApiKey
from longshore.deploy.gateway.batches.bodies import (
    Batch,
    BatchFault,
    BatchFaults,
    BatchRecord,
    RequestCounts,
)
from longshore.deploy.gateway.batches.store import BatchStore
from longshore.deploy.gateway.http.inner_request import ask

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 50_000
"""Of a batch, as in OpenAI's API."""
MAX_RUNNING: Final = 16
"""Limit of the batches that a gateway runs at a time."""
SCAN_INTERVAL_S: Final = 2.0
EXPIRE_INTERVAL_S: Final = 3600.0
SAVE_INTERVAL_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
LEFT_SHARE: Final = 0.25
"""Share of the sequences that run at a time which batches leave free, so that another request need
not wait for one of theirs to finish."""
_BUSY: Final = (429, 503)


class BatchRunner:
    """app:      the gateway's, with its RequestMiddleware.
    services:    returns the services of the models; None: the engines are not ready.
    keys:        returns the API keys; empty: none is needed.
    model:       whose batches it runs.
    priority:    of requests that have none; None: priorities have no effect.
    """

    def __init__(
        self,
        store: BatchStore,
        app: ASGIApp,
        services: Callable[[], Services | None],
        keys: Callable[[], Sequence[ApiKey]],
        *,
        model: str,
        priority: int | None = None,
    ) -> None:
        self._store = store
        self._app = app
        self._services = services
        self._keys = keys
        self._model = model
        self._priority = priority
        self._running: dict[str, asyncio.Task[None]] = {}
        self._num_asked = 0
        self._is_wanted = asyncio.Event()

    def wake(self) -> None:
        """There is a new batch."""
        self._is_wanted.set()

    async def run(self) -> None:
        """Run batches until this is cancelled; then they go on with the next process."""
        expire_at_s = 0.0
        try:
            while True:
                try:
                    if time.monotonic() >= expire_at_s:
                        await asyncio.to_thread(self._store.delete_expired)
                        expire_at_s = time.monotonic() + EXPIRE_INTERVAL_S
                    if self._services() is not None:
                        await self._begin_batches()
                except OSError as error:
                    logger.warning("batches cannot be read: %s", error)
                try:
                    await asyncio.wait_for(self._is_wanted.wait(), SCAN_INTERVAL_S)
                    self._is_wanted.clear()
                except TimeoutError:
                    continue
        finally:
            running = tuple(self._running.values())
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    async def _begin_batches(self) -> None:
        for owner, record in await asyncio.to_thread(self._store.unfinished):
            batch_id = record.batch.id
            is_ours = record.model == self._model and batch_id not in self._running
            if is_ours and len(self._running) < MAX_RUNNING:
                task = asyncio.create_task(self._claim_and_run(owner, batch_id))
                self._running[batch_id] = task
                task.add_done_callback(partial(self._ended, batch_id))

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._running[batch_id]

    async def _claim_and_run(self, owner: str, batch_id: str) -> None:
        with ExitStack() as stack:
            try:
                if not stack.enter_context(self._store.claim(owner, batch_id)):
                    return
                record = await asyncio.to_thread(self._store.batch, owner, batch_id)
                await _BatchRun(self, owner, record).run()
            except Exception:
                logger.exception("batch %s stopped; it goes on later", batch_id)
                await asyncio.sleep(MAX_RETRY_S)

    def key_of(self, owner: str) -> ApiKey | None:
        """The key whose batch it is; None if it is no longer valid."""
        return next((key for key in self._keys() or (NO_KEY,) if key.owner == owner), None)

    def num_at_a_time(self, num_own: int) -> int:
        """How many lines of a batch may be asked, which has `num_own` now."""
        services = self._services()
        if services is None:
            return 0
        num_sequences = sum(
            ready.identity.max_num_seqs
            for service in services.all
            for client in service.client.clients.values()
            if (ready := client.ready) is not None
        )
        num_others = max(0, services.num_live_requests - self._num_asked)
        num_left = int(num_sequences * (1 - LEFT_SHARE)) - num_others - self._num_asked
        if not self._num_asked:
            num_left = max(1, num_left)  # so that it comes to an end
        return num_own + max(0, num_left)

    async def ask(self, line: BatchLine, key: ApiKey) -> BatchAnswer:
        """The answer to a line, once the gateway has one."""
        body = dict(line.body)
        if self._priority is not None:
            body.setdefault("priority", msgspec.Raw(b"%d" % self._priority))
        encoded = msgspec.json.encode(body)
        self._num_asked += 1
        try:
            delay_s = 1.0
            while True:
                answer = await ask(self._app, line.url, encoded, key)
                if answer.status not in _BUSY:
                    request_id = answer.headers.get("x-request-id")
                    return BatchAnswer.of(line, answer.status, request_id, answer.body)
                await asyncio.sleep(max(delay_s, float(answer.headers.get("retry-after", 0))))
                delay_s = min(2 * delay_s, MAX_RETRY_S)
        finally:
            self._num_asked -= 1


class _BatchRun:
    """One batch while this gateway runs it."""

    def __init__(self, runner: BatchRunner, owner: str, record: BatchRecord) -> None:
        self._runner = runner
        self._store = runner._store
        self._owner = owner
        self._record = record
        self._saved_s = 0.0

    @property
    def _batch(self) -> Batch:
        return self._record.batch

    def _now(self) -> int:
        return int(self._store.clock())

    async def run(self) -> None:
        """Until it has ended. If it is interrupted, it is as it was."""
        await asyncio.to_thread(self._check)
        if self._batch.status == "failed":
            return
        key = self._runner.key_of(self._owner)
        if key is None:
            self._fail(BatchFault(code="invalid_api_key", message="its API key is not valid"))
            return
        ids = (self._record.output_id, self._record.error_id)
        paths = (self._store.path(self._owner, file_id) for file_id in ids)
        with ExitStack() as stack:
            files = []
            for path in paths:
                file = await asyncio.to_thread(OutputFile, path)
                stack.callback(file.close)
                files.append(file)
            good, bad = files
            source = stack.enter_context(
                open(self._store.path(self._owner, self._batch.input_file_id), "rb")
            )
            lines = _lines_after(source, good.num_lines + bad.num_lines, self._batch.endpoint)

            def write(answers: Sequence[BatchAnswer]) -> None:
                good.write([answer for answer in answers if answer.is_good])
                bad.write([answer for answer in answers if not answer.is_good])
                self._note_progress(good, bad)

            work = asyncio.ensure_future(
                run_lines(
                    lines,
                    lambda line: self._runner.ask(line, key),
                    lambda answers: asyncio.to_thread(write, answers),
                    self._runner.num_at_a_time,
                )
            )
            watch = asyncio.ensure_future(self._until_unwanted())
            try:
                await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                watch.cancel()
                await asyncio.wait((work, watch))
            self._count(good, bad)
            if work.cancelled():
                status = watch.result()
                ended: dict[str, object] = {"status": status, f"{status}_at": self._now()}
            else:
                ended = self._result(work.exception())
            await asyncio.to_thread(self._end, ended, good, bad)

    def _check(self) -> None:
        """Count the requests, unless that is done, and reject an input that is not valid."""
        if self._batch.status != "validating":
            return
        path = self._store.path(self._owner, self._batch.input_file_id)
        try:
            with open(path, "rb") as file:
                total = check_lines(file, (self._batch.endpoint,), max_lines=MAX_REQUESTS)
        except BadLine as error:
            self._fail(BatchFault(code=error.code, message=str(error), line=error.number))
            return
        except FileNotFoundError:
            self._fail(BatchFault(code="file_not_found", message="its input file was deleted"))
            return
        if not total:
            self._fail(BatchFault(code="empty_file", message="the input file has no requests"))
            return
        counts = RequestCounts(total)
        self._save(status="in_progress", in_progress_at=self._now(), request_counts=counts)

    def _count(self, good: OutputFile, bad: OutputFile) -> None:
        total = self._batch.request_counts.total
        counts = RequestCounts(total, good.num_lines, bad.num_lines)
        batch = msgspec.structs.replace(self._batch, request_counts=counts)
        self._record = msgspec.structs.replace(self._record, batch=batch)

    def _note_progress(self, good: OutputFile, bad: OutputFile) -> None:
        """Store the counts, at times. Raises _TooLarge if the files exceed the owner's limit."""
        noted = self._batch.request_counts
        is_noted = (noted.completed, noted.failed) == (good.num_lines, bad.num_lines)
        if is_noted or time.monotonic() - self._saved_s < SAVE_INTERVAL_S:
            return
        self._count(good, bad)
        self._save()
        if self._store.used_bytes(self._owner) > self._store.max_bytes:
            raise _TooLarge

    async def _until_unwanted(self) -> str:
        """Returns how the batch ends, once it is cancelled or its time is over."""
        while True:
            if await asyncio.to_thread(self._store.is_cancelled, self._owner, self._batch.id):
                return "cancelled"
            if self._store.clock() >= self._batch.expires_at:
                return "expired"
            await asyncio.sleep(SAVE_INTERVAL_S)

    def _result(self, error: BaseException | None) -> dict[str, object]:
        """What the record says of work that was not interrupted. Raises other errors than those of
        the batch."""
        if error is None:
            return {"status": "completed", "completed_at": self._now()}
        if not isinstance(error, _TooLarge):
            raise error
        message = (
            f"the files of this API key have more than {self._store.max_bytes} bytes "
            "(--stored-files-mib); delete some"
        )
        fault = BatchFault(code="storage_limit_exceeded", message=message)
        return {"status": "failed", "failed_at": self._now(), "errors": BatchFaults([fault])}

    def _end(self, ended: dict[str, object], good: OutputFile, bad: OutputFile) -> None:
        """Publish the answers, and store the last state."""
        ended["finalizing_at"] = self._now()
        for name, file, file_id in (
            ("output", good, self._record.output_id),
            ("error", bad, self._record.error_id),
        ):
            if file.num_lines:
                self._store.publish(
                    self._owner,
                    file_id,
                    filename=f"{self._batch.id}_{name}.jsonl",
                    purpose="batch_output",
                )
                ended[f"{name}_file_id"] = file_id
            else:
                self._store.discard(self._owner, file_id)
        self._save(**ended)

    def _fail(self, fault: BatchFault) -> None:
        self._save(status="failed", failed_at=self._now(), errors=BatchFaults([fault]))

    def _save(self, **changes: object) -> None:
        batch = msgspec.structs.replace(self._batch, **changes)
        self._record = msgspec.structs.replace(self._record, batch=batch)
        self._store.put(self._owner, self._record)
        self._saved_s = time.monotonic()


class _TooLarge(Exception):
    """The files of an API key exceed their limit."""


def _lines_after(source: BinaryIO, num_done: int, path: str) -> Iterator[BatchLine]:
    for index, (number, data) in enumerate(raw_lines(source)):
        if index >= num_done:
            yield read_line(number, data, (path,))
