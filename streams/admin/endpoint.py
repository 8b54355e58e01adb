"""The table of routes of the operator's endpoint.

Every feature enters its routes with `add`. A route is found by method and path; then the gate
(`streams.admin.gate`) decides whether the request may use it. An answer to a path that is unknown
tells nothing that needs a token.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from streams.errors import JournalError
from streams.exchange import Headers, HttpError, Request, Responder
from streams.observe.registry import NoSuchCall

Access = Literal["open", "read", "write"]
"""`open`: without credentials. `write`: it changes something, and needs --admin-write too."""

Answer = Callable[..., Awaitable[None]]
"""Answers one request: called with the `Request`, the `Responder`, and the parts of the path that
stand for `{}` in the route. An `HttpError` that it raises before it has answered is the answer."""

NO_STORE: Final = ("cache-control", "no-store")
JSON: Final[Headers] = (
    ("content-type", "application/json"),
    NO_STORE,
    ("x-content-type-options", "nosniff"),
)
# A request without a valid token may have a body of this size: it is read, and dropped.
STRANGERS_BODY_BYTES_MAX: Final = 1024
PART_LETTERS_MAX: Final = 200  # of a path
FIELDS_MAX: Final = 20  # of a query

# SQLite, and the signed numbers of Redis, have 64 bits.
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number in a query."""

_T = TypeVar("_T")


class Route(msgspec.Struct, frozen=True):
    """One kind of request. Each `{}` in `path` stands for one part between slashes.

    A route with GET answers HEAD too.
    """

    method: str
    path: str
    answer: Answer
    access: Access = "read"


class Gate(Protocol):
    """Decides which requests are let in."""

    def check(self, request: Request, access: Access) -> None:
        """Raises `HttpError` for a request that may not use a route with this access."""


class AdminEndpoint:
    """The operator's endpoint: `streams.exchange.Endpoint`, with a table of routes."""

    def __init__(self, gate: Gate, routes: Sequence[Route] = ()) -> None:
        self._gate = gate
        self._routes = list(routes)
        self.is_starting = False  # routes are still to be added

    def add(self, *routes: Route) -> None:
        """Enter routes. May be called while requests are answered."""
        self._routes += routes

    async def __call__(self, request: Request, responder: Responder) -> None:
        try:
            route, parts = self._find(request)
            self._gate.check(request, route.access)
            await route.answer(request, responder, *parts)
        except HttpError as refused:
            await refuse(responder, refused)

    def screen(self, request: Request) -> int | None:
        """See `streams.exchange.Screen`: a large body is only for requests that are let in."""
        try:
            route, _ = self._find(request)
            if route.access != "write":
                return STRANGERS_BODY_BYTES_MAX
            self._gate.check(request, route.access)
        except HttpError:
            return STRANGERS_BODY_BYTES_MAX
        return None

    def _find(self, request: Request) -> tuple[Route, Sequence[str]]:
        method = "GET" if request.method == "HEAD" else request.method
        allowed: list[str] = []
        for route in self._routes:
            parts = parts_of(request.path, route.path)
            if parts is not None:
                if route.method == method:
                    return route, parts
                allowed += ["GET", "HEAD"] if route.method == "GET" else [route.method]
        if allowed:
            told = ", ".join(dict.fromkeys(allowed))
            raise HttpError(405, f"Ask with {told}.", (("allow", told),))
        if self.is_starting:
            raise HttpError(503, "The server is starting: ask again soon.", (("retry-after", "1"),))
        raise HttpError(404, "There is nothing at this path: /health/ready and /api/stats exist.")


def parts_of(path: str, pattern: str) -> Sequence[str] | None:
    """The parts of `path` that stand for `{}` in `pattern`; None if it does not match."""
    if "{}" not in pattern:
        return () if path == pattern else None
    given, wanted = path.split("/"), pattern.split("/")
    if len(given) != len(wanted):
        return None
    found = []
    for part, expected in zip(given, wanted, strict=True):
        if expected == "{}" and 0 < len(part) <= PART_LETTERS_MAX:
            found.append(part)
        elif part != expected:
            return None
    return found


async def respond_json(responder: Responder, value: Any, status: int = 200) -> None:
    """Answer with a value as JSON."""
    await responder.respond(status, JSON, msgspec.json.encode(value) + b"\n")


async def refuse(responder: Responder, refused: HttpError) -> None:
    """Answer with an error: `{"error": {"message": …}}`."""
    error: dict[str, Any] = {"message": refused.refusal.message}
    if refused.refusal.data is not None:
        error["data"] = refused.refusal.data
    body = msgspec.json.encode({"error": error}) + b"\n"
    await responder.respond(refused.status, (*JSON, *refused.headers), body)


@contextmanager
def journal_errors() -> Iterator[None]:
    """Answer with HTTP errors where a call is unknown, or the journal cannot be read."""
    try:
        yield
    except NoSuchCall as error:
        raise HttpError(404, str(error)) from None
    except JournalError as error:
        why = str(error).rstrip(".")
        raise HttpError(503, f"The journal cannot be read: {why}.") from error


def query_of(request: Request, kind: type[_T]) -> _T:
    """The query of a request, as a struct. Raises `HttpError`."""
    try:
        given = dict(parse_qsl(request.query, max_num_fields=FIELDS_MAX))
        return msgspec.convert(given, kind, strict=False)
    except ValueError as error:
        raise HttpError(400, f"The query is wrong: {error}.") from None
