"""A remote MCP server as a backend: what a host's own connection to it would lose, this keeps.

Each session has a `Link`, a session of its own with the remote server. A request of the host is a
stream of ours. Its messages are those that the remote server sends for the same request, as they
came but for ids and progress tokens. `_Relay` is one such request.

| the remote server | after a cut, or an outage |
|---|---|
| one of ours | each call is resumed by its ticket |
| with event ids over HTTP | the transport continues each response (`Last-Event-ID`) |
| any other | calls end as `interrupted`, or are sent again where `rerun` allows it |

A call that may run twice is one of MCP's methods that only read, or a tool that `rerun` names.

This is one file because the backend, its guests and their relays share the link and its end.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import trio

from streams import messages
from streams.backends.kept import Kept, Members, Pages, stale
from streams.backends.link import Link, RemoteCall, greeting
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.connection import ClientConnection
from streams.engine.engine import StreamHandler
from streams.engine.lifecycle import LIVE
from streams.engine.stream import Stream
from streams.errors import (
    INTERNAL_ERROR,
    CallFailed,
    CallLost,
    CannotConnect,
    ClientError,
    Ended,
    Refusal,
    ServerRefused,
    StreamGone,
    refusal,
)
from streams.exchange import Dialer, Scopes
from streams.logs import log
from streams.messages import Kind, Message, RequestId, Run
from streams.protocol.extension import EXTENSION
from streams.protocol.ticket import Ticket
from streams.server import backend
from streams.server.backend import CallTool, Received, SessionInfo, Standing
from streams.server.methods import progress_token

# Without a server, and with what it said last, `initialize` is answered after this time at most.
OFFLINE_AFTER_S: Final = 2.0

# How often a request that may run twice is sent in all, if its connection is lost each time.
ATTEMPTS_MAX: Final = 5

# A call of a server of ours is checkpointed with its first message, and then after so many messages
# or seconds. After a crash, no more than those come once more from the remote server.
CHECKPOINT_LINES: Final = 400
CHECKPOINT_S: Final = 0.25

# Pages of one list that are read to be kept.
PAGES_MAX: Final = 100

# How long the end of this backend waits for cancels that the remote server has not got.
FAREWELL_S: Final = 1.0

HINTED: Final = "hinted"  # in `rerun`: the tools with readOnlyHint or idempotentHint

_LISTS: Final = {  # and the notification that a list has changed
    "tools/list": "notifications/tools/list_changed",
    "resources/list": "notifications/resources/list_changed",
    "resources/templates/list": "notifications/resources/list_changed",
    "prompts/list": "notifications/prompts/list_changed",
}
_CALL: Final = "tools/call"
_INITIALIZED: Final = "notifications/initialized"
_PROGRESS: Final = wire.PROGRESS.encode()
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
    hello_path: Path | None = None  # the file of that: see `kept_path`; None: it is not kept
    rerun: tuple[str, ...] = ()  # names and globs of tools, and `hinted`
    resume_min_s: float = 0.0  # for the hosts that can resume: as those of `Server`
    resume_max_s: float = 3600.0
    era: Literal["auto", "legacy"] = "auto"

    def __post_init__(self) -> None:
        if self.era not in ("auto", "legacy"):
            raise ValueError(
                f"era {self.era!r}: revisions {', '.join(sorted(wire.PROTOCOL_VERSIONS))} are "
                "spoken, which is 'auto' or 'legacy'"
            )
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
        self._cancelling = 0
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
                    while self._cancelling:
                        await trio.sleep(0.01)
                self.nursery.cancel_scope.cancel()

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
            log.warning("a call cannot be resumed", stream=stream.id[:8], why=str(error))
            return None
        if ticket is None and not self.may_run_again(_CALL, params.name):
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
                revision=wire.PROTOCOL_VERSION,
                client_info=msgspec.Raw(b'{"name":"mcp-streams","version":"1"}'),
                capabilities=_ALL_CAPABILITIES,
            )
            self._restarted = _RemoteGuest(self, info, _Nowhere())
        guest = self._restarted
        with guest.used():
            guest.close()  # once no call uses it
            return await _Relay(guest, origin, tool).run(stream, ticket)

    def may_run_again(self, method: str, tool: str) -> bool:
        """Whether a request may be sent again after its connection was lost."""
        if method != _CALL:
            return method in wire.HARMLESS
        is_named = any(fnmatchcase(tool, each) for each in self.settings.rerun if each != HINTED)
        return is_named or (HINTED in self.settings.rerun and self.is_hinted(tool))

    def is_hinted(self, tool: str) -> bool:
        """Whether the server says of a tool that a second run does no harm."""
        for page in (self.kept.pages("tools/list") or {}).values():
            try:
                listed = messages.decode(page, _Listing).tools
            except ValueError:
                continue
            for each in listed:
                if each.name == tool and each.annotations is not None:
                    hints = each.annotations
                    return hints.read_only_hint is True or hints.idempotent_hint is True
        return False

    def cancel(self, guest: "_RemoteGuest", call: RemoteCall) -> None:
        """Have the remote server cancel a call, however long that takes."""

        async def cancel() -> None:
            with guest.used():
                try:
                    with trio.move_on_after(self.settings.give_up_s):
                        await call.cancel()
                except ClientError as error:
                    log.info("a call was not cancelled", why=str(error))
                finally:
                    await guest.link.leave(call)
                    self._cancelling -= 1

        self._cancelling += 1
        self.nursery.start_soon(cancel)


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
        self.relays: dict[RunningCall, _Relay] = {}
        self.link = Link(
            home.settings.dial,
            greeting(session.revision, session.client_info, session.capabilities),
            self,
            give_up_s=home.settings.give_up_s,
        )
        self._standing = standing
        self._told: dict[str, Pages] = {}  # the lists, as the host knows them
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
            spoken = ", ".join(sorted(wire.PROTOCOL_VERSIONS))
            advice = f"it must take `initialize` for {spoken}, over Streamable HTTP or a WebSocket"
        return Refusal(INTERNAL_ERROR, f"{self.settings.url}: {why}: {advice}.", {"reason": reason})

    # As a guest

    def tool(self, name: str) -> None:
        return None  # a peer needs to know nothing of it

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        """All tools are open to the callers of this backend."""

    async def call(self, received: Received, params: CallTool) -> backend.Run:
        await trio.lowlevel.checkpoint()
        may_run_again = self.home.may_run_again(_CALL, params.name)
        return backend.Run(
            handler=self._handler(received.message, params.name),
            progress_token=params.meta.progress_token,
            min_s=self.settings.resume_min_s,
            max_s=self.settings.resume_max_s,
            is_restartable=self._is_ours or may_run_again,
            is_repeatable=may_run_again or self.home.is_hinted(params.name),
        )

    @property
    def _is_ours(self) -> bool:
        """Whether the server announces tickets, as far as is known."""
        hello: Members = (self.link.hello or self.home.kept.hello) or {}
        return EXTENSION.encode() in bytes(hello.get("capabilities", b""))

    async def request(self, received: Received) -> backend.Run | Any:
        await trio.lowlevel.checkpoint()
        method = str(received.message.method)
        if method in _LISTS and not self.link.is_up:
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
                return await _Relay(self, message, tool).run(stream, None)

        return handle

    async def notify(self, received: Received) -> None:
        if received.message.method == _INITIALIZED:
            await trio.lowlevel.checkpoint()  # the link says so itself, over each connection
        else:
            await self.link.tell(received.line.rstrip(b"\n") + b"\n")

    def close(self) -> None:
        self.is_closed = True
        self._end_if_unused()

    def used(self) -> "_Use":
        """Keep the session open for the length of a block."""
        return _Use(self)

    def add_user(self, change: int) -> None:
        self._users += change
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.is_closed and not self._users:
            self._scope.cancel()

    # As the listener of the link

    def came_up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._keep_lists, connection)

    def notified(self, message: Message) -> None:
        method = str(message.method)
        if method in (wire.PROGRESS, wire.CANCELLED):
            return  # of a request that is over
        key = method if method in _LISTS.values() else None
        if key is not None:
            self._stale_lists.set()
        elif method == wire.UPDATED:
            key = f"{method} {messages.decode(message.params, dict[str, Any]).get('uri')}"
        self._standing.notify(messages.notification(method, message.params), key=key)

    async def respond(self, message: Message, call: RunningCall | None) -> bytes:
        relay = None if call is None else self.relays.get(call)
        if relay is not None and isinstance(call, RemoteCall):
            answer = await relay.answer(message, call)
        else:
            answer = await self._standing.ask(str(message.method), message.params)
        assert isinstance(message.id, int | str)
        return messages.answer(msgspec.structs.replace(answer, id=message.id))

    # The lists of the server

    def note_result(self, request: Message, result: Any) -> None:
        """The host gets this result."""
        method = str(request.method)
        if method in _LISTS and isinstance(result, msgspec.Raw):
            self._note_told(method, _cursor(request), result)
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
            for method in _LISTS:
                is_wanted = kept.path or HINTED in self.settings.rerun or method in self._told
                if not is_wanted or method.partition("/")[0] not in declared:
                    continue
                pages = await _read_pages(connection, method)
                if pages is not None:
                    await kept.keep_pages(method, pages)
                    self._compare(method, pages)
            await self._stale_lists.wait()

    def _compare(self, method: str, pages: Pages) -> None:
        """Tell the host of a list that is not what it knows."""
        told = self._told.get(method)
        if told is not None and any(pages.get(cursor) != page for cursor, page in told.items()):
            del self._told[method]
            changed = _LISTS[method]
            self._standing.notify(messages.notification(changed), key=changed)


class _Use:
    """Keeps a guest's session open."""

    def __init__(self, guest: _RemoteGuest) -> None:
        self._guest = guest

    def __enter__(self) -> None:
        self._guest.add_user(+1)

    def __exit__(self, *error: object) -> None:
        self._guest.add_user(-1)


