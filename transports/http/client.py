"""MCP's Streamable HTTP, from the client's side: a `ClientChannel` that sends each line as a POST.

It receives the lines of all responses, and of the standing stream: a GET whose response carries
messages that belong to no request.

HTTP has no connection whose end both sides notice. When the channel ends depends on the server:

- Our servers answer in our own framing, with resume tokens. The channel ends when a response is
  interrupted or ends too early. The client connects again and resumes its streams. The same holds
  for a response whose stream is resumed by a resume token (`leave_to_token`).
- With other servers, the channel lasts as long as the session. An event stream that is interrupted
  or ends too early is continued by a GET with `Last-Event-ID`, as often as necessary. A response
  that cannot be continued is lost. If other requests wait for responses, only its own request is
  answered by an error, with the reason `lost`; else the channel ends.

The channel always ends when the server fails (5xx) or cannot be reached, and no response can be
continued; and when the server no longer knows the session (404).

With `outlast_s`, only the last holds for other servers. An outage then loses no more than the
responses that cannot be continued. A response from which nothing comes may belong to a connection
that died without a word, so the server is probed by a ping over a connection of its own. After a
probe that failed and one that was answered, the silent responses are continued. Those of our
servers end the channel.

This file is longer than 500 lines: all of it is about one request, from its line to its response.
"""

import itertools
import random
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.clock import backoff_s
from streams.errors import INTERNAL_ERROR, Refusal
from streams.exchange import Scopes
from streams.keys import new_request_id
from streams.logs import log
from streams.messages import (
    ENDS_BYTES,
    MESSAGE_BYTES_MAX,
    Block,
    Incoming,
    Message,
    RequestId,
    TooLarge,
    has_method,
    id_in,
    look,
    sound,
)
from transports.http.bodies import (
    ACCEPT,
    UNPROCESSED,
    Body,
    EventBody,
    EventTrail,
    JsonBody,
    LineBody,
    Malformed,
    Media,
    answer_in,
    body_of,
    refusal_line,
)
from transports.http.connections import ConnectionPool, HttpConnection, ResponseHead
from transports.lines import in_blocks, last_lines, lines_of
from transports.net.dialing import (
    HTTP,
    Address,
    Headers,
    Token,
    authorization,
    bearer_for,
    begin_or_leave,
    check_headers,
    tasks_until,
)
from transports.net.sockets import CLOSE_S

# A line waits until the response to the line before it has begun, so that the lines arrive in
# order. Some servers begin a response only when it is complete. After this time, the line has
# certainly arrived.
ORDER_S: Final = 5.0

# With `outlast_s`, requests wait for no response, except to those that set something for the
# session. A cancellation waits so long after its request was written.
ARRIVAL_S: Final = 0.5
UNANSWERED_MAX: Final = 1_000  # how many requests may wait for their response to begin

# How long the body of a cancelled request may take to end by itself.
CANCELLED_S: Final = 1.0

# The size of a body without messages, and how long it may take.
REFUSAL_BYTES_MAX: Final = 64 * 1024
REFUSAL_S: Final = 10.0

# How long the first call waits for the standing stream: a server may send a question on it during
# the call, and does not repeat that.
STANDING_S: Final = 1.0

# How long the last lines of a channel that is over may wait to be received, and how often it is
# looked whether they were.
LAST_LINES_S: Final = 1.0
LOOK_EVERY_S: Final = 0.01

# While so many bytes wait to be received, no more are read. Each response may hold one read more.
RECEIVE_BYTES_MAX: Final = 1024 * 1024

# The progress of a response: its request, and the id of its last event, which may be empty.
Mark = tuple[RequestId, bytes]

# The pause before an event stream is continued, unless the server sets it (`retry`), and its
# minimum in any case.
RETRY_S: Final = 1.0
RETRY_MIN_S: Final = 0.1

# While a server cannot be reached, pauses double up to these: the first while a request waits, so
# that its response comes soon after an outage, the second for the standing stream alone.
WAITED_PAUSE_MAX_S: Final = 2.0
IDLE_PAUSE_MAX_S: Final = 30.0

# The longest pause while a request waits, even if the server asks for a longer one (`retry`).
WAITED_RETRY_MAX_S: Final = 3.0

# For how long a response is continued without success. `Client` gives up after the same time.
CONTINUE_S: Final = 300.0

# A server that has forgotten the events of a response continues it with an empty one, which ends at
# once. Some servers do so as well while a call is silent. After so many in a row, which take about
# five minutes, the response is lost.
EMPTY_MAX: Final = 150
EMPTY_S: Final = 1.0

# With `outlast_s`: how long a response is silent before a probe, and when a probe counts as failed.
# Further probes begin beside it, and each may still be answered for longer.
PROBE_AFTER_S: Final = 3.0
PROBE_S: Final = 2.0
PROBE_EVERY_S: Final = 1.5
PROBE_ANSWER_S: Final = 10.0

# A response that was silent for this is continued over another connection, although the server is
# reachable. Many servers send a comment every 15 s.
SILENT_S: Final = 45.0

# Status codes of a server that cannot answer now: the request is retried. So it is for all of 5xx,
# which proxies have more of (521 to 524), but for those that say that there is no such request.
_BUSY: Final = frozenset({408, 409, 425, 429})
_LASTING: Final = frozenset({501, 505})

# Of those, the ones of a proxy that does not reach its server.
_UNREACHED: Final = frozenset({502, 503, 504})

# Status codes of a server that does not know the session: 404 says MCP, and 400 say servers made
# like the examples of the SDK in TypeScript.
_FORGOTTEN: Final = frozenset({400, 404})

