"""A server object of the official Python SDK as a backend: `MCPServer`, or the low-level `Server`.

The object runs unchanged, under trio. The SDK draws a line between handlers and the wire, its
`DispatchContext`: each request has one, and all that a handler reports, logs or asks passes through
it. Here that is an `_Exchange`, over the stream of the request. So a message needs no attribution:
the exchange that it leaves through knows its stream. The SDK's own loop over a connection does not
run, and no session owns the handlers: a call goes on after the session in which it began.

This is one file because its three classes are the two ends of that line: a guest takes what the
client sends, an exchange and an outbound channel send what the handler says.

A handler may send a message without naming its request: it leaves through the SDK's connection. A
question, a log message or progress belongs to the call in whose task it was made. All else (a
changed list, an updated resource) belongs to the session.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.engine.engine import StreamHandler
from streams.engine.lifecycle import ProgressToken
from streams.engine.notices import resource_updated
from streams.engine.sessions import HttpSession
from streams.engine.stream import Stream
from streams.errors import INTERNAL_ERROR, INVALID_PARAMS, PARSE_ERROR, Refusal
from streams.exchange import Scopes
from streams.faults import let_pass, log_failure, text_of
from streams.forks import Confined
from streams.logs import Warnings, log
from streams.messages import Message, RequestId
from streams.server.backend import CallTool, Received, Run, SessionInfo, Standing
from streams.server.call import Call
from streams.server.lifespan import entered
from streams.server.methods import progress_token
from streams.turns import work_on

try:
    import anyio
    import pydantic_core
    from mcp.server import Server
    from mcp.server.auth.middleware.auth_context import auth_context_var
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken
    from mcp.server.connection import Connection
    from mcp.server.mcpserver import MCPServer
    from mcp.server.runner import ServerRunner, aclose_shielded
    from mcp.shared.dispatcher import CallOptions, ProgressFnT
    from mcp.shared.exceptions import MCPError, NoBackChannelError
    from mcp.shared.jsonrpc_dispatcher import handler_exception_to_error_data
    from mcp.shared.message import ServerMessageMetadata
    from mcp.shared.transport_context import TransportContext
    from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT
except ImportError:
    _IS_INSTALLED = False
else:
    _IS_INSTALLED = True

# Handlers of notifications that run at once for one session. A handler may ask its client, and so
# never end; more notifications than these are dropped, so that a flood of them fills no memory.
NOTIFIED_MAX: Final = 100

_SDK_LOG: Final = "mcp.server"
_INITIALIZE: Final = "initialize"
_INITIALIZED: Final = "notifications/initialized"
_PROGRESS: Final = "notifications/progress"
_LOG: Final = "notifications/message"
_UPDATED: Final = "notifications/resources/updated"

_exchange: Final[ContextVar["_Exchange | None"]] = ContextVar("exchange", default=None)


def recognised(server: object) -> bool:
    """Whether this is a server object of the official SDK, or one of its kin.

    `SdkBackend` tells which of those it cannot serve.
    """
    return any(
        each.__module__.partition(".")[0] in ("mcp", "fastmcp")
        and each.__name__ in ("MCPServer", "Server", "FastMCP")
        for each in type(server).__mro__
    )


class SdkBackend:
    """One server object of the official SDK, behind all sessions.

    Its lifespan is entered once, before the first session. `resume_min_s` and `resume_max_s` are
    those of `streams.Server`, for calls of tools. All other requests end with their connection.

    Raises `TypeError` for another object.
    """

    def __init__(
        self, server: Any, *, resume_min_s: float = 1.0, resume_max_s: float = 3600.0
    ) -> None:
        self.server = _low_level(server)
        self._has_own_auth = getattr(getattr(server, "settings", None), "auth", None) is not None
        self.resume_min_s = resume_min_s
        self.resume_max_s = resume_max_s
        self.confined = Confined()
        self.running_requests: dict[Stream, str] = {}
        self.adviser = _Adviser()
        self.state: Any = None  # what the lifespan has yielded
        self.nursery: trio.Nursery
        self.guests: set[_SdkGuest] = set()

    @property
    def running_tools(self) -> Sequence[str]:
        return sorted(set(self.running_requests.values()))

    @staticmethod
    def tool_at(frame: FrameType) -> str | None:
        """The name of the tool or method that runs in this frame; None for any other frame."""
        if frame.f_code is not _SdkGuest._answer.__code__:
            return None
        exchange = frame.f_locals["exchange"]
        return exchange.name if isinstance(exchange, _Exchange) else None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if self._has_own_auth:
            log.warning(
                "the server's own auth settings are not used: serve it with --auth-tokens or "
                "--auth-jwks",
                server=self.server.name,
            )
        logging.getLogger(_SDK_LOG).addHandler(self.adviser)
        try:
            async with (
                entered(self.server.lifespan, self.server) as self.state,
                trio.open_nursery() as self.nursery,
            ):
                try:
                    yield
                finally:
                    for guest in list(self.guests):
                        guest.close()
        finally:
            logging.getLogger(_SDK_LOG).removeHandler(self.adviser)

    @property
    def passes_page_tokens(self) -> bool:
        return False  # the SDK drops them

    def delivers(self, method: str) -> bool:
        return True  # any method may have a handler, which may report and ask

    async def open(self, session: SessionInfo, standing: Standing) -> "_SdkGuest":
        guest = _SdkGuest(self, session, standing)
        try:
            await guest.initialize()
        except BaseException:
            guest.close()
            raise
        return guest

    def reopen(self, session: SessionInfo, standing: Standing) -> "_SdkGuest":
        return _SdkGuest(self, session, standing)

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        return None  # the SDK's tools do not say which calls may run twice


class _Adviser(logging.Handler):
    """Advises what to do with a tool that needs asyncio.

    It reads the SDK's log, since the SDK tells the exception of a tool nowhere else.
    """

    def __init__(self) -> None:
        super().__init__()
        self._warnings = Warnings()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and trio.lowlevel.in_trio_run():
            self.look_at(record.exc_info[1])

    def look_at(self, error: BaseException | None) -> None:
        while error is not None:
            if isinstance(error, RuntimeError) and str(error) == "no running event loop":
                self._warnings.warn(
                    "a tool uses asyncio, and this server runs on trio: use anyio in its place, "
                    "or serve the program by `mcp-streams wrap -- python FILE.py`"
                )
            error = error.__cause__ or error.__context__


class _SdkGuest:
    """One session, which to the SDK is one connection."""

    def __init__(self, backend: SdkBackend, session: SessionInfo, standing: Standing) -> None:
        self.backend = backend
        self.hello: Mapping[str, Any] = {}
        self.standing = standing
        self._session = session
        self._connection = Connection.for_loop(_Outbound(self))
        self._runner = ServerRunner(backend.server, self._connection, backend.state)
        self._initializing = trio.Lock()
        self._is_initialized = False
        self._running = 0
        self._is_closed = False
        self._notified: set[trio.CancelScope] = set()
        self._asking: set[trio.CancelScope] = set()  # the session, without a request
        self._numbers = count(1)
        self._on_progress: dict[ProgressToken, ProgressFnT] = {}  # of the client, on questions
        self.exchanges: dict[ProgressToken, _Exchange] = {}  # by the tokens of their clients
        backend.guests.add(self)

    # The session

    async def initialize(self) -> None:
        """Let the SDK shake hands, as far as it has not yet. Raises `Refusal`."""
        async with self._initializing:
            if self._is_initialized:
                return
            exchange = _Exchange(self, None, None)
            try:
                params = _greeting(self._session)
                self.hello = await self._runner.on_request(exchange, _INITIALIZE, params)
            except BaseException as error:
                await let_pass(error)
                raise _refused(error, _INITIALIZE) from None
            finally:
                exchange.close()
            self._is_initialized = True

    async def _resumed(self) -> None:
        """Shake hands again for a session of an earlier process, which will not do it again."""
        if not self._is_initialized:
            await self.initialize()
            await self._runner.on_notify(_Exchange(self, None, None), _INITIALIZED, None)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for scope in (*self._notified, *self._asking):
                scope.cancel()
            self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_closed and not self._running:
            self.backend.guests.discard(self)
            self.backend.nursery.start_soon(aclose_shielded, self._connection)

    # Messages of the client

    def tool(self, name: str) -> None:
        return None

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        """The SDK's tools have no scopes."""

    async def call(self, received: Received, params: CallTool) -> Run:
        return Run(
            handler=await self._handler(received, params.name),
            progress_token=params.meta.progress_token,
            min_s=self.backend.resume_min_s,
            max_s=self.backend.resume_max_s,
        )

    async def request(self, received: Received) -> Run:
        handler = await self._handler(received, str(received.message.method))
        return Run(handler=handler, progress_token=progress_token(received.message.params))

    async def _handler(self, received: Received, name: str) -> StreamHandler:
        method, params = str(received.message.method), await _params(received)

        async def handle(stream: Stream) -> tuple[bytes, bool]:
            exchange = _Exchange(self, stream, received, name)
            self._running += 1
            self.backend.running_requests[stream] = name
            try:
                with self.backend.confined:
                    return await self._answer(exchange, stream, method, params)
            except BaseException as error:
                exchange.cancel_requested.set()
                await let_pass(error)
                self.backend.adviser.look_at(error)
                refused = _refused(error, name)
                messages.error(stream.request_id, refused)  # raises for what JSON cannot express
                raise refused from None
            finally:
                exchange.close()
                del self.backend.running_requests[stream]
                self._running -= 1
                self._end_if_idle()

        return handle

    async def _answer(
        self, exchange: "_Exchange", stream: Stream, method: str, params: Any
    ) -> tuple[bytes, bool]:
        _exchange.set(exchange)
        auth_context_var.set(exchange.user)
        await self._resumed()
        result = await self._runner.on_request(exchange, method, params)
        return messages.result(stream.request_id, _raw(result)), bool(result.get("isError"))

    async def notify(self, received: Received) -> None:
        method, params = str(received.message.method), await _params(received)
        if method == _PROGRESS and params is not None:
            token = params.get("progressToken")
            if isinstance(token, str) and token in self._on_progress:
                tell = partial(_tell_progress, self._on_progress[token], params)
                self._run(tell, method)
        if method == _INITIALIZED and self._is_initialized:
            self._connection.initialized.set()  # before the next message, as its order promises
        self._run(partial(self._notify, received, method, params), method)

    async def _notify(self, received: Received, method: str, params: Any) -> None:
        exchange = _Exchange(self, None, received)
        auth_context_var.set(exchange.user)
        with self.backend.confined:
            await self._resumed()
            await self._runner.on_notify(exchange, method, params)

    def _run(self, work: Callable[[], Awaitable[None]], method: str) -> None:
        """Run the handler of a notification in a task, since it may ask the client."""
        if len(self._notified) >= NOTIFIED_MAX:
            log.info("a notification was dropped: too many are handled", method=method[:100])
            return
        scope = trio.CancelScope()
        self._notified.add(scope)

        async def run() -> None:
            try:
                with scope:
                    await work()
            except BaseException as error:
                await let_pass(error)
                log_failure("a notification failed", error, method=method[:100])
            finally:
                self._notified.discard(scope)

        self.backend.nursery.start_soon(run)

    # Questions to the client

    async def ask(
        self,
        ask: Callable[[str, Any], Awaitable[Message]],
        method: str,
        params: Mapping[str, Any] | None,
        opts: "CallOptions | None",
    ) -> dict[str, Any]:
        """Ask the client by `ask` and return the result. Raises `MCPError`."""
        options = opts or {}
        given = dict(params or {})
        token: ProgressToken | None = None
        if (on_progress := options.get("on_progress")) is not None:
            token = f"question-{next(self._numbers)}"
            given["_meta"] = {**(given.get("_meta") or {}), "progressToken": token}
            self._on_progress[token] = on_progress
        answer: Message | None = None
        try:
            with trio.move_on_after(options.get("timeout", float("inf"))):
                answer = await ask(method, _raw(given))
        except Refusal as refused:
            raise MCPError(refused.code, refused.message, refused.data) from None
        finally:
            if token is not None:
                del self._on_progress[token]
        if answer is None:
            raise MCPError(REQUEST_TIMEOUT, f"Request {method!r} timed out")
        return _result_of(answer, method)

    async def ask_session(
        self, method: str, params: Mapping[str, Any] | None, opts: "CallOptions | None"
    ) -> dict[str, Any]:
        """Ask the client without a request of its own. Raises `MCPError`, also at its end."""
        with trio.CancelScope() as scope:
            if self._is_closed:
                scope.cancel()
            self._asking.add(scope)
            try:
                return await self.ask(self.standing.ask, method, params, opts)
            finally:
                self._asking.discard(scope)
        raise MCPError(CONNECTION_CLOSED, "Connection closed")


