"""A server as an ASGI application, which `Server.asgi` makes.

It is served by any ASGI server, alone or mounted in Starlette or FastAPI. Under an asyncio server
(uvicorn) the server runs in the guest (`streams.aio.guest`), under hypercorn's trio worker in the
run of trio that is there.

The service begins with the lifespan. A mounted application has none of its own: `lifespan` is to be
entered by that of the outer one. Where nothing does, the service begins with the first request, and
ends with the event loop; calls that a restart continues wait until then.

An ASGI server that ends waits for open responses before it tells the application, and event streams
do not end. So the application ends them when the signal comes, before the handler that was there.
With a grace it lets running calls end first. No listener is ours: the ASGI server closes its own.
"""

import math
import signal
import threading
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    MutableMapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import trio

from streams.aio.guest import Guest, is_guest, keep_guest, run_asyncio
from streams.auth.bearer import Authenticator
from streams.errors import INTERNAL_ERROR, Refusal, first_of
from streams.exchange import Admit, AsgiMessage, AsgiReceive, AsgiSend, HttpError
from streams.limits import LEASE_MAX_S, LEASE_MIN_S, LEASE_S, Durability, LogFormat
from streams.logs import log
from streams.observe.observer import Observer
from streams.server.http.endpoint import HttpEndpoint
from streams.server.running import RunningServer
from streams.server.server import Server
from streams.server.storage import Place, open_storage
from transports.http.asgi import AsgiRequests, refuse

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_T = TypeVar("_T")

Serving = Callable[[Observer], AbstractAsyncContextManager[tuple[RunningServer, AsgiRequests]]]

_NOT_NOW: Final = Refusal(INTERNAL_ERROR, "The server does not serve now: try again later.")


class App:
    """An ASGI application that serves one server at one path."""

    def __init__(
        self,
        server: Server,
        path: str,
        *,
        journal: str | Path | None,
        durability: Durability,
        lease_s: float = LEASE_S,
        replicas_acked: int = 0,
        key_file: str | Path | None = None,
        auth_tokens: str | Path | None,
        admit: Admit | None,
        allowed_hosts: Collection[str],
        allowed_origins: Collection[str],
        log_calls: LogFormat | None = None,
        metrics: bool = False,
        grace_s: float = 0.0,
    ) -> None:
        if not path.startswith("/"):
            raise ValueError(f"path {path!r}: begin it with a slash, such as /mcp")
        if auth_tokens is not None and admit is not None:
            raise ValueError("auth_tokens and admit: give one of them")
        if not LEASE_MIN_S <= lease_s <= LEASE_MAX_S:
            raise ValueError(f"lease_s {lease_s:g}: write {LEASE_MIN_S:g} to {LEASE_MAX_S:g}")
        if not 0 <= grace_s < math.inf:
            raise ValueError(f"grace_s {grace_s:g}: write seconds, 0 or more")
        self._server = server
        self._path = path
        self._observing = partial(Observer, log_calls=log_calls, metrics=metrics)
        self._observing()  # raises what is wrong
        self._grace_s = grace_s
        self._place = Place(
            journal=journal,
            durability=durability,
            lease_s=lease_s,
            replicas_acked=replicas_acked,
            key_file=None if key_file is None else Path(key_file),
        )
        self._admit = admit if auth_tokens is None else _by_tokens(server, Path(auth_tokens))
        self._allowed_hosts = allowed_hosts
        self._allowed_origins = allowed_origins
        self._service: _Service | None = None

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend
    ) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})  # before it is accepted: 403
        else:
            raise ValueError(f"scope {scope['type']!r}: only HTTP and its lifespan are served")

    @asynccontextmanager
    async def lifespan(self, app: Any = None) -> AsyncIterator[None]:
        """Serve for the length of a block, which the outer application's lifespan has."""
        guest = None if trio.lowlevel.in_trio_task() else await Guest.enter()
        try:
            service = await _in(guest, self._begin)
            try:
                yield
            finally:
                await _in(guest, service.end)
        finally:
            if guest is not None:
                await guest.leave()

    async def metrics(self, accept: str = "") -> tuple[bytes, str]:
        """See `AsgiApp.metrics`."""
        guest = None if trio.lowlevel.in_trio_task() else await Guest.enter()
        try:
            return await _in(guest, partial(self._measure, accept))
        finally:
            if guest is not None:
                await guest.leave()

    async def _measure(self, accept: str) -> tuple[bytes, str]:
        service = await self._started()
        return await service.observer.metrics(accept)

    async def _live(self, receive: AsgiReceive, send: AsgiSend) -> None:
        """The lifespan protocol, where the application is not mounted."""
        await receive()
        step = "startup"
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                step = "shutdown"
                await receive()
        except Exception as error:
            await send({"type": f"lifespan.{step}.failed", "message": str(error)})
            return
        await send({"type": "lifespan.shutdown.complete"})

    async def _serve(
        self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend
    ) -> None:
        if trio.lowlevel.in_trio_task():
            await self._answer(scope, receive, send)
            return
        guest = await Guest.enter()
        try:
            await guest.run(
                self._answer,
                scope,
                lambda: run_asyncio(receive),
                lambda message: run_asyncio(send, message),
            )
        finally:
            await guest.leave()

    async def _answer(
        self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend
    ) -> None:
        service = await self._started()
        await service.answer(scope, receive, send)

    async def _started(self) -> "_Service":
        """The service of this run of trio, once it has started or failed."""
        service = self._service
        if service is None or not service.is_of_this_run:
            log.warning(
                "the ASGI app starts with its first request: enter its lifespan in that of the "
                "application which it is mounted in"
            )
            keep_guest()
            service = self._start()
        await service.started.wait()
        return service

    def _start(self) -> "_Service":
        """Start the service in this run of trio."""
        self._service = _Service(self._serving, self._observing(), self._grace_s)
        trio.lowlevel.spawn_system_task(self._service.run)
        return self._service

    async def _begin(self) -> "_Service":
        """Start the service, and wait until it serves. Raises the error that prevents it."""
        service = self._service
        if service is not None and service.is_of_this_run and not service.ended.is_set():
            raise RuntimeError("the lifespan of this ASGI app is entered already")
        service = self._start()
        await service.started.wait()
        if service.failure is not None:
            raise service.failure
        return service

    @asynccontextmanager
    async def _serving(
        self, observer: Observer
    ) -> AsyncIterator[tuple[RunningServer, AsgiRequests]]:
        limits = self._server.limits
        async with (
            open_storage(self._place, limits) as (opened, keys),
            observer.watch(
                self._server.open(opened, keys.keyring, events=observer.events)
            ) as running,
        ):
            endpoint = HttpEndpoint(running, self._path)
            yield (
                running,
                AsgiRequests(
                    endpoint,
                    screen=endpoint.screen,
                    body_bytes_max=limits.message_bytes_max,
                    requests_max=limits.connections_max,
                    per_principal_max=limits.connections_per_principal_max,
                    allowed_hosts=self._allowed_hosts,
                    allowed_origins=self._allowed_origins,
                    admit=self._admit,
                    departure=running.engine.departure,
                ),
            )


