"""One session with a remote server, over as many connections as it takes.

A `Link` is the client of `streams.client` without its decoding: a request is sent as the host has
made it, and its messages are read as lines. With one of our servers each call is resumed by its
ticket; with others the transport does what can be done.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

import msgspec
import trio

from streams import messages
from streams.client import wire
from streams.client.answers import Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls, ClientConnection
from streams.client.reconnect import Reconnector, Resumer
from streams.errors import CannotConnect, ServerRefused
from streams.exchange import Dialer
from streams.keys import new_id
from streams.messages import Message
from streams.protocol.extension import EXTENSION, KEY
from streams.protocol.ticket import Ticket

# One attempt to connect, `initialize` included.
CONNECT_S: Final = 10.0

# A server that is not ours and that answers no ping is given up after this, where that loses no
# call.
SILENCE_S: Final = 20.0

_DIALECTS: Final = ("streams", "resumableRequests")

Respond = Callable[[Message, RunningCall | None], Awaitable[bytes]]


class RemoteCall(RunningCall):
    """A request to the remote server. It confirms what was read, or no more than is `kept`."""

    kept: int | None = None  # the seq up to which nothing need come again; None: all that was read
    announced: trio.Event | None = None

    @property
    def confirmed(self) -> int:
        return super().confirmed if self.kept is None else self.kept

    @property
    def has_unread(self) -> bool:
        """Whether messages have come that were not handed out."""
        return bool(self._inbox) or not self._outlet.is_empty

    def announce(self, ticket: Ticket) -> None:
        super().announce(ticket)
        if self.announced is not None:
            self.announced.set()

    def put_back(self) -> bool:
        return False  # its owner begins another call

    def keep(self, seq: int) -> None:
        """From now on the messages up to `seq` need not come again."""
        self.kept = seq
        self._owner.want_ack(self, now=False)

    @property
    def response(self) -> Message:
        """The response as it came, once all other messages are read."""
        assert self._final is not None
        return self._final

    def settle(self) -> None:
        """Nothing of it need come again, the response included."""
        self.kept = None
        self._settle()


class LinkListener(Protocol):
    """Is told what comes from the remote server without a request of its own."""

    def came_up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        """There is a connection. The nursery lasts as long as it does."""

    def notified(self, message: Message) -> None:
        """A notification that belongs to no request."""

    async def respond(self, message: Message, call: RunningCall | None) -> bytes:
        """Answer a request of the remote server. Raises `Refusal`."""


class Link:
    """One session; `run` lasts as long as it does."""

    def __init__(
        self,
        dialer: Dialer,
        greeting: Mapping[str, Any],
        listener: LinkListener,
        *,
        give_up_s: float,
    ) -> None:
        self._listener = listener
        self._calls = Calls()
        self._answers = Answers({}, listener.respond)
        self._has_begun = trio.Event()
        self.keeps_session = False  # the remote server still works for it when it is closed
        self._reconnector = Reconnector(
            dialer,
            self._answers,
            self._calls,
            greeting=lambda: dict(greeting),
            on_notification=listener.notified,
            connect_s=0,
            connect_timeout_s=CONNECT_S,
            patience_s=give_up_s,
            silence_s=SILENCE_S,
            is_first_awaited=True,
            is_watchful=True,
        )
        self._reconnector.listen()
        self._resumer = Resumer(self._reconnector, self._calls, self._answers, patience_s=give_up_s)

    async def run(self) -> None:
        """Stay connected until cancelled."""
        async with trio.open_nursery() as nursery:
            self._answers.nursery = nursery
            self._has_begun.set()
            try:
                await self._reconnector.run(self)
            finally:
                connection = self._reconnector.connection
                if connection is not None and self.keeps_session:
                    connection.abandon("the session is kept")

    # As the listener of the connection

    def up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        self._resumer.up(connection, nursery)
        self._listener.came_up(connection, nursery)

    def down(self, connection: ClientConnection) -> None:
        self._resumer.down(connection)

    def surrender(self, error: CannotConnect) -> None:
        self._resumer.surrender(error)

    # The remote server

    @property
    def is_up(self) -> bool:
        """Whether there is a connection now."""
        connection = self._reconnector.connection
        return connection is not None and not connection.is_over

    @property
    def hello(self) -> dict[str, msgspec.Raw]:
        """The members of the last answer to `initialize`; empty before the first."""
        return messages.decode(self._reconnector.greeted, dict[str, msgspec.Raw])

    async def connected(self) -> ClientConnection:
        """Wait for a connection as a call does. Raises `CannotConnect`."""
        await self._has_begun.wait()
        return await self._reconnector.connected_for_call()

    async def first_failure(self) -> OSError:
        """Wait for the first failure to connect."""
        while (error := self._reconnector.error) is None:
            await self._reconnector.change()
        return error

    async def refused(self) -> OSError:
        """Wait for a failure that will be the same the next time."""
        while not isinstance(error := self._reconnector.error, PermissionError | ServerRefused):
            await self._reconnector.change()
        return error

    @property
    def error(self) -> OSError | None:
        """Why there is no connection, as far as is known."""
        return self._reconnector.error

    async def begin(
        self, method: str, params: msgspec.Raw, *, wants_progress: bool, kept: int | None
    ) -> RemoteCall:
        """Send a request. Raises `CannotConnect`."""
        connection = await self.connected()
        request_id = self._reconnector.new_id()
        is_keyed = method == "tools/call" and bool(connection.hello.key_memory)
        meta: dict[str, Any] = {KEY: new_id()} if is_keyed else {}
        if wants_progress:
            meta["progressToken"] = request_id
        line = messages.request(request_id, method, _with_meta(params, meta))
        call = RemoteCall(self._resumer, line, request_id, has_key=is_keyed, name=method)
        call.kept = kept
        call.announced = trio.Event()
        await call.__aenter__()
        return call

    async def resume(self, ticket: Ticket) -> RemoteCall:
        """Resume a call. Raises `CannotConnect`, `ValueError` for a ticket of another version."""
        wire.resuming(ticket)
        await self.connected()
        call = RemoteCall.of(self._resumer, ticket)
        call.kept = ticket.after or 0
        await call.__aenter__()
        return call

    async def leave(self, call: RemoteCall) -> None:
        """Nothing more of this call is read."""
        await call.__aexit__(None, None, None)

    async def tell(self, line: bytes) -> None:
        """Send a notification, if there is a connection."""
        connection = self._reconnector.connection
        if connection is not None and not connection.is_over:
            await connection.send(line)

    def remember(self, method: str, params: msgspec.Raw) -> None:
        """The server has done this: tell it so over each later connection."""
        try:
            given = messages.decode(params, _Setting)
        except ValueError:
            return
        reconnector = self._reconnector
        if method == wire.SUBSCRIBE:
            reconnector.subscribed[given.uri] = None
        elif method == wire.UNSUBSCRIBE:
            reconnector.subscribed.pop(given.uri, None)
        elif method == "logging/setLevel":
            reconnector.level = given.level


class _Setting(msgspec.Struct):
    uri: str = ""
    level: str = ""


def greeting(
    revision: str, client_info: msgspec.Raw, capabilities: Mapping[str, msgspec.Raw]
) -> dict[str, Any]:
    """The params of `initialize` for a host: its own, and what our client adds to them."""
    ours = wire.hello("", "", (), _DIALECTS)
    added = ours["capabilities"]
    theirs = capabilities.get("experimental", msgspec.Raw(b"{}"))
    try:
        experimental = messages.decode(theirs, dict[str, Any])
    except ValueError:
        experimental = {}
    experimental = {**experimental, EXTENSION: added["experimental"][EXTENSION]}
    merged = {**capabilities, **added, "experimental": experimental}
    return {"protocolVersion": revision, "capabilities": merged, "clientInfo": client_info}


def _with_meta(params: msgspec.Raw, meta: Mapping[str, Any]) -> msgspec.Raw:
    """The same params with other names in their `_meta`: those that the host gave mean nothing to
    the remote server.
    """
    try:
        members: dict[str, Any] = dict(messages.decode(params, dict[str, msgspec.Raw]))
        given = messages.decode(members.get("_meta", b"{}"), dict[str, msgspec.Raw])
    except ValueError:
        return params  # no params of MCP: the server says so
    kept: dict[str, Any] = {name: raw for name, raw in given.items() if name not in _OWN}
    if kept == given and not meta:
        return params
    return msgspec.Raw(messages.encode({**members, "_meta": {**kept, **meta}}))


_OWN: Final = frozenset({KEY, "progressToken"})
