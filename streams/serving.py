"""Running a server as a process: in the foreground, or as the owner of a journal."""

import gc
import importlib
import importlib.util
import os
import resource
import signal
import ssl
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams.endpoint import HttpEndpoint
from streams.errors import JournalUnusable, first_of
from streams.handling import tool_at
from streams.journal import Journal
from streams.keys import Keyring
from streams.logs import log
from streams.memory import MemoryJournal
from streams.options import READY, STARTER_VARIABLE, CannotServe, Options
from streams.ownership import key_path, socket_path
from streams.server import RunningServer, Server
from streams.sqlite import open_sqlite_journal
from streams.watchdog import watched
from transports import http, stdio, unix, websocket
from transports.origins import names_loopback

# Threads of the journal and of tools come and go in less than the interpreter's 5 ms, for which
# everybody else would wait.
SWITCH_S: Final = 0.0005
# A server that holds much makes little garbage in cycles: collect it a tenth as often.
GARBAGE_MAX: Final = (10_000, 20, 20)

# For all that is no connection. Over HTTP and over WebSocket there may be `connections_max` each.
DESCRIPTORS_BESIDES: Final = 256

# Else an owner could end before the relay that has started it gets through.
LINGER_MIN_S: Final = 0.5


def load(app: str) -> Server:
    """The server that `file.py:name` or `package.module:name` stands for. Raises `CannotServe`.

    Whatever goes wrong inside is the author's, who is told where.
    """
    place, _, name = app.rpartition(":")
    if not place or not name:
        raise CannotServe(f"{app}: name the server as file.py:server or package.module:server.")
    sys.path.insert(0, os.getcwd())
    try:
        module = _import(place)
    except CannotServe:
        raise
    except Exception as error:
        raise CannotServe(f"{place} cannot be imported: {_described(error)}.") from error
    server = getattr(module, name, None)
    if not isinstance(server, Server):
        raise CannotServe(f"{place} has no Server named {name!r}: make one, or name another.")
    return server


