"""Notices: messages to one client that belong to no request, until the client has them.

Only the latest notice of a key is kept: a client that hears ten times that a resource has changed
reads it once. A notice without a key is kept by itself, and dropped where the client has no stream
for it: a broadcast each second must not fill the memory for clients that never listen. Notices are
in memory only. After a restart each session is told that the resources it subscribed to may have
changed.

A request to the client is a notice as well. It is kept until it is answered.

Each notice has a number. A standing stream of HTTP sends the numbers as event ids, so a client that
was cut off gets the notices it has missed. One that was sent is kept for `SENT_S` longer for that.
"""

from typing import Final

import trio

from streams import messages
from streams.keys import new_request_id
from streams.logs import log

# For each client, while it reads nothing or has no standing stream. A client has one notice for
# each resource that it subscribed to, and one for each list; the rest are an author's own.
NOTICES_MAX: Final = 1_500
NOTICES_BYTES_MAX: Final = 256 * 1024
# How long a client may need to notice a cut and to open its next standing stream. A client that
# sends no Last-Event-ID then receives the changes of this time once more.
SENT_S: Final = 60.0

STANDING: Final = "standing_"  # how the event ids of standing streams begin

_UPDATED: Final = "notifications/resources/updated"


class _Notice:
    __slots__ = ("is_request", "line", "number", "sent_at")

    def __init__(self, number: int, line: bytes, *, is_request: bool = False) -> None:
        self.number = number
        self.line = line
        self.is_request = is_request
        self.sent_at: float | None = None


class Notices:
    """The notices of one client, oldest first."""

    def __init__(self) -> None:
        self.kept: dict[str | int, _Notice] = {}  # by their keys, or else by their numbers
        self.has_stream = False  # a connection or a standing stream sends them now
        self._bytes = 0
        self._last = 0
        self._epoch = ""
        self._has_dropped = False
        self._added = trio.lowlevel.ParkingLot()

    def add(self, line: bytes, key: str | None, *, is_request: bool = False) -> None:
        """Add a notice in place of the one with the same key.

        The oldest notifications are dropped for room, but not this one, which may be as long as
        any message.
        """
        if key is None and not self.has_stream:
            return
        self._last += 1
        name = self._last if key is None else key
        self.drop(name)
        self.kept[name] = _Notice(self._last, line, is_request=is_request)
        self._bytes += len(line)
        while len(self.kept) > NOTICES_MAX or self._bytes > NOTICES_BYTES_MAX:
            others = (each for each in self.kept if each != name and not self.kept[each].is_request)
            if (oldest := next(others, None)) is None:
                break
            if self.kept[oldest].sent_at is None and not self._has_dropped:
                self._has_dropped = True
                log.warning("a client reads no notifications: the oldest are dropped")
            self.drop(oldest)
        self._added.unpark_all()

    def take(self) -> list[bytes]:
        """Remove all notices, for a connection that is the whole session."""
        lines = [notice.line for notice in self.kept.values()]
        self.kept.clear()
        self._bytes = 0
        return lines

    def position(self, last_event_id: str | None) -> int:
        """The number of the last notice that a client has received; it needs no earlier one.

        A client that does not tell gets changes again, which does no harm, and no other notices.
        """
        epoch, _, number = (last_event_id or "").removeprefix(STANDING).rpartition("_")
        is_ours = epoch == self._epoch != "" and number.isascii() and number.isdigit()
        position = min(int(number[:18]), self._last) if is_ours else 0
        for name, notice in list(self.kept.items()):
            is_over = not is_ours and isinstance(name, int) and notice.sent_at is not None
            if (is_over or notice.number <= position) and not notice.is_request:
                self.drop(name)
        return position

    async def after(self, position: int) -> list[tuple[int, bytes]]:
        """Wait for notices with greater numbers than this; returns them with their numbers."""
        while not (found := self._after(position)):
            await self._added.park()
        return found

    def sent(self, number: int) -> None:
        """All notices up to this number were written to the standing stream."""
        now = trio.current_time()
        for notice in self.kept.values():
            if notice.number <= number and notice.sent_at is None:
                notice.sent_at = now

    def leave(self) -> None:
        """The standing stream has ended. Notices without a key do not wait long for the next."""
        self.has_stream = False
        for name, notice in self.kept.items():
            if isinstance(name, int) and notice.sent_at is None:
                notice.sent_at = trio.current_time()

    def event_id(self, number: int) -> str:
        """The event id of a notice. Ids of another process, before a restart, name nothing."""
        self._epoch = self._epoch or new_request_id()
        return f"{STANDING}{self._epoch}_{number}"

    def _after(self, position: int) -> list[tuple[int, bytes]]:
        now = trio.current_time()
        for name, notice in list(self.kept.items()):
            is_old = notice.sent_at is not None and now - notice.sent_at > SENT_S
            if is_old and not notice.is_request:
                self.drop(name)
        return [(each.number, each.line) for each in self.kept.values() if each.number > position]

    def drop(self, name: str | int) -> None:
        """Remove the notice of this key, if there is one."""
        notice = self.kept.pop(name, None)
        if notice is not None:
            self._bytes -= len(notice.line)


def resource_updated(uri: str) -> tuple[bytes, str]:
    """The notice that a resource has changed, and its key."""
    return messages.notification(_UPDATED, {"uri": uri}), f"{_UPDATED} {uri}"
