"""The official SDK's client over our reconnecting one, under trio and under asyncio.

The SDK writes and reads JSON-RPC messages; a `Link` sends them. Each request of the SDK is a call
of the link, so it is resumed over each new connection, and its messages come once and in order. The
SDK sees one session without cuts. Messages pass unchanged but for ids and progress tokens, which
are the link's own on the wire. `initialize` is the SDK's, and our client adds its extension to it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import pydantic_core
import trio
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)

from streams import messages
from streams.aio.guest import Guest, GuestEnded, Held
from streams.backends.link import Link, RemoteCall, greeting
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.connection import ClientConnection
from streams.errors import CallFailed, CallLost, CannotConnect, ClientError, StreamGone
from streams.exchange import Dialer
from streams.logs import Warnings
from streams.messages import Kind, Message, RequestId

# Messages that wait for the SDK. Those of calls then wait in their connection; of the others,
# notifications are dropped.
WAITING_MAX: Final = 1_000

FAREWELL_S: Final = 1.0  # for what is still to be written at the end

_T = TypeVar("_T")
_Reply = JSONRPCResponse | JSONRPCError
_Item = SessionMessage | Exception


class Over:
    """A transport for the SDK's `Client` and `ClientSession`; it is entered once."""

    def __init__(self, dialer: Dialer, *, connect_s: float, patience_s: float) -> None:
        self._session = _session(dialer, connect_s, patience_s)
        self._guest: Guest | None = None
        self._held: Held[_Relay]

    async def __aenter__(self) -> "tuple[_Reading, _Writing]":
        if trio.lowlevel.in_trio_task():
            relay = await self._session.__aenter__()
        else:
            self._guest = await Guest.enter()
            self._held = Held(self._guest, self._session)
            try:
                relay = await self._held.enter()
            except BaseException:
                await self._guest.leave()
                raise
        return _Reading(relay, self._guest), _Writing(relay, self._guest)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        if self._guest is None:
            return await self._session.__aexit__(kind, error, traceback)
        try:
            return await self._held.leave(error)
        finally:
            await self._guest.leave()


@asynccontextmanager
async def _session(dialer: Dialer, connect_s: float, patience_s: float) -> "AsyncIterator[_Relay]":
    async with trio.open_nursery() as nursery:
        relay = _Relay(dialer, nursery, connect_s, patience_s)
        try:
            yield relay
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_S):
                await relay.farewell()
            relay.close()
            nursery.cancel_scope.cancel()


