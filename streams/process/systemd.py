"""The sockets that systemd passes to a service: some to listen at, and one for notices.

The sockets are described in sd_listen_fds(3), the notices in sd_notify(3). The variables of both
are removed from the environment, so that no child process takes them for its own.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from streams.clock import steady
from streams.logs import log
from streams.process.options import CannotServe, Options

FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
NAMES: Final = ("http", "ws")  # of sockets, as FileDescriptorName= gives them

Sockets = Mapping[str, Sequence[socket.socket]]
"""The sockets to listen at, for "http" and for "ws"."""


def take_sockets(options: Options) -> tuple[Options, Sockets]:
    """Take the sockets that systemd has passed to this process, if any.

    Their addresses take the place of those in the options, so that all checks of an address see the
    real one. Raises `CannotServe` where it is not clear what to serve at a socket.
    """
    told = {name: os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")}
    os.environ.pop("LISTEN_PIDFDID", None)
    if told["PID"] != str(os.getpid()):
        return options, {}  # they were meant for another process
    count = int(told["FDS"]) if told["FDS"].isdecimal() else 0
    names = told["FDNAMES"].split(":") if told["FDNAMES"] else []
    names += ["unknown"] * (count - len(names))
    sockets: dict[str, list[socket.socket]] = {}
    for fd, name in zip(range(FIRST_FD, FIRST_FD + count), names, strict=False):
        sockets.setdefault(_purpose(name, options), []).append(_listening(fd, name))
    places = {purpose: _address(found) for purpose, found in sockets.items()}
    return msgspec.structs.replace(options, **places), sockets


def _purpose(name: str, options: Options) -> str:
    """The server for a socket of this name: "http" or "ws"."""
    asked = [each for each in NAMES if getattr(options, each) is not None]
    if not asked:
        raise CannotServe(
            f"systemd passes the socket {name}, and no option says what to serve there: add --http "
            "or --ws; the address in the option does not count then."
        )
    if name in asked:
        return name
    if name in NAMES:
        raise CannotServe(f"systemd passes the socket {name}: add --{name} to serve there.")
    if len(asked) > 1:
        raise CannotServe(
            f"systemd passes the socket {name} for --http or --ws: name it with "
            "FileDescriptorName=http or FileDescriptorName=ws in its .socket unit."
        )
    return asked[0]


def _listening(fd: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        taken = socket.socket(fileno=fd)
        listens = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise CannotServe(f"The socket {name} of systemd cannot be used: {error}.") from error
    if taken.family not in (socket.AF_INET, socket.AF_INET6) or taken.type != socket.SOCK_STREAM:
        raise CannotServe(
            f"The socket {name} of systemd is no TCP socket: write ListenStream=HOST:PORT."
        )
    if not listens:
        raise CannotServe(
            f"The socket {name} of systemd is one connection: write Accept=no in its .socket unit."
        )
    return taken


def _address(sockets: Sequence[socket.socket]) -> str:
    """The address of these, of which the security is checked: one that others reach, if any."""
    names = [each.getsockname()[:2] for each in sockets]
    others_reach = (name for name in names if not ipaddress.ip_address(name[0]).is_loopback)
    host, port = next(others_reach, names[0])
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Notices:
    """Tells systemd what this process does, if systemd has passed a socket for that.

    A process that does not listen is no service, but may be the child of one: it tells nothing.
    """

    def __init__(self, *, is_service: bool) -> None:
        told = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = told if is_service else ""
        self._is_stopping = False

    def ready(self) -> None:
        """The process serves, for the first time or after a reload."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """A reload has begun: `Type=notify-reload` waits for `ready`."""
        now_us = int(steady() * 1_000_000)
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={now_us}")

    def stopping(self) -> None:
        """The process ends. Only the first call counts."""
        if not self._is_stopping:
            self._is_stopping = True
            self._tell("STOPPING=1")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        # A name that begins with @ is in the abstract namespace of Linux.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notice:
                notice.setblocking(False)
                notice.sendto(state.encode(), address)
        except OSError as error:  # the service goes on without a supervisor that listens
            log.warning("systemd cannot be told", state=state.partition("\n")[0], why=str(error))
