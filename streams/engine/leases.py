"""Which replicas live: this one renews its lease, and watches those of the others.

A lease needs no clock that replicas share. Each replica counts up. It is gone if its count has not
changed for most of the lease, measured by a replica that could use the store all that time.
"""

import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

import trio

from streams.engine.committer import Committer
from streams.errors import StoreAway, StoreDown, StoreUnsafe, Unavailable
from streams.journal.contract import Journal, Wanted
from streams.logs import log

# How often a lease is renewed, and the leases of the others are looked at, in each `lease_s`.
BEATS: Final = 16
BEAT_MIN_S: Final = 0.01
STEPS: Final = 4  # in which clients are sent elsewhere: they do not all come back there at once
# The part of the lease after which a replica that does not renew is gone. The rest is for its calls
# to go on elsewhere.
GONE: Final = 11 / BEATS
STILL: Final = 4 / BEATS  # one that has not reached the store for so long cannot judge the others


class Marks(NamedTuple):
    """Parts of the lease without the store, after which a replica sends its clients elsewhere.

    From `late` on, balancers are told to send no new connections, and a part of the connections is
    closed with each step. From `cut_off` on, all are closed.
    """

    late: float
    cut_off: float


AWAY: Final = Marks(0.45, 0.65)  # perhaps from this replica alone: the others may take over
DOWN: Final = Marks(1.25, 1.5)  # see `StoreDown`: the others cannot reach it either


class LeaseListener(Protocol):
    """Is told what becomes of the leases."""

    def gone(self, replica: str) -> None:
        """A replica is gone: its streams are free."""

    def lost_all(self) -> None:
        """All streams of this replica were taken over by others. It has a new name."""

    def cut_off(self, part: float) -> None:
        """The lease of this replica ends soon: this part of its clients must go to another one."""

    def counted(self, replicas: int) -> None:
        """So many replicas live, this one included."""

    def beaten(self) -> None:
        """The store was asked once more, with or without success."""


