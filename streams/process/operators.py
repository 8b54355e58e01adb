"""The listeners for operators: `--admin`, and a socket beside the journal.

Both answer the same routes. `--admin` asks for the operator's token. Only the user of this process
can connect to the socket beside the journal, so it asks for none.
"""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from streams.admin.api import Api
from streams.admin.changes import Changes
from streams.admin.endpoint import AdminEndpoint, Route
from streams.admin.feed import Feeds
from streams.admin.gate import OwnerGate, Token, TokenGate
from streams.admin.health import READY_PATH, Health, health_routes
from streams.admin.tokens import TokenUnusable, kept_token, path_for, read_token
from streams.clock import wall
from streams.journal.ownership import operators_path
from streams.logs import log
from streams.observe.registry import Registry
from streams.process import state
from streams.process.addresses import origin, why_not
from streams.process.guard import parse_address
from streams.process.options import CannotServe, Options
from streams.process.version import VERSION
from streams.server.running import RunningServer
from transports import http
from transports.net.origins import Origins, names_loopback
from transports.relay.private import listen_privately

CONNECTIONS_MAX: Final = 64  # a balancer has one or two; descriptors are for clients
BODY_BYTES_MAX: Final = 256 * 1024  # an answer to a question
LOOPBACK: Final = "127.0.0.1"
UNIX: Final = "unix:"
_PORT: Final = re.compile(r":?([0-9]+)")


class Operators:
    """All that operators of one process reach."""

    def __init__(self, options: Options) -> None:
        self.health = Health()
        self._options = options
        self.gate = TokenGate(None, may_write=options.admin_write, why_refused=self._why_refused)
        self._origins = Origins(is_loopback=False, takes_any_host=True)
        routes = health_routes(self.health)
        self._endpoints = (
            AdminEndpoint(self.gate, routes),
            AdminEndpoint(OwnerGate(), routes),
        )
        for endpoint in self._endpoints:
            endpoint.is_starting = True

    def add(self, *routes: Route) -> None:
        """Answer these requests too from now on: the server has started."""
        for endpoint in self._endpoints:
            endpoint.add(*routes)
            endpoint.is_starting = False

    async def serve_address(
        self, address: str, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve `--admin` until cancelled. Raises `CannotServe`."""
        if address.startswith(UNIX):
            if address == UNIX:
                raise CannotServe(f"{address} has no path: write unix:PATH.")
            await self._serve_path(Path(address.removeprefix(UNIX)), task_status)
            return
        host, port = parse_address(admin_address(address))
        is_loopback = names_loopback(host)
        self._origins = Origins(is_loopback, frozenset(map(str.lower, self._options.allowed_hosts)))
        self._read_given_token()
        async with trio.open_nursery() as nursery:
            try:
                port = await nursery.start(partial(_serve, self._endpoints[0]), host, port)
            except OSError as error:
                raise CannotServe(why_not(address, error)) from error
            url = origin("http", host, port)
            kept = self._keep_token(url.partition("://")[2]) if is_loopback else None
            log.info("listening for operators", url=f"{url}{READY_PATH}", **_token_told(kept))
            if self.gate.token is None and not is_loopback:
                log.warning("only /health is served to operators: name --admin-token-file")
            task_status.started()

    async def _serve_path(self, path: Path, task_status: trio.TaskStatus[None]) -> None:
        self._read_given_token()
        kept = self._keep_token(_absolute(path))
        with _listener_at(path) as sockets:
            async with trio.open_nursery() as nursery:
                await nursery.start(partial(_serve, self._endpoints[0], sockets=sockets), "", 0)
                log.info("listening for operators", socket=str(path), **_token_told(kept))
                task_status.started()

    async def serve_socket(
        self, journal: Path, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve the socket beside the journal, which this process owns, until cancelled."""
        with _listener_at(operators_path(journal)) as sockets:
            await _serve(self._endpoints[1], "", 0, sockets=sockets, task_status=task_status)

    def _why_refused(self, host: str) -> str | None:
        return self._origins.why_refused(host, ())

    def _read_given_token(self) -> None:
        file = self._options.admin_token_file
        if file is not None:
            try:
                self.gate.token = Token(read_token(file))
            except TokenUnusable as error:
                raise CannotServe(f"--admin-token-file: {error}") from None

    def _keep_token(self, address: str) -> Path | None:
        """Use the token that is kept for this address; returns its file.

        Without a place for it there is no token: balancers are answered all the same.
        """
        if self._options.admin_token_file is not None:
            return None
        try:
            file = path_for(state.folder(), address)
            self.gate.token = Token(kept_token(file))
        except (TokenUnusable, OSError, RuntimeError) as error:
            log.warning("no operator's token: name one with --admin-token-file", why=str(error))
            return None
        return file


def api_routes(
    running: RunningServer, registry: Registry, options: Options, nursery: trio.Nursery
) -> Sequence[Route]:
    """The routes for operators that need a running server."""
    engine, began_at = running.engine, wall()

    def about() -> dict[str, object]:
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "startedAt": began_at,
            "journal": options.journal_shown if options.is_kept else None,
            "replica": engine.replica or None,
            "unready": engine.unready,
        }

    def drain(grace_s: float | None) -> float:
        grace_s = options.grace_s if grace_s is None else grace_s
        log.info("draining", by="an operator", grace_s=grace_s)
        nursery.start_soon(running.drain, grace_s)
        return grace_s

    api = Api(registry, Changes(registry, engine), about=about, drain=drain)
    return (*api.routes, *Feeds(registry, engine.events).routes)


@contextmanager
def _listener_at(path: Path) -> Iterator[Sequence[socket.socket]]:
    """Listen at a Unix socket for the length of a block. Raises `CannotServe`."""
    try:
        listener = listen_privately(path)
    except OSError as error:
        raise CannotServe(
            f"{path}: cannot listen there: {error.strerror or error}: name a new file in a folder "
            "that you may write to."
        ) from error
    ours = os.lstat(path)
    try:
        yield [listener]
    finally:
        # Another process may have removed it, or listen there already: the next one of a restart.
        with suppress(FileNotFoundError):
            if os.path.samestat(ours, os.lstat(path)):
                os.unlink(path)


async def _serve(
    endpoint: AdminEndpoint,
    host: str,
    port: int,
    *,
    sockets: Sequence[socket.socket] = (),
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    await http.serve(
        endpoint,
        host,
        port,
        screen=endpoint.screen,
        body_bytes_max=BODY_BYTES_MAX,
        connections_max=CONNECTIONS_MAX,
        gives_way=True,  # a probe that is refused ends a process that is well
        # Probes send an address or nothing. The gate checks the requests of operators.
        allowed_hosts=None,
        sockets=sockets,
        task_status=task_status,
    )


def _absolute(path: Path) -> str:
    return os.path.abspath(path)


def _token_told(file: Path | None) -> dict[str, str]:
    return {} if file is None else {"token_file": str(file)}


def admin_address(address: str) -> str:
    """`HOST:PORT`; a port alone is one of loopback."""
    port = _PORT.fullmatch(address)
    return f"{LOOPBACK}:{port[1]}" if port else address
