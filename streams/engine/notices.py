"""Notifications to one client that belong to no request.

They go over the client's connection, or over HTTP over its standing stream. No journal has them.
While the client is not connected, a notice with a key is kept, and replaces the one before it with
the same key: a client needs only the last `tools/list_changed`. Other notices are dropped then.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from streams.limits import MIB
from streams.logs import log

# Notices that wait for one client, which may read too slowly or not at all.
NOTICES_MAX: Final = 1_000
NOTICES_BYTES_MAX: Final = MIB

Item = tuple[str | int, bytes]


class Notices:
    """The notices that wait for one client."""

    __slots__ = ("_bytes", "_has_dropped", "_numbers", "_waiting", "_wake")

    def __init__(self) -> None:
        # The lines, by their keys. A notice without a key has a number.
        self._waiting: dict[str | int, bytes] = {}
        self._bytes, self._has_dropped = 0, False
        self._numbers = count()
        self._wake: Callable[[], object] | None = None  # where the client is connected

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def send(self, line: bytes, key: str | None = None) -> None:
        """Tell the client. With a `key` only the last line is kept for it."""
        if self._wake is None and key is None:
            return
        self._put(next(self._numbers) if key is None else key, line)
        while len(self._waiting) > NOTICES_MAX or self._bytes > NOTICES_BYTES_MAX:
            oldest = next(iter(self._waiting))
            self._bytes -= len(self._waiting.pop(oldest))
            if not self._has_dropped:  # logged once until the client reads again
                self._has_dropped = True
                log.warning("notifications are dropped: their client reads too slowly")
        if self._wake is not None:
            self._wake()

    def _put(self, key: str | int, line: bytes) -> None:
        self._bytes += len(line) - len(self._waiting.get(key, b""))
        self._waiting[key] = line

    def take(self) -> Sequence[Item]:
        """All that waits, in order, with the keys."""
        items = list(self._waiting.items())
        self._waiting.clear()
        self._bytes, self._has_dropped = 0, False
        return items

    def put_back(self, items: Sequence[Item]) -> None:
        """These could not be sent: keep those with keys, unless there are newer ones."""
        for key, line in items:
            if isinstance(key, str) and key not in self._waiting:
                self._put(key, line)

    def listen(self, wake: Callable[[], object]) -> None:
        """The client is connected: call `wake` when there is something to take."""
        self._wake = wake
        if self._waiting:
            wake()

    def leave(self, wake: Callable[[], object]) -> None:
        """The connection with this `wake` is over; nothing changes if there is a newer one."""
        if self._wake == wake:
            self._wake = None
            self.put_back(self.take())
