"""The paths of files and batches, in OpenAI's format. Each API key has its own."""

import asyncio
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from longshore.deploy.batch.lines import PATHS
from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.api.parameters import read_parameters
from longshore.deploy.gateway.batches.bodies import (
    ENDED,
    Batch,
    BatchList,
    BatchRecord,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
)
from longshore.deploy.gateway.batches.store import MAX_BATCHES, BatchStore, new_file_id
from longshore.deploy.gateway.http.exchange import Exchange
from longshore.deploy.gateway.http.json_body import read_json_body
from longshore.deploy.gateway.http.middleware import api_key_of
from longshore.deploy.gateway.http.multipart import FormReader
from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened

MAX_BODY_BYTES: Final = 64 << 10
CHECK_BYTES: Final = 1 << 20
"""After so many bytes of an upload, the owner's files are measured again."""
MAX_METADATA: Final = 16
MAX_LISTED: Final = 10_000
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})([hd])")
_UNIT_S: Final = {"h": 3600, "d": 86_400}

ItemT = TypeVar("ItemT", FileObject, Batch)


class BatchRoutes:
    """store: None: the server keeps no files. model: whose batches are begun. wake: called when
    there is a new one."""

    def __init__(self, store: BatchStore | None, model: str, wake: Callable[[], None]) -> None:
        self._stored = store
        self._model = model
        self._wake = wake
        self.routes = (
            # One route for several methods, so that a rejected method gets all allowed ones.
            Route("/v1/files", self._files, methods=["GET", "POST"]),
            Route("/v1/files/{file_id}", self._file, methods=["GET", "DELETE"]),
            Route("/v1/files/{file_id}/content", self._content),
            Route("/v1/batches", self._batches, methods=["GET", "POST"]),
            Route("/v1/batches/{batch_id}", self._batch),
            Route("/v1/batches/{batch_id}/cancel", self._cancel, methods=["POST"]),
        )

    @property
    def _store(self) -> BatchStore:
        """Raises ApiError (404) if there is none."""
        if self._stored is None:
            raise ApiError(
                404,
                "this server keeps no files; start it with --stored-files-mib above 0",
                code="files_disabled",
            )
        return self._stored

    async def _files(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._upload(request)
        files = await asyncio.to_thread(self._store.files, api_key_of(request.scope).owner)
        purpose = request.query_params.get("purpose")
        chosen = [file for file in files if purpose in (None, file.purpose)]
        page, has_more = _page(request, chosen, MAX_LISTED)
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(FileList(data=page, has_more=has_more, first_id=first, last_id=last))

    async def _upload(self, request: Request) -> Response:
        store, owner = self._store, api_key_of(request.scope).owner
        file_id, file = await asyncio.to_thread(store.create, owner)
        num_unchecked = 0

        def take(data: bytes) -> None:
            nonlocal num_unchecked
            file.write(data)
            num_unchecked += len(data)
            if num_unchecked >= CHECK_BYTES:  # there may be other uploads
                num_unchecked = 0
                store.check_room(owner)

        try:
            with file:
                content_type = request.headers.get("content-type", "").encode("latin-1")
                reader = FormReader(content_type, take)
                async for part in request.stream():
                    await asyncio.to_thread(reader.feed, part)
                form = reader.finish()
                await asyncio.to_thread(file.flush)
                await asyncio.to_thread(store.check_room, owner)
                fields = dict(form.fields)
                if "file" not in form.files:
                    raise invalid("the form has no file; send one as `file`", param="file")
                if fields.get("purpose") != "batch":
                    raise invalid(
                        f"purpose={shortened(fields.get('purpose', ''))!r} is not supported; use "
                        "batch",
                        param="purpose",
                    )
            record = await asyncio.to_thread(
                store.publish,
                owner,
                file_id,
                filename=form.filenames["file"][:256],
                purpose="batch",
            )
        except BaseException:
            store.discard(owner, file_id)
            raise
        return _json(record)

    async def _file(self, request: Request) -> Response:
        owner, file_id = api_key_of(request.scope).owner, request.path_params["file_id"]
        record = await asyncio.to_thread(self._store.file, owner, file_id)
        if request.method == "GET":
            return _json(record)
        await asyncio.to_thread(self._store.discard, owner, file_id)
        return _json(DeletedFile(file_id))

    async def _content(self, request: Request) -> Response:
        owner, file_id = api_key_of(request.scope).owner, request.path_params["file_id"]
        await asyncio.to_thread(self._store.file, owner, file_id)
        path = self._store.path(owner, file_id)
        return FileResponse(path, media_type="application/octet-stream")

    async def _batches(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._create(request)
        records = await asyncio.to_thread(self._store.batches, api_key_of(request.scope).owner)
        batches = [self._shown(api_key_of(request.scope).owner, record) for record in records]
        page, has_more = _page(request, batches, 100)
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(BatchList(data=page, has_more=has_more, first_id=first, last_id=last))

    async def _create(self, request: Request) -> Response:
        store, owner = self._store, api_key_of(request.scope).owner
        exchange = Exchange(request.scope, request.receive, _never_send)
        body = await read_json_body(exchange, MAX_BODY_BYTES)
        asked = read_parameters(BatchRequest, body, rules={})
        if asked.endpoint not in PATHS:
            raise invalid(
                f"endpoint={shortened(asked.endpoint)!r} must be one of {', '.join(PATHS)}",
                param="endpoint",
            )
        if len(asked.metadata or ()) > MAX_METADATA:
            raise invalid(f"metadata has more than {MAX_METADATA} entries", param="metadata")
        window = _WINDOW.fullmatch(asked.completion_window)
        if window is None:
            raise invalid(
                f"completion_window={shortened(asked.completion_window)!r} must be a number of "
                "hours or days, as 24h or 7d",
                param="completion_window",
            )
        await asyncio.to_thread(store.file, owner, asked.input_file_id)
        if len(await asyncio.to_thread(store.batches, owner)) >= MAX_BATCHES:
            raise ApiError(
                429,
                f"this API key has {MAX_BATCHES} batches, which is the limit; they are deleted "
                "some days after they have ended (--stored-file-ttl-s)",
                code="too_many_batches",
            )
        now_s = int(store.clock())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            status="validating",
            created_at=now_s,
            expires_at=now_s + int(window[1]) * _UNIT_S[window[2]],
            metadata=asked.metadata,
        )
        record = BatchRecord(
            batch=batch, model=self._model, output_id=new_file_id(), error_id=new_file_id()
        )
        await asyncio.to_thread(store.put, owner, record)
        self._wake()
        return _json(batch)

    async def _batch(self, request: Request) -> Response:
        owner, batch_id = api_key_of(request.scope).owner, request.path_params["batch_id"]
        record = await asyncio.to_thread(self._store.batch, owner, batch_id)
        return _json(self._shown(owner, record))

    async def _cancel(self, request: Request) -> Response:
        owner, batch_id = api_key_of(request.scope).owner, request.path_params["batch_id"]
        record = await asyncio.to_thread(self._store.batch, owner, batch_id)
        if record.batch.status in ENDED:
            raise invalid(f"the batch {batch_id} is {record.batch.status}; it has ended")
        await asyncio.to_thread(self._store.cancel, owner, batch_id)
        self._wake()
        return _json(self._shown(owner, record))

    def _shown(self, owner: str, record: BatchRecord) -> Batch:
        batch = record.batch
        if batch.status in ENDED or not self._store.is_cancelled(owner, batch.id):
            return batch
        return msgspec.structs.replace(batch, status="cancelling")


async def _never_send(message: Message) -> None:
    raise AssertionError("the exchange only reads")


def _page(request: Request, items: Sequence[ItemT], most: int) -> tuple[Sequence[ItemT], bool]:
    """The items that the query asks for, which are newest first, and whether there are more."""
    query = request.query_params
    limit = query.get("limit", str(min(most, 20) if most <= 100 else most))
    is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 6
    if not (is_number and 1 <= int(limit) <= most):
        raise invalid(f"limit={shortened(limit)!r} must be between 1 and {most}", param="limit")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid(f"order={shortened(order)!r} must be asc or desc", param="order")
    if order == "asc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise invalid(f"there is no item {shortened(after)!r}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    return page, len(page) < len(items)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
