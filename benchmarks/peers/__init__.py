"""Other systems that keep and replay messages: one module each, with one interface.

A module's `opened(folder)` starts the peer as a child process, on a free port and with its most
durable settings, and gives a `Peer`. It raises `Missing` where it is not installed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

# The bound for one read, however busy the machine: a longer one has hung.
READ_TIMEOUT_S: Final = 120.0
# The size of a read where a reader can choose: the same as in our own raw readers.
PIECE_BYTES: Final = 256 * 1024


class Missing(Exception):
    """A peer is not on this machine; the text says why and how to install it."""


class Replayed(NamedTuple):
    """The time of one replay, from the request to the last message, and its messages, in order."""

    took_s: float
    messages: Iterable[bytes]


class Peer(msgspec.Struct, frozen=True):
    """A running peer.

    `fill(count, size)` has it keep so many numbered messages of `size` bytes, once for each size.
    Each of `readers`, by name, has the messages of a size replayed, all of those after the first
    `skipped`. All of them block, and are called by one thread at a time.
    """

    version: str
    fill: Callable[[int, int], None]
    readers: Mapping[str, Callable[[int], Replayed]]
    skipped: int = 0
    slowness: int = 1  # it gets so many times fewer messages, so that it does not take minutes


def is_ended(pieces: Sequence[bytes], by: bytes) -> bool:
    """Whether the pieces end with a word, which may be split between two of them."""
    return b"".join(piece[-len(by) :] for piece in pieces[-2:]).endswith(by)


Opened = Callable[[Path], AbstractContextManager[Peer]]
