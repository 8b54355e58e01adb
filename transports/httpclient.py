"""MCP's Streamable HTTP, from the client's side: a `Channel` whose lines are POSTs.

Each line goes out as a request of its own; the lines that are received are those of all the
responses. HTTP has no connection that both sides could lose, so one is made up: the channel is over
when a response breaks off or ends without what it is there for, when the server is not to be
reached or fails (5xx), and when it has forgotten the session (404). Whoever uses the channel
connects again then, and resumes.

Not spoken: GET, which opens a stream for what belongs to no request and continues the event streams
of other servers.
"""

import re
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import h11
import msgspec
import trio

from streams import messages
from streams.blocks import Block
from streams.messages import (
    MESSAGE_BYTES_MAX,
    Incoming,
    Message,
    RequestId,
    Scopes,
    TooLarge,
    look,
)
from transports.address import HTTP, Address
from transports.bearer import Token, authorization, bearer_for
from transports.httpbodies import ACCEPT, Body, Malformed, answer_in, body_of, refusal_line
from transports.httpinbox import Inbox
from transports.httpwire import Connection, Connections, Head
from transports.lines import CLOSE_S, in_blocks, lines_of
from transports.tasks import begin_or_leave, tasks_until

# The next line waits for the response to this one to begin, so that they arrive in order. A server
# that begins its response when it has all of it may take long: after this time the line has arrived
# for certain.
ORDER_S: Final = 5.0
UNANSWERED_MAX: Final = 1_000  # requests whose response has not begun, beyond which none is sent

# No response comes to what was cancelled; how long its body may take to end by itself.
CANCELLED_S: Final = 1.0

REFUSAL_BYTES_MAX: Final = 64 * 1024  # of a body that is no message

_INITIALIZE: Final = "initialize"
_CANCELLED: Final = "notifications/cancelled"
_HEADER_VALUE: Final = re.compile(r"[\x21-\x7e]+")


@asynccontextmanager
async def connect(
    url: str,
    *,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    ssl_context: ssl.SSLContext | None = None,
    token: Token = None,
) -> AsyncIterator["HttpChannel"]:
    """Connect to an MCP endpoint; leaving the block ends the session and closes, within a second.

    Whether the server takes the `token` shows when the first message is answered. Raises `OSError`
    when nobody answers within 10 seconds; `ValueError` when `url` is none, or no place for a token.
    """
    address = Address(url, HTTP)
    bearer = bearer_for(address, token)
    connections = Connections(address, ssl_context)
    await connections.open()
    channel = HttpChannel(connections, message_bytes_max, bearer)
    async with tasks_until(channel.aclose) as nursery:
        await nursery.start(channel.run)
        yield channel


