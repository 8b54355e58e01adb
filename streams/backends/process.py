"""A child process with pipes: started, read, written and ended, whatever it does.

On Linux the kernel kills the child when this process dies (PR_SET_PDEATHSIG). The kernel binds that
to the *thread* that has started the child. So one thread, which lives as long as this process,
starts all children.

The child leads a process group of its own. When the child ends, the rest of the group is killed
before the child is reaped: until then no other group can have its number.

This is one file because all of it is one lifetime: the start, the pipes and the end of a process
use the same state, and each may bring about the end.
"""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final, Literal, TypeVar

import msgspec
import trio

from streams.backends.guard import Guard, entry
from streams.backends.secrets import Secrets
from streams.errors import Refusal, refusal
from streams.forks import in_child, withhold
from streams.logs import escaped, log
from streams.messages import MESSAGE_BYTES_MAX
from streams.turns import RateLimit

try:
    import fcntl
except ImportError:  # Windows: a child cannot be started there
    fcntl = None  # type: ignore[assignment]

READ_BYTES: Final = 256 * 1024
PIPE_BYTES: Final = 1024 * 1024  # the most that an unprivileged process may set
# Bytes that may wait for a child that does not read. Requests wait beyond it, notifications are
# dropped.
OUTBOX_BYTES_MAX: Final = 1024 * 1024
TAIL_BYTES: Final = (
    2048  # of standard error, for the error of a call that the child has taken along
)
STDERR_LINE_BYTES_MAX: Final = 64 * 1024  # a longer line is cut
# Lines of standard error that are logged at once, and per second in the long run.
LOGGED_LINES: Final = 1_000
LOGGED_LINES_PER_S: Final = 100.0
LAST_READS_MAX: Final = 64  # of each pipe of a dead child, whose grandchildren may still write
SHUT_S: Final = 1.0  # how long a child may live after it has closed its input or output
GONE_S: Final = 5.0  # how long SIGKILL may take; a process in the kernel may take longer
_PR_SET_PDEATHSIG: Final = 1
# Names of systemd's variables, which are meant for this process alone.
_OURS: Final = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID")

_T = TypeVar("_T")

Isolation = Literal["session", "none", "call"]
RestartPolicy = Literal["on-failure", "always", "never"]


class ChildSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a command is run as a backend.

    `isolate`: one child for each client session, one for all of them, or one for each call of a
    tool. `rerun` has globs of names of tools, or `"hinted"` for the tools that say `readOnlyHint`
    or `idempotentHint`: their calls are sent again to the next child when a child dies.
    """

    command: tuple[str, ...]  # the program and its arguments, without a shell
    isolate: Isolation = "session"
    children_max: int = 32
    child_idle_s: float = 600.0  # an unused child ends after this time
    restart: RestartPolicy = "on-failure"
    rerun: tuple[str, ...] = ()
    env: Mapping[str, str] = {}  # beside this process's own
    cwd: str | None = None
    start_timeout_s: float = 30.0  # until the child has answered `initialize`
    stop_timeout_s: float = 5.0  # from the end of its input to SIGTERM, and from that to SIGKILL
    cancel_timeout_s: float = 5.0  # how long a cancelled call counts as running in the child
    stderr: Literal["log", "inherit", "null"] = "log"
    resume_min_s: float = 1.0  # of calls, as `Server` has it
    resume_max_s: float = 3600.0
    message_bytes_max: int = MESSAGE_BYTES_MAX

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("command: a program is needed")
        if self.children_max < 1:
            raise ValueError(f"children_max must be 1 or more, not {self.children_max}")
        for name in ("child_idle_s", "start_timeout_s", "cancel_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not self.stop_timeout_s >= 0:
            raise ValueError(f"stop_timeout_s must be 0 or more, not {self.stop_timeout_s}")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a child."""
        inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
        return inherited | dict(self.env)


class Ending(msgspec.Struct, frozen=True):
    """How a child has ended, and its last words."""

    exit_code: int | None  # None where a signal has ended it, or nothing yet
    signal: str | None  # its name
    stderr: str  # the last 2 KiB, without secrets
    why: str = ""  # where this process has ended it
    is_alive: bool = False  # it is not gone `GONE_S` after SIGKILL: a system call may hold it

    @property
    def is_failure(self) -> bool:
        """Whether it did not end by itself with exit code 0."""
        return self.exit_code != 0 or bool(self.why) or self.is_alive

    @property
    def words(self) -> str:
        """How it has ended, in a few words."""
        if self.is_alive:
            still = f"it still lives {GONE_S:g} s after SIGKILL"
            return f"{self.why}; {still}" if self.why else still
        if self.why:
            return self.why
        return f"signal {self.signal}" if self.exit_code is None else f"exit code {self.exit_code}"

    @property
    def details(self) -> dict[str, Any]:
        """The same for the `data` of an error."""
        code: dict[str, Any] = {"exitCode": self.exit_code, "signal": self.signal}
        code = {name: value for name, value in code.items() if value is not None}
        return code | ({"stderrTail": self.stderr} if self.stderr else {})

    @property
    def story(self) -> str:
        """How it has ended, and the last line of its standard error."""
        lines = self.stderr.strip().splitlines()
        return f"{self.words}: {lines[-1][-200:]!r}" if lines else self.words

    def interrupted(self) -> Refusal:
        """The end of a call that the child took along."""
        return refusal("interrupted", **self.details).saying(
            f"The wrapped server ended ({self.story}) before the call was done: make it again if "
            "that is safe."
        )


