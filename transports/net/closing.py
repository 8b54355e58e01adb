"""Closing a listener without a reset of connections that are on their way.

Linux accepts no further attempts to connect while a filter on the listening socket drops them
(socket(7), SO_ATTACH_FILTER). The peer repeats its attempt after a second, as for a lost packet.
"""

import ctypes
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Final

import trio

_SO_ATTACH_FILTER: Final = 26
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
_FLAGS_AT: Final = 13  # in a TCP header
_SYN: Final = 0x02
_ALL: Final = 0xFFFFFFFF

# The last packet of a handshake, and data, have no SYN.
_PROGRAM: Final = (
    (_LOAD_BYTE, 0, 0, _FLAGS_AT),
    (_JUMP_IF_SET, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _ALL),
)


def drop_new_connections(sockets: Iterable[trio.socket.SocketType]) -> bool:
    """Let the kernel drop attempts to connect to these listening sockets, for good.

    Returns False where the system cannot do that.
    """
    if sys.platform != "linux":
        return False
    code = b"".join(struct.pack("HBBI", *each) for each in _PROGRAM)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(_PROGRAM), ctypes.addressof(buffer))
    try:
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:  # a sandbox may forbid filters
        return False
    return True
