"""Takes a process's standard streams for a transport, so that nothing else uses them.

Apart from `transports.stdio`, because a relay needs it without trio, which takes time to load.
"""

import contextlib
import os
import stat


def claim_standard_streams() -> tuple[int, int]:
    """Take the process's standard input and output, as new file descriptors for `serve`.

    Call it before `trio.run`. Afterwards 0 is /dev/null and 1 is a copy of 2, so that a tool may
    `print`, and a child process does not inherit the transport. Any of 0, 1 and 2 that was closed
    is opened on /dev/null first: else the next file to be opened would get its number.
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
    """Another descriptor for the file, which is not inherited and does not share its flags, where
    possible.

    trio makes it non-blocking. A duplicate would share that flag with every other holder, such as
    standard error and the shell on a terminal, whose writes would then fail. So pipes and terminals
    are opened anew, where the system has /proc.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(fd):
        flags = access | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
        with contextlib.suppress(OSError):  # no /proc, or another user's file: share its flags
            return os.open(f"/proc/self/fd/{fd}", flags)
    return os.dup(fd)