class _Exchange:
    """One request of the client, or one notification: the SDK's `DispatchContext`."""

    def __init__(
        self,
        guest: _SdkGuest,
        stream: Stream | None,
        received: Received | None,
        name: str = "",
    ) -> None:
        """Without a `stream`, messages are those of the session. `name` is the tool's."""
        self.name = name
        self._guest = guest
        self._stream = stream
        self._received = received
        self._is_closed = False
        # The client's token, as the handler knows it. A client that repeats a call may have
        # another token by then.
        self._token = None if stream is None else stream.progress_token
        if self._token is not None:
            guest.exchanges[self._token] = self
        self.cancel_requested = anyio.Event()

    @property
    def transport(self) -> "TransportContext":
        return TransportContext(kind="jsonrpc", can_send_request=True)

    @property
    def request_id(self) -> RequestId | None:
        return None if self._stream is None else self._stream.request_id

    @property
    def can_send_request(self) -> bool:
        return not self._is_closed

    @property
    def message_metadata(self) -> "ServerMessageMetadata | None":
        """With what a handler may do to its HTTP response: release its client, which resumes."""
        received, stream = self._received, self._stream
        if received is None or stream is None or not isinstance(received.session, HttpSession):
            return None
        call = Call(stream, str(received.message.method), received.caller, None)

        async def close() -> None:
            await call.disconnect()

        return ServerMessageMetadata(close_sse_stream=close)

    @property
    def user(self) -> "AuthenticatedUser | None":
        """The caller, as the SDK's `get_access_token` tells it; None if it is anonymous."""
        if self._received is None:
            return None
        caller = self._received.caller
        principal = caller.principal
        if principal.is_anonymous or principal.scopes is None:
            return None
        return AuthenticatedUser(
            AccessToken(
                token="",  # nosec B106 # the transport has checked it, and keeps it
                client_id=str(principal.claims.get("client_id") or principal.subject),
                scopes=sorted(principal.scopes),
                subject=principal.subject,
                claims={"iss": principal.issuer, **principal.claims},
            )
        )

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: "CallOptions | None" = None,
    ) -> dict[str, Any]:
        if self._is_closed:
            raise NoBackChannelError(method)
        if self._stream is None:
            return await self._guest.ask_session(method, params, opts)
        return await self._guest.ask(self._stream.ask, method, params, opts)

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: "CallOptions | None" = None
    ) -> None:
        if self._is_closed:
            log.debug("a message after the end of its request was dropped", method=method[:100])
        elif self._stream is None:
            _notify(self._guest.standing, method, params)
        elif method == _PROGRESS and params and params.get("progressToken") == self._token:
            await self._report(self._stream, params)
        else:
            await _sent(self._stream.send(_line(method, params), is_droppable=method == _LOG))

    async def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> None:
        stream = self._stream
        if stream is None or self._is_closed or stream.progress_token is None:
            return
        params: dict[str, Any] = {"progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        await self._report(stream, params)

    async def _report(self, stream: Stream, params: Mapping[str, Any]) -> None:
        """Report progress of this request, under the token that its client has by now."""
        if (token := stream.progress_token) is not None:
            line = _line(_PROGRESS, {**params, "progressToken": token})
            await _sent(stream.send_progress(token, line))

    def close(self) -> None:
        """The request is answered, or the notification handled."""
        self._is_closed = True
        if self._token is not None and self._guest.exchanges.get(self._token) is self:
            del self._guest.exchanges[self._token]

    @property
    def is_open_call(self) -> bool:
        return self._stream is not None and not self._is_closed

    def belongs_to(self, guest: _SdkGuest) -> bool:
        """Whether it is an open request of this session."""
        return self._guest is guest and self.is_open_call


class _Outbound:
    """The SDK's channel for messages that name no request."""

    def __init__(self, guest: _SdkGuest) -> None:
        self._guest = guest

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: "CallOptions | None" = None,
    ) -> dict[str, Any]:
        if (exchange := self._current()) is not None:
            return await exchange.send_raw_request(method, params, opts)
        return await self._guest.ask_session(method, params, opts)

    async def notify(
        self, method: str, params: Mapping[str, Any] | None, opts: "CallOptions | None" = None
    ) -> None:
        exchange = self._current() if method in (_LOG, _PROGRESS) else None
        token = None if method != _PROGRESS or params is None else params.get("progressToken")
        if isinstance(token, str | int):
            exchange = self._guest.exchanges.get(token, exchange)
        if exchange is not None:
            await exchange.notify(method, params)
        else:
            _notify(self._guest.standing, method, params)

    def _current(self) -> _Exchange | None:
        """The request in whose task the code runs, if that is one of this session."""
        exchange = _exchange.get()
        return exchange if exchange is not None and exchange.belongs_to(self._guest) else None


