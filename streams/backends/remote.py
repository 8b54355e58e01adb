"""A remote MCP server as a backend: what a host's own connection to it would lose, this keeps.

Each session has a `Link`, a session of its own with the remote server. A request of the host is a
stream of ours. Its messages are those that the remote server sends for the same request, as they
came but for ids and progress tokens (`streams.backends.remote_request`).

| the remote server | after a cut, or an outage |
|---|---|
| one of ours | each call is resumed by its ticket |
| with event ids over HTTP | the transport continues each response (`Last-Event-ID`) |
| any other | calls end as `interrupted`, or are sent again where `rerun` allows it |

A call that may run twice is one of MCP's methods that only read, or a tool that `rerun` names.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.backends.attribution import CANCELLED, cancelled_id, is_news, key_of
from streams.backends.kept import FILE_BYTES_MAX, PAGES_MAX, Kept, Members, Pages, stale
from streams.backends.link import Link, RemoteCall, greeting
from streams.backends.remote_request import CALL, Question, RemoteRequest
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.connection import ClientConnection
from streams.engine.engine import StreamHandler
from streams.engine.stream import Stream
from streams.errors import (
    INTERNAL_ERROR,
    CannotConnect,
    ClientError,
    Refusal,
    ServerRefused,
)
from streams.exchange import Dialer, Scopes
from streams.logs import STREAM_LETTERS, log
from streams.messages import Message, RequestId, sound
from streams.protocol.extension import EXTENSION
from streams.protocol.listings import CHANGED, HINTED, TOOLS, matches
from streams.protocol.revisions import REVISIONS
from streams.protocol.ticket import Ticket
from streams.server import backend
from streams.server.backend import CallTool, Received, SessionInfo, Standing
from streams.server.methods import progress_token

# Without a server, and with what it said last, `initialize` is answered after this time at most.
OFFLINE_AFTER_S: Final = 2.0

LISTS_BYTES_MAX: Final = FILE_BYTES_MAX // 4  # of one list

# The lists are read again at most so often, however often the server says that they changed.
LISTS_EVERY_S: Final = 1.0

# How long the end of this backend waits for cancels that the remote server has not got.
FAREWELL_S: Final = 1.0


_INITIALIZED: Final = "notifications/initialized"
_ALL_CAPABILITIES: Final = {
    name: msgspec.Raw(b"{}") for name in ("elicitation", "sampling", "roots")
}


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a remote server is used. Raises `ValueError`."""

    url: str  # for messages; `dial` connects
    dial: Dialer
    give_up_s: float = 86_400.0  # an outage beyond this ends the calls that wait
    start_s: float = 30.0  # for how long `initialize` waits for a server that never answered
    offline_start: bool = True  # answer with what the server said last, if it is not there
    # The file of that (`ownership.hello_path`). None: it is not kept.
    hello_path: Path | None = None
    rerun: tuple[str, ...] = ()  # names and globs of tools, and `hinted`
    resume_min_s: float = 0.0  # for the hosts that can resume: as those of `Server`
    resume_max_s: float = 3600.0

    def __post_init__(self) -> None:
        if not (self.give_up_s > 0 and self.start_s > 0):
            raise ValueError("give_up_s and start_s are seconds above 0")
        if not all(self.rerun):
            raise ValueError(f"rerun: give names of tools, globs, or {HINTED!r}")


