"""Running a server as a process: in the foreground, as a journal's owner, or as a relay to one.

One process owns a journal. What a client spawns with `--stdio --journal FILE` is only a relay: it
finds the owner, or starts it in a session of its own, and hands over its standard streams. So the
work outlives the client's host, and the next process that a client spawns reaches it.
"""

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import trio

from streams.errors import JournalUnusable
from streams.journal import Journal
from streams.keys import Keyring
from streams.memory import MemoryJournal
from streams.ownership import StarterLock, key_path, log_path, socket_path
from streams.server import RunningServer, Server
from streams.sqlite import Durability, open_sqlite_journal
from transports import relay, stdio, unix, websocket
from transports.origins import names_loopback

log = structlog.get_logger()

# How long a relay looks for an owner, or waits for the one that somebody is starting.
OWNER_PATIENCE_S: Final = 30.0
OWNER_RETRY_S: Final = 0.05


class CannotServe(Exception):
    """The server cannot start; the message says what to do."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to serve an app; `mcp-streams serve --help` says what each of them means."""

    app: str
    journal: Path | None = None
    stdio: bool = False
    foreground: bool = False
    ws: str | None = None
    linger_s: float = 5.0
    durability: Durability = "power"
    insecure_anonymous: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limits: dict[str, float] = {}

    @property
    def is_relay(self) -> bool:
        """Whether this process only brings a client to the journal's owner."""
        return self.stdio and self.journal is not None and not (self.foreground or self.ws)


def load(app: str) -> Server:
    """The server that `file.py:name` or `package.module:name` stands for. Raises `CannotServe`."""
    place, _, name = app.rpartition(":")
    if not place or not name:
        raise CannotServe(f"{app}: name the server as file.py:server or package.module:server.")
    sys.path.insert(0, os.getcwd())
    try:
        module = _import(place)
    except ImportError as error:
        raise CannotServe(f"{place} cannot be imported: {error}.") from error
    server = getattr(module, name, None)
    if not isinstance(server, Server):
        raise CannotServe(f"{place} has no Server named {name!r}: make one, or name another.")
    return server


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


def run(options: Options) -> None:
    """Serve until there is nothing left to do, or a signal says so. Raises `CannotServe`."""
    if options.is_relay:
        _run_relay(options)
        return
    fds = stdio.claim_standard_streams() if options.stdio else None
    server = load(options.app)
    if options.limits:
        server.limits = msgspec.structs.replace(server.limits, **options.limits)
    try:
        trio.run(_serve, server, options, fds)
    except* (JournalUnusable, OSError) as errors:
        raise CannotServe(str(_first(errors))) from errors


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def options_from(settings: str) -> Options:
    """The options in what `owner_command` makes of them."""
    return msgspec.json.decode(settings, type=Options, dec_hook=lambda kind, text: kind(text))


# The process that does the work


async def _serve(server: Server, options: Options, fds: tuple[int, int] | None) -> None:
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
        if fds is not None:
            await stdio.serve(running.serve, fds, message_bytes_max=server.limits.message_bytes_max)
        if options.ws is None:
            _tell_starter()
            await running.engine.rest(0.0 if fds is not None else options.linger_s)
            nursery.cancel_scope.cancel()


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
    host, port = parse_address(options.ws)
    if not (names_loopback(host) or options.insecure_anonymous):
        raise OSError(
            f"{options.ws} can be reached from elsewhere and nobody is asked who they are: "
            "bind to 127.0.0.1, or say --insecure-anonymous"
        )
    limits = running.server.limits
    async with trio.open_nursery() as nursery:
        port = await nursery.start(
            lambda task_status: websocket.serve(
                running.serve,
                host,
                port,
                message_bytes_max=limits.message_bytes_max,
                connections_max=limits.connections_max,
                allowed_hosts=options.allowed_hosts,
                allowed_origins=options.allowed_origins,
                task_status=task_status,
            )
        )
        shown = f"[{host}]" if ":" in host else host
        log.info("listening", url=f"ws://{shown}:{port}")
        task_status.started()


async def _serve_relays(
    running: RunningServer, options: Options, *, task_status: trio.TaskStatus[None]
) -> None:
    assert options.journal is not None
    ours = _hello(options)

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


def _hello(options: Options) -> dict[str, str]:
    place, _, name = options.app.rpartition(":")
    if place.endswith(".py"):
        place = str(Path(place).resolve())
    return {"app": f"{place}:{name}", "version": version("mcp-streams")}


# The relay, and how it comes by an owner

_READY: Final = "ready\n"
STARTER_VARIABLE: Final = "MCP_STREAMS_STARTER_FD"


def _tell_starter() -> None:
    """Tell the relay that started this owner, if one did, that it listens."""
    fd = os.environ.pop(STARTER_VARIABLE, None)
    if fd is not None:
        with open(int(fd), "w") as starter:
            starter.write(_READY)


def _run_relay(options: Options) -> None:
    assert options.journal is not None
    fds = stdio.claim_standard_streams()
    hello = _hello(options)
    starter = StarterLock(options.journal)
    give_up_at = time.monotonic() + OWNER_PATIENCE_S
    while True:
        try:
            relay.relay(socket_path(options.journal), hello, fds)
        except relay.Refused as refused:
            raise CannotServe(str(refused)) from refused
        except relay.NobodyListens as nobody:
            if time.monotonic() > give_up_at:
                raise CannotServe(f"{nobody}: see {log_path(options.journal)}.") from nobody
        else:
            return
        if _acquired(starter):
            try:
                _start_owner(options)
            finally:
                starter.release()
        else:
            time.sleep(OWNER_RETRY_S)


def _acquired(starter: StarterLock) -> bool:
    try:
        return starter.acquire()
    except JournalUnusable as error:
        raise CannotServe(str(error)) from error


def _start_owner(options: Options) -> None:
    """Start an owner in a session of its own and wait until it listens, or has failed.

    Stock hosts send SIGTERM to the whole process group two seconds after they have closed stdin.
    """
    assert options.journal is not None
    log_file = log_path(options.journal)
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    began_at = os.fstat(fd).st_size
    read_fd, write_fd = os.pipe()
    with open(fd, "ab") as log_stream, open(read_fd) as answer:
        try:
            subprocess.Popen(
                owner_command(options),
                stdin=subprocess.DEVNULL,
                stdout=log_stream,
                stderr=log_stream,
                start_new_session=True,
                pass_fds=(write_fd,),
                env={**os.environ, STARTER_VARIABLE: str(write_fd)},
            )
        finally:
            os.close(write_fd)
        if answer.read() != _READY:
            with open(log_file, errors="replace") as written:
                written.seek(began_at)
                why = written.read().strip().rpartition("\n")[2]
            if "already owned" not in why:  # else somebody was faster, and is found soon
                raise CannotServe(f"The journal's owner did not start: {why} (see {log_file}).")


def owner_command(options: Options) -> Sequence[str]:
    """The command of an owner with these options, which comes to its end when it has rested."""
    own = msgspec.structs.replace(options, stdio=False, foreground=True)
    settings = msgspec.json.encode(own, enc_hook=str).decode()
    return [sys.executable, "-m", "streams.owner", settings]