def _low_level(server: Any) -> "Server[Any]":
    """The low-level server of this object. Raises `TypeError` for any other object."""
    kinds = [f"{each.__module__}.{each.__qualname__}" for each in type(server).__mro__]
    if any(kind.startswith("fastmcp.") for kind in kinds):
        raise TypeError(
            "This is a server of FastMCP, which needs asyncio: run "
            "`mcp-streams wrap -- fastmcp run FILE.py`."
        )
    if not _IS_INSTALLED:
        raise TypeError(
            "A server of the official SDK needs mcp 2.3 or newer beside mcp-streams: "
            "pip install 'mcp-streams[sdk]'."
        )
    if isinstance(server, MCPServer):
        return server._lowlevel_server
    if isinstance(server, Server):
        return server
    raise TypeError(
        f"{type(server).__qualname__} is no server: give a streams.Server, or an MCPServer or "
        "low-level Server of the official SDK."
    )


def _refused(error: BaseException, name: str) -> Refusal:
    """The JSON-RPC error for an exception of the SDK or of a handler, as the SDK words it."""
    if isinstance(error, Refusal):
        return error
    known = handler_exception_to_error_data(error)
    if known is None:
        log_failure("a request failed", error, name=name)
        return Refusal(0, _readable(text_of(error)))
    data = known.data
    if data is not None:
        data = msgspec.Raw(pydantic_core.to_json(data, inf_nan_mode="null", serialize_unknown=True))
    return Refusal(known.code, _readable(known.message), data)


