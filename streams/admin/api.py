"""The operators' API: JSON over HTTP, below `/api`.

GET  /api/stats                 what lives in this process
GET  /api/calls                 calls, the newest first: ?state=&text=&before=&limit=
GET  /api/calls/ID              one call; ID is the beginning of its id
GET  /api/connections           the open connections
"""

from typing import Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from streams.admin.endpoint import Route, respond_json
from streams.exchange import HttpError, Request, Responder
from streams.observe.registry import NoSuchCall, Registry, State, Wanted

CALLS_USUAL: Final = 100  # on a page
FIELDS_MAX: Final = 20  # of a query
TEXT_LETTERS_MAX: Final = 200

_T = TypeVar("_T")


class _CallsAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The query of a list of calls."""

    state: str = ""
    text: str = ""
    before: int | None = None
    limit: int = CALLS_USUAL


class Api:
    """The answers of the API, from a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def routes(self) -> tuple[Route, ...]:
        """The table."""
        return (
            Route("GET", "/api/stats", self._stats),
            Route("GET", "/api/calls", self._calls),
            Route("GET", "/api/calls/{}", self._call),
            Route("GET", "/api/connections", self._connections),
        )

    async def _stats(self, _: Request, responder: Responder) -> None:
        await respond_json(responder, self._registry.counts())

    async def _calls(self, request: Request, responder: Responder) -> None:
        asked = query_of(request, _CallsAsked)
        page = await self._registry.calls(
            before=asked.before, limit=asked.limit, wanted=wanted(asked.state, asked.text)
        )
        await respond_json(responder, page)

    async def _call(self, _: Request, responder: Responder, prefix: str) -> None:
        try:
            call = await self._registry.call(await self._registry.find(prefix))
        except NoSuchCall as error:
            raise HttpError(404, str(error)) from None
        await respond_json(responder, call)

    async def _connections(self, _: Request, responder: Responder) -> None:
        await respond_json(responder, self._registry.connections())


def wanted(states: str, text: str) -> Wanted:
    """The calls in one of these states, separated by commas, and with a text.

    Raises `HttpError`.
    """
    names = [each for each in states.split(",") if each]
    try:
        found = frozenset(msgspec.convert(names, list[State]))
    except msgspec.ValidationError as error:
        raise HttpError(400, f"state: {error}.") from None
    return Wanted(found, text[:TEXT_LETTERS_MAX])


def query_of(request: Request, kind: type[_T]) -> _T:
    """The query of a request, as a struct. Raises `HttpError`."""
    try:
        given = dict(parse_qsl(request.query, max_num_fields=FIELDS_MAX))
        return msgspec.convert(given, kind, strict=False)
    except ValueError as error:
        raise HttpError(400, f"The query is wrong: {error}.") from None


def api_routes(registry: Registry) -> tuple[Route, ...]:
    """The routes of the API."""
    return Api(registry).routes
