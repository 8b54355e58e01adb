"""HTTP/1.1: a listener that reads whole requests and passes them to an `Endpoint`.

It knows no MCP. It checks connections, bounds all times and sizes, and writes responses to peers
that may hang up meanwhile. `transports.http.requests` has the protocol.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Unpack

import msgspec
import trio

from streams import messages
from streams.exchange import (
    Caller,
    Departure,
    Endpoint,
    Head,
    Headers,
    HttpError,
    Request,
    Responder,
    Screen,
)
from streams.logs import log
from streams.messages import MESSAGE_BYTES_MAX
from streams.turns import TURN_UNITS, Turns, units_of
from transports.http.cors import PREFLIGHT, is_preflight
from transports.http.debt import Debt
from transports.http.failures import failed, incomplete, is_hang_up
from transports.http.requests import EVENTS_MAX, HEAD_BYTES_MAX, Phase, Requests
from transports.http.waits import Wait, Waits
from transports.net.listening import HANDSHAKE_S, Listener, ListenOptions, open_listener, refuse
from transports.net.sockets import (
    CLOSE_S,
    Pieces,
    ServerStream,
    close_at_once,
    close_gracefully,
    has_hung_up,
    receive_some,
    send_now,
    send_pieces,
    unsent_to_socket,
)

# The size of one read of a body, which is parsed without letting other tasks run.
BODY_READ_BYTES: Final = 64 * 1024

# How many bytes of the next request are kept while a response is sent. Beyond that the connection
# is not read until the response is over, and a hang-up is not noticed.
PIPELINED_BYTES_MAX: Final = 64 * 1024


async def serve(
    endpoint: Endpoint,
    host: str,
    port: int,
    *,
    body_bytes_max: int = MESSAGE_BYTES_MAX,
    screen: Screen | None = None,
    task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ListenOptions],
) -> None:
    """Listen at every address of `host` and run `endpoint` for each request, until cancelled.

    Reports the port, so that `port` may be 0. A newline at the end of a body does not count for
    `body_bytes_max`. Once a request is authenticated, `screen` says how long its body may be.
    When cancelled, it closes all connections at once. Raises `OSError` if the address cannot be
    bound.
    """
    listener = await open_listener(host, port, options)
    task_status.started(listener.port)
    server = _Server(listener, endpoint, body_bytes_max, screen)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.waits.run)
        if listener.departure is not None:
            nursery.start_soon(server.end_idle, listener.departure)
        await listener.serve(server.serve_connection)


@dataclass(frozen=True, slots=True)
class _Server:
    """The state that all connections of one `serve` share."""

    listener: Listener
    endpoint: Endpoint
    body_bytes_max: int
    screen: Screen | None
    waits: Waits = field(default_factory=Waits)
    stuck: "dict[_Connection, None]" = field(default_factory=dict)  # whose peers must read first

    async def end_idle(self, departure: Departure) -> None:
        """Close the connections that wait for a next request, once the departure begins."""
        await departure.begun()
        self.waits.end_idle()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its peer; False without one."""
        if self.waits.end_longest():
            return True
        for connection in self.stuck:
            del self.stuck[connection]
            connection.hang_up()
            return True
        return False

    async def serve_connection(self, nursery: trio.Nursery, tcp: trio.SocketStream) -> None:
        """Serve one connection to its end; the caller closes it."""
        # The peer may hang up during the handshake or a refusal. Errors of an endpoint are caught
        # in `_answer`.
        debt = Debt(self.listener.departure)
        with suppress(trio.BrokenResourceError, OSError), debt:
            stream: ServerStream | None = tcp
            if self.listener.has_tls:
                stream = await self._secured(tcp)
            if stream is not None:
                await self._serve_requests(_Connection(stream, tcp, nursery, debt, self.stuck))

    async def _secured(self, tcp: trio.SocketStream) -> ServerStream | None:
        """TLS over a connection; None if the handshake takes too long."""
        with trio.move_on_after(HANDSHAKE_S):
            return await self.listener.secure(tcp)
        return None

    async def _serve_requests(self, connection: "_Connection") -> None:
        requests = Requests(self.listener.origins, self.body_bytes_max)
        wait = Wait()
        phase = Phase.HEAD  # the first request must come at once
        try:
            self.listener.check_room(connection.tcp, self._make_room)
            while True:
                with wait.scope:
                    await self._serve_in_turn(connection, requests, phase, wait)
                is_late = wait.is_over and not wait.scope.cancelled_caught
                if not (is_late and connection.has_pipelined):
                    break
                # A request came in the same turn in which the wait for it was given up.
                wait, phase = Wait(), Phase.NOTHING
            if wait.scope.cancelled_caught and requests.phase is not Phase.NOTHING:
                raise incomplete()
        except HttpError as refused:
            await connection.unwatch()
            refused.headers = (*refused.headers, *requests.cors)
            await connection.refuse(refused)
        finally:
            self.waits.end(wait)
            connection.end()

    async def _serve_in_turn(
        self, connection: "_Connection", requests: Requests, phase: Phase, wait: Wait
    ) -> None:
        while request := await self._next_request(connection, requests, phase, wait):
            if connection.turns.spend(units_of(request.body)):
                await connection.turns.wait()
            try:
                if request.caller is None:
                    await self._answer(request, requests, connection)
                else:
                    with self.listener.counted(request.caller):
                        await self._answer(request, requests, connection)
            except HttpError as refused:
                refused.request_id = messages.salvage_id(request.body)
                raise
            await connection.unwatch()
            if not requests.next_cycle() or connection.debt.is_last:
                await connection.close_gracefully()
                return
            phase = Phase.NOTHING

    async def _next_request(
        self,
        connection: "_Connection",
        requests: Requests,
        phase: Phase,
        wait: Wait,
    ) -> Request | None:
        """The next request; None when the peer has hung up, or the wait was given up.

        Raises `HttpError`, also for a request of which only a part came.
        """
        caller: Caller | None = None
        is_admitted = False
        if requests.phase is not Phase.NOTHING:  # it came with the request before
            phase = requests.phase
            connection.debt.owe()
        self.waits.begin(wait, phase)
        while (request := requests.next_request(EVENTS_MAX)) is None:
            if (now := requests.phase) not in (phase, Phase.NOTHING):
                phase = now
                self.waits.begin(wait, phase)
            if phase is Phase.BODY and not is_admitted and (head := requests.head) is not None:
                caller = await self._admit(head)
                self._screen(requests, head, caller)
                is_admitted = True
            if permission := requests.go_ahead():
                await connection.send(permission)
            if requests.has_more:
                connection.turns.spend(TURN_UNITS)
                await connection.turns.wait()
                continue
            bytes_max = BODY_READ_BYTES if phase is Phase.BODY else HEAD_BYTES_MAX
            # A client sends its next request only once it has read the response.
            is_early = phase is Phase.NOTHING
            data = await connection.next_bytes(bytes_max, is_early=is_early)
            if not data:
                if requests.phase is Phase.NOTHING:
                    return None
                raise incomplete()
            connection.debt.owe()
            if wait.is_over and phase is Phase.NOTHING:
                connection.keep(data)
                return None
            self.waits.heard(wait)
            requests.feed(data)
            if connection.turns.spend():
                await connection.turns.wait()
        if not is_admitted:
            caller = await self._admit(request)
        if wait.is_over:
            raise incomplete()
        self.waits.end(wait)
        return request if caller is None else msgspec.structs.replace(request, caller=caller)

    async def _admit(self, head: Head) -> Caller | None:
        """The caller; None where no token is needed. Raises `HttpError`.

        A browser sends no token with a preflight.
        """
        return None if self._is_preflight(head) else await self.listener.authenticate(head)

    def _is_preflight(self, head: Head) -> bool:
        return is_preflight(head, self.listener.origins.origins)

    def _screen(self, requests: Requests, head: Head, caller: Caller | None) -> None:
        """Check a request before its body is read. Raises `HttpError`."""
        if self._is_preflight(head):
            requests.limit_body(0)
            return
        if self.screen is None:
            return
        limit = self.screen(Request(head.method, head.path, head.headers, b"", caller))
        if limit is not None:
            requests.limit_body(limit)

    async def _answer(
        self, request: Request, requests: Requests, connection: "_Connection"
    ) -> None:
        """Let the endpoint answer a request. Raises `HttpError` if no response has begun."""
        response = _Response(requests, connection)
        endpoint = _answer_preflight if self._is_preflight(request) else self.endpoint
        try:
            await endpoint(request, response)
            await response.complete()
        except Exception as error:
            if not response.is_open() and is_hang_up(error):
                return
            log.exception("http.endpoint_failed", method=request.method, path=request.path)
            if not response.has_begun:
                raise failed() from None
            if not response.has_ended:
                await connection.close()  # an incomplete response must not look complete


