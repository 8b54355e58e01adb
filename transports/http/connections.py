"""The HTTP/1.1 connections of a client: h11 has the protocol, trio moves the bytes.

httpx2 was tried first. Its pool looks at each of its connections for each request, so that a POST
takes ten times as long with 1,000 open responses as with none. It writes the head and the body of a
request apart, reads 64 KiB at most, and cannot use a connection that is already open. `connect`
needs that, to know that the server answers.

Proxies in the environment are not used: the client connects to the dialed address, as over every
other transport.
"""

import ssl
from typing import Final

import h11
import msgspec
import trio

from transports.net.dialing import CONNECT_S, Address, ClientStream, reach
from transports.net.sockets import READ_BYTES

HEAD_BYTES_MAX: Final = 64 * 1024  # of a response

# Interim responses (1xx) before a response. They have no meaning for MCP; one or two are usual.
INTERIM_MAX: Final = 100

# From the first byte of a response's head to its last. The time before the first is not limited:
# the server works.
HEAD_S: Final = 30.0

# One `read` returns at most so many chunks: a chunk of one byte costs as much time as a large one.
READ_EVENTS_MAX: Final = 1_000

REASON_CHARS_MAX: Final = 100  # of a status line, in an error

# Some servers close a connection that was idle for 5 s. No request should be sent at that moment.
IDLE_S: Final = 4.0
IDLE_MAX: Final = 16  # a burst may need more connections at once, but not for long


class ResponseHead(msgspec.Struct, frozen=True):
    """The head of a response. Names of `fields` are lower-case."""

    status: int
    reason: str
    fields: dict[str, str]

    @property
    def content_type(self) -> str:
        """The media type of the body without parameters; empty where it is missing."""
        return self.fields.get("content-type", "").partition(";")[0].strip().lower()

    def __str__(self) -> str:
        return f"HTTP {self.status} {self.reason[:REASON_CHARS_MAX]}".strip()


class HttpConnection:
    """One connection: a request, its response, and then perhaps the next request.

    When the connection fails or the server violates HTTP, all methods that wait raise
    `trio.BrokenResourceError`. Then no other request can be sent over it.
    """

    def __init__(self, stream: ClientStream, tcp: trio.SocketStream) -> None:
        self._stream = stream
        self._tcp = tcp
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._idle_since: float | None = None
        self._is_half_written = False

    async def write(self, request: h11.Request, body: bytes) -> None:
        """Send a request, in one piece. A failure is raised by `read_head`."""
        self._idle_since = None
        parts = [self._http.send(request)]
        if body:
            parts.append(self._http.send(h11.Data(data=body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        try:
            await self._stream.send_all(b"".join(part or b"" for part in parts))
        except trio.BrokenResourceError:
            # A server may answer a request before it has read all of it.
            self._is_half_written = True

    async def read_head(self) -> ResponseHead:
        """Wait for the response to begin."""
        for _ in range(INTERIM_MAX):
            event = await self._next_event()
            if isinstance(event, h11.Response):
                fields: dict[str, str] = {}
                for name, value in event.headers:
                    fields.setdefault(name.decode("latin-1"), value.decode("latin-1"))
                return ResponseHead(event.status_code, event.reason.decode("latin-1"), fields)
        raise trio.BrokenResourceError(f"the server sent {INTERIM_MAX} interim responses (1xx)")

    async def read(self) -> bytes:
        """The next bytes of the body, as many as there are; empty at its proper end."""
        found: list[bytes] = []
        while self._http.their_state is h11.SEND_BODY:
            event = self._look()
            if event is h11.NEED_DATA and not found:
                await self._fetch()
            elif isinstance(event, h11.Data):
                found.append(bytes(event.data))
                if len(found) >= READ_EVENTS_MAX:
                    await trio.lowlevel.checkpoint()
                    break
            else:
                break
        return b"".join(found)

    async def _next_event(self) -> object:
        begun_at: float | None = None  # the head, of which a part has come
        while (event := self._look()) is h11.NEED_DATA:
            if not self._http.trailing_data[0]:
                await self._fetch()
                continue
            begun_at = begun_at or trio.current_time()
            with trio.CancelScope(deadline=begun_at + HEAD_S) as scope:
                await self._fetch()
            if scope.cancelled_caught:
                raise trio.BrokenResourceError(f"the server took above {HEAD_S:g} s for a head")
        return event

    def _look(self) -> object:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise trio.BrokenResourceError(f"the server violated HTTP: {error}") from None

    async def _fetch(self) -> None:
        try:
            data = await self._stream.receive_some(READ_BYTES)
        except trio.BrokenResourceError:
            raise trio.BrokenResourceError("the connection failed during a response") from None
        if not data and self._http.their_state is h11.SEND_RESPONSE:
            raise trio.BrokenResourceError("the server hung up and gave no response")
        self._http.receive_data(bytes(data))

    def begin_again(self) -> bool:
        """Prepare for the next request, after a whole response; False where that is impossible."""
        if not (self._http.our_state is h11.DONE and self._http.their_state is h11.DONE):
            return False
        if self._is_half_written or self._http.trailing_data[0]:  # bytes behind the response
            return False
        self._http.start_next_cycle()
        self._idle_since = trio.current_time()
        return True

    def is_fresh(self) -> bool:
        """Whether the server is likely to read a request that is sent now."""
        if self._idle_since is None:
            return True  # just opened
        # An idle connection is readable only at its end.
        is_quiet = not self._tcp.socket.is_readable()
        return is_quiet and trio.current_time() - self._idle_since < IDLE_S

    async def aclose(self) -> None:
        """Hang up at once."""
        await trio.aclose_forcefully(self._stream)


class ConnectionPool:
    """The connections to one server: as many as there are requests at once."""

    def __init__(self, address: Address, ssl_context: ssl.SSLContext | None) -> None:
        self.address = address
        self._ssl_context = ssl_context
        self._idle: list[HttpConnection] = []
        self._is_closed = False
        if address.is_tls and ssl_context is None:
            self._ssl_context = ssl.create_default_context()

    async def open(self) -> None:
        """Connect, for the first request. Raises `OSError` without an answer within 10 seconds."""
        self._idle.append(await self._reach())

    async def take(self) -> HttpConnection:
        """A connection for one request; the caller must `put` or close it. Raises `OSError`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            await connection.aclose()
        return await self._reach()

    async def put(self, connection: HttpConnection) -> None:
        """Keep a connection for another request where that is possible, else close it."""
        has_room = len(self._idle) < IDLE_MAX and not self._is_closed
        if has_room and connection.begin_again():
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def aclose(self) -> None:
        """Close all idle connections now, and the others when they are `put` back."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().aclose()

    async def _reach(self) -> HttpConnection:
        deadline = trio.current_time() + CONNECT_S
        tcp, stream = await reach(self.address, self._ssl_context, deadline)
        return HttpConnection(stream, tcp)