# With `outlast_s`: how long another bearer token than a refused one is waited for, and how many may
# be refused for one request.
TOKEN_S: Final = 5.0
TOKEN_EVERY_S: Final = 0.25
REFUSALS_MAX: Final = 3

_INITIALIZE: Final = "initialize"
_CALL: Final = "tools/call"
_SETTING: Final = frozenset(
    {"initialize", "logging/setLevel", "resources/subscribe", "resources/unsubscribe"}
)
_INITIALIZED: Final = "notifications/initialized"
_CANCELLED: Final = "notifications/cancelled"
_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e]+")


@asynccontextmanager
async def connect(
    url: str,
    *,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    ssl_context: ssl.SSLContext | None = None,
    token: Token = None,
    headers: Headers = (),
    outlast_s: float | None = None,
) -> AsyncIterator["HttpChannel"]:
    """Connect to an MCP endpoint; leaving the block ends the session and closes, within a second.

    A refused `token` shows only in the answer to the first message. Each request has `headers`
    besides its own. With `outlast_s` the session outlives outages of up to so many seconds. Raises
    `OSError` without an answer within 10 seconds; `ValueError` for an invalid `url`, or one where
    others could read the token.
    """
    address = Address(url, HTTP)
    bearer = bearer_for(address, token)
    check_headers(address, headers)
    connections = ConnectionPool(address, ssl_context)
    await connections.open()
    channel = HttpChannel(connections, message_bytes_max, headers, outlast_s)
    channel.authorize(token, bearer)
    async with tasks_until(channel.aclose) as nursery:
        await nursery.start(channel.run)
        yield channel


