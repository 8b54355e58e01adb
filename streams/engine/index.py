"""Which streams there are, whose, and how many there may be."""

import itertools
from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import msgspec

from streams.engine.stream import Stream
from streams.errors import refusal
from streams.journal.contract import Record
from streams.keys import Keyring
from streams.limits import Limits


class Elsewhere(msgspec.Struct):
    """What is to be considered of streams that are not in memory."""

    wanted: int = 0  # how many the journal has at rest, of one principal
    read: Record | None = None  # the first of these that was fully written
    unwanted: Record | None = None  # of anybody's, what is to be forgotten first


NOTHING_ELSEWHERE: Final = Elsewhere()
_number = attrgetter("number")


class Registry:
    """The streams of a journal that are in memory: running, undelivered, or remembered."""

    def __init__(self, limits: Limits, keyring: Keyring) -> None:
        self._limits = limits
        self._keyring = keyring
        self.last_number = 0  # that was given to a stream
        self.evicted = 0  # streams of the journal that are not here
        self._by_id: dict[str, Stream] = {}
        self._by_name: dict[bytes, Stream] = {}  # those that a token or a key alone may lead to
        # Running or not known to be delivered, of each principal, by their numbers, and in their
        # order, except where some came back from rest.
        self._wanted: dict[str, dict[int, Stream]] = {}
        self._disordered: set[str] = set()
        # Drained, abandoned and cancelled ones, in that order: what goes first where room is
        # needed.
        self._unwanted: dict[Stream, None] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._by_id.values()))

    def next_number(self) -> int:
        """The number of the next stream, in the order of creation."""
        self.last_number += 1
        return self.last_number

    def get(self, stream_id: str) -> Stream | None:
        """The stream of this id."""
        return self._by_id.get(stream_id)

    def named(self, name: bytes) -> Stream | None:
        """The stream of this name, which is what its tokens or its key lead to."""
        return self._by_name.get(name)

    def add(self, stream: Stream) -> None:
        """Hold a stream that runs or is not delivered."""
        self._by_id[stream.id] = stream
        if stream.record.is_announced:
            self._by_name |= dict.fromkeys(stream.names, stream)
        principal = stream.record.principal
        wanted = self._wanted.setdefault(principal, {})
        if wanted and stream.number < next(reversed(wanted)):
            self._disordered.add(principal)
        wanted[stream.number] = stream

    def retire(self, stream: Stream) -> None:
        """Nothing of the stream is wanted any more, but it is remembered."""
        self._unwant(stream)
        self._unwanted[stream] = None

    def evict(self, stream: Stream) -> None:
        """A stream is at rest, and in memory no more."""
        self.remove(stream)
        self.evicted += 1

    def remove(self, stream: Stream) -> None:
        """Forget a stream."""
        self._by_id.pop(stream.id, None)
        if stream.record.is_announced:
            for name in stream.names:
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
        """A principal's streams that run, or are not known to be delivered."""
        return list(self._in_order(principal).values())

    def page(self, principal: str, after: int, size: int) -> tuple[list[Stream], bool]:
        """A principal's wanted streams that it was told of, above a number; whether more follow."""
        wanted = self._in_order(principal)  # the page is found by skipping
        found = (s for n, s in wanted.items() if n > after and s.record.is_announced)
        streams = list(itertools.islice(found, size + 1))
        return streams[:size], len(streams) > size

    def is_full(self, principal: str, elsewhere: Elsewhere) -> bool:
        """Whether one more stream of this principal is one too many, for it or for the server."""
        return self._is_principal_full(principal, elsewhere) or self._is_server_full

    def _is_principal_full(self, principal: str, elsewhere: Elsewhere) -> bool:
        limit = self._limits.streams_per_principal_max
        wanted = self._wanted.get(principal, {})
        if len(wanted) + elsewhere.wanted < limit:
            return False
        counted_twice = sum(stream.was_evicted for stream in wanted.values())
        return len(wanted) + elsewhere.wanted - counted_twice >= limit

    def kept_bytes(self, principal: str) -> int:
        """Bytes that wait to be delivered to a principal."""
        return sum(stream.state.kept_bytes for stream in self._wanted.get(principal, {}).values())

    @property
    def _is_server_full(self) -> bool:
        return len(self._by_id) + self.evicted >= self._limits.streams_max

    def make_room(
        self, principal: str, elsewhere: Elsewhere = NOTHING_ELSEWHERE
    ) -> list[Stream | Record]:
        """What must be forgotten before this principal has one more stream.

        Raises `Refusal` where that would be something that is still wanted.
        """
        if self._is_principal_full(principal, elsewhere):
            wanted = self._in_order(principal)
            here = next((s for s in wanted.values() if is_probably_read(s)), None)
            read = [each for each in (here, elsewhere.read) if each is not None]
            if not read:
                raise refusal("too_many_streams", limit=self._limits.streams_per_principal_max)
            return [min(read, key=_number)]
        if self._is_server_full:
            unwanted = elsewhere.unwanted or next(iter(self._unwanted), None)
            if unwanted is None:
                raise refusal("too_many_streams", limit=self._limits.streams_max)
            return [unwanted]
        return []


def is_probably_read(stream: Stream) -> bool:
    """Whether it was fully written to a client that confirms nothing, or not that it has it all."""
    state = stream.state
    is_written = state.is_ended and state.handed == state.last
    may_confirm = state.client_confirms and not state.is_paged
    return is_written and not may_confirm and stream.delivery is None
