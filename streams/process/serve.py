"""Running a server as a process: in the foreground, or as the owner of a journal."""

import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from streams.engine.hooks import Hooks
from streams.errors import Full, JournalError, LifespanFailed, first_of
from streams.journal.contract import Journal
from streams.journal.ownership import OwnerLock, check_files, socket_path
from streams.limits import Limits
from streams.logs import log
from streams.observe.registry import Registry
from streams.process.addresses import origin, why_not
from streams.process.deadline import DEADLINE_S, END_OF_SIGNAL, Exit, let_children_end
from streams.process.differences import settings
from streams.process.guard import Guard, guard_for, parse_address
from streams.process.loading import Servable, load, patience_of, tool_namer
from streams.process.observers import Observers
from streams.process.operators import Operators, api_routes
from streams.process.options import READY, STARTER_VARIABLE, CannotServe, Options
from streams.process.shutdown import DOWN, Shutdown, heeds_hangup
from streams.process.succession import Standby, standing_by
from streams.process.systemd import Notices, Sockets, take_sockets
from streams.process.watchdog import watched
from streams.server.http.endpoint import HttpEndpoint
from streams.server.running import RunningServer
from streams.server.storage import Keys, Place, import_client, open_storage
from transports import http, stdio, websocket
from transports.relay import owner

# Threads of the journal and of tools often run for less than the interpreter's default of 5 ms, for
# which all other threads would wait.
SWITCH_S: Final = 0.0005

# Descriptors besides those of connections; HTTP and WebSocket may have `connections_max` each.
DESCRIPTORS_BESIDES: Final = 256

# An owner must not end before the relay that has started it has connected.
LINGER_MIN_S: Final = 0.5


def run(options: Options) -> None:
    """Serve until the server is idle, or a signal ends it. Raises `CannotServe`."""
    if heeds_hangup():
        signal.signal(signal.SIGHUP, _go_on)
    options, sockets = take_sockets(options)
    guard = guard_for(options, lambda: server.scopes)  # once it is loaded, below
    fds = stdio.claim_standard_streams() if options.stdio else None
    down = trio.Event()
    server = load(options, on_down=down.set)
    import_client(options.store or "")
    _tune()
    let_children_end()
    _raise_descriptors(server.limits.connections_max)
    failure: BaseException | None = None  # Python before 3.11.4 groups what except* raises
    try:
        deadline = Exit(DEADLINE_S + options.stopping_s, options.grace_s)
        trio.run(_serve_watched, server, options, fds, sockets, guard, deadline, down)
        if options.otel:  # at the exit its exporters may wait for a collector that is away
            deadline.begin(END_OF_SIGNAL)
    except* (CannotServe, JournalError, LifespanFailed, OSError) as errors:
        failure = first_of(errors)
    if failure is not None:
        # A full disk does not end a running server, so this one was full at the start.
        advice = " Make room, or name another journal." if isinstance(failure, Full) else ""
        raise CannotServe(f"{failure}{advice}") from failure


def _go_on(*_: object) -> None:
    """Ignore SIGHUP while the server starts: it has just read all that a reload would read."""


def _tune() -> None:
    """Tune the interpreter for a process that is only a server; see `garbage` as well."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # imported modules are not collected


def _raise_descriptors(connections_max: int) -> None:
    """Let the process have as many file descriptors as its connections need, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections_max + DESCRIPTORS_BESIDES
    if soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        if raised < wanted:
            log.debug("fewer file descriptors than connections_max needs", limit=raised)


# The serving process


async def _serve_watched(server: Servable, options: Options, *how: Any) -> None:
    operators, observers = Operators(options), Observers(server, options)
    with watched(options.watchdog_s, tool_namer(server)):
        async with trio.open_nursery() as nursery:
            if options.admin is not None:  # it answers before all else, and after it
                await nursery.start(operators.serve_address, options.admin)
            nursery.start_soon(observers.calls.run)  # to the end: a shutdown has much to tell
            await _serve(server, options, operators, observers, *how)
            nursery.cancel_scope.cancel()