class Leases:
    """The lease of this replica and those of the others. `run` it in a task of its own."""

    def __init__(self, journal: Journal, committer: Committer, listener: LeaseListener) -> None:
        self._journal = journal
        self._committer = committer
        self._listener = listener
        self._name = journal.replica
        self.names = {journal.replica}  # that this replica has had
        self._seen: dict[str, tuple[int, float]] = {}  # counts of the others, and since when
        self._unseen: set[str] = set()  # replicas that have sent posts, and are perhaps gone
        self._dropped: dict[str, float] = {}  # those that are gone, and since when: one lease long
        self._has_renewed = trio.lowlevel.ParkingLot()
        self._renewed_at = trio.current_time()
        self._refused_at = -math.inf  # when the store has said last that it is down
        self.why_late = ""  # why balancers should send new clients elsewhere
        self.is_leaving = False
        self._cut_off = 0.0  # the part of the clients that was sent elsewhere

    @property
    def lives(self) -> int:
        """How many replicas live, this one included."""
        return 1 + len(self._seen)

    async def share(self, owner: str) -> Wanted:
        """Which streams of a replica that is gone are for this one: `anything` if it lives alone.

        Each stream ranks the replicas anew (rendezvous hashing), weighted by how many calls each
        lacks to their mean. So no two replicas want the same streams, and all run about as many
        calls then. They need not ask at one moment: who has taken some lacks fewer, so that who
        asks later wants more, and not less.

        Raises `Unavailable`.
        """
        heirs = [self._name, *self._seen]
        if len(heirs) == 1:
            return anything
        running = await self._journal.running([*heirs, owner])
        mean = sum(running.values()) / len(heirs)
        weights = {heir: max(0.0, mean - running[heir]) for heir in heirs}
        if not any(weights.values()):
            weights = dict.fromkeys(heirs, 1.0)
        return lambda stream: (
            max(heirs, key=lambda heir: _rank(heir, stream, weights[heir])) == self._name
        )

    def has_left(self, replica: str) -> None:
        """A replica has given up its streams, and wants none of those of others."""
        self._seen.pop(replica, None)

    def heard_of(self, replica: str) -> None:
        """A replica has sent a post: if no lease of it is known, it is perhaps gone already."""
        if replica not in self._seen:
            self._unseen.add(replica)

    async def run(self) -> None:
        """Renew the lease, and look at those of the others, until this replica leaves."""
        while not self.is_leaving:
            senders = frozenset(self._unseen)
            try:
                with trio.fail_at(self._patient_until()):
                    counts = await self._journal.renew()
            except (Unavailable, trio.TooSlowError) as trouble:
                self._missed(trouble)
            else:
                # An answer that tells of the claim may have been lost: the new name tells as well.
                if counts is None or self._journal.replica != self._name:
                    self._begin_anew()
                else:
                    self._look_at(counts, senders)
                self._committer.store_told(None)
                self._has_renewed.unpark_all()
            self._listener.beaten()
            await trio.sleep_until(self._next_at())

    async def be_sure(self) -> None:
        """See `Owner.be_sure`. A replica that has stood still must not judge a client's cursor."""
        lease_s = self._journal.lease_s
        # The others may date our last renewal two beats before its answer came.
        if trio.current_time() - self._renewed_at < (GONE - 2 / BEATS) * lease_s:
            return
        with trio.move_on_after(lease_s / 2):
            await self._has_renewed.park()
            return
        raise StoreAway("the store does not say which streams are ours")

    @property
    def _reached_at(self) -> float:
        """When this replica has reached the store last.

        A renewal may take long on a machine that is too busy. Clients that are sent away come back
        at once, and make it busier.
        """
        return max(self._renewed_at, self._committer.committed_at)

    @property
    def _heard_at(self) -> float:
        """When the store has answered last, if only that it is down."""
        return max(self._reached_at, self._refused_at)

    def _patient_until(self) -> float:
        """Until when a renewal may take: then this replica is late, or some clients leave."""
        now, lease_s = trio.current_time(), self._journal.lease_s
        step = (AWAY.cut_off - AWAY.late) / STEPS
        parts = (AWAY.late + step * number for number in range(STEPS + 1))
        ends = (self._heard_at + part * lease_s for part in parts)
        return min((at for at in ends if at > now), default=now + lease_s / 2)

    def _next_at(self) -> float:
        """When to look at the leases next: soon, and when the first of them ends."""
        now, lease_s = trio.current_time(), self._journal.lease_s
        ends = (since + GONE * lease_s for _, since in self._seen.values())
        return max(now + BEAT_MIN_S, min([now + lease_s / BEATS, *ends]))

    def _missed(self, trouble: Exception) -> None:
        """The store does not answer. Others may take over, so clients go there in time."""
        now = trio.current_time()
        if is_unsafe := isinstance(trouble, StoreUnsafe):
            self._committer.store_told(trouble)
        if isinstance(trouble, StoreDown):
            self._refused_at = now
            since, (late, cut_off) = self._reached_at, DOWN
        else:
            since, (late, cut_off) = self._heard_at, AWAY
        away = (now - since) / self._journal.lease_s
        if away >= late:
            what = "may delete messages as it is set" if is_unsafe else "does not answer"
            self.why_late = f"the store of the journal {what}"
        part, before = min(1.0, (away - late) / (cut_off - late)), self._cut_off
        if part <= before:
            return
        self._cut_off = part
        if self._seen:
            if not before:
                log.warning(
                    "the lease of this replica ends: its clients go elsewhere",
                    why=str(trouble) or "the store is silent",
                )
            self._listener.cut_off((part - before) / (1 - before))

    def _look_at(self, counts: Mapping[str, int], senders: frozenset[str]) -> None:
        """Look at the counts of all replicas. `senders` have sent posts before these were taken."""
        now, lease_s = trio.current_time(), self._journal.lease_s
        # A count that has changed did so since the last look.
        changed_at = max(self._renewed_at, now - 2 * lease_s / BEATS)
        # Where this replica itself has stood still, the others did not.
        if now - self._renewed_at > STILL * lease_s:
            self._seen = {replica: (count, now) for replica, (count, _) in self._seen.items()}
        self._renewed_at, self.why_late, self._cut_off = now, "", 0.0
        for replica, count in counts.items():
            was, since = self._seen.get(replica, (None, now))
            if replica == self._name or (replica in self.names and count >= 0):
                continue
            if count < 0:
                if replica not in self._dropped:  # else its heirs have a lease
                    self._drop(replica)
            elif count == was and now - since >= GONE * lease_s:
                self._drop(replica)
            elif count != was:
                self._seen[replica] = count, changed_at
        for replica in sorted((self._seen.keys() | senders) - counts.keys()):
            self._drop(replica)
        self._unseen -= senders
        self._dropped = {each: at for each, at in self._dropped.items() if now - at < lease_s}
        self._listener.counted(self.lives)

    def _drop(self, replica: str) -> None:
        self._seen.pop(replica, None)
        self._dropped[replica] = trio.current_time()
        self._listener.gone(replica)

    def _begin_anew(self) -> None:
        """Others have claimed all streams of this replica."""
        self._name = self._journal.replica
        self.names.add(self._name)
        self._listener.lost_all()
        self._renewed_at, self.why_late, self._cut_off = trio.current_time(), "", 0.0
        self._seen.clear()


def anything(_: str) -> bool:
    """Want each stream."""
    return True


def _rank(replica: str, stream: str, weight: float) -> float:
    """A random number below 0: of some replicas each has the highest as often as it weighs."""
    if not weight:
        return -math.inf
    drawn = blake2b(f"{replica} {stream}".encode(), digest_size=8).digest()
    return math.log((int.from_bytes(drawn) + 0.5) / 2**64) / weight