class HttpChannel:
    """A `ClientChannel` and `RequestChannel`: the requests of one session."""

    def __init__(
        self,
        connections: ConnectionPool,
        message_bytes_max: int,
        headers: Headers,
        outlast_s: float | None = None,
    ) -> None:
        self._connections = connections
        self._limit = message_bytes_max
        self._headers = headers
        self._token: Token = None
        self._authorization: Headers = ()
        self._outlasts = outlast_s is not None
        self._continue_s = CONTINUE_S if outlast_s is None else outlast_s
        self._received = ReceiveBuffer()
        self._session = ""
        self._version = ""
        self._exchanges: dict[RequestId, _Exchange] = {}  # requests that wait for a response
        self._prepared: dict[RequestId, tuple[bytes, bool, bool]] = {}  # requests to be sent next
        self._is_ours = False  # the server answers in our own framing
        self._listens = False  # the standing stream is wanted, also of a server of ours
        self._is_listening = False  # to the standing stream
        self._standing: _Exchange | None = None
        self._is_initialized = False
        self._has_asked = trio.Event()  # a request was sent
        self._unanswered = trio.Semaphore(UNANSWERED_MAX)
        self._is_closed = False
        self._nursery: trio.Nursery
        self._tasks = trio.CancelScope(shield=True)

    def authorize(self, token: Token, bearer: str | None) -> None:
        """Send `bearer` with each request, and ask `token` for another one once it is refused."""
        self._token, self._authorization = token, authorization(bearer)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Run the tasks that read responses, until the channel is over.

        They are shielded, because a graceful close needs them; `aclose` always ends them.
        """
        await begin_or_leave()
        with self._tasks:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                if self._outlasts:
                    await self._probe_forever()
                await trio.sleep_forever()

    # -- the channel

    @property
    def principal(self) -> str:
        address = self._connections.address
        return f"server({address.host}:{address.port})"

    @property
    def scopes(self) -> Scopes:
        return None  # the peer is the server

    async def receive(self) -> Sequence[Incoming]:
        return lines_of(await self._received.take())

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        return await self._received.take()

    def is_writable(self) -> bool:
        return self._received.ended is None

    async def send(self, *lines: bytes) -> None:
        try:
            for line in b"".join(lines).split(b"\n"):
                if line:
                    await self._post(line)
        except trio.BrokenResourceError:
            raise
        except BaseException:
            self._end("interrupted")  # the server may have received some of the lines
            raise

    async def ping(self) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    def unsent_bytes(self) -> int | None:
        return None

    async def aclose(self) -> None:
        if self._is_closed:
            await trio.lowlevel.checkpoint()
            return
        self._is_closed = True
        has_session = bool(self._session) and self._received.ended is None
        self._end("closed")
        self._received.drop()
        try:
            if has_session:
                with trio.move_on_after(CLOSE_S):
                    await self._delete_session()
        finally:
            with trio.CancelScope(shield=True):  # takes no time
                await self._connections.aclose()

    async def _delete_session(self) -> None:
        try:
            connection = await self._connections.take()
        except OSError:
            return  # the session ends by its time limit
        try:
            await connection.write(self._request("DELETE"))
            await connection.read_head()
        except trio.BrokenResourceError:
            return  # as above
        finally:
            await connection.aclose()

    def _end(self, why: str, last: Sequence[Block | TooLarge] = ()) -> None:
        """End the channel; `last` can still be received."""
        self._received.end(why, last)
        self._tasks.cancel()

    # -- one line, one request

    async def _post(self, line: bytes) -> None:
        if self._unanswered.value:
            self._unanswered.acquire_nowait()  # the wait below is a checkpoint
        else:
            await self._unanswered.acquire()
        self._check_open()
        exchange = _Exchange(line)
        if exchange.request_id in self._prepared:
            prepared = self._prepared.pop(exchange.request_id)
            exchange.follows, exchange.has_token, exchange.may_lack_reply = prepared
        cancelled = self._exchanges.get(exchange.cancels) if exchange.cancels is not None else None
        if cancelled is not None:
            await self._arrived(cancelled)
            self._check_open()  # the channel may have ended meanwhile
            self._cancel(cancelled)
        self._nursery.start_soon(self._run_exchange, exchange)
        with exchange.in_order:
            await (
                exchange.is_written if self._is_independent(exchange) else exchange.is_ready
            ).wait()
        if self._received.ended is not None:
            await self._received.left(LAST_LINES_S)  # the sender may close the channel now
        if cancelled is not None and not self._outlasts:
            # A request behind the cancellation must be answered after the last message of the
            # cancelled one.
            await cancelled.is_over.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._received.ended is not None:
            raise trio.BrokenResourceError(self._received.ended)

    def _is_independent(self, exchange: "_Exchange") -> bool:
        """Whether the next line need not wait until the server has begun to answer this one."""
        is_request = exchange.request_id is not None
        return self._outlasts and is_request and exchange.method not in _SETTING

    async def _arrived(self, exchange: "_Exchange") -> None:
        """Wait until the server has surely got a request, ahead of its cancellation."""
        if exchange.is_written.is_set():
            with trio.move_on_at(exchange.written_at + ARRIVAL_S):
                await exchange.is_ready.wait()

    def _cancel(self, cancelled: "_Exchange") -> None:
        """Stop waiting for the response to a request."""
        cancelled.is_answered = True
        cancelled.is_cancelled = True
        cancelled.scope.deadline = trio.current_time() + CANCELLED_S

    async def _run_exchange(self, exchange: "_Exchange") -> None:
        if exchange.request_id is not None:
            self._exchanges[exchange.request_id] = exchange
            self._has_asked.set()
        try:
            with exchange.scope:
                await self._complete(exchange)
        finally:
            if exchange.request_id is not None:
                self._exchanges.pop(exchange.request_id, None)
            exchange.is_over.set()
            self._allow_next(exchange)

    async def _complete(self, exchange: "_Exchange") -> None:
        """Send a line and read the response, over as many connections as necessary."""
        act: Callable[[_Exchange], Awaitable[None]] = self._send_request
        pauses = _Pauses(exchange.trail)
        while (failure := await _failure_of(act, exchange)) or exchange.is_awaited:
            if exchange.refusal is not None:
                if await self._is_renewed(exchange):
                    continue
                self._answer_with(exchange, exchange.refusal)
                return
            if failure and exchange.is_answered and not self._is_ours:
                return  # the rest of the response is not needed
            if not failure and exchange.ends_with_body:
                self._answer_with_lost(exchange, "the server ended a delivery without a reply")
                return
            if exchange.is_awaited and exchange.trail.last_id and not exchange.has_token:
                act = self._continue_response
            elif not (failure and self._may_send_again(exchange)):
                self._fail(exchange, failure or "the server ended a response too early")
                return
            pause_s = min(pauses.next(WAITED_PAUSE_MAX_S), WAITED_RETRY_MAX_S)
            if pauses.failing_s > self._continue_s:
                self._fail(exchange, failure or "the server does not continue a response")
                return
            await trio.sleep(0 if exchange.is_doubted else pause_s)
            exchange.is_doubted = False

    async def _is_renewed(self, exchange: "_Exchange") -> bool:
        """Whether there is another bearer token than the one that the server has refused."""
        exchange.refusals += 1
        if exchange.refusals > REFUSALS_MAX:
            return False
        with trio.move_on_after(TOKEN_S):
            while self._authorization == exchange.authorization:
                with suppress(OSError, ValueError):
                    bearer = bearer_for(self._connections.address, self._token)
                    self._authorization = authorization(bearer)
                if self._authorization == exchange.authorization:
                    if not callable(self._token):
                        return False
                    await trio.sleep(TOKEN_EVERY_S)
        return self._authorization != exchange.authorization

    def _is_refused(self, exchange: "_Exchange", head: ResponseHead, text: bytes) -> bool:
        """Whether a response only refuses the bearer token: the session then lives on."""
        if not (head.status == 401 and self._outlasts and self._is_initialized):
            return False
        url = self._connections.address.url
        exchange.refusal = refusal_line(head, text, exchange.request_id, url)
        return True

    def _may_send_again(self, exchange: "_Exchange") -> bool:
        """Whether a line is sent once more: that does no harm, and other requests wait."""
        is_harmless = exchange.request_id is None or not exchange.is_sent
        # After a lost connection to a server of ours, a new session resumes all at once.
        is_apt = exchange.is_put_off or not self._is_ours
        return is_harmless and is_apt and self._lives_on(exchange)

    def _lives_on(self, exchange: "_Exchange") -> bool:
        """Whether the channel goes on although this line, or its response, is lost."""
        if self._outlasts:
            return exchange.method != _INITIALIZE
        return self._has_others(exchange)

    def _has_others(self, exchange: "_Exchange") -> bool:
        return any(each.is_awaited for each in self._exchanges.values() if each is not exchange)

    def _fail(self, exchange: "_Exchange", why: str) -> None:
        """A line or its response is lost: end the channel, unless other requests need it."""
        if self._is_ours or exchange.has_token or not self._lives_on(exchange):
            self._end(why)
            return
        self._answer_with_lost(exchange, why)

    def _answer_with_lost(self, exchange: "_Exchange", why: str) -> None:
        log.info("a response was lost", why=why, method=exchange.method)
        if exchange.request_id is not None:
            why = f"The response was lost: {why}."
            self._answer_with(exchange, _error_line(exchange.request_id, why, "lost"))

    def _answer_with(self, exchange: "_Exchange", line: bytes) -> None:
        exchange.is_answered = True
        self._received.add(in_blocks([line]), len(line))

    async def _send_request(self, exchange: "_Exchange") -> None:
        async with self._connection() as connection:
            exchange.has_session = bool(self._session)
            exchange.begin_attempt(self._authorization)
            exchange.is_sent = True
            await connection.write(self._request("POST", exchange.line, exchange.follows))
            exchange.written_at = trio.current_time()
            exchange.in_order.deadline = exchange.written_at + ORDER_S
            exchange.is_written.set()
            head = await connection.read_head()
            await self._answered(exchange, head, connection)

    async def _continue_response(self, exchange: "_Exchange") -> None:
        """Continue a response behind its last event."""
        trail = exchange.trail
        async with self._connection() as connection:
            exchange.begin_attempt(self._authorization)
            await connection.write(self._request("GET", last_event_id=trail.last_id))
            head = await connection.read_head()
            if _is_event_stream(head):
                trail.continues()
                await self._read_continued(exchange, connection)
                return
            text = await _read_some(connection)
            if _is_busy(head):
                raise trio.BrokenResourceError(f"the server answered with {head}")
            if self._is_refused(exchange, head, text):
                return
            if not await self._is_over_with(head, exchange):
                trail.last_id = b""  # the response cannot be continued
                raise trio.BrokenResourceError(f"the server does not continue a response: {head}")

    async def _read_continued(self, exchange: "_Exchange", connection: HttpConnection) -> None:
        """Read a continued response. Raises where too many were empty."""
        trail, began_at = exchange.trail, trio.current_time()
        before = trail.events
        await self._read(exchange, EventBody(self._limit, trail), connection)
        is_empty = trail.events == before and trio.current_time() - began_at < EMPTY_S
        exchange.empty = exchange.empty + 1 if is_empty else 0
        if exchange.empty >= EMPTY_MAX:
            trail.last_id = b""
            raise trio.BrokenResourceError("the server has nothing more of a response")

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[HttpConnection]:
        """A connection for one request. Closed after an error, else kept for the next request."""
        connection = await self._connections.take()
        try:
            yield connection
        except BaseException:
            await connection.aclose()
            raise
        await self._connections.put(connection)

    def _allow_next(self, exchange: "_Exchange") -> None:
        """The response has begun: the next line may be sent."""
        exchange.is_written.set()
        if not exchange.is_ready.is_set():
            exchange.is_ready.set()
            self._unanswered.release()

    def _request(self, method: str, body: bytes | None = None, last_event_id: bytes = b"") -> bytes:
        """A whole request."""
        address = self._connections.address
        fields = [
            f"{method} {address.target} HTTP/1.1",
            f"Host: {address.host_header}",
            "User-Agent: mcp-streams",
            f"Accept: {Media.EVENTS if method == 'GET' else ACCEPT}",
            "Accept-Encoding: identity",  # no compression
            *(f"{name}: {value}" for name, value in [*self._authorization, *self._headers]),
        ]
        if body is not None:
            fields += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self._session:
            fields.append(f"Mcp-Session-Id: {self._session}")
        if self._version:
            fields.append(f"MCP-Protocol-Version: {self._version}")
        head = "\r\n".join(fields).encode("latin-1")
        if last_event_id:
            head += b"\r\nLast-Event-ID: " + last_event_id
        return head + b"\r\n\r\n" + (body or b"")

    def _ping_request(self) -> bytes:
        """A request that any server answers at once."""
        return self._request("POST", messages.request(new_request_id(), "ping", {}).rstrip(b"\n"))

    # -- the response

    async def _answered(
        self, exchange: "_Exchange", head: ResponseHead, connection: HttpConnection
    ) -> None:
        is_success = 200 <= head.status < 300
        if is_success and exchange.method == _INITIALIZE:
            self._session = _printable(head.fields.get("mcp-session-id"))
        body = None
        if is_success and head.status != 202:
            body = body_of(head, self._limit, exchange.trail)
        if is_success and exchange.method == _INITIALIZE:
            self._is_ours = isinstance(body, LineBody)
        if is_success and exchange.method == _INITIALIZED:
            await self._open_standing_stream()
        if body is None:
            await self._no_messages(exchange, head, connection)
            return
        # With a JSON reply, the messages come on the standing stream.
        is_event_stream = isinstance(body, EventBody)
        may_lack_reply = exchange.may_lack_reply and not self._is_ours
        exchange.ends_with_body = may_lack_reply and is_event_stream
        if exchange.method != _INITIALIZE:  # its result decides how the next line is sent
            self._allow_next(exchange)
        await self._read(exchange, body, connection)

    async def _no_messages(
        self, exchange: "_Exchange", head: ResponseHead, connection: HttpConnection
    ) -> None:
        """Handle a response without messages: mostly a 202, else an error."""
        text = await _read_some(connection)
        if self._is_refused(exchange, head, text) or await self._is_over_with(head, exchange):
            return
        is_lost = exchange.request_id is None and head.status in UNPROCESSED
        if is_lost or (head.status >= 500 and exchange.method != _INITIALIZE):
            # Perhaps a proxy's, whose server is being restarted: no call fails for that.
            exchange.is_put_off = head.status == 503 and exchange.request_id is None
            raise trio.BrokenResourceError(f"the server answered with {head}")
        if exchange.is_awaited or head.status >= 300:
            exchange.is_answered = True
            line = refusal_line(head, text, exchange.request_id, self._connections.address.url)
            await self._received.put(in_blocks([line]), len(line))
            if head.status >= 500:
                self._end(f"the server answered with {head}")

    async def _is_over_with(self, head: ResponseHead, exchange: "_Exchange") -> bool:
        """Whether a response means that the session has ended; if so, end the channel.

        With `outlast_s` a ping must be answered in the same way: else this was about one request.
        A call, and with `outlast_s` any request, which was not taken, is then answered before.
        """
        if self._outlasts and self._is_initialized:
            if not (exchange.has_session and head.status in _FORGOTTEN):
                return False
            status = await self._status_of_ping()
            if status != head.status and not (status is None and head.status == 404):
                return self._received.ended is not None
        elif not (exchange.has_session and head.status in {401, 404}):
            return False
        last: list[Block | TooLarge] = []
        is_told = self._outlasts or exchange.method == _CALL  # other requests may be repeated
        is_taken = exchange.trail.events or exchange.trail.responses
        if is_told and not is_taken and exchange.is_awaited and exchange.request_id is not None:
            why = f"The server has refused the session: {head}."
            last = in_blocks([_error_line(exchange.request_id, why, "untaken")])
        knows = "accepts the bearer token" if head.status == 401 else "knows the session"
        self._end(f"the server no longer {knows}", last)
        return True

    async def _status_of_ping(self) -> int | None:
        """The status of the answer to a ping in this session; None without an answer."""
        with trio.move_on_after(PROBE_ANSWER_S):
            try:
                async with self._connection() as connection:
                    await connection.write(self._ping_request())
                    return (await connection.read_head()).status
            except (OSError, trio.BrokenResourceError):
                return None
        return None

    async def _read(self, exchange: "_Exchange", body: Body, connection: HttpConnection) -> None:
        """Read a response to its end, or until the rest is not needed.

        Raises `trio.BrokenResourceError`.
        """
        try:
            await self._read_all(exchange, body, connection)
        except Malformed as error:
            if self._is_ours or not self._lives_on(exchange):
                self._end(str(error), body.held())
                return
            exchange.trail.last_id = b""  # else it would come again
            if not (lost := self._too_large(exchange)):
                raise trio.BrokenResourceError(str(error)) from None
            exchange.is_answered = True
            self._received.add(in_blocks(lost), 0)
        except trio.BrokenResourceError as error:
            if isinstance(body, LineBody):
                self._end(str(error), body.held())
            raise

    async def _read_all(
        self, exchange: "_Exchange", body: Body, connection: HttpConnection
    ) -> None:
        size = 0
        is_watched = not self._outlasts
        while pieces := await connection.read():
            if not is_watched and (self._is_ours or exchange.trail.last_id):
                connection.watch()  # if it is dead, nothing is lost
                is_watched = True
            size += sum(map(len, pieces))
            exchange.heard_at = trio.current_time()
            if blocks := list(itertools.chain.from_iterable(map(body.feed, pieces))):
                await self._deliver(exchange, blocks, body, size)
                size = 0
            if body.is_useless:
                return  # the connection closes, since the body was not read to its end
        if blocks := body.end():
            await self._deliver(exchange, blocks, body, size)

    async def _deliver(
        self, exchange: "_Exchange", blocks: list[Block | TooLarge], body: Body, size: int
    ) -> None:
        if exchange.is_cancelled and self._outlasts and not self._is_ours:
            return  # nothing waits for it, and it would be taken for another call's
        if not (isinstance(body, LineBody) or all(map(_is_sound, blocks))):
            is_whole = isinstance(body, JsonBody)
            lines = [self._mended(line, exchange, is_whole=is_whole) for line in lines_of(blocks)]
            blocks = in_blocks(itertools.chain.from_iterable(lines))
        if exchange.is_awaited:
            self._look_for_answer(exchange, blocks, body.tail_lines)
        if not self._is_ours and self._has_others(exchange):
            self._look_for_others(exchange, blocks, body.tail_lines)
        mark = None
        if exchange.request_id is not None and not self._is_ours:
            event_id = b"" if exchange.is_answered else exchange.trail.last_id
            mark = (exchange.request_id, event_id)
        await self._received.put(blocks, size, mark)

    def _mended(
        self, line: Incoming, exchange: "_Exchange", *, is_whole: bool
    ) -> Sequence[Incoming]:
        """The messages in a line of a response of another server.

        A line that cannot be read ends its own request and no other one. One among several that
        names another id, or is no response, is dropped. `is_whole`: it is all of the response.
        """
        if isinstance(line, TooLarge):
            return self._too_large(exchange)
        if (mended := sound(line)) is not None:
            return [mended]
        if batch := _batch_in(line):
            return batch
        head, tail = line[:ENDS_BYTES], line[-ENDS_BYTES:]
        if not is_whole and has_method(head):
            return self._refused(None, line)
        request_id = id_in(head, tail)
        if request_id not in self._exchanges:
            ends = head + tail
            may_be_answer = b'"id"' not in ends and (b'"result"' in ends or b'"error"' in ends)
            if not (is_whole or may_be_answer):
                return self._refused(None, line)
            request_id = exchange.request_id
        if request_id is None:  # on the standing stream
            awaited = [each.request_id for each in self._exchanges.values() if each.is_awaited]
            request_id = awaited[0] if len(awaited) == 1 else None
        return self._refused(request_id, line)

    def _too_large(self, exchange: "_Exchange") -> Sequence[TooLarge]:
        if exchange.is_awaited:
            return [TooLarge(self._limit, exchange.request_id)]
        log.warning("a message above the limit was dropped", server=self.principal)
        return []

    def _refused(self, request_id: RequestId | None, line: bytes) -> Sequence[bytes]:
        """The response to a request in place of a line that cannot be read."""
        log.warning("a line is no JSON-RPC", server=self.principal, start=str(line[:200]))
        exchange = None if request_id is None else self._exchanges.get(request_id)
        if request_id is None or exchange is None or not exchange.is_awaited:
            return []
        exchange.scope.deadline = trio.current_time() + CANCELLED_S
        why = "The server sent an answer that is no JSON-RPC, and cannot be mended: see the log."
        return [_error_line(request_id, why, "unreadable")]

    def _look_for_answer(
        self, exchange: "_Exchange", blocks: list[Block | TooLarge], tail_lines: int
    ) -> None:
        assert exchange.request_id is not None  # only requests are awaited
        answer = answer_in(blocks, exchange.request_id, tail_lines)
        if answer is None:
            return
        if exchange.ends_with_body and not (
            isinstance(answer, Message) and answer.error is not msgspec.UNSET
        ):
            return  # messages of the stream may follow
        exchange.is_answered = True
        if exchange.method == _INITIALIZE:
            if not isinstance(answer, TooLarge):
                self._version = _printable(_version_in(answer))
            self._allow_next(exchange)

    def _look_for_others(
        self, exchange: "_Exchange", blocks: list[Block | TooLarge], tail_lines: int
    ) -> None:
        """A server may answer a request on another response: then its own one is not needed."""
        for line in last_lines(blocks, tail_lines):
            message = None if isinstance(line, TooLarge) else _look(line)
            if message is None or message.method is not msgspec.UNSET:
                continue
            for request_id, each in self._exchanges.items():
                if request_id == message.id and each is not exchange:
                    each.is_answered = True
                    each.scope.deadline = trio.current_time() + CANCELLED_S

    # -- what the client knows of a response: see `RequestChannel`

    def listen(self) -> None:
        self._listens = True
        if self._is_initialized and not self._is_listening and self._received.ended is None:
            self._begin_standing_stream()

    def leave_to_token(self, request_id: RequestId) -> None:
        if exchange := self._exchanges.get(request_id):
            exchange.has_token = True

    def prepare(
        self,
        request_id: RequestId,
        last_event_id: bytes,
        *,
        is_resume: bool = False,
        may_lack_reply: bool = False,
    ) -> None:
        self._prepared[request_id] = (last_event_id, is_resume, may_lack_reply)

    def settle(self, request_id: RequestId) -> None:
        exchange = self._exchanges.get(request_id)
        if exchange is not None and not self._is_ours:
            exchange.is_answered = True

    def last_event_id(self, request_id: RequestId) -> bytes:
        return self._received.event_ids.get(request_id, b"")

    @property
    def received_for(self) -> RequestId | None:
        return self._received.request_id

    def heard_at(self, request_id: RequestId) -> float | None:
        exchange = self._exchanges.get(request_id)
        return None if exchange is None else exchange.heard_at

    def abandon(self, why: str) -> None:
        self._end(why)

    # -- connections that died without a word

    async def _probe_forever(self) -> None:
        """Find the responses whose connections are dead, for ever."""
        while True:
            await trio.sleep(PROBE_AFTER_S / 2)
            silent_since = trio.current_time() - PROBE_AFTER_S
            waiting = [each for each in self._exchanges.values() if each.is_awaited]
            is_silent = any(each.heard_at < silent_since for each in waiting)
            if not (is_silent and self._is_initialized):
                continue
            probed_at = trio.current_time()
            probes = await self._probe()
            if probes == 1 and trio.current_time() < probed_at + PROBE_S:
                self._doubt([each for each in waiting if each.heard_at < probed_at - SILENT_S])
                continue
            log.info("the server was not reachable", server=self.principal, probes=probes)
            await self._connections.drop_idle()
            standing = [] if self._standing is None else [self._standing]
            reading = [*self._exchanges.values(), *standing]
            self._doubt([each for each in reading if each.heard_at < probed_at])

    def _doubt(self, silent: Sequence["_Exchange"]) -> None:
        """Continue these responses over other connections, if that loses nothing."""
        if self._is_ours and any(each.is_awaited for each in silent):
            self._end("the server was not reachable")
            return
        for each in silent:
            # A response without event ids may still come. Another request for it would run the
            # call twice.
            if each.trail.last_id or each.method != _CALL:
                each.is_doubted = True
                each.attempt.cancel()

    async def _probe(self) -> int:
        """Wait until the server answers a ping over a connection of its own.

        Pings are sent until then. Returns the number of the one that was answered, from 1 on.
        """
        answered = 0
        async with trio.open_nursery() as nursery:

            async def probe(number: int) -> None:
                nonlocal answered
                with trio.move_on_after(PROBE_ANSWER_S):
                    if await self._is_answered(self._ping_request()):
                        answered = answered or number
                        nursery.cancel_scope.cancel()

            for number in itertools.count(1):
                nursery.start_soon(probe, number)
                # Random, so that clients of one server do not all come at the same moment.
                share = random.uniform(0.5, 1.0)  # nosec B311 # jitter, not a secret
                await trio.sleep(share * PROBE_EVERY_S)
        return answered

    async def _is_answered(self, request: bytes) -> bool:
        try:
            connection = await self._connections.reach()
        except OSError:
            return False
        try:
            await connection.write(request)
            head = await connection.read_head()
        except trio.BrokenResourceError:
            return False
        finally:
            await connection.aclose()
        return head.status not in _UNREACHED

    # -- the standing stream

    async def _open_standing_stream(self) -> None:
        """Open the standing stream, before the first call.

        Our servers send no messages of calls on it, so it is opened only if it is wanted.
        """
        self._is_initialized = True
        if self._is_listening or (self._is_ours and not self._listens):
            return
        standing = self._begin_standing_stream()
        with trio.move_on_after(STANDING_S):
            await standing.is_ready.wait()

    def _begin_standing_stream(self) -> "_Exchange":
        self._is_listening = True
        standing = self._standing = _Exchange(b"")
        self._nursery.start_soon(self._keep_standing_stream, standing)
        return standing

    async def _keep_standing_stream(self, standing: "_Exchange") -> None:
        """Read the standing stream; reopen it when it ends, unless the server refuses that."""
        pauses = _Pauses(standing.trail)
        while not standing.is_answered:
            if failure := await _failure_of(self._read_standing_stream, standing):
                log.debug("the standing stream has failed", why=failure)
            standing.is_ready.set()
            if not standing.is_answered:
                await self._pause_standing_stream(standing, pauses)

    async def _pause_standing_stream(self, standing: "_Exchange", pauses: "_Pauses") -> None:
        """Wait before the standing stream is reopened: only shortly while a call is running."""
        self._has_asked = trio.Event()
        with trio.move_on_after(pauses.next(IDLE_PAUSE_MAX_S)):
            if not self._has_others(standing):
                await self._has_asked.wait()
            await trio.sleep(max(pauses.least_s, WAITED_PAUSE_MAX_S))

    async def _read_standing_stream(self, standing: "_Exchange") -> None:
        trail = standing.trail
        async with self._connection() as connection:
            standing.begin_attempt(self._authorization)
            await connection.write(self._request("GET", last_event_id=trail.last_id))
            head = await connection.read_head()
            if _is_event_stream(head):
                standing.has_session = bool(self._session)  # from now on, a 404 ends the session
                standing.is_ready.set()
                trail.continues()
                await self._read(standing, EventBody(self._limit, trail), connection)
                return
            await _read_some(connection)
            if _is_busy(head):
                raise trio.BrokenResourceError(f"the server answered with {head}")
            # Mostly 405: "the server does not offer an SSE stream at this endpoint".
            if self._is_refused(standing, head, b""):
                await self._is_renewed(standing)
                standing.refusal, standing.refusals = None, 0
                raise trio.BrokenResourceError(f"the server answered with {head}")
            if not await self._is_over_with(head, standing):
                log.debug("the server has no standing stream", answer=str(head))
            standing.is_answered = True


class ReceiveBuffer:
    """The lines of all responses that wait to be received: bounded."""

    def __init__(self) -> None:
        self.ended: str | None = None  # the reason, once the channel is over
        self.event_ids: dict[RequestId, bytes] = {}  # of the last events that were handled
        self._batches: deque[tuple[Sequence[Block | TooLarge], int, Mark | None]] = deque()
        self._mark: Mark | None = None  # of the lines that were received last
        self._bytes = 0
        self._has_come = trio.Event()
        self._has_room = trio.Event()
        self._turn = trio.StrictFIFOLock()  # one response waits for room, the others for this

    async def put(
        self, blocks: Sequence[Block | TooLarge], size: int, mark: Mark | None = None
    ) -> None:
        """Add blocks when there is room; after the end, discard them."""
        if self._bytes < RECEIVE_BYTES_MAX and not self._turn.locked():
            self.add(blocks, size, mark)  # no checkpoint: the reader of the body has some
            return
        async with self._turn:
            while self._bytes >= RECEIVE_BYTES_MAX and self.ended is None:
                self._has_room = trio.Event()
                await self._has_room.wait()
            self.add(blocks, size, mark)

    def add(self, blocks: Sequence[Block | TooLarge], size: int, mark: Mark | None = None) -> None:
        """Add blocks without waiting for room: for few and small ones."""
        if self.ended is None:
            self._add(blocks, size, mark)

    def end(self, why: str, last: Sequence[Block | TooLarge]) -> None:
        """End, after `last`."""
        if self.ended is None:
            self.ended = why
            if last:
                self._add(last, 0)
            self._has_come.set()
            self._has_room.set()

    async def left(self, most_s: float) -> None:
        """Wait until the last lines are received, for so long at most."""
        with trio.move_on_after(most_s):
            while self._batches:
                await trio.sleep(LOOK_EVERY_S)

    def drop(self) -> None:
        """Discard all that waits."""
        self._batches.clear()

    @property
    def request_id(self) -> RequestId | None:
        """The request of the lines that were received last."""
        return None if self._mark is None else self._mark[0]

    async def take(self) -> Sequence[Block | TooLarge]:
        """The next lines; the lines before them are handled then. Raises `trio.EndOfChannel`."""
        self._note()
        if self._batches:
            await trio.lowlevel.checkpoint()
        while not self._batches:
            if self.ended is not None:
                raise trio.EndOfChannel(self.ended)
            self._has_come = trio.Event()
            await self._has_come.wait()
        blocks, size, self._mark = self._batches.popleft()
        self._bytes -= size
        self._has_room.set()
        return blocks

    def _note(self) -> None:
        if self._mark is not None:
            request_id, event_id = self._mark
            self._mark = None
            if event_id:
                self.event_ids[request_id] = event_id
            else:
                self.event_ids.pop(request_id, None)

    def _add(self, blocks: Sequence[Block | TooLarge], size: int, mark: Mark | None = None) -> None:
        self._batches.append((blocks, size, mark))
        self._bytes += size
        self._has_come.set()


class _Params(msgspec.Struct, rename="camel"):
    request_id: RequestId | None = None


class _Result(msgspec.Struct, rename="camel"):
    protocol_version: str = ""


class _Pauses:
    """The pauses between the responses that carry one event stream."""

    def __init__(self, trail: EventTrail) -> None:
        self._trail = trail
        self._seen = (0, 0)
        self._failures = 0
        self._since = trio.current_time()
        self.failing_s = 0.0  # the time since the last progress

    @property
    def least_s(self) -> float:
        """The pause that the server asks for, or the default."""
        retry_s = self._trail.retry_s
        return max(RETRY_S if retry_s is None else retry_s, RETRY_MIN_S)

    def next(self, most_s: float) -> float:
        """How long to wait now: twice as long each time, while no event comes."""
        seen = (self._trail.responses, self._trail.events)
        if seen != self._seen:
            self._since = trio.current_time()
        if self._trail.events != self._seen[1]:
            self._failures = 0
        self._seen = seen
        self.failing_s = trio.current_time() - self._since
        pause_s = backoff_s(RETRY_MIN_S, self._failures, most_s)
        self._failures += 1
        # Random, so that clients of one server do not all reconnect at the same moment.
        jitter_s: float = random.uniform(0.5, 1.0) * pause_s  # nosec B311 # jitter, not a secret
        return max(self.least_s, jitter_s)


class _Exchange:
    """The state of one line and of the response to it."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self.method: str | None = None
        self.request_id: RequestId | None = None  # None for a line that gets no response
        self.cancels: RequestId | None = None
        self.has_session = False
        self.has_token = False  # its stream is resumed by a resume token
        self.follows = b""  # the id of the last event that was read of the stream it asks for
        self.may_lack_reply = False
        self.ends_with_body = False  # the response is complete only at the end of the body
        self.trail = EventTrail()
        self.heard_at = trio.current_time()
        self.is_sent = False  # perhaps only a part of it
        self.is_answered = False
        self.in_order = trio.CancelScope()  # until the next line may be sent
        self.is_written = trio.Event()
        self.written_at = 0.0
        self.is_ready = trio.Event()  # its response has begun
        self.is_cancelled = False
        self.is_over = trio.Event()
        self.scope = trio.CancelScope()
        self.attempt = trio.CancelScope()  # around one request of it and the response to that
        self.is_doubted = False  # that attempt was cancelled, because its connection may be dead
        self.is_put_off = False  # the server lives, and cannot take it now
        self.refusal: bytes | None = None  # the answer where its bearer token was refused
        self.refusals = 0
        self.empty = 0  # continued responses in a row that ended at once, with no event
        self.authorization: Headers = ()  # that it was sent with
        self._look()

    def begin_attempt(self, authorization: Headers) -> None:
        """It is sent with this."""
        self.refusal, self.authorization = None, authorization
        self.is_put_off = False

    @property
    def is_awaited(self) -> bool:
        """Whether a response must still come."""
        return self.request_id is not None and not self.is_answered

    def _look(self) -> None:
        try:
            message = look(self.line)
            if not isinstance(message.method, str):
                return
            self.method = message.method
            if message.id is not msgspec.UNSET:
                self.request_id = message.id
            elif self.method == _CANCELLED:
                self.cancels = messages.decode(message.params, _Params).request_id
        except (ValueError, RecursionError):
            return  # the server answers a malformed line with an error


