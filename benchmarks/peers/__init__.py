"""What else keeps messages and gives them again: each is one module here, with one interface.

A module's `opened(folder)` starts the peer as a child process, on a free port and with the most
durable settings that it has, and gives a `Peer`. It raises `Missing` where it is not installed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

# Each read ends sooner, however busy the machine; one that does not has hung.
READ_TIMEOUT_S: Final = 120.0
# Where a reader may choose: as large as what our own raw readers take.
PIECE_BYTES: Final = 256 * 1024


class Missing(Exception):
    """A peer is not on this machine; the words say why and what installs it."""


class Replayed(NamedTuple):
    """What one replay took, from the request to the last message, and what came, in order."""

    took_s: float
    messages: Iterable[bytes]


class Peer(msgspec.Struct, frozen=True):
    """A peer that runs.

    `fill(count, size)` has it keep so many numbered messages of `size` bytes, once for each size.
    Each of `readers`, by name, has the messages of a size replayed, all of those behind the first
    `skipped`. All of them block, and are called by one thread at a time.
    """

    version: str
    fill: Callable[[int, int], None]
    readers: Mapping[str, Callable[[int], Replayed]]
    skipped: int = 0
    slowness: int = 1  # how many times fewer messages it is given, so that it takes no minutes


def is_ended(pieces: Sequence[bytes], by: bytes) -> bool:
    """Whether what has come in pieces ends with some word, which may have come in two of them."""
    return b"".join(piece[-len(by) :] for piece in pieces[-2:]).endswith(by)


Opened = Callable[[Path], AbstractContextManager[Peer]]
