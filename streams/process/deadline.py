"""Ends the process at its deadline at the latest, whatever a tool does.

A shutdown waits for tools, and a tool may never end: it may be shielded from cancellation, block
the thread of the event loop, or have started a thread that Python waits for. So a separate thread
ends the process once the deadline has passed, as SIGKILL would. The journal is made for that, and
the calls that ran are `interrupted` after the next start.

C code that holds Python's global lock for ever defeats even this: then neither the thread nor the
handler of the signal runs.

A process that ends in time ends with `leave`.
"""

import atexit
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final, NoReturn

from streams.clock import steady
from streams.logs import STANDARD_ERROR, log

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_HANDLED: Final = (*END_SIGNALS, signal.SIGHUP)
DEADLINE_S: Final = 4.0  # from the signal or the failure; the design page promises it
FINAL_LOG_S: Final = 0.2  # of these, to write the log: standard error may be a full pipe

END_OF_SIGNAL: Final = 0
END_OF_FAILURE: Final = 2


class Exit:
    """The deadline of the process, which starts with `begin`. Make it before the server.

    It ends the process `within_s` seconds later. The first SIGTERM gives running calls `grace_s`
    seconds more. `tools` returns the names of the tools that have not ended, `failure` the error
    that ended the server, if any.
    """

    def __init__(self, within_s: float = DEADLINE_S, grace_s: float = 0.0) -> None:
        self._within_s = within_s
        self._grace_s = grace_s
        self.tools: Callable[[], Sequence[str]] = list
        self.failure: Callable[[], BaseException | None] = lambda: None
        # A signal handler calls `put`, which may interrupt itself; `Event.set` may not.
        self._begun: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mcp-streams exit", daemon=True).start()

    def begin(self, code: int, grace_s: float = 0.0) -> None:
        """Start the deadline; `code` is the exit code once it has passed.

        Of several calls the earliest deadline counts, and the first code. It may be called from a
        signal handler.
        """
        self._begun.put((code, steady() + grace_s))

    @contextmanager
    def with_signals(self) -> Iterator[None]:
        """In this block each of `END_SIGNALS` calls `begin`, then its former handler.

        Install the former handlers before.
        """
        handlers = {number: signal.getsignal(number) for number in END_SIGNALS}
        is_first = True

        def begin(number: int, frame: FrameType | None) -> None:
            nonlocal is_first
            self.begin(END_OF_SIGNAL, self.grace_of(number) if is_first else 0.0)
            is_first = False
            handler: Any = handlers[signal.Signals(number)]
            handler(number, frame)

        for number in END_SIGNALS:
            signal.signal(number, begin)
        yield

    def grace_of(self, number: int) -> float:
        """How many seconds running calls have to end after this signal, if it is the first one."""
        return self._grace_s if number == signal.SIGTERM else 0.0

    def _run(self) -> None:
        code, begun_at = self._begun.get()
        while (rest_s := begun_at + self._within_s - FINAL_LOG_S - steady()) > 0:
            with suppress(queue.Empty):
                _, again_at = self._begun.get(timeout=rest_s)
                begun_at = min(begun_at, again_at)
        last_words = threading.Thread(target=self._tell, args=[code], daemon=True)
        last_words.start()
        last_words.join(FINAL_LOG_S)
        os._exit(code)

    def _tell(self, code: int) -> None:
        tools = ", ".join(self.tools())
        # Without tools it is a library that has not: an exporter whose collector is away, mostly.
        what = "some tools have not ended" if tools else "a thread of a library has not ended"
        told = {"tools": tools} if tools else {}
        log.warning(f"the process ends at its deadline; {what}", **told, code=code)
        STANDARD_ERROR.finish(FINAL_LOG_S)
        failure = self.failure()
        if code == END_OF_FAILURE and failure is not None:
            with suppress(OSError):
                print(failure, file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """Exit as `sys.exit` does, but leave out what Python does last: it frees its own memory.

    A daemon thread that wakes just then, such as one that has waited for an issuer's keys, crashes
    the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as `multiprocessing` ends its processes
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(code)  # it says what is lost
    os._exit(code)


def let_children_end() -> None:
    """Give forked children the default signal handlers, so that signals end them.

    Signals are blocked from before the fork until the child has its handlers; a signal in between
    would be lost.
    """
    was = threading.local()

    def wait() -> None:
        was.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)

    def go_on() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, was.mask)

    def become_child() -> None:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            if callable(signal.getsignal(number)):
                is_ctrl_c = number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
        go_on()

    os.register_at_fork(before=wait, after_in_parent=go_on, after_in_child=become_child)