class _Service:
    """The server while it runs, in a system task of one run of trio."""

    def __init__(self, serving: Serving, observer: Observer, grace_s: float) -> None:
        self.observer = observer
        self.started = trio.Event()  # or failed
        self.ended = trio.Event()
        self.failure: BaseException | None = None
        self._serving = serving
        self._grace_s = grace_s
        self._running: RunningServer
        self._requests: AsgiRequests | None = None
        self._leaving = trio.Event()
        self._hurrying = trio.Event()  # a second signal has come
        self._scopes: set[trio.CancelScope] = set()  # of the requests that are answered
        self._token = trio.lowlevel.current_trio_token()

    @property
    def is_of_this_run(self) -> bool:
        """Whether it belongs to this run of trio, and not to one of another event loop before."""
        return self._token is trio.lowlevel.current_trio_token()

    async def run(self) -> None:
        """Serve until `end`. An error is kept and logged, since the process goes on without us."""
        try:
            async with self._serving(self.observer) as (self._running, self._requests):
                with _at_end_signals(self._leave_soon):
                    self.started.set()
                    await self._leaving.wait()
                    if self._grace_s:
                        await self._drain()
                    else:
                        await self._running.engine.shut_down()
        except* Exception as errors:
            self.failure = first_of(errors)
            log.error("the ASGI app serves no more: restart it", why=str(self.failure))
        finally:
            self._requests = None
            self.started.set()
            self.ended.set()
            for scope in self._scopes:
                scope.cancel()

    async def _drain(self) -> None:
        log.info("draining", grace_s=self._grace_s)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hurry)
            await self._running.drain(self._grace_s)
            nursery.cancel_scope.cancel()

    async def _hurry(self) -> None:
        await self._hurrying.wait()
        await self._running.drain(0)

    def _leave_soon(self) -> None:
        """Called by handlers of signals."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._heard_signal)

    def _heard_signal(self) -> None:
        if self._leaving.is_set():
            self._hurrying.set()
        self._leaving.set()

    async def end(self) -> None:
        self._leaving.set()
        await self.ended.wait()

    async def answer(
        self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Answer one request; the end of the service ends it as well."""
        has_begun = False

        async def noted(message: AsgiMessage) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        if self._requests is not None:
            with trio.CancelScope() as cancelling:
                self._scopes.add(cancelling)
                try:
                    await self._requests.serve(scope, receive, noted)
                finally:
                    self._scopes.discard(cancelling)
        if not has_begun and self.ended.is_set():
            await refuse(HttpError(503, _NOT_NOW, (("retry-after", "1"),)), scope, receive, send)


@contextmanager
def _at_end_signals(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` at each of `END_SIGNALS` in this block, then the handler that was there.

    Where no handler was there, the signal ends the process, or the run of trio handles it.
    """
    handlers: dict[signal.Signals, Any] = {}
    if is_guest() and threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in END_SIGNALS}
        handlers = {
            number: handler
            for number, handler in found.items()
            if callable(handler) and handler is not signal.default_int_handler
        }

    def handle(number: int, frame: FrameType | None) -> None:
        leave()
        handlers[signal.Signals(number)](number, frame)

    for number in handlers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def _by_tokens(server: Server, path: Path) -> Admit:
    """Authenticate callers by the tokens of a file."""
    # Imported where it is used (PLC0415), as for our own listener.
    from streams.auth.tokens import TokenFile  # noqa: PLC0415

    return Authenticator([TokenFile(path)], scopes=lambda: server.tools.scopes).admit


async def _in(guest: Guest | None, function: Callable[[], Awaitable[_T]]) -> _T:
    """Await a trio function, from trio or from asyncio."""
    return await (function() if guest is None else guest.run(function))
