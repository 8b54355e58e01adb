"""Unix sockets that only the user of this process, and root, can connect to."""

import contextlib
import os
import socket
import stat
from typing import Final

from transports.relay.handover import socket_address

BACKLOG: Final = 128


def listen_privately(path: str | os.PathLike[str]) -> socket.socket:
    """Listen at `path` with mode 0600. A socket that is there already is removed first.

    Call this only while no other process may listen there. Raises `OSError`.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        os.fchmod(listener.fileno(), 0o600)  # before `bind` makes it visible
        with socket_address(path) as address:
            listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