class _Untaken(CallLost):
    """The remote server has not taken the request."""


class _Question:
    """A request of the remote server within a call, and the host's answer to it."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._is_here = trio.Event()
        self.is_sent = trio.Event()
        self._answer: Message | Refusal = Refusal(INTERNAL_ERROR, "The call has ended.")

    @property
    def is_answered(self) -> bool:
        return self._is_here.is_set()

    def give(self, answer: Message | Refusal | None) -> None:
        """None: there will be no answer."""
        if answer is not None:
            self._answer = answer
        self.is_sent.set()
        self._is_here.set()

    async def wait(self) -> Message:
        await self._is_here.wait()
        if isinstance(self._answer, Refusal):
            raise self._answer
        return self._answer


class _Relay:
    """One request of the host, as it runs on the remote server."""

    def __init__(self, guest: _RemoteGuest, request: Message, tool: str) -> None:
        self._guest = guest
        self._home = guest.home
        self._request = request
        self._method = str(request.method)
        self._tool = tool
        self._questions: dict[RequestId, _Question] = {}
        self._open: list[_Question] = []  # that the remote server may not have the answers of
        self._stream: Stream
        self._tasks: trio.Nursery
        self._turn = trio.Lock()  # held while a run is passed on, up to its checkpoint
        self._lines = 0  # passed on since the last checkpoint
        self._checkpointed_at: float | None = None
        self._progress: float | None = None  # the most that was reported, before a rerun
        self._is_second = False

    async def run(self, stream: Stream, ticket: Ticket | None) -> tuple[bytes, bool]:
        """Run the request, or go on with it. Returns its response. Raises `Refusal`."""
        self._stream = stream
        attempts = 0
        while True:
            attempts += 1
            call = await self._begun(ticket)
            try:
                return await self._passed_on(call)
            except (CallLost, StreamGone, CannotConnect) as error:
                await self._guest.link.leave(call)
                may_run_again = isinstance(error, _Untaken) or self._home.may_run_again(
                    self._method, self._tool
                )
                is_over = isinstance(error, CannotConnect) or attempts >= ATTEMPTS_MAX
                if is_over or not may_run_again:
                    raise self._interrupted(error) from None
                log.info("a request is sent again", method=self._method, why=str(error))
                ticket, self._is_second = None, True
                await trio.sleep(min(2.0 ** (attempts - 2), 4.0))
            except CallFailed as error:
                await self._guest.link.leave(call)
                failed = Refusal(error.code, error.message, error.data)
                return messages.error(stream.request_id, failed), True

    async def _begun(self, ticket: Ticket | None) -> RemoteCall:
        link, keeps = self._guest.link, self._stream.rerun is not None
        try:
            if ticket is not None:
                return await link.resume(ticket)
            return await link.begin(
                self._method,
                self._request.params,
                wants_progress=self._stream.is_progress_wanted,
                kept=0 if keeps else None,
            )
        except CannotConnect as error:
            raise self._guest.unreachable(error) from None
        except ClientError as error:
            raise self._interrupted(error) from None

    def _interrupted(self, error: ClientError) -> Refusal:
        return refusal("interrupted").saying(
            f"The connection to {self._guest.settings.url} was lost, and the server cannot resume "
            f"this request: make it again if that is safe. ({error})"
        )

    async def _passed_on(self, call: RemoteCall) -> tuple[bytes, bool]:
        """Pass on all messages of the call. Raises `ClientError`."""
        guest = self._guest
        failure: ClientError | Refusal | None = None
        is_over = False
        guest.relays[call] = self
        try:
            async with trio.open_nursery() as self._tasks:
                if call.kept is not None and call.ticket is None:
                    self._tasks.start_soon(self._keep_ticket, call)
                try:
                    async for run in call.runs():
                        async with self._turn:
                            await self._take(run)
                            await self._checkpoint(call)
                except (ClientError, Refusal) as error:
                    failure = error
                self._tasks.cancel_scope.cancel()
            is_over = not isinstance(failure, Refusal)
        finally:
            del guest.relays[call]
            for question in self._questions.values():
                question.give(None)
            if not is_over:
                self._leave_unfinished(call)
        if failure is not None:
            raise failure
        return self._response(call)

    def _leave_unfinished(self, call: RemoteCall) -> None:
        """The host does not want the call any more, or this process ends."""
        if self._stream.is_suspended:
            self._guest.link.keeps_session = True  # the next process goes on with it
        else:
            self._home.cancel(self._guest, call)

    def _response(self, call: RemoteCall) -> tuple[bytes, bool]:
        response = call.response
        is_error = response.kind is Kind.ERROR
        if is_error and (lost := wire.error_of(response)).reason in (wire.LOST, wire.UNTAKEN):
            kind = _Untaken if lost.reason == wire.UNTAKEN else CallLost
            raise kind(lost.message)
        self._home.nursery.start_soon(self._release, call)
        self._guest.add_user(+1)  # until then
        if not is_error:
            self._guest.note_result(self._request, response.result)
            assert isinstance(response.result, msgspec.Raw)
            is_error = self._method == _CALL and messages.is_tool_error(response.result)
        return messages.answer(
            msgspec.structs.replace(response, id=self._stream.request_id)
        ), is_error

    async def _release(self, call: RemoteCall) -> None:
        """Let the remote server forget the call, once the response is safe here."""
        stream = self._stream
        try:
            if call.kept is not None:
                while stream.state.outcome is LIVE:
                    await trio.sleep(0.01)
                if not stream.is_deferred:
                    await stream.flush()
            call.settle()
            await self._guest.link.leave(call)
        finally:
            self._guest.add_user(-1)

    # Messages of the remote server

    async def _take(self, run: Run) -> None:
        self._open = [each for each in self._open if not each.is_answered]
        *lines, last = run.lines
        for line in lines:
            await self._send(line)
        message = messages.look(last)
        if message.kind is Kind.REQUEST:
            await self._ask(message)
        else:
            await self._send(last)
        self._lines += run.count

    async def _send(self, line: bytes) -> None:
        if _PROGRESS in line and await self._report(line):
            return
        if b"notifications/cancelled" in line and self._withdraw(line):
            return
        await self._stream.send(line)

    async def _report(self, line: bytes) -> bool:
        """Send this line if it is progress, under the host's token."""
        message = messages.look(line)
        if message.method != wire.PROGRESS:
            return False
        token = self._stream.progress_token
        try:
            params = messages.decode(message.params, dict[str, msgspec.Raw])
            progress = messages.decode(params.get("progress", b"null"), float | int | None)  # type: ignore[arg-type]
        except ValueError:
            return True  # nothing that a host could read
        if token is None or self._is_known(progress):
            return True
        params["progressToken"] = msgspec.Raw(messages.encode(token))
        await self._stream.send_progress(token, messages.notification(wire.PROGRESS, params))
        return True

    def _is_known(self, progress: float | None) -> bool:
        """Whether a second attempt has come no further than the first. MCP: "The progress value
        MUST increase with each notification".
        """
        is_known = (
            self._is_second
            and None not in (progress, self._progress)
            and progress <= self._progress  # type: ignore[operator]
        )
        if not is_known:
            self._progress = progress
        return is_known

    def _withdraw(self, line: bytes) -> bool:
        """The remote server does not want an answer any more. Our id of the question is another."""
        message = messages.look(line)
        if message.method != wire.CANCELLED:
            return False
        try:
            cancelled = messages.decode(message.params, dict[str, Any]).get("requestId")
        except ValueError:
            return True
        if isinstance(cancelled, int | str) and cancelled in self._questions:
            self._questions[cancelled].scope.cancel()
        return True

    async def _ask(self, message: Message) -> None:
        """Ask the host; returns when the question has its place in the stream."""
        assert isinstance(message.id, int | str)
        question = self._questions.setdefault(message.id, _Question())
        self._open.append(question)
        self._tasks.start_soon(self._put, message, question)
        await question.is_sent.wait()

    async def _put(self, message: Message, question: _Question) -> None:
        answer: Message | Refusal | None = None
        try:
            with question.scope:

                def sent(_: RequestId) -> None:
                    question.is_sent.set()

                answer = await self._stream.ask(str(message.method), message.params, on_sent=sent)
        except Refusal as refused:
            answer = refused
        finally:
            question.give(answer)

    async def answer(self, message: Message, call: RemoteCall) -> Message:
        """The host's answer to a request of the remote server. Raises `Refusal`."""
        assert isinstance(message.id, int | str)
        question = self._questions.setdefault(message.id, _Question())
        if not call.is_numbered:  # else it is among the messages of the call
            self._tasks.start_soon(self._put_behind, call, message, question)
        try:
            return await question.wait()
        finally:
            del self._questions[message.id]

    async def _put_behind(self, call: RemoteCall, message: Message, question: _Question) -> None:
        """Ask the host behind the messages that came before."""
        while call.has_unread:
            await trio.sleep(0.01)
        async with self._turn:
            pass  # they are passed on
        await self._put(message, question)

    # For the next process

    async def _keep_ticket(self, call: RemoteCall) -> None:
        assert call.announced is not None
        await call.announced.wait()
        async with self._turn:
            await self._checkpoint(call)

    async def _checkpoint(self, call: RemoteCall) -> None:
        """Keep the ticket of the call, and how far it is passed on.

        Not while the host has a question to answer: after a restart it must come once more.
        """
        ticket, now = call.ticket, trio.current_time()
        if call.kept is None or ticket is None or self._open:
            return
        last = self._checkpointed_at
        is_due = last is None or self._lines >= CHECKPOINT_LINES or now - last >= CHECKPOINT_S
        if not is_due:
            return
        with suppress(Ended):  # a host's cancel has ended the stream, and ends this task next
            await self._stream.checkpoint(messages.encode(str(ticket)))
        self._lines, self._checkpointed_at = 0, trio.current_time()
        if call.is_numbered:
            call.keep(ticket.after or 0)


class _Hints(msgspec.Struct, rename="camel"):
    read_only_hint: Any = None
    idempotent_hint: Any = None


class _Listed(msgspec.Struct):
    name: str
    annotations: _Hints | None = None


class _Listing(msgspec.Struct):
    tools: list[_Listed] = []


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
        try:
            cursor = messages.decode(reply.result, _Page).next_cursor
        except ValueError:
            return None
    return pages
