"""Child processes that a tool forks (`os.fork`, `multiprocessing`).

A forked child has copies of the server's memory and file descriptors, and must use none of them:

- A connection ends only when the last process closes it, and an epoll set is shared. So in the
  child /dev/null replaces every descriptor that was withheld. The number stays in use: an object
  that closes it later cannot close a file that the child has opened since. Where /dev/null cannot
  be opened, the descriptors are closed.
- The tool's code would return, or raise, into the server. There the child ends (`Confined`), as a
  child of `multiprocessing` does: no `atexit` and no `finally` of the server runs.

Children that run another program (`subprocess`) inherit no descriptors of the server.
"""

import os
import sys
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn

_withheld: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_callbacks: Final[list[Callable[[], object]]] = []


def withhold(opened: Any) -> None:
    """Replace `opened.fileno()`, such as a client's socket or pipe, in all forked children."""
    _withheld.add(opened)


def in_child(do: Callable[[], object]) -> None:
    """Call `do` in every child that is forked from now on, before its own code runs."""
    _callbacks.append(do)


def _become_child() -> None:
    """Raises nothing: an exception in a hook of `os.fork` would be printed, and the child go on."""
    try:
        _let_go()
    finally:
        _withheld.clear()
        for do in _callbacks:
            do()


def _let_go() -> None:
    descriptors = []
    for opened in list(_withheld):
        with suppress(OSError, ValueError):
            if (descriptor := opened.fileno()) >= 0:
                descriptors.append(descriptor)
    if not descriptors:
        return
    null, has_own = _null(), True
    if null is None:  # perhaps no descriptor is free: close one of ours
        os.close(descriptors[0])
        null, has_own = _null(), False
    for descriptor in descriptors:
        with suppress(OSError):
            if null is None:
                os.close(descriptor)  # the number may be reused for a file of the child
            elif descriptor != null:
                os.dup2(null, descriptor, inheritable=False)
    if null is not None and (has_own or null not in descriptors):
        os.close(null)


def _null() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # too many descriptors, or no /dev
        return None


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_become_child)


class Confined:
    """Around a block that only this process may leave: a forked child exits at the end of it.

    The child's exit code is that of `sys.exit`, 1 for any other exception, else 0.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            end_child(error)

    def check(self) -> None:
        """Raises `RuntimeError` in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError("a forked child cannot use the call: use it in the tool's process")


def end_child(error: BaseException | None) -> NoReturn:
    """End this process, a forked child, because of `error`."""
    code: object = 0
    try:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
        elif error is not None:
            code = "".join(traceback.format_exception(error))
        if not isinstance(code, int):
            # Not `sys.stderr`: another thread may have held its lock when the child was forked.
            os.write(2, f"{code}\n".encode(errors="backslashreplace"))
            code = 1
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(code & 0xFF if isinstance(code, int) else 1)