async def _failure_of(
    act: Callable[[_Exchange], Awaitable[None]], exchange: _Exchange
) -> str | None:
    """Run `act`; return the failure of the connection, if there was one."""
    with trio.CancelScope() as exchange.attempt:
        try:
            await act(exchange)
        except (trio.BrokenResourceError, OSError) as error:
            return str(error) or type(error).__name__
        return None
    return "the server was not reachable"


async def _read_some(connection: HttpConnection) -> bytes:
    """The body of a refusal, or its start. Raises `trio.BrokenResourceError`."""
    text = b""
    if connection.has_ended:  # mostly a 202
        return text
    with trio.move_on_after(REFUSAL_S):
        while len(text) <= REFUSAL_BYTES_MAX and (pieces := await connection.read()):
            text += b"".join(pieces)
    return text


def _is_sound(block: Block | TooLarge) -> bool:
    """Whether each line of a block is a message, in UTF-8."""
    if isinstance(block, TooLarge):
        return False
    text = block.data[block.start : block.end]
    try:
        if not text.isascii():
            text.decode()  # msgspec does not check UTF-8 in values that it skips
        return len(messages.look_at_lines(text)) == text.count(b"\n")
    except (ValueError, RecursionError):
        return False


def _error_line(request_id: RequestId, why: str, reason: str) -> bytes:
    """An error in place of the response to a request."""
    refused = Refusal(INTERNAL_ERROR, why, {"reason": reason})
    return messages.error(request_id, refused).rstrip(b"\n")


