"""HTTP from an ASGI server: its messages become requests for an `Endpoint`, and responses its
messages. `transports.http.server` is the listener that this replaces.

It runs under trio. The ASGI server owns the sockets, so these bounds are its own: the head as it
comes in, idle connections, TLS. Here are the bounds of a whole head, of a body and its time, of
requests at once, and the checks of `Host` and `Origin`.

Once `send` returns, the ASGI server has the bytes, and how many of them the peer has is unknown.
So nothing counts as delivered by being sent: a client confirms it with its next `Last-Event-ID`.
"""

import contextlib
import os
import socket
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import trio

from streams import messages
from streams.errors import refusal
from streams.exchange import (
    Admit,
    AsgiReceive,
    AsgiSend,
    Caller,
    Departure,
    Endpoint,
    Head,
    Headers,
    HttpError,
    Request,
    Screen,
)
from streams.logs import log
from streams.turns import LARGE_BYTES
from transports.http.debt import Debt
from transports.http.failures import failed, incomplete, is_hang_up
from transports.http.requests import HEAD_BYTES_MAX, HEADERS_MAX, NEWLINE_BYTES, is_field
from transports.net.origins import Origins, names_loopback

# As for our own listener: a body of 4 MiB in 30 s needs 1.1 Mbit/s.
BODY_S: Final = 30.0

_VERSIONS: Final = ("1.0", "1.1")
_SOON: Final = ("retry-after", "1")
_CLOSE: Final = ("connection", "close")
_JSON: Final = ("content-type", "application/json")
_DESCRIPTORS: Final = Path("/dev/fd")


class AsgiRequests:
    """Serves one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        screen: Screen,
        body_bytes_max: int,
        requests_max: int,
        per_principal_max: int | None,
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
        admit: Admit | None = None,
        departure: Departure | None = None,
    ) -> None:
        """`screen` says how long the body of a request may be, before it is read. `requests_max`
        limits the requests at once, `per_principal_max` those of one authenticated caller. A
        `departure` waits for the responses that have not begun.
        """
        self._endpoint = endpoint
        self._screen = screen
        self._body_bytes_max = body_bytes_max
        self._requests_max = requests_max
        self._per_principal_max = per_principal_max
        self._hosts = frozenset(name.lower() for name in allowed_hosts)
        self._origins = frozenset(name.lower() for name in allowed_origins)
        self._admit = admit
        self._departure = departure
        self._open = 0
        self._of_principal: Counter[str] = Counter()

    async def serve(self, scope: Mapping[str, Any], receive: AsgiReceive, send: AsgiSend) -> None:
        """Answer one request."""
        async with trio.open_nursery() as nursery:
            debt = Debt(self._departure)
            response = _Response(receive, send, nursery, scope, debt)
            with debt:
                await self._serve(scope, receive, response)
            nursery.cancel_scope.cancel()

    async def _serve(
        self, scope: Mapping[str, Any], receive: AsgiReceive, response: "_Response"
    ) -> None:
        body = b""
        try:
            with self._counted():
                request = await self._read(scope, receive)
                body = request.body
                with self._counted_of(request.caller):
                    await self._answer(request, response)
        except HttpError as refused:
            request_id = messages.salvage_id(body) if body else None
            await response.refuse(refused, request_id)
        except trio.EndOfChannel:
            pass  # the client has gone before its body was whole

    async def _read(self, scope: Mapping[str, Any], receive: AsgiReceive) -> Request:
        """The request, checked. Raises `HttpError`, or `trio.EndOfChannel`."""
        if scope["http_version"] not in _VERSIONS:
            raise HttpError(
                505, "Only HTTP/1.1 and HTTP/1.0 are served here: a proxy may end HTTP/2."
            )
        head = self._head(scope)
        caller = await self._admit(head) if self._admit is not None else None
        limit = self._screen(Request(head.method, head.path, head.headers, b"", caller))
        body = await _body(head, receive, self._body_bytes_max if limit is None else limit)
        query = scope.get("query_string", b"").decode("latin-1")
        return Request(head.method, head.path, head.headers, body, caller, query)

    def _head(self, scope: Mapping[str, Any]) -> Head:
        given: list[tuple[bytes, bytes]] = list(scope["headers"])
        if len(given) > HEADERS_MAX:
            raise HttpError(431, f"More than {HEADERS_MAX} header fields: send fewer.")
        if sum(len(name) + len(value) for name, value in given) > HEAD_BYTES_MAX:
            raise HttpError(431, f"More than {HEAD_BYTES_MAX} bytes of headers: send fewer.")
        fields: dict[str, list[str]] = {}
        for name, value in given:
            fields.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        self._check_origins(scope, fields)
        headers = {name: ", ".join(values) for name, values in fields.items()}
        return Head(scope["method"], path_in(scope), headers)

    def _check_origins(self, scope: Mapping[str, Any], fields: Mapping[str, list[str]]) -> None:
        address = (scope.get("server") or ("", None))[0]  # None for a Unix socket
        origins = Origins(names_loopback(address), self._hosts, self._origins)
        for host in fields.get("host", [""]):
            if why := origins.why_refused(host, fields.get("origin", ())):
                raise HttpError(403, why)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._open >= self._requests_max:
            raise HttpError(503, "Too many requests are open: try again later.", (_SOON,))
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextlib.contextmanager
    def _counted_of(self, caller: Caller | None) -> Iterator[None]:
        limit = self._per_principal_max
        if caller is None or limit is None:
            yield
            return
        if self._of_principal[caller.principal] >= limit:
            raise HttpError(429, refusal("too_many_connections", limit=limit), (_SOON,))
        self._of_principal[caller.principal] += 1
        try:
            yield
        finally:
            self._of_principal[caller.principal] -= 1
            self._of_principal += Counter()  # without those of zero

    async def _answer(self, request: Request, response: "_Response") -> None:
        """Let the endpoint answer. Raises `HttpError` if no response has begun."""
        try:
            await self._endpoint(request, response)
            await response.complete()
        except HttpError:
            raise
        except Exception as error:
            if is_hang_up(error):
                return
            log.exception("http.endpoint_failed", method=request.method, path=request.path)
            if not response.has_begun:
                raise failed() from None


async def refuse(
    refused: HttpError, scope: Mapping[str, Any], receive: AsgiReceive, send: AsgiSend
) -> None:
    """Refuse a request without reading it."""
    async with trio.open_nursery() as nursery:
        await _Response(receive, send, nursery, scope, Debt(None)).refuse(refused, None)


def path_in(scope: Mapping[str, Any]) -> str:
    """The path below the place at which the application is mounted."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    # Some frameworks leave the prefix in the path, others do not.
    if root and (path == root or path.startswith(f"{root}/")):
        path = path[len(root) :]
    return path or "/"