async def _answer_preflight(request: Request, responder: Responder) -> None:
    """Answer a preflight for any path: the request that follows is told what is wrong with it."""
    await responder.respond(204, PREFLIGHT)


class _Connection:
    """The bytes of one connection, both ways.

    While a request is answered, the connection is read only if the endpoint waits for the peer to
    hang up, or for room to write: then `watch` reads, and keeps the bytes for later. Watching
    during each response would cost as much as parsing its request.
    """

    def __init__(
        self,
        stream: ServerStream,
        tcp: trio.SocketStream,
        nursery: trio.Nursery,
        debt: Debt,
        stuck: "dict[_Connection, None]",
    ) -> None:
        """`stuck` has the connection while it waits for its peer to read."""
        self._stuck = stuck
        self._stream = stream
        self.debt = debt
        self.gone = trio.Event()
        self.turns = Turns()
        self.tcp = tcp
        self._nursery = nursery
        self._pipelined = bytearray()
        self._watch: trio.CancelScope | None = None
        self._has_stopped = trio.Event()
        self._sending: trio.CancelScope | None = None

    @property
    def has_pipelined(self) -> bool:
        return bool(self._pipelined)

    def keep(self, data: bytes) -> None:
        """Keep bytes that were read, for `next_bytes`."""
        self._pipelined += data

    async def next_bytes(self, bytes_max: int, *, is_early: bool) -> bytes:
        """The next bytes for the parser: first those that came while a response was sent."""
        if self._pipelined:
            data = bytes(self._pipelined)
            self._pipelined.clear()
            return data
        if is_early:
            self.turns.rest()
        return await self._read(bytes_max, is_early=is_early)

    async def _read(self, bytes_max: int, *, is_early: bool = False) -> bytes:
        """The next bytes of the peer; empty when it sends no more. See `receive_some`."""
        if self.gone.is_set():
            return b""
        try:
            return await receive_some(self._stream, bytes_max, is_early=is_early)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""  # the peer has hung up

    async def send(self, *data: bytes, is_whole: bool = False) -> None:
        """Write all pieces of `data`; cancelled or failed half-way, it closes the connection.

        Other tasks run before the write, unless the data are a whole response: then they run when
        the next request is waited for, or by `turns`.

        Raises `trio.BrokenResourceError` when the peer is gone.
        """
        if self.gone.is_set():
            raise trio.BrokenResourceError("the peer has hung up")
        try:
            if not is_whole:
                await trio.lowlevel.checkpoint()
            if rest := send_now(self._stream, data):  # most writes fit the socket's buffer
                await self._send_watched(rest)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            self.hang_up()
            raise trio.BrokenResourceError("the peer has hung up") from None
        except BaseException:
            await self.close()
            raise

    async def _send_watched(self, data: Pieces) -> None:
        """Write; stop waiting for room as soon as the peer hangs up."""
        self.watch()
        self._stuck[self] = None
        try:
            with trio.CancelScope() as self._sending:
                await send_pieces(self._stream, data)
        finally:
            self._stuck.pop(self, None)
        if self._sending.cancelled_caught:
            raise trio.BrokenResourceError("the peer has hung up")

    def watch(self) -> None:
        """Notice from now on when the peer hangs up."""
        if self._watch is None and not self.gone.is_set():
            self._watch = trio.CancelScope()
            self._has_stopped = trio.Event()
            self._nursery.start_soon(self._look_out, self._watch, self._has_stopped)

    async def _look_out(self, scope: trio.CancelScope, has_stopped: trio.Event) -> None:
        try:
            with scope:
                while (room := PIPELINED_BYTES_MAX - len(self._pipelined)) > 0:
                    data = await self._read(room)
                    if not data:
                        self.hang_up()
                        return
                    self._pipelined += data
        finally:
            has_stopped.set()

    async def unwatch(self) -> None:
        """Stop watching: `read` may be called again."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
            await self._has_stopped.wait()

    def end(self) -> None:
        """Stop watching for good."""
        if self._watch is not None:
            self._watch.cancel()

    def is_open(self) -> bool:
        """Whether the peer may still read. The kernel knows before `watch` has read."""
        if not self.gone.is_set() and has_hung_up(self.tcp):
            self.gone.set()
        return not self.gone.is_set()

    def hang_up(self) -> None:
        """The peer is gone, or counts as gone."""
        self.gone.set()
        if self._sending is not None:
            self._sending.cancel()  # `send_pieces` waits for a peer that is gone

    def unsent_bytes(self) -> int | None:
        return unsent_to_socket(self.tcp.socket.fileno())

    async def close(self) -> None:
        """Close at once; the peer sees that the response is incomplete."""
        self.hang_up()
        await close_at_once(self.tcp)

    async def refuse(self, refused: HttpError) -> None:
        if not self.gone.is_set():
            await refuse(self._stream, refused)

    async def close_gracefully(self) -> None:
        """End our output, so that the last response arrives. The caller closes the connection."""
        if not self.gone.is_set():
            with trio.move_on_after(CLOSE_S):
                await close_gracefully(self._stream)


class _Response:
    """The `Responder` of one request."""

    def __init__(self, requests: Requests, connection: _Connection) -> None:
        self.has_begun = False
        self.has_ended = False
        self._requests = requests
        self._connection = connection

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        self._close_if_last()
        response = self._requests.whole(status, headers, body)
        self.has_begun = self.has_ended = True
        await self._connection.send(response, is_whole=True)
        self._connection.debt.settle()

    async def start(self, status: int, headers: Headers, *first: bytes) -> None:
        self._close_if_last()
        head = self._requests.begin(status, headers)
        self.has_begun = True
        await self._connection.send(head, *self._requests.more(*first))
        self._connection.debt.settle()

    def _close_if_last(self) -> None:
        if self._connection.debt.is_last:
            self._requests.close()

    async def write(self, *data: bytes) -> None:
        await self._connection.send(*self._requests.more(*data))

    async def finish(self) -> None:
        self.has_ended = True
        if end := self._requests.end():
            await self._connection.send(end)

    async def gone(self) -> None:
        self._connection.watch()
        await self._connection.gone.wait()

    def is_open(self) -> bool:
        return self._connection.is_open()

    def unsent_bytes(self) -> int | None:
        return self._connection.unsent_bytes()

    async def complete(self) -> None:
        """Finish a response that the endpoint has begun. Raises `RuntimeError` if it has not."""
        if self.has_ended or not self.is_open():
            return
        if not self.has_begun:
            raise RuntimeError("the endpoint returned without a response")
        await self.finish()