async def _serve(
    server: Servable,
    options: Options,
    operators: Operators,
    observers: Observers,
    fds: tuple[int, int] | None,
    sockets: Sockets,
    guard: Guard,
    exit: Exit,
    down: trio.Event,
) -> None:
    notices, patience = Notices(is_service=options.is_listening), patience_of(options)
    async with (
        standing_by(_file(options), options.standby_s, _addresses(options, sockets)) as standby,
        _open_journal(options, server.limits) as (journal, keys),
        _open_webhooks(options, journal) as hooks,
        server.open(
            journal, keys.keyring, patience=patience, events=observers.events, hooks=hooks
        ) as running,
    ):
        shutdown = Shutdown(running, exit, operators.health, notices, _file(options))
        with shutdown.on_failure():
            standby.over()
            _warn_of_scopes(server, options)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shutdown.on_signals)
                nursery.start_soon(shutdown.when_down, down)
                nursery.start_soon(shutdown.when_ended, nursery.cancel_scope)
                if heeds_hangup():
                    reload = partial(_reload, guard, keys, running, notices)
                    await nursery.start(shutdown.on_hangup, reload)
                await nursery.start(guard.run)
                registry = Registry(journal, running.engine)
                operators.add(
                    *api_routes(running, registry, options, nursery),
                    *observers.watch(running, registry, nursery),
                    *observers.page(running, registry, operators.gate, nursery),
                )
                if options.owned is not None:
                    await nursery.start(operators.serve_socket, options.owned)
                    await nursery.start(_serve_relays, running, options, down)
                await _start_listeners(nursery, running, options, guard, sockets, standby)
                operators.health.why_not = lambda: running.engine.unready
                notices.ready()
                await _until_done(running, options, fds)
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def _open_webhooks(options: Options, journal: Journal) -> AsyncIterator[Hooks | None]:
    """Send webhooks for the length of a block, if the options want any. Raises `CannotServe`."""
    if not options.webhooks.are_on:
        yield None
        return
    # Imported here (PLC0415): they need an HTTP client, which takes time to load.
    from streams.process.webhooks import open_webhooks  # noqa: PLC0415

    async with open_webhooks(options, journal) as hooks:
        yield hooks


def _warn_of_scopes(server: Servable, options: Options) -> None:
    if server.scopes and options.is_listening and not options.auth.is_required:
        log.warning(
            "tools that need scopes can be called over stdio alone: serve with --auth-tokens "
            "or --auth-jwks",
            scopes=" ".join(server.scopes),
        )


async def _until_done(
    running: RunningServer, options: Options, fds: tuple[int, int] | None
) -> None:
    """Serve the client of standard input, if any; then wait until the server has no more to do."""
    if fds is not None:
        await stdio.serve(running.serve, fds, message_bytes_max=running.limits.message_bytes_max)
    if options.is_listening:
        await trio.sleep_forever()
    tell_starter(READY)
    # With patience, calls outlive their client. Without a journal it cannot come back.
    if options.is_kept or options.patience.patience_s is None:
        await running.engine.wait_idle(_linger_s(options))


def _linger_s(options: Options) -> float:
    """How long an idle server waits for clients before it ends; over stdio it ends at once."""
    return 0.0 if options.stdio else max(options.linger_s, LINGER_MIN_S)


@asynccontextmanager
async def _open_journal(options: Options, limits: Limits) -> AsyncIterator[tuple[Journal, Keys]]:
    place = Place(
        journal=options.journal if options.store is None else options.store,
        durability=options.durability,
        lease_s=options.lease_s,
        replicas_acked=options.replicas_acked,
        key_file=options.key_file,
        is_compact=options.compact,
    )
    with _owning(options):
        async with open_storage(place, limits) as (journal, keys):
            _warn_of_limit(journal)
            yield journal, keys


@contextmanager
def _owning(options: Options) -> Iterator[None]:
    """Own the journal of relays, where that is in a store. A file's journal does that itself."""
    if options.store is None or options.owned is None:
        yield
        return
    check_files(options.owned)
    lock = OwnerLock(options.owned)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _warn_of_limit(journal: Journal) -> None:
    """Warn if the journal has reached its limit at the start: clients are told less about it."""
    shortage = journal.shortage
    if shortage is not None and shortage.limit is not None:
        in_file = "with --limit journal_bytes_max=BYTES (0 for none)"
        log.warning(
            "the journal has its limit and new calls are refused: raise it "
            f"{'by maxmemory of the store' if journal.replica else in_file}, or let clients resume "
            "or cancel their calls",
            used=shortage.used,
            limit=shortage.limit,
        )


async def _reload(guard: Guard, keys: Keys, running: RunningServer, notices: Notices) -> None:
    log.info("reloading", signal=signal.SIGHUP.name)
    notices.reloading()
    await guard.reload()
    if await keys.reload():
        await running.engine.use_new_keys()
    notices.ready()


class _Inherited(NamedTuple):
    """Sockets that listen already, if any; those of systemd listen for the next process, too."""

    sockets: Sequence[socket.socket]
    is_shared: bool


def _inherited(name: str, of_systemd: Sockets, of_standby: Sockets) -> _Inherited:
    given = of_systemd.get(name, ())
    return _Inherited(given or of_standby.get(name, ()), bool(given))


