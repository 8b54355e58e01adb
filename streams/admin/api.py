"""The operators' API: JSON over HTTP, below `/api`.

    GET  /api/stats                       what lives in this process
    GET  /api/calls                       calls, the newest first: ?state=&text=&before=&limit=
    GET  /api/calls/ID                    one call, and how much its client has not confirmed
    GET  /api/calls/ID/messages           its kept messages: ?after=&limit=
    GET  /api/connections                 the open connections
    POST /api/calls/ID/cancel             cancel the call; its client is told so
    POST /api/calls/ID/answer             answer a question: {"requestId": …, "result": {…}}
    POST /api/connections/N/cut           close a connection
    POST /api/drain                       {"graceS": …}: take no new calls, and end the process
    GET  /api/events                      server-sent events: see `streams.admin.feed`

ID is the beginning of a call's id. A POST needs `--admin-write`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Final, TypeVar

import msgspec

from streams.admin.changes import Answering, Changes
from streams.admin.endpoint import Number, Route, journal_errors, query_of, respond_json
from streams.exchange import HttpError, Request, Responder
from streams.observe.details import Details
from streams.observe.registry import TEXT_LETTERS_MAX, Registry, State, Wanted

CALLS_USUAL: Final = 100  # on a page
MESSAGES_USUAL: Final = 100
MESSAGES_MAX: Final = 1_000
GRACE_S_MAX: Final = 7 * 86_400.0

_T = TypeVar("_T")


class _CallsAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The query of a list of calls."""

    state: str = ""
    text: str = ""
    before: Number | None = None
    limit: Number = CALLS_USUAL


class _MessagesAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The query of a list of messages."""

    after: Number = 0
    limit: Number = MESSAGES_USUAL


class _Drain(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """How to drain. Without a grace the server's own counts."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=GRACE_S_MAX)] | None = None


class Api:
    """The answers of the API.

    `about` returns what the counts do not have, such as the version. `drain` begins a drain.
    """

    def __init__(
        self,
        registry: Registry,
        changes: Changes,
        *,
        about: Callable[[], Mapping[str, object]] = dict,
        drain: Callable[[float | None], float],
    ) -> None:
        self._registry = registry
        self._details = Details(registry)
        self._changes = changes
        self._about = about
        self._drain_in = drain

    @property
    def routes(self) -> tuple[Route, ...]:
        """The table."""
        return (
            Route("GET", "/api/stats", self._stats),
            Route("GET", "/api/calls", self._calls),
            Route("GET", "/api/calls/{}", self._call),
            Route("GET", "/api/calls/{}/messages", self._messages),
            Route("GET", "/api/connections", self._connections),
            Route("POST", "/api/calls/{}/cancel", self._cancel, "write"),
            Route("POST", "/api/calls/{}/answer", self._answer, "write"),
            Route("POST", "/api/connections/{}/cut", self._cut, "write"),
            Route("POST", "/api/drain", self._drain, "write"),
        )

    async def _stats(self, _: Request, responder: Responder) -> None:
        counts = msgspec.to_builtins(self._registry.counts())
        await respond_json(responder, {**self._about(), **counts})

    async def _calls(self, request: Request, responder: Responder) -> None:
        asked = query_of(request, _CallsAsked)
        with journal_errors():
            page = await self._registry.calls(
                before=asked.before, limit=asked.limit, wanted=wanted(asked.state, asked.text)
            )
        await respond_json(responder, page)

    async def _call(self, _: Request, responder: Responder, prefix: str) -> None:
        with journal_errors():
            call = await self._details.call(prefix)
        await respond_json(responder, call)

    async def _messages(self, request: Request, responder: Responder, prefix: str) -> None:
        asked = query_of(request, _MessagesAsked)
        with journal_errors():
            found = await self._details.messages(
                prefix, max(0, asked.after), limit=min(max(1, asked.limit), MESSAGES_MAX)
            )
        await respond_json(responder, found)

    async def _connections(self, _: Request, responder: Responder) -> None:
        await respond_json(responder, self._registry.connections())

    async def _cancel(self, _: Request, responder: Responder, prefix: str) -> None:
        stream = await self._found(prefix)
        await respond_json(responder, {"cancelled": await self._changes.cancel(stream)})

    async def _answer(self, request: Request, responder: Responder, prefix: str) -> None:
        answer = _body_of(request, Answering)
        stream = await self._found(prefix)
        await respond_json(responder, {"answered": await self._changes.answer(stream, answer)})

    async def _found(self, prefix: str) -> str:
        with journal_errors():
            return await self._registry.find(prefix)

    async def _cut(self, _: Request, responder: Responder, number: str) -> None:
        if not (number.isascii() and number.isdecimal()):
            raise HttpError(404, "Connections have numbers.")
        self._changes.cut(int(number))
        await respond_json(responder, {"cut": int(number)})

    async def _drain(self, request: Request, responder: Responder) -> None:
        grace_s = self._drain_in(_body_of(request, _Drain).grace_s)
        await respond_json(responder, {"draining": True, "graceS": grace_s}, 202)


def _body_of(request: Request, kind: type[_T]) -> _T:
    """The body of a request, as a struct; an empty one is `{}`. Raises `HttpError`."""
    try:
        return msgspec.json.decode(request.body or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpError(400, f"The body is wrong: {error}.") from None


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