class RemoteBackend:
    """A remote server, with a session of it for each session of ours."""

    def __init__(self, settings: RemoteSettings) -> None:
        self.settings = settings
        self.kept: Kept
        self.nursery: trio.Nursery
        self.cancelling = 0
        self._restarted: _RemoteGuest | None = None  # for the calls of an earlier process

    @property
    def running_tools(self) -> Sequence[str]:
        return ()  # their code runs elsewhere

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        path = self.settings.hello_path if self.settings.offline_start else None
        self.kept = Kept(path)
        async with trio.open_nursery() as self.nursery:
            try:
                yield
            finally:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_S):
                    while self.cancelling:
                        await trio.sleep(0.01)
                self.nursery.cancel_scope.cancel()

    @property
    def passes_page_tokens(self) -> bool:
        return True  # a server of ours makes some

    def delivers(self, method: str) -> bool:
        return True  # the remote server may take its time for any request

    async def open(self, session: SessionInfo, standing: Standing) -> "_RemoteGuest":
        guest = _RemoteGuest(self, session, standing)
        try:
            await guest.begin()
        except BaseException:
            guest.close()
            raise
        return guest

    def reopen(self, session: SessionInfo, standing: Standing) -> "_RemoteGuest":
        return _RemoteGuest(self, session, standing)

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        rerun = stream.rerun
        if rerun is None:
            return None
        origin = messages.parse(stream.record.origin)
        try:
            params = messages.decode(origin.params, CallTool)
            ticket = (
                None if rerun.state is None else Ticket.parse(messages.decode(rerun.state, str))
            )
        except ValueError as error:
            log.warning(
                "a call cannot be resumed", stream=stream.id[:STREAM_LETTERS], why=str(error)
            )
            return None
        if ticket is None and not self.may_run_again(CALL, params.name):
            return None
        stream.progress_token = params.meta.progress_token
        return partial(self._resume, origin, params.name, ticket)

    async def _resume(
        self, origin: Message, tool: str, ticket: Ticket | None, stream: Stream
    ) -> tuple[bytes, bool]:
        """Go on with a call that an earlier process began."""
        if self._restarted is None or self._restarted.is_closed:
            info = SessionInfo(
                principal="",
                revision=REVISIONS[0],
                client_info=msgspec.Raw(b'{"name":"mcp-streams","version":"1"}'),
                capabilities=_ALL_CAPABILITIES,
            )
            self._restarted = _RemoteGuest(self, info, _Nowhere())
        guest = self._restarted
        with guest.used():
            guest.close()  # once no call uses it
            return await RemoteRequest(guest, origin, tool).run(stream, ticket)

    def may_run_again(self, method: str, tool: str) -> bool:
        """Whether a request may be sent again after its connection was lost."""
        if method != CALL:
            return method in wire.HARMLESS
        return matches(self.settings.rerun, tool, self.kept.is_hinted(tool))


class _Nowhere:
    """The standing stream of no session."""

    def notify(self, line: bytes, *, key: str | None = None) -> None:
        """There is no client."""

    @property
    def is_listening(self) -> bool:
        return False

    async def ask(
        self, method: str, params: Any, *, on_sent: Callable[[RequestId], object] | None = None
    ) -> Message:
        raise Refusal(INTERNAL_ERROR, "The client is not there any more.")


