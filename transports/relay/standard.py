"""A process's standard streams, taken out of everybody else's way.

Apart from `transports.stdio` because a relay needs it before, and without, trio.
"""

import contextlib
import os
import stat


def claim_standard_streams() -> tuple[int, int]:
    """Take the process's standard input and output, as new file descriptors for `serve`.

    To be called before `trio.run`. Afterwards 0 is empty and 1 goes where 2 goes, so that a tool
    may `print` and a child process inherits nothing that is ours. Whatever of 0-2 was closed is
    opened on /dev/null first: else the next file that anybody opens would stand in its place.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            _put(os.open(os.devnull, os.O_RDWR), fd)
    claimed = _own(0, os.O_RDONLY), _own(1, os.O_WRONLY)
    _put(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return claimed


def _put(opened: int, fd: int) -> None:
    """Move a file descriptor to the number `fd`, where child processes inherit it."""
    if opened == fd:
        os.set_inheritable(fd, True)
        return
    os.dup2(opened, fd)
    os.close(opened)


def _own(fd: int, access: int) -> int:
    """Another descriptor for the file, not inherited, and not sharing its flags where possible.

    trio switches what it is given to non-blocking. A duplicate shares that flag with every other
    holder (standard error and the shell, on a terminal), which would then fail to write; pipes and
    terminals can be opened anew instead, where the system has /proc.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        flags = access | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        with contextlib.suppress(OSError):  # no /proc, or another user's: share it
            return os.open(f"/proc/self/fd/{fd}", flags)
    return os.dup(fd)