def _addresses(options: Options, sockets: Sockets) -> dict[str, tuple[str, int]]:
    """Where to listen while the process waits for the journal."""
    wanted = {"http": options.http, "ws": options.ws}
    found = {name: parse_address(at) for name, at in wanted.items() if at and name not in sockets}
    return {name: at for name, at in found.items() if at[1]}  # a free port is known to nobody yet


def _file(options: Options) -> Path | None:
    """The journal, if it is a file."""
    return options.journal if options.store is None else None


async def _start_listeners(
    nursery: trio.Nursery,
    running: RunningServer,
    options: Options,
    guard: Guard,
    sockets: Sockets,
    standby: Standby,
) -> None:
    """Listen for clients of WebSocket and HTTP, in tasks of `nursery`. Raises `CannotServe`."""
    at_ws, at_http = (_inherited(name, sockets, standby.sockets) for name in ("ws", "http"))
    if options.ws is not None:
        await nursery.start(_serve_websocket, running, options, guard, at_ws)
    if options.http is not None:
        await nursery.start(_serve_http, running, options, guard, at_http)


async def _serve_websocket(
    running: RunningServer,
    options: Options,
    guard: Guard,
    inherited: _Inherited,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    assert options.ws is not None
    listen = partial(
        websocket.serve,
        running.serve,
        message_bytes_max=running.limits.message_bytes_max,
        ssl_context=guard.tls,
        admit=guard.admit_ws,
    )
    await _listen(listen, f"ws{guard.s}", options.ws, "", running, options, inherited, task_status)


async def _serve_http(
    running: RunningServer,
    options: Options,
    guard: Guard,
    inherited: _Inherited,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    assert options.http is not None
    path = options.http_path
    endpoint = HttpEndpoint(running, path, metadata_url=guard.metadata_url)
    listen = partial(
        http.serve,
        guard.with_metadata(endpoint),
        screen=guard.screening(endpoint.screen),
        body_bytes_max=running.limits.message_bytes_max,
        ssl_context=guard.tls,
        admit=guard.admit_http,
    )
    await _listen(
        listen, f"http{guard.s}", options.http, path, running, options, inherited, task_status
    )


async def _listen(
    serve: Callable[..., Awaitable[None]],
    scheme: str,
    address: str,
    path: str,
    running: RunningServer,
    options: Options,
    inherited: _Inherited,
    task_status: trio.TaskStatus[None],
) -> None:
    host, port = parse_address(address)
    serve_all = partial(
        serve,
        connections_max=running.limits.connections_max,
        per_principal_max=running.limits.connections_per_principal_max,
        allowed_hosts=options.allowed_hosts,
        allowed_origins=options.allowed_origins,
        sockets=inherited.sockets,
        is_shared=inherited.is_shared,
        departure=running.engine.departure,
    )
    async with trio.open_nursery() as nursery:
        try:
            port = await nursery.start(serve_all, host, port)
        except OSError as error:
            raise CannotServe(why_not(address, error)) from error
        log.info("listening", url=f"{origin(scheme, host, port)}{path}")
        task_status.started()


async def _serve_relays(
    running: RunningServer,
    options: Options,
    down: trio.Event,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    assert options.owned is not None
    ours = options.hello()

    def check(hello: dict[str, Any]) -> str | None:
        for what in ("app", "version"):
            if hello.get(what) != ours[what]:
                return (
                    f"The owner of this journal serves {what} {ours[what]}, not {hello.get(what)}: "
                    "wait until it ends, stop it, or use another journal."
                )
        if hello.get("key", "") != ours["key"]:
            return (
                f"The owner of this journal was started {options.what_differs}: use another "
                "--journal, or none, or wait until it ends."
            )
        return None

    def farewell() -> dict[str, object] | None:
        if down.is_set():
            return {"error": DOWN}
        # After a shutdown the clients were told how all of their calls have ended.
        return {"ok": True} if running.engine.is_closing else None

    path = socket_path(options.owned)
    async with trio.open_nursery() as nursery:
        serve = partial(
            owner.serve,
            running.serve,
            path,
            hello_check=check,
            farewell=farewell,
            answer={"pid": os.getpid(), "settings": settings(options)},
            message_bytes_max=running.limits.message_bytes_max,
        )
        try:
            await nursery.start(serve)
        except OSError as error:
            raise CannotServe(f"{path}: cannot listen there: {error}.") from error
        task_status.started()


def tell_starter(what: str) -> None:
    """Tell the relay that started this owner, if any, that it listens, or why it failed."""
    fd = os.environ.pop(STARTER_VARIABLE, None)
    if fd is not None:
        # The relay may have been killed; other relays may still wait for this owner.
        with suppress(BrokenPipeError), open(int(fd), "w", errors="backslashreplace") as starter:
            starter.write(what)
