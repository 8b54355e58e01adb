"""Runs a program in a Python that lacks what Windows lacks: `python without_posix.py CODE`."""

import os
import signal
import socket

# trio and Python's own modules have chosen their Linux versions before anything is hidden.
import ssl  # noqa: F401
import subprocess  # noqa: F401
import sys
from functools import partial
from typing import Final

import trio  # noqa: F401

MODULES: Final = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
NAMES: Final = {
    os: (
        *("chown", "fchmod", "fork", "getegid", "geteuid", "getgid", "getpgid", "getuid"),
        *("killpg", "pwritev", "readv", "register_at_fork", "sched_getaffinity", "sendfile"),
        *("setsid", "sysconf", "uname", "writev", "O_CLOEXEC", "O_DIRECTORY", "O_NOCTTY"),
        *("O_NOFOLLOW", "O_NONBLOCK"),
    ),
    socket: ("AF_UNIX", "MSG_DONTWAIT", "SCM_RIGHTS", "SO_PEERCRED", "recv_fds", "send_fds"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGPROF", "SIGUSR1", "setitimer"),
}


def hide() -> None:
    """Hide the modules and names. Those that this machine lacks are hidden already."""
    # Without AF_UNIX, Python opens a port for it, which is not what is tested.
    socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)  # type: ignore[assignment]
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment]
    for home, names in NAMES.items():
        for name in names:
            vars(home).pop(name, None)


if __name__ == "__main__":
    hide()
    sys.argv = sys.argv[1:]
    exec(sys.argv[0])
