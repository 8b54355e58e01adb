"""The index of the streams in memory, by id, name and principal, and the limits on their number."""

import itertools
import zlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Self

import msgspec
import trio

from streams.clock import wall
from streams.engine.stream import Stream
from streams.errors import refusal
from streams.journal.records import Record
from streams.keys import Keyring
from streams.limits import Limits


class Evicted(NamedTuple):
    """A stream that is in the journal alone."""

    number: int
    id: str
    fence: int
    wanted_by: str  # the principal; "" where it is unwanted

    @classmethod
    def of(cls, record: Record) -> Self:
        wanted_by = record.principal if record.is_wanted else ""
        return cls(record.number, record.stream, record.fence, wanted_by)


class Elsewhere(msgspec.Struct):
    """Evicted streams that count where room is made."""

    wanted: int = 0  # the number of one principal's wanted ones
    read: Evicted | None = None  # the oldest of these that was written completely
    unwanted: Evicted | None = None  # of any principal, the one to be forgotten first


SLOTS: Final = 256  # with 16 digits of microseconds, numbers have 18 digits
RENAMED_AT_ONCE: Final = 500  # in about 5 ms

NOTHING_ELSEWHERE: Final = Elsewhere()
_number = attrgetter("number")


class Registry:
    """The streams of a journal that are in memory: *wanted* ones, which run or are not known to be
    delivered, and unwanted ones, which are remembered for a while.
    """

    def __init__(self, limits: Limits, keyring: Keyring, *, replica: str = "") -> None:
        self._limits = limits
        self._keyring = keyring
        self.is_shared = bool(replica)
        self._slot = zlib.crc32(replica.encode()) % SLOTS  # of this replica's numbers
        self.last_number = 0  # the highest number that a stream has
        self.evicted = 0  # how many streams of the journal are not in memory
        self._by_id: dict[str, Stream] = {}
        self._by_name: dict[bytes, Stream] = {}  # for requests with a token or key and no id
        self._names: dict[Stream, Sequence[bytes]] = {}  # all that lead to each stream
        # The wanted streams of each principal, by their numbers and in that order. The order is
        # lost where an evicted stream is loaded.
        self._wanted: dict[str, dict[int, Stream]] = {}
        self._disordered: set[str] = set()
        # Drained, abandoned and cancelled streams, those first that make room first.
        self._unwanted: dict[Stream, None] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._by_id.values()))

    def next_number(self) -> int:
        """The number of the next stream, in the order of creation.

        Replicas number by the time, in microseconds, and by a slot of their own: two streams of
        theirs hardly ever have the same number, and nothing depends on that but their order.
        """
        if not self.is_shared:
            self.last_number += 1
        else:
            now = int(wall() * 1e6) * SLOTS + self._slot
            self.last_number = max(self.last_number + SLOTS, now)
        return self.last_number

    def get(self, stream_id: str) -> Stream | None:
        """The stream of this id."""
        return self._by_id.get(stream_id)

    def named(self, name: bytes) -> Stream | None:
        """The stream of this name (`Stream.names`)."""
        return self._by_name.get(name)

    def add(self, stream: Stream) -> None:
        """Add a stream, as a wanted one. Only its idempotency key leads to it, until `name`."""
        self._by_id[stream.id] = stream
        if stream.mark is not None:
            self._give(stream, [bytes.fromhex(stream.mark.name)])
        principal = stream.record.principal
        wanted = self._wanted.setdefault(principal, {})
        if wanted and stream.number < next(reversed(wanted)):
            self._disordered.add(principal)
        wanted[stream.number] = stream

    def name(self, stream: Stream) -> None:
        """Let the tokens of a stream lead to it, if its client is told of them."""
        if stream.record.is_announced:
            self._give(stream, stream.names)

    async def rename(self) -> None:
        """The keyring has other keys now: let tokens that are made with these lead to streams."""
        for count, stream in enumerate(self, 1):
            names = self._names.get(stream, ())
            if len(names) > (stream.mark is not None):  # else `name` was not called yet
                for name in names:
                    self._by_name.pop(name, None)
                self.name(stream)
            if count % RENAMED_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()

    def _give(self, stream: Stream, names: Sequence[bytes]) -> None:
        self._names[stream] = names
        self._by_name |= dict.fromkeys(names, stream)

    def retire(self, stream: Stream) -> None:
        """Make a stream an unwanted one."""
        self._unwant(stream)
        self._unwanted[stream] = None

    def evict(self, stream: Stream) -> None:
        """Remove a stream that stays in the journal."""
        self.remove(stream)
        self.evicted += 1

    def remove(self, stream: Stream) -> None:
        """Remove a stream."""
        self._by_id.pop(stream.id, None)
        for name in self._names.pop(stream, ()):
            self._by_name.pop(name, None)
        self._unwanted.pop(stream, None)
        self._unwant(stream)

    def _unwant(self, stream: Stream) -> None:
        principal = stream.record.principal
        wanted = self._wanted.get(principal)
        if wanted is not None and wanted.pop(stream.number, stream) and not wanted:
            del self._wanted[principal]
            self._disordered.discard(principal)

    def _in_order(self, principal: str) -> dict[int, Stream]:
        wanted = self._wanted.get(principal, {})
        if principal in self._disordered:
            self._disordered.remove(principal)
            wanted = self._wanted[principal] = dict(sorted(wanted.items()))
        return wanted

    def wanted(self, principal: str) -> list[Stream]:
        """A principal's wanted streams, in the order of their numbers."""
        return list(self._in_order(principal).values())

    def page(self, principal: str, after: int, size: int) -> tuple[list[Stream], bool]:
        """A principal's announced wanted streams above a number; whether more follow."""
        wanted = self._in_order(principal)
        found = (s for n, s in wanted.items() if n > after and s.record.is_announced)
        streams = list(itertools.islice(found, size + 1))
        return streams[:size], len(streams) > size

    def is_principal_full(self, principal: str, elsewhere: Elsewhere) -> bool:
        """Whether one more stream of this principal would pass its limit."""
        limit = self._limits.streams_per_principal_max
        wanted = self._wanted.get(principal, {})
        others = elsewhere.wanted
        is_twice = not self.is_shared  # streams that were loaded are counted there as well
        if others and is_twice and len(wanted) + others >= limit:
            others -= sum(stream.was_evicted for stream in wanted.values())
        return len(wanted) + others >= limit

    def kept_bytes(self, principal: str) -> int:
        """Undelivered bytes of a principal's streams."""
        return sum(stream.state.kept_bytes for stream in self._wanted.get(principal, {}).values())

    @property
    def total(self) -> int:
        """How many streams the journal has, or will have when all changes are durable."""
        return len(self._by_id) + self.evicted

    @property
    def is_server_full(self) -> bool:
        """Whether one more stream would pass the limit of the server."""
        return self.total >= self._limits.streams_max

    def make_room(
        self, principal: str, elsewhere: Elsewhere = NOTHING_ELSEWHERE
    ) -> list[Stream | Evicted]:
        """The streams to be forgotten before this principal has one more.

        A wanted stream is chosen only where it was probably read. Raises `Refusal` where no stream
        can be chosen.
        """
        if self.is_principal_full(principal, elsewhere):
            wanted = self._in_order(principal)
            here = next((s for s in wanted.values() if is_probably_read(s)), None)
            read = [each for each in (here, elsewhere.read) if each is not None]
            if not read:
                raise refusal("too_many_streams", limit=self._limits.streams_per_principal_max)
            return [min(read, key=_number)]
        if self.is_server_full:
            unwanted = elsewhere.unwanted or next(iter(self._unwanted), None)
            if unwanted is None:
                raise refusal("too_many_streams", limit=self._limits.streams_max)
            return [unwanted]
        return []


def is_probably_read(stream: Stream) -> bool:
    """Whether a stream was written completely to a client that does not confirm the end of it.

    A response that stays counts too, even if its client has not fetched it: a client that never
    does must not be refused new calls for that.
    """
    state = stream.state
    if stream.stays:
        return state.is_ended and stream.delivery is None
    is_written = state.is_ended and state.handed == state.last
    may_confirm = state.client_confirms and not state.is_paged
    return is_written and not may_confirm and stream.delivery is None