class _RemoteGuest:
    """A session of the remote server, for one of ours."""

    def __init__(self, home: RemoteBackend, session: SessionInfo, standing: Standing) -> None:
        self.home = home
        self.settings = home.settings
        self.is_closed = False
        self.relays: dict[RunningCall, RemoteRequest] = {}
        self.link = Link(
            home.settings.dial,
            greeting(session.revision, session.client_info, session.capabilities),
            self,
            give_up_s=home.settings.give_up_s,
        )
        self._standing = standing
        self._told: dict[str, Pages] = {}  # the lists, as the host knows them
        self._asked: dict[RequestId | None, Question] = {}  # outside of calls
        self._is_offline = False  # the host was answered with what the server said before
        self._users = 0
        self._stale_lists = trio.Event()
        self._scope = trio.CancelScope()
        home.nursery.start_soon(self._run)

    async def _run(self) -> None:
        with self._scope:
            await self.link.run()

    @property
    def hello(self) -> Mapping[str, Any]:
        if self._is_offline:
            return stale(self.home.kept.hello or {})
        return self.link.hello

    async def begin(self) -> None:
        """Wait for the server, or go on without it. Raises `Refusal`."""
        known = self.home.kept.hello if self.settings.offline_start else None
        limit_s = self.settings.start_s if known is None else OFFLINE_AFTER_S
        error: OSError | None = None
        with trio.move_on_after(limit_s):
            async with trio.open_nursery() as nursery:

                async def fail() -> None:
                    nonlocal error
                    wait = self.link.refused if known is None else self.link.first_failure
                    error = await wait()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(fail)
                try:
                    await self.link.connected()
                except CannotConnect:
                    error = self.link.error
                nursery.cancel_scope.cancel()
        if self.link.is_up:
            await self.home.kept.keep_hello(self.link.hello)
        elif known is None or isinstance(error, PermissionError):
            raise self.unreachable(error or self.link.error)
        else:
            self._is_offline = True

    def unreachable(self, error: BaseException | None) -> Refusal:
        """The refusal of a request that the server never got."""
        why = str(error or "no answer in time").removesuffix(".")
        advice, reason = "start the server, or try later", "unavailable"
        if isinstance(error, PermissionError):
            advice, reason = "give a valid token or header", "unauthorized"
        elif isinstance(error, ServerRefused):
            spoken = ", ".join(reversed(REVISIONS))
            advice = f"it must take `initialize` for {spoken}, over Streamable HTTP or a WebSocket"
        return Refusal(INTERNAL_ERROR, f"{self.settings.url}: {why}: {advice}.", {"reason": reason})

    # As a guest

    def tool(self, name: str) -> None:
        return None  # a peer needs to know nothing of it

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        """All tools are open to the callers of this backend."""

    async def call(self, received: Received, params: CallTool) -> backend.Run:
        await trio.lowlevel.checkpoint()
        may_run_again = self.home.may_run_again(CALL, params.name)
        return backend.Run(
            handler=self._handler(received.message, params.name),
            progress_token=params.meta.progress_token,
            min_s=self.settings.resume_min_s,
            max_s=self.settings.resume_max_s,
            is_restartable=self._is_ours or may_run_again,
            is_repeatable=may_run_again or self.home.kept.is_hinted(params.name),
        )

    @property
    def _is_ours(self) -> bool:
        """Whether the server announces tickets, as far as is known."""
        hello: Members = (self.link.hello or self.home.kept.hello) or {}
        return EXTENSION.encode() in bytes(hello.get("capabilities", b""))

    async def request(self, received: Received) -> backend.Run | Any:
        await trio.lowlevel.checkpoint()
        method = str(received.message.method)
        if method in CHANGED and not self.link.is_up:
            page = (self.home.kept.pages(method) or {}).get(_cursor(received.message))
            if page is not None and self.settings.offline_start:
                self._note_told(method, _cursor(received.message), page)
                return stale(bytes(page))
        return backend.Run(
            handler=self._handler(received.message, ""),
            progress_token=progress_token(received.message.params),
        )

    def _handler(self, message: Message, tool: str) -> StreamHandler:
        async def handle(stream: Stream) -> tuple[bytes, bool]:
            with self.used():
                return await RemoteRequest(self, message, tool).run(stream, None)

        return handle

    async def notify(self, received: Received) -> None:
        if received.message.method == _INITIALIZED:
            await trio.lowlevel.checkpoint()  # the link says so itself, over each connection
        else:
            await self.link.tell(received.line.rstrip(b"\n") + b"\n")

    def close(self) -> None:
        self.is_closed = True
        self._end_if_unused()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the session open for the length of a block."""
        self._add_user(+1)
        try:
            yield
        finally:
            self._add_user(-1)

    def _add_user(self, change: int) -> None:
        self._users += change
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.is_closed and not self._users:
            self._scope.cancel()

    # For its requests

    @property
    def url(self) -> str:
        return self.settings.url

    def may_run_again(self, method: str, tool: str) -> bool:
        return self.home.may_run_again(method, tool)

    def cancel(self, call: RemoteCall) -> None:
        async def cancel() -> None:
            try:
                with trio.move_on_after(self.settings.give_up_s):
                    await call.cancel()
            except ClientError as error:
                log.info("a call was not cancelled", why=str(error))
            finally:
                await self.link.leave(call)
                self.home.cancelling -= 1

        self.home.cancelling += 1
        self.release(cancel)

    def release(self, wait: Callable[[], Awaitable[None]]) -> None:
        async def released() -> None:
            try:
                await wait()
            finally:
                self._add_user(-1)

        self._add_user(+1)
        self.home.nursery.start_soon(released)

    # As the listener of the link

    def came_up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._keep_lists, connection)

    def notified(self, message: Message) -> None:
        method = str(message.method)
        if method == wire.PROGRESS:
            return  # of a request that is over
        if method == CANCELLED:
            self._withdraw(message)
            return
        if method in CHANGED.values():
            self._stale_lists.set()
        key = key_of(method, message.params) if is_news(method) else None
        line = sound(messages.notification(method, message.params).rstrip(b"\n"))
        if line is not None:  # else above 1 MiB, and no UTF-8
            self._standing.notify(line + b"\n", key=key)

    def _withdraw(self, message: Message) -> None:
        """The remote server does not want an answer any more."""
        question = self._asked.get(cancelled_id(message.params))
        if question is not None and (line := question.withdrawn(message)) is not None:
            self._standing.notify(line)

    async def respond(self, message: Message, call: RunningCall | None) -> bytes:
        assert isinstance(message.id, int | str)
        relay = None if call is None else self.relays.get(call)
        if relay is not None and isinstance(call, RemoteCall):
            answer = await relay.answer(message, call)
        else:
            question = self._asked[message.id] = Question()
            try:
                await question.put(self._standing, message)
                answer = await question.wait()
            finally:
                del self._asked[message.id]
        if answer is None:
            return b""
        return messages.answer(msgspec.structs.replace(answer, id=message.id))

    # The lists of the server

    def note_result(self, request: Message, result: Any) -> None:
        """The host gets this result."""
        method = str(request.method)
        if method in CHANGED and isinstance(result, msgspec.Raw):
            self._note_told(method, _cursor(request), result)
            if method == TOOLS:
                self.home.kept.note_tools(_cursor(request), result)
        else:
            self.link.remember(method, request.params)

    def _note_told(self, method: str, cursor: str, page: msgspec.Raw) -> None:
        if not cursor:
            self._told[method] = {}
        self._told.setdefault(method, {})[cursor] = page

    async def _keep_lists(self, connection: ClientConnection) -> None:
        """Read the lists anew with each connection, and when the server says that they changed."""
        kept = self.home.kept
        await kept.keep_hello(self.link.hello)
        capabilities = bytes(self.link.hello.get("capabilities", b"{}"))
        try:
            declared = messages.decode(capabilities, dict[str, msgspec.Raw])
        except ValueError:
            declared = {}
        while True:
            self._stale_lists = trio.Event()
            for method in CHANGED:
                is_wanted = kept.path or HINTED in self.settings.rerun or method in self._told
                if not is_wanted or method.partition("/")[0] not in declared:
                    continue
                pages = await _read_pages(connection, method)
                if pages is not None:
                    await kept.keep_pages(method, pages)
                    self._compare(method, pages)
            await self._stale_lists.wait()
            await trio.sleep(LISTS_EVERY_S)

    def _compare(self, method: str, pages: Pages) -> None:
        """Tell the host of a list that is not what it knows."""
        told = self._told.get(method)
        if told is not None and any(pages.get(cursor) != page for cursor, page in told.items()):
            del self._told[method]
            changed = CHANGED[method]
            self._standing.notify(messages.notification(changed), key=changed)


class _Page(msgspec.Struct, rename="camel"):
    cursor: str | None = None
    next_cursor: str | None = None


def _cursor(request: Message) -> str:
    """The cursor of a request for a list; empty for the first page."""
    try:
        return messages.decode(request.params, _Page).cursor or ""
    except ValueError:
        return ""


async def _read_pages(connection: ClientConnection, method: str) -> Pages | None:
    """All pages of a list; None if it cannot be read now."""
    pages: Pages = {}
    cursor: str | None = ""
    while cursor is not None and cursor not in pages and len(pages) < PAGES_MAX:
        reply = await connection.ask(method, {"cursor": cursor} if cursor else {})
        if reply is None or not isinstance(reply.result, msgspec.Raw):
            return None
        pages[cursor] = reply.result
        if sum(map(len, pages.values())) > LISTS_BYTES_MAX:
            return None
        try:
            cursor = messages.decode(reply.result, _Page).next_cursor
        except ValueError:
            return None
    return pages
