"""The HTTP/1.1 connections of a client: httptools (llhttp) has the protocol, trio moves the bytes.

h11 was tried before. It copies each body three times, and took a quarter of the CPU time of a short
call.

httpx2 was tried first. Its pool looks at each of its connections for each request, so that a POST
takes ten times as long with 1,000 open responses as with none. It writes the head and the body of a
request apart, reads 64 KiB at most, and cannot use a connection that is already open. `connect`
needs that, to know that the server answers.

Proxies in the environment are not used: the client connects to the dialed address, as over every
other transport.
"""

import ssl
from typing import Final

import httptools
import msgspec
import trio

from transports.net.dialing import CONNECT_S, Address, ClientStream, reach
from transports.net.sockets import (
    READ_BYTES,
    close_at_once,
    receive_some,
    send_now,
    send_pieces,
    watch_closely,
)

# Of a response's head, of the head of a chunk, or of a trailer.
HEAD_BYTES_MAX: Final = 64 * 1024

# Interim responses (1xx) before a response. They have no meaning for MCP; one or two are usual.
INTERIM_MAX: Final = 100

# The size of a read after one that was full: the cost of passing on the bytes of a read does not
# depend on its size.
BULK_BYTES: Final = 1024 * 1024

# From the first byte of a response's head to its last. The time before the first is not limited:
# the server works.
HEAD_S: Final = 30.0

# More pieces of a body are joined: a piece of one byte costs as much time as a large one.
PIECES_MAX: Final = 16

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


class _Response:
    """One response after the other, as httptools reads them: its methods `on_…` are called back."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Expect a response."""
        self.fields: dict[str, str] = {}
        self.reason = b""
        self.status = 0
        self.interims = 0
        self.body: list[bytes] = []  # pieces that were not taken yet
        self.violation: str | None = None
        self.has_head = False
        self.is_complete = False
        self.is_kept_alive = False
        self.has_more = False  # bytes came behind the response
        self.head_bytes = 0  # of a head that is incomplete, or of a chunk's

    def feed(self, data: bytes) -> None:
        """Parse some bytes."""
        self.head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.violation = self.violation or str(error) or type(error).__name__
        if self.is_complete or self.body:
            self.head_bytes = 0
        elif self.head_bytes > HEAD_BYTES_MAX:
            self.violation = self.violation or f"a head above {HEAD_BYTES_MAX} bytes"

    def end(self) -> None:
        """The server has hung up. That ends a body without a length of its own."""
        if self.has_head and self.fields.keys().isdisjoint(("content-length", "transfer-encoding")):
            self.is_complete = True
        elif not self.has_head and not self.head_bytes:
            self.violation = "it hung up and gave no response"
        else:
            self.violation = "it hung up during a response"

    def on_message_begin(self) -> None:
        self.has_more = self.is_complete

    def on_status(self, part: bytes) -> None:
        if not self.has_head:
            self.reason += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # else it is a trailer
            self.fields.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self.has_head or status < 200:
            return
        self.has_head = True
        self.status = status
        self.is_kept_alive = self._parser.should_keep_alive()
        coding = self.fields.get("transfer-encoding", "chunked")
        if coding.lower() != "chunked":
            self.violation = f"the transfer encoding {coding[:REASON_CHARS_MAX]!r}"

    def on_body(self, piece: bytes) -> None:
        if not self.is_complete and self.violation is None:
            self.body.append(piece)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.is_complete = self.violation is None
            return
        self.interims += 1
        self.head_bytes = 0
        self.fields = {}
        self.reason = b""
        if self.interims >= INTERIM_MAX:
            self.violation = f"{INTERIM_MAX} interim responses (1xx)"


class HttpConnection:
    """One connection: a request, its response, and then perhaps the next request.

    When the connection fails or the server violates HTTP, all methods that wait raise
    `trio.BrokenResourceError`. Then no other request can be sent over it.
    """

    def __init__(self, stream: ClientStream, tcp: trio.SocketStream) -> None:
        self._stream = stream
        self._tcp = tcp
        self._response = _Response()
        self._idle_since: float | None = None
        self._is_half_written = False
        self._read_bytes = READ_BYTES

    async def write(self, request: bytes) -> None:
        """Send a whole request. A failure is raised by `read_head`."""
        self._idle_since = None
        try:
            if rest := send_now(self._stream, (request,)):
                await send_pieces(self._stream, rest)
        except (trio.BrokenResourceError, OSError):
            # A server may answer a request before it has read all of it.
            self._is_half_written = True

    async def read_head(self) -> ResponseHead:
        """Wait for the response to begin."""
        response = self._response
        while not response.has_head:
            if not response.head_bytes:  # also after an interim response
                await self._fetch()
                continue
            with trio.CancelScope(deadline=trio.current_time() + HEAD_S) as scope:
                while response.head_bytes and not response.has_head:
                    await self._fetch()
            if scope.cancelled_caught:
                raise trio.BrokenResourceError(f"the server took above {HEAD_S:g} s for a head")
        return ResponseHead(response.status, response.reason.decode("latin-1"), response.fields)

    async def read(self) -> list[bytes]:
        """The next bytes of the body, in pieces; none at its proper end."""
        response = self._response
        while not (response.body or response.is_complete):
            await self._fetch()
        found, response.body = response.body, []
        return found if len(found) <= PIECES_MAX else [b"".join(found)]

    @property
    def has_ended(self) -> bool:
        """Whether the whole response was read."""
        return self._response.is_complete and not self._response.body

    async def _fetch(self) -> None:
        """Read more of the response."""
        response = self._response
        if response.violation is not None:
            raise trio.BrokenResourceError(f"the server violated HTTP: {response.violation}")
        try:
            data = await receive_some(self._stream, self._read_bytes)
        except trio.BrokenResourceError:
            raise trio.BrokenResourceError("the connection failed during a response") from None
        self._read_bytes = BULK_BYTES if len(data) >= READ_BYTES else READ_BYTES
        if data:
            response.feed(data)
        else:
            response.end()

    def begin_again(self) -> bool:
        """Prepare for the next request, after a whole response; False where that is impossible."""
        response = self._response
        is_usable = response.is_complete and response.is_kept_alive and not response.has_more
        if not is_usable or response.violation is not None or self._is_half_written:
            return False
        response.begin()
        self._idle_since = trio.current_time()
        return True

    def is_fresh(self) -> bool:
        """Whether the server is likely to read a request that is sent now."""
        if self._idle_since is None:
            return True  # just opened
        # An idle connection is readable only at its end.
        is_quiet = not self._tcp.socket.is_readable()
        return is_quiet and trio.current_time() - self._idle_since < IDLE_S

    def watch(self) -> None:
        """Let the kernel notice soon that the peer has vanished."""
        watch_closely(self._tcp.socket)

    async def aclose(self) -> None:
        """Hang up at once."""
        await close_at_once(self._stream)


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
        self._idle.append(await self.reach())

    async def take(self) -> HttpConnection:
        """A connection for one request; the caller must `put` or close it. Raises `OSError`."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            await connection.aclose()
        return await self.reach()

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
        await self.drop_idle()

    async def drop_idle(self) -> None:
        """Close all idle connections."""
        while self._idle:
            await self._idle.pop().aclose()

    async def reach(self) -> HttpConnection:
        """A new connection; the caller must `put` or close it. Raises `OSError`."""
        deadline = trio.current_time() + CONNECT_S
        tcp, stream = await reach(self.address, self._ssl_context, deadline)
        return HttpConnection(stream, tcp)