def _readable(text: str) -> str:
    """A text without lone surrogates, which UTF-8 cannot express."""
    return text.encode(errors="backslashreplace").decode()


def _greeting(session: SessionInfo) -> dict[str, Any]:
    """The params of `initialize`. Raises `Refusal`."""
    try:
        declared = session.capabilities
        return {
            "protocolVersion": session.revision,
            "clientInfo": _decoded(session.client_info),
            "capabilities": {name: _decoded(each) for name, each in declared.items()},
        }
    except ValueError as error:
        raise Refusal(PARSE_ERROR, f"The params are not JSON: {error}.") from None


async def _params(received: Received) -> dict[str, Any] | None:
    """The params of a message, decoded as the SDK does. Raises `Refusal`."""
    params = received.message.params
    try:
        found = await work_on(received.line, received.session.principal, partial(_decoded, params))
    except ValueError as error:
        raise Refusal(PARSE_ERROR, f"The params are not JSON: {error}.") from None
    if found is None or isinstance(found, dict):
        return found
    raise Refusal(INVALID_PARAMS, "params must be an object.")


def _result_of(answer: Message, method: str) -> dict[str, Any]:
    """The result in the client's answer. Raises `MCPError`."""
    given = answer.result if isinstance(answer.result, msgspec.Raw) else answer.error
    assert isinstance(given, msgspec.Raw)
    try:
        found = _decoded(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise MCPError(INVALID_PARAMS, f"The client's answer to {method} cannot be read.")
    if given is answer.result:
        return found
    code = found.get("code")
    known = code if isinstance(code, int) else INTERNAL_ERROR
    raise MCPError(known, str(found.get("message", "")), found.get("data"))


def _notify(standing: Standing, method: str, params: Mapping[str, Any] | None) -> None:
    """Send a notification of the session. The latest one of a kind says all that there is."""
    if method == _UPDATED and params is not None:
        key = resource_updated(str(params.get("uri")))[1]
    elif method.endswith("/list_changed"):
        key = method
    else:
        key = None
    standing.notify(_line(method, params), key=key)


async def _sent(sending: Awaitable[None]) -> None:
    try:
        await sending
    except Refusal as refused:
        raise MCPError(refused.code, refused.message, refused.data) from None


async def _tell_progress(on_progress: "ProgressFnT", params: Mapping[str, Any]) -> None:
    progress, total, message = (params.get(each) for each in ("progress", "total", "message"))
    if isinstance(progress, int | float) and not isinstance(progress, bool):
        await on_progress(
            float(progress),
            float(total) if isinstance(total, int | float) else None,
            message if isinstance(message, str) else None,
        )


# JSON is read and written by the SDK's own library, which knows integers of any size.


def _decoded(raw: msgspec.Raw) -> Any:
    return pydantic_core.from_json(bytes(raw))


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(pydantic_core.to_json(value, inf_nan_mode="null"))


def _line(method: str, params: Mapping[str, Any] | None) -> bytes:
    return messages.notification(method, None if params is None else _raw(params))