def _described(error: Exception) -> str:
    if isinstance(error, SyntaxError):  # says itself where it is
        return f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if frame.filename.startswith("<") else f" ({frame.filename}, line {frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    if not path.is_file():
        raise CannotServe(f"{path}: there is no such file.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def parse_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` or `[HOST]:PORT` as a pair. Raises `CannotServe`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise CannotServe(f"{address}: write HOST:PORT, such as 127.0.0.1:8765.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _check_address(address: str, *, is_insecure_allowed: bool) -> None:
    host, _ = parse_address(address)
    if not (names_loopback(host) or is_insecure_allowed):
        raise CannotServe(
            f"{address} can be reached from elsewhere and nobody is asked who they are: "
            "bind to 127.0.0.1, or say --insecure-anonymous."
        )


def run(options: Options) -> None:
    """Serve until there is nothing left to do, or a signal says so. Raises `CannotServe`."""
    for address in (options.ws, options.http):
        if address is not None:
            _check_address(address, is_insecure_allowed=options.insecure_anonymous)
    tls = _tls(options)
    fds = stdio.claim_standard_streams() if options.stdio else None
    server = load(options.app)
    if options.limits:
        server.limits = msgspec.structs.replace(server.limits, **options.limits)
    _tune()
    _raise_descriptors(server.limits.connections_max)
    failure: BaseException | None = None  # Python before 3.11.4 groups what except* raises
    try:
        trio.run(_serve_watched, server, options, fds, tls)
    except* (CannotServe, JournalUnusable, OSError) as errors:
        failure = first_of(errors)
    if failure is not None:
        raise CannotServe(str(failure)) from failure


def _tune() -> None:
    """Settings for a process that is a server and nothing else."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()  # what was imported stays
    gc.set_threshold(*GARBAGE_MAX)


def _raise_descriptors(connections_max: int) -> None:
    """Let the process have as many file descriptors as its connections need, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections_max + DESCRIPTORS_BESIDES
    if soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        if raised < wanted:
            log.debug("fewer file descriptors than connections_max needs", limit=raised)


# The process that does the work


async def _serve_watched(server: Server, options: Options, *how: Any) -> None:
    with watched(options.watchdog_s, tool_at):
        await _serve(server, options, *how)


async def _serve(
    server: Server,
    options: Options,
    fds: tuple[int, int] | None,
    tls: ssl.SSLContext | None,
) -> None:
    async with (
        _open_journal(options) as (journal, keyring),
        server.open(journal, keyring) as running,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_stop_on_signal, running, nursery.cancel_scope)
        if options.journal is not None:
            await nursery.start(_serve_relays, running, options)
        if options.ws is not None:
            await nursery.start(_serve_websocket, running, options)
        if options.http is not None:
            await nursery.start(_serve_http, running, options, tls)
        if fds is not None:
            await stdio.serve(running.serve, fds, message_bytes_max=server.limits.message_bytes_max)
        if not options.is_listening:
            _tell_starter()
            await running.engine.rest(_linger_s(options))
            nursery.cancel_scope.cancel()


def _linger_s(options: Options) -> float:
    """For how long nothing to do is no reason to end; a client's own process ends with it."""
    return 0.0 if options.stdio else max(options.linger_s, LINGER_MIN_S)


@asynccontextmanager
async def _open_journal(options: Options) -> AsyncIterator[tuple[Journal, Keyring]]:
    if options.journal is None:
        log.info("no --journal: streams live as long as this process")
        yield MemoryJournal(), Keyring.load(None)
        return
    async with open_sqlite_journal(options.journal, durability=options.durability) as journal:
        yield journal, Keyring.load(key_path(options.journal))


async def _stop_on_signal(running: RunningServer, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("shutting down", signal=signal.Signals(number).name)
            await running.engine.shut_down()
            scope.cancel()


async def _serve_websocket(
    running: RunningServer, options: Options, *, task_status: trio.TaskStatus[None]
) -> None:
    assert options.ws is not None
    message_bytes_max = running.server.limits.message_bytes_max
    listen = partial(websocket.serve, running.serve, message_bytes_max=message_bytes_max)
    await _listen(listen, "ws", options.ws, "", running, options, task_status)


async def _serve_http(
    running: RunningServer,
    options: Options,
    tls: ssl.SSLContext | None,
    *,
    task_status: trio.TaskStatus[None],
) -> None:
    assert options.http is not None
    listen = partial(
        http.serve,
        HttpEndpoint(running, options.http_path),
        body_bytes_max=running.server.limits.message_bytes_max,
        ssl_context=tls,
    )
    scheme, path = "http" if tls is None else "https", options.http_path
    await _listen(listen, scheme, options.http, path, running, options, task_status)


async def _listen(
    serve: Callable[..., Awaitable[None]],
    scheme: str,
    address: str,
    path: str,
    running: RunningServer,
    options: Options,
    task_status: trio.TaskStatus[None],
) -> None:
    host, port = parse_address(address)
    serve_all = partial(
        serve,
        connections_max=running.server.limits.connections_max,
        allowed_hosts=options.allowed_hosts,
        allowed_origins=options.allowed_origins,
    )
    async with trio.open_nursery() as nursery:
        try:
            port = await nursery.start(serve_all, host, port)
        except OSError as error:
            raise CannotServe(f"{address} cannot be listened at: {error}.") from error
        shown = f"[{host}]" if ":" in host else host
        log.info("listening", url=f"{scheme}://{shown}:{port}{path}")
        task_status.started()


def _tls(options: Options) -> ssl.SSLContext | None:
    """What --http is served with. Raises `CannotServe` where the files are none."""
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise CannotServe(f"{options.tls_cert} cannot be used for TLS: {error}.") from error
    return context


async def _serve_relays(
    running: RunningServer, options: Options, *, task_status: trio.TaskStatus[None]
) -> None:
    assert options.journal is not None
    ours = options.hello()

    def check(hello: dict[str, Any]) -> str | None:
        for what in ("app", "version"):
            if hello.get(what) != ours[what]:
                return (
                    f"The owner of this journal serves {what} {ours[what]}, not {hello.get(what)}: "
                    "wait until it ends, stop it, or use another journal."
                )
        return None

    await unix.serve(
        running.serve,
        socket_path(options.journal),
        hello_check=check,
        message_bytes_max=running.server.limits.message_bytes_max,
        task_status=task_status,
    )


def _tell_starter() -> None:
    """Tell the relay that started this owner, if one did, that it listens."""
    fd = os.environ.pop(STARTER_VARIABLE, None)
    if fd is not None:
        # That relay may have been killed; others wait for this owner as well.
        with suppress(BrokenPipeError), open(int(fd), "w") as starter:
            starter.write(READY)