class _Request:
    """A request of the SDK that has no response yet."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.call: RemoteCall | None = None
        self.is_cancelled = False


class _Relay:
    """Between the SDK's messages and a `Link`, of which it is the listener. It runs in trio."""

    def __init__(
        self, dialer: Dialer, nursery: trio.Nursery, connect_s: float, patience_s: float
    ) -> None:
        self._dialer = dialer
        self._nursery = nursery
        self._connect_s = connect_s
        self._patience_s = patience_s
        self._put, self.received = trio.open_memory_channel[_Item](WAITING_MAX)
        self._link: Link | None = None
        self._requests: dict[RequestId, _Request] = {}
        self._numbers = count(1)
        self._questions: dict[RequestId, trio.MemorySendChannel[bytes]] = {}
        self._asked: dict[RequestId, RequestId] = {}  # the SDK's id of a question, by the server's
        self._warnings = Warnings()
        self._is_closed = False

    # From the SDK

    async def send(self, sent: SessionMessage) -> None:
        """Take a message of the SDK. Raises `trio.ClosedResourceError` after the end."""
        message = sent.message
        if self._is_closed:
            raise trio.ClosedResourceError
        if isinstance(message, JSONRPCRequest):
            request = self._requests[message.id] = _Request()
            self._nursery.start_soon(self._answer, message, request)
        elif isinstance(message, JSONRPCNotification):
            await self._tell(message)
        elif message.id is not None:
            self._answered(message.id, message)

    async def _answer(self, message: JSONRPCRequest, request: _Request) -> None:
        try:
            with request.scope:
                reply = await self._reply(message, request)
                if not request.is_cancelled:
                    await self._give(reply)
        finally:
            if self._requests.get(message.id) is request:
                del self._requests[message.id]

    async def _reply(self, message: JSONRPCRequest, request: _Request) -> _Reply:
        try:
            if message.method == wire.INITIALIZE:
                return await self._initialize(message)
            if self._link is None:
                return _error(message.id, _refused(message.method))
            return await self._run(self._link, message, request)
        except CallFailed as failed:
            data = ErrorData(code=failed.code, message=failed.message, data=failed.data)
        except ClientError as failed:
            reason = {"reason": failed.reason} if isinstance(failed, StreamGone) else None
            data = ErrorData(code=CONNECTION_CLOSED, message=str(failed), data=reason)
        except ValueError as unfit:
            why = f"The server's answer to {message.method} cannot be read: {unfit}."
            data = ErrorData(code=INTERNAL_ERROR, message=why)
        return _error(message.id, data)

    async def _initialize(self, message: JSONRPCRequest) -> _Reply:
        """Connect, with the SDK's own greeting. Raises `CannotConnect`."""
        if self._link is not None:
            return _error(message.id, _refused(message.method))
        params = message.params or {}
        declared = params.get("capabilities") or {}
        greets = greeting(
            str(params.get("protocolVersion")),
            _raw(params.get("clientInfo") or {}),
            {name: _raw(value) for name, value in declared.items()},
        )
        link = Link(self._dialer, greets, self, give_up_s=self._patience_s)
        scope = trio.CancelScope()
        self._nursery.start_soon(_run_in, scope, link)
        try:
            await self._connected(link)
        except BaseException:
            scope.cancel()
            raise
        self._link = link
        hello = {name: _decoded(value) for name, value in link.hello.items()}
        return JSONRPCResponse(jsonrpc="2.0", id=message.id, result=hello)

    async def _connected(self, link: Link) -> None:
        """Wait for the first connection; it fails with the first attempt after `connect_s`."""
        failure: OSError | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal failure
                with trio.move_on_after(self._connect_s):
                    failure = await link.refused()
                failure = failure or await link.first_failure()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await link.connected()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise CannotConnect(f"No connection: {failure}.") from failure

    async def _run(self, link: Link, message: JSONRPCRequest, request: _Request) -> _Reply:
        """Send a request, and give the SDK its messages. A request that only reads is sent again
        if its response is lost.
        """
        method, params = message.method, _raw(message.params or {})
        token = (message.params or {}).get("_meta", {}).get("progressToken")
        while True:
            call = await link.begin(method, params, wants_progress=token is not None, kept=None)
            request.call = call
            try:
                async for each in call:
                    if each.kind is Kind.NOTIFICATION and (
                        told := self._notification(each, call, token)
                    ):
                        await self._give(told)
                reply = _response(message.id, call.response)
                call.settle()
            except CallLost:
                if method in wire.HARMLESS:
                    continue
                raise
            finally:
                with trio.CancelScope(shield=True):
                    await link.leave(call)
            if isinstance(reply, JSONRPCResponse):
                link.remember(method, params)
            return reply

    async def _tell(self, message: JSONRPCNotification) -> None:
        """Send a notification. A cancelled request has an id of the link's on the wire."""
        params = message.params or {}
        if message.method == wire.CANCELLED:
            request = self._requests.get(params.get("requestId", ""))
            if request is not None:
                request.is_cancelled = True
                self._nursery.start_soon(_cancel, request)
        elif self._link is not None and message.method != wire.INITIALIZED:  # the link has sent it
            given = None if message.params is None else _raw(params)
            await self._link.tell(messages.notification(message.method, given))

    def _answered(self, number: RequestId, message: _Reply) -> None:
        put = self._questions.pop(number, None)
        if put is not None:
            put.send_nowait(_json(message))

    # From the server

    def came_up(self, connection: ClientConnection, nursery: trio.Nursery) -> None:
        """The SDK is not told: to it, the session has never been cut."""

    def notified(self, message: Message) -> None:
        told = self._notification(message, None, None)
        try:
            if told is not None:
                self._put.send_nowait(told)
        except trio.WouldBlock:
            self._warnings.warn("the program reads too slowly: notifications are dropped")

    async def respond(self, message: Message, call: RunningCall | None) -> bytes:
        """Have the SDK answer a request of the server; returns the response."""
        assert isinstance(message.id, int | str)
        number = f"server-{next(self._numbers)}"
        put, answer = trio.open_memory_channel[bytes](1)
        self._questions[number], self._asked[message.id] = put, number
        try:
            asked = JSONRPCRequest(
                jsonrpc="2.0", id=number, method=str(message.method), params=_params(message)
            )
            await self._give(asked)
            return messages.readdressed(await answer.receive(), message.id)
        finally:
            self._questions.pop(number, None)
            self._asked.pop(message.id, None)

    def _notification(
        self, message: Message, call: RemoteCall | None, token: Any
    ) -> SessionMessage | None:
        """A notification for the SDK; None if it cannot be read."""
        method = str(message.method)
        try:
            params = _params(message)
        except ValueError as error:
            self._warnings.warn("a notification cannot be read", method=method, why=str(error))
            return None
        if params is None:
            return SessionMessage(JSONRPCNotification(jsonrpc="2.0", method=method))
        if method == wire.PROGRESS and call is not None:
            if params.get("progressToken") == call.request_id:
                params["progressToken"] = token
        elif method == wire.CANCELLED and isinstance(asked := params.get("requestId"), int | str):
            params["requestId"] = self._asked.get(asked, asked)
        return SessionMessage(JSONRPCNotification(jsonrpc="2.0", method=method, params=params))

    async def _give(self, message: Any) -> None:
        is_wrapped = isinstance(message, SessionMessage)
        await self._put.send(message if is_wrapped else SessionMessage(message))

    # The end

    def close(self) -> None:
        """Nothing more comes for the SDK, nor from it."""
        self._is_closed = True
        self._put.close()

    async def farewell(self) -> None:
        """Write what is still to be written."""
        if self._link is not None and self._link.is_up:
            await (await self._link.connected()).drained()


