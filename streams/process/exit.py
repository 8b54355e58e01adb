"""The end of the process: at its deadline at the latest, whatever a tool does.

A shutdown waits for tools, and a tool may never end: it may be shielded from cancellation, compute
without a pause on the thread that everything runs on, or have started a thread that Python waits
for. So a thread of its own ends the process when the deadline has passed, as SIGKILL would; the
journal is made for that, and the calls that ran are `interrupted` after a restart.

Not even this helps against code in C that holds Python's global lock and never gives it back: then
neither this thread nor the handler of the signal runs.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

from streams.clock import steady
from streams.logs import log

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_HANDLED: Final = (*END_SIGNALS, signal.SIGHUP)
DEADLINE_S: Final = 4.0  # from the signal or the failure; the design page promises it
FINAL_LOG_S: Final = 0.2  # of them, for the log: standard error may be a pipe without a reader

END_OF_SIGNAL: Final = 0
END_OF_FAILURE: Final = 2


class Exit:
    """Made before the server is, and told by `begin` that the process is about to end.

    `tools` gives the names of those that have not ended, `failure` what has failed, if anything.
    """

    def __init__(self) -> None:
        self.tools: Callable[[], Sequence[str]] = list
        self.failure: Callable[[], BaseException | None] = lambda: None
        # Unlike those of an event, its `put` may interrupt itself: a signal handler calls it.
        self._begun: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="mcp-streams exit", daemon=True).start()

    def begin(self, code: int) -> None:
        """From now on the process has `DEADLINE_S` seconds; `code` is the exit code if it takes
        longer. Only the first call counts. May be called from a signal handler.
        """
        self._begun.put((code, steady()))

    @contextmanager
    def with_signals(self) -> Iterator[None]:
        """In this block each of `END_SIGNALS` calls `begin`, and then the handler it had before.

        Install those handlers first: these take their place.
        """
        handlers = {number: signal.getsignal(number) for number in END_SIGNALS}

        def begin(number: int, frame: FrameType | None) -> None:
            self.begin(END_OF_SIGNAL)
            handler: Any = handlers[signal.Signals(number)]
            handler(number, frame)

        for number in END_SIGNALS:
            signal.signal(number, begin)
        yield

    def _run(self) -> None:
        code, begun_at = self._begun.get()
        deadline = begun_at + DEADLINE_S - FINAL_LOG_S
        threading.Event().wait(max(0.0, deadline - steady()))
        last_words = threading.Thread(target=self._tell, args=[code], daemon=True)
        last_words.start()
        last_words.join(FINAL_LOG_S)
        os._exit(code)

    def _tell(self, code: int) -> None:
        told: dict[str, object] = {"tools": ", ".join(self.tools()) or "none", "code": code}
        log.warning("the process ends at its deadline, before all in it has ended", **told)
        failure = self.failure()
        if code == END_OF_FAILURE and failure is not None:
            with suppress(OSError):
                print(failure, file=sys.stderr, flush=True)


def let_children_end() -> None:
    """Let forked children end for a signal: the handlers of this process are the server's.

    Signals are blocked from before the fork until the child has the system's own handling: one
    that came in between would be lost.
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