def _batch_in(line: bytes) -> list[bytes]:
    """The messages of a batch, which MCP had in revision 2025-03-26."""
    if not line.startswith(b"["):
        return []
    try:
        parts = [bytes(each) for each in messages.decode(line, list[msgspec.Raw])]
    except (ValueError, RecursionError):
        return []
    mended = [found for each in parts if (found := sound(each)) is not None]
    return mended if len(mended) == len(parts) else []


def _is_busy(head: ResponseHead) -> bool:
    """Whether the same request may have another response soon."""
    return head.status in _BUSY or (head.status >= 500 and head.status not in _LASTING)


def _is_event_stream(head: ResponseHead) -> bool:
    return head.status == 200 and head.content_type == Media.EVENTS


def _look(line: bytes) -> Message | None:
    try:
        return look(line)
    except (ValueError, RecursionError):
        return None  # the client reports a malformed line when it reads it


def _version_in(answer: Message) -> str:
    result: Any = answer.result
    try:
        return "" if result is msgspec.UNSET else messages.decode(result, _Result).protocol_version
    except ValueError:
        return ""  # the client reports the error when it reads the result


def _printable(value: str | None) -> str:
    """A header's value from the server, to be sent back; empty if it is not a valid header."""
    return value if value and _HEADER_VALUE.fullmatch(value) else ""