class _Stream:
    """One direction, as the SDK sees it: its methods run in trio or asyncio."""

    def __init__(self, relay: _Relay, guest: Guest | None) -> None:
        self._relay = relay
        self._guest = guest

    async def _in_trio(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        if self._guest is None:
            return await function(*args)
        return await self._guest.run(function, *args)

    async def aclose(self) -> None:
        """Nothing is closed before the transport is left: calls may still be acknowledged."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Reading(_Stream):
    """Messages for the SDK."""

    async def receive(self) -> _Item:
        """The next message. Raises `anyio.EndOfStream`."""
        await anyio.lowlevel.checkpoint()
        received = self._relay.received
        try:
            with suppress(trio.WouldBlock):
                return received.receive_nowait()
            return await self._in_trio(received.receive)
        except (trio.EndOfChannel, trio.ClosedResourceError, GuestEnded):
            raise anyio.EndOfStream from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class _Writing(_Stream):
    """Messages of the SDK."""

    async def send(self, item: SessionMessage, /) -> None:
        """Take a message, to be sent over whichever connection there is.

        Raises `anyio.ClosedResourceError` once the transport was left.
        """
        try:
            await self._in_trio(self._relay.send, item)
        except (trio.ClosedResourceError, GuestEnded):
            raise anyio.ClosedResourceError from None


async def _run_in(scope: trio.CancelScope, link: Link) -> None:
    with scope:
        await link.run()


async def _cancel(request: _Request) -> None:
    """Cancel the work on the server, if it has begun, and drop its messages."""
    try:
        if request.call is not None and not request.call.is_left:
            await request.call.cancel()
    except ClientError:
        pass  # the call has ended all the same, and nobody waits for its response
    finally:
        request.scope.cancel()


def _refused(method: str) -> ErrorData:
    """The error for a request that cannot be sent: before `initialize`, or a second one of those.

    A client that asks for `server/discover` first goes on with `initialize`: this client speaks the
    revisions that have it.
    """
    if method == "server/discover":
        return ErrorData(code=METHOD_NOT_FOUND, message="Method not found", data=method)
    if method == wire.INITIALIZE:
        return ErrorData(code=INVALID_REQUEST, message="Already initialized.")
    return ErrorData(code=INVALID_REQUEST, message=f"{method} before initialize: initialize first.")


def _error(request_id: RequestId, error: ErrorData) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=error)


def _response(request_id: RequestId, response: Message) -> _Reply:
    if isinstance(response.result, msgspec.Raw):
        result = _decoded(response.result)
        return JSONRPCResponse(jsonrpc="2.0", id=request_id, result=result)
    assert isinstance(response.error, msgspec.Raw)
    return _error(request_id, ErrorData.model_validate(_decoded(response.error)))


def _params(message: Message) -> dict[str, Any] | None:
    found = _decoded(message.params)
    return found if isinstance(found, dict) and found else None


def _decoded(raw: msgspec.Raw) -> Any:
    """Raises `ValueError` for what is no JSON, even once its text is mended."""
    try:
        return pydantic_core.from_json(bytes(raw))
    except ValueError:
        mended = messages.mend(b'{"id":0,"result":%b}' % bytes(raw))
        if mended is None:
            raise
        return pydantic_core.from_json(mended)["result"]


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(pydantic_core.to_json(value, inf_nan_mode="null"))


def _json(message: _Reply) -> bytes:
    return message.model_dump_json(by_alias=True, exclude_unset=True).encode()