class Process:
    """One child process. `run` is its life."""

    def __init__(self, child: "subprocess.Popen[bytes]", settings: ChildSettings) -> None:
        self.pid = child.pid
        self.ending: Ending | None = None
        self.has_ended = trio.Event()
        self._child = child
        self._is_logging = settings.stderr == "log"
        self._secrets = Secrets(settings.environment, settings.command)
        self._why = ""
        self._tail = ""
        self._line = b""  # the start of a line of standard error
        self._logged = RateLimit(LOGGED_LINES, LOGGED_LINES_PER_S)
        self._is_reaped = False
        self._has_shut = trio.Event()  # it has closed its input or output; usually it ends
        self._outbox: deque[bytes | memoryview] = deque()
        self._outbox_bytes = 0
        self._moved = trio.lowlevel.ParkingLot()  # the outbox has become shorter, or useless
        self._has_output = trio.lowlevel.ParkingLot()
        for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
            os.set_blocking(pipe.fileno(), False)
            withhold(pipe)
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    async def run(self) -> None:
        """Wait until it has ended, and clean up. Cancelled, it kills the child first."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_waiting)
                nursery.start_soon(self._end_if_shut)
                if self._child.stderr is not None:
                    nursery.start_soon(self._read_stderr)
                await self._exit()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + GONE_S):
                if self._child.returncode is None:
                    self.signal(signal.SIGKILL)
                    await self._exit()
            self._finish()

    async def _exit(self) -> None:
        """Wait for the exit, kill what is left of the group, and reap."""
        await _exited(self.pid)
        self.signal(signal.SIGKILL)
        self._is_reaped = True
        with trio.CancelScope(shield=True):
            await _in_spawner(self._reap)

    def _reap(self) -> None:
        if self._child.returncode is None:
            _guard.remove(self.pid)
            self._child.wait()
            _guard.leave()

    def _finish(self) -> None:
        for _ in range(LAST_READS_MAX):
            if self._child.stderr is None or not (data := _read_now(self._child.stderr.fileno())):
                break
            self._hear(data)
        self._hear(b"\n")
        code = self._child.returncode
        self.ending = Ending(
            exit_code=code if code is not None and code >= 0 else None,
            signal=_signal_name(code) if code is not None and code < 0 else None,
            stderr=self._tail,
            why=self._why,
            is_alive=code is None,
        )
        if self.ending.is_alive:
            log.error("a child does not end", child=self.pid, how=self.ending.words)
        self._outbox.clear()
        self._outbox_bytes = 0
        self._moved.unpark_all()
        _close(self._child.stdin)
        _close(self._child.stderr)
        self.has_ended.set()

    async def _end_if_shut(self) -> None:
        await self._has_shut.wait()
        await trio.sleep(SHUT_S)
        self.kill("it has closed its pipes")

    # Output

    async def read(self) -> bytes:
        """The next bytes of its output; empty at the end."""
        assert self._child.stdout is not None
        while not self._child.stdout.closed:
            await trio.lowlevel.wait_readable(self._child.stdout)
            data = _read_now(self._child.stdout.fileno())
            if data == b"":
                self._has_shut.set()
            if data is not None:
                return data
        return b""

    def read_rest(self) -> bytes:
        """The bytes that a dead child has left in its pipe, which is closed."""
        assert self._child.stdout is not None
        found = b""
        for _ in range(LAST_READS_MAX):
            if not (data := _read_now(self._child.stdout.fileno())):
                break
            found += data
        _close(self._child.stdout)
        return found

    # Input

    @property
    def has_room(self) -> bool:
        """Whether it reads its input, more or less."""
        return self._outbox_bytes <= OUTBOX_BYTES_MAX

    async def wait_for_room(self) -> None:
        """Wait until it has read enough of its input to be sent more."""
        while not self.has_room:
            await self._moved.park()

    def write(self, line: bytes) -> None:
        """Write a line, as far as the pipe takes it now; the rest waits. Nothing is refused."""
        rest: bytes | memoryview = line
        if not self._outbox:
            rest = memoryview(line)[self._write_now(line) :]
        if rest:
            self._outbox.append(rest)
            self._outbox_bytes += len(rest)
            self._has_output.unpark_all()

    def _write_now(self, data: bytes | memoryview) -> int:
        pipe = self._child.stdin
        if pipe is None or pipe.closed or self.ending is not None:
            return len(data)  # it will read nothing more
        try:
            return os.write(pipe.fileno(), data)
        except BlockingIOError:
            return 0
        except OSError:
            self._has_shut.set()
            return len(data)

    async def _write_waiting(self) -> None:
        pipe = self._child.stdin
        assert pipe is not None
        while True:
            while not self._outbox:
                await self._has_output.park()
            with contextlib.suppress(trio.ClosedResourceError):
                await trio.lowlevel.wait_writable(pipe)
            if pipe.closed:  # by `close_input`, which has dropped all that waited
                return
            data = self._outbox.popleft()
            written = self._write_now(data)
            self._outbox_bytes -= written
            if written < len(data):
                self._outbox.appendleft(data[written:])
            self._moved.unpark_all()

    def close_input(self) -> None:
        """End its input: a well-behaved server ends then."""
        self._outbox.clear()
        self._outbox_bytes = 0
        self._moved.unpark_all()
        _close(self._child.stdin)

    # Standard error

    async def _read_stderr(self) -> None:
        pipe = self._child.stderr
        assert pipe is not None
        while True:
            await trio.lowlevel.wait_readable(pipe)
            data = _read_now(pipe.fileno())
            if data == b"":
                return
            if data:
                self._hear(data)

    def _hear(self, data: bytes) -> None:
        *lines, rest = (self._line + data).split(b"\n")
        if len(rest) > STDERR_LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        self._line = rest
        for line in filter(None, lines):
            text = self._secrets.struck_out(line.decode(errors="replace"))
            self._tail = f"{self._tail}{escaped(text)}\n"[-TAIL_BYTES:]
            if self._is_logging and self._logged.spend():
                log.info("standard error of a child", child=self.pid, line=text[:2000])

    # Its end

    def kill(self, why: str) -> None:
        """End it now, for this reason."""
        self._why = self._why or why
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its process group."""
        if not self._is_reaped:  # else the number may be another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    async def stop(self, timeout_s: float) -> None:
        """End its input, then send SIGTERM and SIGKILL. Returns when `run` has cleaned up."""
        self.close_input()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with trio.move_on_after(timeout_s):
                await self.has_ended.wait()
            if self.has_ended.is_set():
                return
            self.signal(number)
        await self.has_ended.wait()


