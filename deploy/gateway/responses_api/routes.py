"""The paths of stored responses."""

from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from longshore.deploy.gateway.api.errors import ApiError
from longshore.deploy.gateway.http.middleware import api_key_of
from longshore.deploy.gateway.responses_api.bodies import (
    CANCELLED,
    DeletedResponse,
    InputItemList,
    StoredResponse,
)
from longshore.deploy.gateway.responses_api.store import ResponseStore, with_response
from longshore.deploy.requests.errors import invalid
from longshore.protocol.errors import shortened

DEFAULT_ITEMS: Final = 20
MAX_ITEMS: Final = 100


class StoredResponseRoutes:
    """Shows, deletes and cancels the responses of the API key that asks.

    store: None: there are none.
    """

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store
        path = "/v1/responses/{response_id}"
        self.routes = (
            # One route, so that a rejected method gets all allowed ones.
            Route(path, self._show_or_delete, methods=["GET", "DELETE"]),
            Route(f"{path}/cancel", self._cancel, methods=["POST"]),
            Route(f"{path}/input_items", self._input_items, methods=["GET"]),
        )

    async def _show_or_delete(self, request: Request) -> Response:
        return await (self._delete if request.method == "DELETE" else self._show)(request)

    async def _show(self, request: Request) -> Response:
        _check_query(request, ())
        _, _, record = await self._find(request)
        return _json(record.response)

    async def _delete(self, request: Request) -> Response:
        store, owner, record = await self._find(request)
        await store.delete(owner, record.response.id)
        return _json(DeletedResponse(record.response.id))

    async def _cancel(self, request: Request) -> Response:
        store, owner, record = await self._find(request)
        if not record.response.background:
            raise invalid(
                "only a response that is computed in the background can be cancelled; close the "
                "connection of another one"
            )
        if await store.end(owner, record.response.id):
            await store.put(owner, with_response(record, status=CANCELLED))
        return _json((await self._find(request))[2].response)

    async def _input_items(self, request: Request) -> Response:
        _check_query(request, ("after", "limit", "order"))
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_ITEMS))
        if order not in ("asc", "desc"):
            raise invalid(f"order={shortened(order)!r} must be asc or desc", param="order")
        is_number = limit.isascii() and limit.isdecimal() and len(limit) <= 3
        if not (is_number and 1 <= int(limit) <= MAX_ITEMS):
            raise invalid(
                f"limit={shortened(limit)!r} must be between 1 and {MAX_ITEMS}", param="limit"
            )
        _, _, record = await self._find(request)
        items = list(record.input_items)
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            ids = [item.id for item in items]
            if after not in ids:
                raise invalid(f"there is no item {shortened(after)!r}", param="after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return _json(
            InputItemList(data=page, first_id=first, last_id=last, has_more=len(page) < len(items))
        )

    async def _find(self, request: Request) -> tuple[ResponseStore, str, StoredResponse]:
        """Raises RequestError if the API key has no such response."""
        owner = api_key_of(request.scope).owner
        response_id = request.path_params["response_id"]
        record = None if self._store is None else await self._store.get(owner, response_id)
        if self._store is None or record is None:
            raise ApiError(
                404,
                f"there is no stored response {shortened(response_id)!r}; it may have expired, or "
                "belong to another API key",
                code="response_not_found",
            )
        return self._store, owner, record


def _check_query(request: Request, supported: tuple[str, ...]) -> None:
    for name, value in request.query_params.items():
        if name not in supported and value != "false":
            raise invalid(
                f"the query parameter {shortened(name)!r} is not supported; remove it",
                param=name,
                code="unsupported_parameter",
            )


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