class HttpChannel:
    """The requests to one endpoint, in one session."""

    def __init__(self, connections: Connections, message_bytes_max: int, token: str | None) -> None:
        self._connections = connections
        self._limit = message_bytes_max
        self._authorization = authorization(token)
        self._inbox = Inbox()
        self._session = ""
        self._version = ""
        self._exchanges: dict[RequestId, _Exchange] = {}  # those that a response is awaited for
        self._unanswered = trio.Semaphore(UNANSWERED_MAX)
        self._is_closed = False
        self._nursery: trio.Nursery
        self._tasks = trio.CancelScope(shield=True)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Hold the tasks that read responses, until the channel is over.

        Shielded, since to be cancelled is no reason to be impolite; `aclose` is their end in any
        case.
        """
        await begin_or_leave()
        with self._tasks:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()

    # The channel

    @property
    def principal(self) -> str:
        address = self._connections.address
        return f"server({address.host}:{address.port})"

    @property
    def scopes(self) -> Scopes:
        return None  # the peer is the server

    async def receive(self) -> Sequence[Incoming]:
        return lines_of(await self._inbox.take())

    async def receive_blocks(self) -> Sequence[Block | TooLarge]:
        return await self._inbox.take()

    def is_writable(self) -> bool:
        return self._inbox.ended is None

    async def send(self, *lines: bytes) -> None:
        try:
            for line in b"".join(lines).split(b"\n"):
                if line:
                    await self._post(line)
        except trio.BrokenResourceError:
            raise
        except BaseException:
            self._end("interrupted")  # perhaps the server has some of the lines
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
        has_session = bool(self._session) and self._inbox.ended is None
        self._end("closed")
        self._inbox.drop()
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
            return  # the session's own time limit will do
        try:
            await connection.write(self._request("DELETE"), b"")
            await connection.read_head()
        except trio.BrokenResourceError:
            return  # as above
        finally:
            await connection.aclose()

    def _end(self, why: str, last: Sequence[Block | TooLarge] = ()) -> None:
        """The channel is over; `last` is received before its end, and nothing after that."""
        self._inbox.end(why, last)
        self._tasks.cancel()

    # One line, one request

    async def _post(self, line: bytes) -> None:
        await self._unanswered.acquire()
        self._check()
        exchange = _Exchange(line)
        cancelled = self._give_up(exchange)
        self._nursery.start_soon(self._carry, exchange)
        await exchange.is_written.wait()
        with trio.move_on_after(ORDER_S):
            await exchange.is_ready.wait()
        if cancelled is not None:
            # Who has cancelled and then asks something else expects to have heard the last of it
            # when the answer to that is here.
            await cancelled.is_over.wait()
        self._check()

    def _check(self) -> None:
        if self._inbox.ended is not None:
            raise trio.BrokenResourceError(self._inbox.ended)

    def _give_up(self, exchange: "_Exchange") -> "_Exchange | None":
        """What `exchange` cancels, if it is here: it need not be answered any more."""
        cancelled = self._exchanges.get(exchange.cancels) if exchange.cancels is not None else None
        if cancelled is not None:
            cancelled.is_answered = True
            cancelled.scope.deadline = trio.current_time() + CANCELLED_S
        return cancelled

    async def _carry(self, exchange: "_Exchange") -> None:
        if exchange.request_id is not None:
            self._exchanges[exchange.request_id] = exchange
        try:
            with exchange.scope:
                await self._ask(exchange)
        except (trio.BrokenResourceError, OSError) as error:
            self._end(str(error))
        finally:
            if exchange.request_id is not None:
                self._exchanges.pop(exchange.request_id, None)
            exchange.is_over.set()
            self._begun(exchange)

    async def _ask(self, exchange: "_Exchange") -> None:
        connection = await self._connections.take()
        try:
            exchange.has_session = bool(self._session)
            await connection.write(self._request("POST", exchange.line), exchange.line)
            exchange.is_written.set()
            head = await connection.read_head()
            await self._answered(exchange, head, connection)
        except BaseException:
            await connection.aclose()
            raise
        await self._connections.put(connection)

    def _begun(self, exchange: "_Exchange") -> None:
        """The next line may be sent."""
        exchange.is_written.set()
        if not exchange.is_ready.is_set():
            exchange.is_ready.set()
            self._unanswered.release()

    def _request(self, method: str, body: bytes | None = None) -> h11.Request:
        fields = [
            ("Host", self._connections.address.host_header),
            ("User-Agent", "mcp-streams"),
            ("Accept", ACCEPT),
            ("Accept-Encoding", "identity"),  # to be read as it comes
            *self._authorization,
        ]
        if body is not None:
            fields += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        if self._session:
            fields.append(("Mcp-Session-Id", self._session))
        if self._version:
            fields.append(("MCP-Protocol-Version", self._version))
        return h11.Request(method=method, target=self._connections.address.target, headers=fields)

    # Its response

    async def _answered(self, exchange: "_Exchange", head: Head, connection: Connection) -> None:
        is_success = 200 <= head.status < 300
        if is_success and exchange.method == _INITIALIZE:
            self._session = _printable(head.fields.get("mcp-session-id"))
        body = body_of(head, self._limit) if is_success and head.status != 202 else None
        if body is None:
            await self._no_messages(exchange, head, connection)
            return
        if exchange.method != _INITIALIZE:  # whose result says how to go on
            self._begun(exchange)
        await self._read(exchange, body, connection)

    async def _no_messages(self, exchange: "_Exchange", head: Head, connection: Connection) -> None:
        """A response that is no success, or has nothing in it: mostly a 202."""
        text = await _read_some(connection)
        if head.status == 404 and exchange.has_session:
            self._end("the server has forgotten the session")
        elif head.status == 401 and exchange.has_session:
            self._end("the server does not take the token any more")
        elif head.status >= 500 and exchange.method != _INITIALIZE:
            # Perhaps a proxy's, whose server is being restarted: no call fails for that.
            self._end(f"the server answered with {head}")
        elif exchange.is_awaited or head.status >= 300:
            exchange.is_answered = True
            line = refusal_line(head, text, exchange.request_id)
            await self._inbox.put(in_blocks([line]), len(line))
            if head.status >= 500:
                self._end(f"the server answered with {head}")

    async def _read(self, exchange: "_Exchange", body: Body, connection: Connection) -> None:
        size = 0
        try:
            while data := await connection.read():
                size += len(data)
                if blocks := body.feed(data):
                    await self._deliver(exchange, blocks, body.tail_lines, size)
                    size = 0
            if blocks := body.end():
                await self._deliver(exchange, blocks, body.tail_lines, size)
        except (trio.BrokenResourceError, Malformed) as error:
            self._end(str(error), body.held())
        if exchange.is_awaited:
            self._end("the server let go of a request")

    async def _deliver(
        self, exchange: "_Exchange", blocks: list[Block | TooLarge], tail_lines: int, size: int
    ) -> None:
        if exchange.is_awaited:
            self._look_for_answer(exchange, blocks, tail_lines)
        await self._inbox.put(blocks, size)

    def _look_for_answer(
        self, exchange: "_Exchange", blocks: list[Block | TooLarge], tail_lines: int
    ) -> None:
        assert exchange.request_id is not None  # else nothing is awaited
        answer = answer_in(blocks, exchange.request_id, tail_lines)
        if answer is None:
            return
        exchange.is_answered = True
        if exchange.method == _INITIALIZE:
            if not isinstance(answer, TooLarge):
                self._version = _printable(_version_in(answer))
            self._begun(exchange)


class _Params(msgspec.Struct, rename="camel"):
    request_id: RequestId | None = None


class _Result(msgspec.Struct, rename="camel"):
    protocol_version: str = ""


class _Exchange:
    """One line, the response to it, and how far they have come."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self.method: str | None = None
        self.request_id: RequestId | None = None  # where it is a request, which is to be answered
        self.cancels: RequestId | None = None
        self.has_session = False
        self.is_answered = False
        self.is_written = trio.Event()
        self.is_ready = trio.Event()  # its response has begun
        self.is_over = trio.Event()
        self.scope = trio.CancelScope()
        self._look()

    @property
    def is_awaited(self) -> bool:
        """Whether a response must come yet."""
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
            return  # what a line says is the server's business


async def _read_some(connection: Connection) -> bytes:
    """The body of a refusal, or how it begins. Raises `trio.BrokenResourceError`."""
    text = b""
    while len(text) <= REFUSAL_BYTES_MAX and (data := await connection.read()):
        text += data
    return text


def _version_in(answer: Message) -> str:
    result: Any = answer.result
    try:
        return "" if result is msgspec.UNSET else messages.decode(result, _Result).protocol_version
    except ValueError:
        return ""  # whoever receives it will say what is wrong with it


def _printable(value: str | None) -> str:
    """A value of a header as the server gave it; empty where no header could have it."""
    return value if value and _HEADER_VALUE.fullmatch(value) else ""