async def start(settings: ChildSettings) -> Process:
    """Start a child. Raises `Refusal` in the words of the operating system."""
    try:
        with trio.CancelScope(shield=True):  # or else nothing would own the child
            child = await _in_spawner(partial(_start, settings))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        place = f" {error.filename}" if isinstance(error, OSError) and error.filename else ""
        raise refusal("start_failed").saying(
            f"The wrapped server {settings.command[0]!r} cannot be started: {why}{place}."
        ) from error
    return Process(child, settings)


_guard: Final = Guard()


def _start(settings: ChildSettings) -> "subprocess.Popen[bytes]":
    pipe = _guard.enter()
    try:
        child = _popen(settings, pipe)
    except BaseException:
        _guard.leave()
        raise
    _guard.add(child.pid)
    return child


def _popen(settings: ChildSettings, guard: int | None) -> "subprocess.Popen[bytes]":
    pipes: dict[str, int | None] = {
        "log": subprocess.PIPE,
        "inherit": None,
        "null": subprocess.DEVNULL,
    }
    return subprocess.Popen(  # nosec B603 # the command that the operator has given
        settings.command,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=pipes[settings.stderr],
        cwd=settings.cwd,
        env=settings.environment,
        start_new_session=True,
        preexec_fn=_die_with_parent(guard),  # noqa: PLW1509  # a few system calls, prepared before
    )


def _die_with_parent(guard: int | None) -> Callable[[], None]:
    """Makes the child die with this process: called in the child, between fork and exec."""
    prctl, parent, getpid, getppid = _prctl, os.getpid(), os.getpid, os.getppid

    def die_with_parent() -> None:
        if guard is not None:
            os.write(guard, entry(getpid()))
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if getppid() != parent:  # it has died before the call
            os._exit(1)

    return die_with_parent


_prctl: Final[Any] = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


# The thread that starts all children

_Jobs = queue.SimpleQueue[Callable[[], None]]


@cache
def _spawner() -> _Jobs:
    jobs = _Jobs()

    def run() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=run, name="mcp-streams children", daemon=True).start()
    return jobs


in_child(_spawner.cache_clear)  # a forked child has no such thread


async def _in_spawner(work: Callable[[], _T]) -> _T:
    token, is_done = trio.lowlevel.current_trio_token(), trio.Event()
    found: list[_T] = []
    failed: list[Exception] = []

    def job() -> None:
        try:
            found.append(work())
        except Exception as error:
            failed.append(error)
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(is_done.set)

    _spawner().put(job)
    await is_done.wait()
    if failed:
        raise failed[0]
    return found[0]


# Files and processes


async def _exited(pid: int) -> None:
    """Wait for the exit of a child, and leave it a zombie."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or too many descriptors
        wait = partial(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ChildProcessError):
            await trio.to_thread.run_sync(wait, abandon_on_cancel=True)
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _read_now(descriptor: int) -> bytes | None:
    """The bytes that can be read at once; empty at the end, None if none have come yet."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:  # no pipe that was opened for a child should do this
        log.warning("a pipe of a child cannot be read: it counts as ended", why=str(error))
        return b""


def _close(pipe: Any) -> None:
    if pipe is not None and not pipe.closed:
        trio.lowlevel.notify_closing(pipe)
        pipe.close()


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"{-code}"