async def _body(head: Head, receive: AsgiReceive, limit: int) -> bytes:
    too_large = HttpError(413, refusal("too_large", limit=limit))
    length = head.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit + NEWLINE_BYTES:
        raise too_large
    body = bytearray()
    with trio.move_on_after(BODY_S):
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise trio.EndOfChannel
            body += message.get("body", b"")
            if len(body) > limit + NEWLINE_BYTES:
                raise too_large
            has_more = message.get("more_body", False)
        if len(body.rstrip(b"\r\n")) > limit:
            raise too_large
        return bytes(body)
    raise incomplete()


class _Response:
    """The `Responder` of one request."""

    def __init__(
        self,
        receive: AsgiReceive,
        send: AsgiSend,
        nursery: trio.Nursery,
        scope: Mapping[str, Any],
        debt: Debt,
    ) -> None:
        self.has_begun = False
        self._debt = debt
        self._has_ended = False
        self._receive = receive
        self._asgi_send = send
        self._nursery = nursery
        self._scope = scope
        self._gone = trio.Event()
        self._is_watched = self._is_sending = False

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        length = () if status in (204, 304) else (("content-length", str(len(body))),)
        if len(body) > LARGE_BYTES:
            self._watch()
        await self._begin(status, headers, length)
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, headers: Headers, *first: bytes) -> None:
        await self._begin(status, headers)
        self._watch()
        await self.write(*first)

    async def write(self, *data: bytes) -> None:
        body = data[0] if len(data) == 1 else b"".join(data)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._has_ended = True

    async def refuse(self, refused: HttpError, request_id: messages.RequestId | None) -> None:
        """Respond with an error, unless the client has gone, and close: its body may be unread."""
        body = messages.error(request_id, refused.refusal)
        with contextlib.suppress(trio.BrokenResourceError):
            await self.respond(refused.status, (_JSON, *refused.headers, _CLOSE), body)

    async def complete(self) -> None:
        """Finish a response that the endpoint has begun. Raises `RuntimeError` if it has not."""
        if self._has_ended or not self.is_open():
            return
        if not self.has_begun:
            raise RuntimeError("the endpoint returned without a response")
        await self.finish()

    async def _begin(self, status: int, headers: Headers, framing: Headers = ()) -> None:
        for name, value in headers:
            if not is_field(name, value):
                raise ValueError(f"this field cannot be sent: {name}: {value[:100]!r}")
        sent = [(name.encode(), value.encode("latin-1")) for name, value in (*headers, *framing)]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        self._debt.settle()

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            raise trio.BrokenResourceError("the peer has hung up")
        self._is_sending = True
        try:
            await self._asgi_send(message)
        except OSError as error:  # of the ASGI specification: the client is gone
            self._gone.set()
            raise trio.BrokenResourceError("the peer has hung up") from error
        except trio.Cancelled:
            reset(self._scope)  # the ASGI server would wait for a peer that does not read
            raise
        finally:
            self._is_sending = False

    def _watch(self) -> None:
        """Notice from now on when the peer hangs up."""
        if not self._is_watched:
            self._is_watched = True
            self._nursery.start_soon(self._look_out)

    async def _look_out(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
        except trio.Cancelled:
            if self._is_sending:  # hypercorn shields its sends, so that only this task notices
                reset(self._scope)
            raise
        self._gone.set()

    async def gone(self) -> None:
        self._watch()
        await self._gone.wait()

    def is_open(self) -> bool:
        return not self._gone.is_set()

    def unsent_bytes(self) -> int | None:
        return None  # the ASGI server does not say


_FORWARDED: Final = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip"})


def reset(scope: Mapping[str, Any]) -> None:
    """Shut the TCP connection of a request down, which is found among those of this process.

    A response that ends half-way must not look complete, and must not keep the ASGI server waiting
    for a peer that does not read. Where a proxy is the peer, nothing is found; then the time limit
    of the ASGI server counts. So it does for an address that a header names: an ASGI server that
    trusts the header puts it into the scope, and it may be the address of another client.
    """
    ends = [tuple(scope.get(end) or ()) for end in ("client", "server")]
    if not all(ends):
        return
    named = (value for name, value in scope.get("headers", ()) if name.lower() in _FORWARDED)
    if any(str(ends[0][0]).encode() in value for value in named):
        return
    for descriptor in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):  # it is closed, or no connection
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as found:
                if [each[:2] for each in (found.getpeername(), found.getsockname())] == ends:
                    found.shutdown(socket.SHUT_RDWR)
                    return
