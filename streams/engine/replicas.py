"""This process as one of several replicas, which share a journal.

Each stream has one owner, which runs its handler. The other replicas follow it for the clients that
are attached to them (`streams.engine.followed`). This module does what that takes: it renews the
lease of this replica and watches those of the others, takes over the streams of one that is gone,
receives the news of the journal, and sends and handles the posts between replicas.

An owner sees a client that is attached at another replica as a `RemoteFollower`.

A lease needs no clock that replicas share. Each replica counts up. It is gone if its count has not
changed for `lease_s`, measured by a replica that could use the store all that time.

It is one file because leases, take-overs, news and posts change the same tables of streams.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec
import trio

from streams import messages
from streams.clock import backoff_s
from streams.engine import posts
from streams.engine.committer import Committer
from streams.engine.connection import Delivery
from streams.engine.followed import FollowedStream
from streams.engine.lifecycle import LIVE
from streams.engine.notices import NOTICES_MAX
from streams.engine.posts import Taker, ToOwner, ToReplica
from streams.engine.retry import patiently
from streams.engine.stream import Follower, Stream
from streams.engine.streams import Streams
from streams.errors import Conflict, Gone, Refusal, StoreAway, Unavailable, refusal
from streams.journal.contract import Journal, News, Post
from streams.journal.records import Outcome, Record, Restore
from streams.keys import Keyring
from streams.limits import Limits
from streams.logs import log

# How often a lease is renewed, and the leases of the others are looked at, in each `lease_s`.
BEATS: Final = 16
BEAT_MIN_S: Final = 0.01
# Parts of the lease without the store, after which balancers are told to send no new connections,
# and after which all connections are closed. A balancer needs some time to go elsewhere.
LATE: Final = 0.5
CUT_OFF: Final = 0.75
# A post is sent again after this time where the journal takes nothing.
RETRY_FIRST_S: Final = 0.02
RETRY_LAST_S: Final = 0.2
SENT_S: Final = 5.0  # how long a client waits until the journal has what it has told
# How often the owner of a stream is asked how it is, each half a lease, until that is given up. Two
# leases pass if the owner dies, and the replica that claims its streams as well.
LOOKS: Final = 5
WAITED_S: Final = 0.1  # a request that waits no longer than that is overtaken by no other
LOOKED_UP_AT_ONCE: Final = 200  # records of streams


_T = TypeVar("_T")


class RemoteReader:
    """The client of a delivery at another replica."""

    def __init__(self, replica: str, attach: posts.Attach) -> None:
        self.name = attach.taker.session
        self.level = attach.level
        self.confirms = attach.confirms
        self.place = replica, attach.number  # where its delivery is


class RemoteFollower:
    """A delivery at another replica: the `Follower` of a stream that is owned here."""

    def __init__(
        self,
        stream: Stream,
        replica: str,
        attach: posts.Attach,
        asked_at: float | None,
        tell: "Tell",
    ) -> None:
        self.number = 0
        self.asked_at = asked_at
        self.attached_at = attach.at
        self.waited_s = attach.waited_s
        self.is_again = attach.is_again
        self.replica = replica
        self.start = attach.start
        self.position = attach.position
        self.written = attach.position - 1
        self.reply_id = attach.reply_id
        self.taker = attach.taker
        self.only_waits = attach.only_waits
        self.wait_s = attach.wait_s
        self.number_there = attach.number
        self.reader = RemoteReader(replica, attach)
        self._stream = stream
        self._tell = tell

    def wake(self) -> None:
        """The replica hears of it from the journal."""

    def give_way(self, by: Taker) -> None:
        """See `Follower.give_way`."""
        self._end(posts.Ended(self.number_there, superseded_by=by))

    def hang_up(self) -> None:
        """See `Follower.hang_up`: the replica tells its client as soon as it knows the owner."""

    def drop(self) -> None:
        """See `Follower.drop`."""
        self._end(posts.Ended(self.number_there))

    def answer(self, line: bytes) -> None:
        """See `Follower.answer`."""
        self._end(posts.Ended(self.number_there, answer=line))

    def fail(self, refused: Refusal) -> None:
        """See `Follower.fail`."""
        self._end(posts.Ended(self.number_there, error=posts.error_of(refused)))

    def let_go(self) -> bool:
        """See `Follower.let_go`. The other replica alone knows whether its client can resume."""
        self._tell(self.replica, self._stream.id, posts.Ended(self.number_there, is_released=True))
        return True

    def _end(self, post: posts.Ended) -> None:
        self._tell(self.replica, self._stream.id, post)
        self._stream.detach(self)


class _Looking(msgspec.Struct):
    """A question to the owner of a stream, which waits for its answer."""

    stream: FollowedStream
    answer: trio.MemorySendChannel[posts.View]


Tell = Callable[[str, str, ToReplica], None]  # to a replica, about a stream


class Engine(Protocol):
    """The engine, as its replicas see it."""

    def go_on(self, stream: Stream) -> None:
        """Restart the call of a stream that was taken over, or end it as interrupted."""

    def hang_up_all(self) -> None:
        """Close all connections, so that their clients go to another replica."""

    def tell_here(self, notice: posts.Notice) -> None:
        """Send a notification to the clients of this replica."""

    def cancel_here(self, cancelled: posts.Cancelled) -> None:
        """Cancel a request of a session, if this replica serves it."""

    def share(self, replicas: int) -> None:
        """So many replicas live, this one included."""


class Replicas:
    """The part of an engine that is about other replicas. `run` it in a task of its own."""

    def __init__(
        self,
        journal: Journal,
        streams: Streams,
        committer: Committer,
        keyring: Keyring,
        limits: Limits,
        engine: Engine,
    ) -> None:
        self._journal = journal
        self._name = journal.replica
        self._streams = streams
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self._engine = engine
        self._followed: dict[str, FollowedStream] = {}
        self._looks: dict[int, _Looking] = {}
        self._turns: dict[str, trio.Lock] = {}
        self._adopted: dict[str, float] = {}  # streams that were taken over not long ago
        self._numbers = itertools.count(1)
        # Posts for streams that are being taken over, until that is done.
        self._adopting: dict[str, list[Post]] = {}
        # Posts with their numbers, by the places that are sent to now.
        self._unsent: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
        self._outbox, self._posts = trio.open_memory_channel[tuple[int, str, str, bytes]](math.inf)
        self._sending: dict[int, None] = {}  # the numbers of posts that the journal does not have
        self._has_sent = trio.lowlevel.ParkingLot()
        self._has_renewed = trio.lowlevel.ParkingLot()
        self._notices: dict[str | int, posts.Notice] = {}  # by their keys, or else by a number
        self._has_notices = trio.Event()
        self._claims: dict[str, None] = {"": None}  # owners whose streams are free
        self._has_claims = trio.Event()
        self._has_claims.set()
        self._has_doubts = trio.Event()  # about which streams this replica owns
        self._seen: dict[str, tuple[int, float]] = {}  # counts of the others, and since when
        self._unseen: set[str] = set()  # replicas that have sent posts, and are perhaps gone
        self._names = {journal.replica}  # that this replica has had
        self._renewed_at = trio.current_time()
        self.is_late = self._is_cut_off = self._is_leaving = False
        self._nursery: trio.Nursery
        streams.replicas = self
        streams.sessions.tell_others = self._tell_of_session
        streams.sessions.on_listening = lambda key, at: self.broadcast(posts.Listening(key, at))
        streams.sessions.count_replicas = lambda: self.lives
        committer.on_refused = self.refused

    @property
    def lives(self) -> int:
        """How many replicas live, this one included."""
        return 1 + len(self._seen)

    async def run(self) -> None:
        """Live as a replica, for ever."""
        async with trio.open_nursery() as self._nursery:
            for task in (
                self._beat,
                self._send_posts,
                self._listen,
                self._claim_free,
                self._clear_doubts,
                self._send_notices,
            ):
                self._nursery.start_soon(task)

    async def release(self) -> None:
        """Give up all streams, so that other replicas take them over at once.

        From then on this replica renews no lease: what it cannot give up, others claim then.
        """
        if self._is_leaving:
            return
        self._is_leaving = self._streams.cache.is_leaving = True
        try:
            await self._journal.release()
        except Unavailable as trouble:  # they wait for the end of the lease
            log.warning("the calls of this replica could not be handed over", why=str(trouble))

    # Leases

    async def _beat(self) -> None:
        """Renew the lease, and look at those of the others, for ever."""
        while not self._is_leaving:
            senders = frozenset(self._unseen)
            try:
                with trio.fail_at(self._patient_until()):
                    counts = await self._journal.renew()
            except (Unavailable, trio.TooSlowError) as trouble:
                self._missed_beat(trouble)
            else:
                # An answer that tells of the claim may have been lost: the new name tells as well.
                if counts is None or self._journal.replica != self._name:
                    self._lose_all()
                else:
                    self._look_at(counts, senders)
                self._has_renewed.unpark_all()
            self._look_after_followed()
            await trio.sleep_until(self._next_beat_at())

    async def be_sure(self) -> None:
        """See `Owner.be_sure`. A replica that has stood still must not judge a client's cursor."""
        lease_s = self._journal.lease_s
        if trio.current_time() - self._reached_at < lease_s:
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

    def _patient_until(self) -> float:
        """Until when a renewal may take: then this replica is late, or its clients leave."""
        now, lease_s = trio.current_time(), self._journal.lease_s
        marks = (self._reached_at + part * lease_s for part in (LATE, CUT_OFF))
        return min((at for at in marks if at > now), default=now + lease_s / 2)

    def _next_beat_at(self) -> float:
        """When to look at the leases next: soon, and when the first of them ends."""
        now, lease_s = trio.current_time(), self._journal.lease_s
        ends = (since + lease_s for _, since in self._seen.values())
        return max(now + BEAT_MIN_S, min([now + lease_s / BEATS, *ends]))

    def _missed_beat(self, trouble: Exception) -> None:
        """The store does not answer. Others may take over, so clients go there in time."""
        late_s = trio.current_time() - self._reached_at
        self.is_late = late_s >= LATE * self._journal.lease_s
        if self._is_cut_off or late_s < CUT_OFF * self._journal.lease_s:
            return
        self._is_cut_off = True
        if self._seen:
            log.warning(
                "the lease of this replica ends: its clients go elsewhere", why=str(trouble)
            )
            self._engine.hang_up_all()

    def _look_at(self, counts: Mapping[str, int], senders: frozenset[str]) -> None:
        """Look at the counts of all replicas. `senders` have sent posts before these were taken."""
        now, lease_s = trio.current_time(), self._journal.lease_s
        # Where this replica itself has stood still, the others did not.
        if now - self._renewed_at > lease_s / 2:
            self._seen = {replica: (count, now) for replica, (count, _) in self._seen.items()}
        self._renewed_at, self.is_late, self._is_cut_off = now, False, False
        ours = self._journal.replica
        for replica, count in counts.items():
            was, since = self._seen.get(replica, (None, now))
            if replica == ours:
                continue
            if count < 0 or (count == was and now - since >= lease_s):
                self._seen.pop(replica, None)
                self._gone(replica)
            elif count != was:
                self._seen[replica] = count, now
        for replica in sorted((self._seen.keys() | senders) - counts.keys()):
            self._seen.pop(replica, None)
            self._gone(replica)
        self._unseen -= senders
        self._engine.share(self.lives)

    def _gone(self, replica: str) -> None:
        """A replica is gone: its clients are detached, and its streams are free."""
        for stream in self._streams.index:
            follower = stream.delivery
            if isinstance(follower, RemoteFollower) and follower.replica == replica:
                stream.detach(follower)
        self._claim(replica)

    def _lose_all(self) -> None:
        """All streams of this replica were taken over by others."""
        self._name = self._journal.replica
        lost = [each for each in self._streams.index if each.record.owner != self._name]
        log.warning("other replicas have taken over all calls of this one", calls=len(lost))
        self._names.add(self._journal.replica)
        for stream in lost:
            self._streams.lose(stream)
        # Owners have detached what was attached here under the former name.
        for followed in list(self._followed.values()):
            self._leave(followed)
            self._nursery.start_soon(self._unfollow, followed.id)
        for number, look in self._looks.items():
            look.stream.look(number)  # the answer would go to the former name
        self._engine.hang_up_all()
        self._renewed_at, self.is_late, self._is_cut_off = trio.current_time(), False, False
        self._seen.clear()

    def _look_after_followed(self) -> None:
        """Follow no stream any more that no client is attached to; read the others now and then.

        So news that were lost, for whatever reason, delay a message for one lease at most.
        """
        oldest = trio.current_time() - 2 * self._journal.lease_s
        self._adopted = {each: at for each, at in self._adopted.items() if at > oldest}
        for stream_id, stream in list(self._followed.items()):
            idle_since = stream.state.idle_since
            is_idle = idle_since is not None and stream.delivery is None
            if is_idle and trio.current_time() - stream.seen_at > self._journal.lease_s:
                self._leave(stream)
                self._nursery.start_soon(self._unfollow, stream_id)
            elif trio.current_time() - stream.refreshed_at > self._journal.lease_s:
                self._refresh_soon(stream)

    def _leave(self, stream: FollowedStream) -> None:
        del self._followed[stream.id]
        self._streams.sessions.forget(stream)

    async def _unfollow(self, stream_id: str) -> None:
        try:
            await self._journal.unfollow(stream_id)
            if stream_id in self._followed:  # again, meanwhile
                await self._journal.follow(stream_id)
        except Unavailable as trouble:  # its news are ignored
            log.debug("a stream is still followed", why=str(trouble))

    # Taking over

    def _claim(self, owner: str) -> None:
        self._claims[owner] = None
        self._has_claims.set()

    async def _claim_free(self) -> None:
        """Take over the streams that are free, for ever."""
        while True:
            await self._has_claims.wait()
            self._has_claims = trio.Event()
            while self._claims and not self._is_leaving:
                owner = next(iter(self._claims))
                del self._claims[owner]  # first: what is free from now on is claimed once more
                claim = partial(self._journal.claim, owner)
                if records := await patiently(partial(self._or_doubt, claim)):
                    self._claims[owner] = None
                    running = sum(each.outcome is Outcome.LIVE for each in records)
                    told = {"running": running, "ended": len(records) - running}
                    log.info("took over calls", of=owner or "released", **told)
                    await self._adopt(records)

    async def _or_doubt(self, own: Callable[[], Awaitable[_T]]) -> _T:
        """Own streams. Where the answer is lost, they may be ours all the same."""
        try:
            return await own()
        except Unavailable:
            self.doubt()
            raise

    async def _adopt(self, records: Sequence[Record]) -> None:
        """These streams are ours from now on: their calls go on, or end as interrupted."""
        for record in records:
            self._adopting.setdefault(record.stream, [])
        async with trio.open_nursery() as nursery:
            for record in records:
                nursery.start_soon(self.adopt, record)

    async def adopt(self, record: Record) -> Stream:
        """Hold a stream that this replica owns from now on, whose handler no replica runs.

        It may have been claimed and asked for at once: then it is taken over once. A client that
        asks for it and leaves does not break that off.
        """
        send, receive = trio.open_memory_channel[Stream](1)
        self._nursery.start_soon(self._adopt_once, record, send)
        return await receive.receive()

    async def _adopt_once(self, record: Record, done: trio.MemorySendChannel[Stream]) -> None:
        turn = self._turns.setdefault(record.stream, trio.Lock())
        async with turn:
            stream = self._streams.index.get(record.stream)
            if stream is None or stream.record.fence < record.fence:
                stream = await self._take_over(record)
            if not turn.statistics().tasks_waiting:
                del self._turns[record.stream]
        for post in self._adopting.pop(record.stream, ()):
            self._receive(post)
        done.send_nowait(stream)

    async def _take_over(self, record: Record) -> Stream:
        self._adopting.setdefault(record.stream, [])
        grants = await patiently(partial(self._journal.grants, record.stream))
        held = self._streams.index.get(record.stream)
        if held is None or held.record.fence < record.fence:
            if held is not None:  # of an older lease
                self._streams.lose(held)
            held = self._streams.adopt(record, grants)
            self._bring_here(held)
            if held.rerun is not None and held.state.outcome is LIVE:
                try:
                    await held.reopen_questions()
                except Refusal as refused:  # the store has lost some of the call
                    held.fail(refused)
                else:
                    self._engine.go_on(held)
        else:  # it was evicted, and a client has asked for it meanwhile
            self._bring_here(held)
        self._adopted[record.stream] = trio.current_time()
        for number, look in self._looks.items():
            if look.stream.id == record.stream:
                look.answer.send_nowait(_view(held, number))
        return held

    def _bring_here(self, stream: Stream) -> None:
        """Go on with the delivery of a stream that was followed, and is owned from now on."""
        followed = self._followed.pop(stream.id, None)
        if followed is None:
            return
        self._nursery.start_soon(self._unfollow, stream.id)
        if (delivery := followed.delivery) is None:
            return
        assert isinstance(delivery, Delivery)
        if self._streams.index.get(stream.id) is stream and stream.delivery is None:
            stream.newest = max(stream.newest, delivery.number - 1)  # it keeps its number
            delivery.move(stream)
        else:
            delivery.drop()

    # Following

    def here(self, stream_id: str) -> FollowedStream | None:
        """The stream of this id that is followed."""
        return self._followed.get(stream_id)

    async def follow(self, record: Record) -> Stream | None:
        """The stream of a record, which another replica owns, as that one knows it now.

        None where its owner has changed meanwhile. Raises `Unavailable` where the owner is silent.
        """
        stream = self._followed.get(record.stream)
        if stream is None:
            found = await self._journal.follow(record.stream)
            if found is None or found.owner in ("", self._journal.replica):
                await self._unfollow(record.stream)
                return None
            stream = self._followed.get(record.stream) or FollowedStream(
                found,
                self._limits,
                self._committer,
                self._keyring,
                self,
                answers=self._streams.answers,
            )
            self._followed[record.stream] = stream
        else:
            self._learn(stream, record)
        stream.seen_at = trio.current_time()
        view = await self._look(stream)
        owned = self._streams.index.get(record.stream)  # it may have been taken over meanwhile
        return owned or (self._followed.get(record.stream) if view.is_known else None)

    async def _look(self, stream: FollowedStream) -> posts.View:
        """Ask the owner of a stream how it is. One that has died is asked through its heir."""
        send, receive = trio.open_memory_channel[posts.View](math.inf)
        number = next(self._numbers)
        self._looks[number] = _Looking(stream, send)
        try:
            for _ in range(LOOKS):
                stream.look(number)
                with trio.move_on_after(self._journal.lease_s / 2):
                    return await receive.receive()
            raise StoreAway("the replica that runs the call does not answer")
        finally:
            del self._looks[number]

    def introduce(self, stream: FollowedStream) -> None:
        """See `Home.introduce`."""
        self._nursery.start_soon(self._introduce, stream)

    async def _introduce(self, stream: FollowedStream) -> None:
        with trio.move_on_after(self._journal.lease_s), suppress(StoreAway):
            await self._look(stream)
        stream.introduced()

    def left(self, stream: FollowedStream) -> None:
        """See `Home.left`."""
        stream.seen_at = trio.current_time()

    async def _refresh(self, stream_id: str) -> None:
        """A followed stream may have changed."""
        stream = self._followed.get(stream_id)
        if stream is None:
            return
        stream.refreshed_at = trio.current_time()
        record = await patiently(partial(self._journal.follow, stream_id))
        if self._followed.get(stream_id) is not stream:
            return
        if record is None:
            self._leave(stream)
            if stream.delivery is not None:
                stream.delivery.fail(refusal("stream_not_found"))
            await self._unfollow(stream_id)
            return
        self._learn(stream, record)
        if record.owner == "" and stream.delivery is not None:
            await self._own(stream_id)

    def _learn(self, stream: FollowedStream, record: Record) -> None:
        """A followed stream has this record. A new owner is told of the client that is here."""
        was = stream.owner
        stream.follow(record)
        if record.owner not in (was, "", self._journal.replica):
            stream.attach_anew()
            for number, look in self._looks.items():
                if look.stream is stream:  # the owner has died perhaps while it had the question
                    stream.look(number)

    async def _own(self, stream_id: str) -> None:
        """Own a stream that has no owner, for the client that is attached to it here."""
        if self._is_leaving:
            return
        record = await patiently(partial(self._journal.take, stream_id))
        if record is not None and record.owner == self._journal.replica:
            await self.adopt(record)

    # News

    async def _listen(self) -> None:
        """Receive news for ever."""
        while True:
            self.heard(await patiently(self._journal.news))

    def heard(self, news: News) -> None:
        """Act upon news."""
        for post in news.posts:
            self._receive(post)
        if news.has_released:
            self._claim("")
        changed = sorted(news.changed)  # so that a simulation repeats
        if news.is_all:
            changed = list(self._followed)
            self._streams.sessions.doubt()
            self._claim("")
            self.doubt()
        for stream_id in changed:
            if (stream := self._followed.get(stream_id)) is not None:
                self._refresh_soon(stream)

    def _refresh_soon(self, stream: FollowedStream) -> None:
        if not stream.is_refreshing:
            stream.is_refreshing = True
            self._nursery.start_soon(self._refresh_once, stream)

    async def _refresh_once(self, stream: FollowedStream) -> None:
        await trio.lowlevel.checkpoint()
        stream.is_refreshing = False  # what changes from now on needs another look
        await self._refresh(stream.id)

    def _receive(self, post: Post) -> None:
        if post.stream in self._adopting:
            self._adopting[post.stream].append(post)
            return
        try:
            body = posts.decode(post.body)
        except msgspec.DecodeError as error:
            log.warning("a replica of another version has sent what is unknown", why=str(error))
            return
        if isinstance(body, ToReplica):
            self._told(post.stream, post.sender, body)
            return
        stream = self._streams.index.get(post.stream)
        if stream is not None:
            self._asked(stream, post.sender, body)
        elif isinstance(body, posts.Look):
            self._tell(post.sender, post.stream, posts.View(body.request, is_known=False))
        else:
            self._nursery.start_soon(self._pass_on, post, body)

    async def _pass_on(self, post: Post, body: ToOwner) -> None:
        """A post for a stream that this replica does not own any more, or has evicted."""
        stream = await patiently(partial(self._streams.cache.find, post.stream))
        if isinstance(stream, FollowedStream):
            self.post(post.stream, body)
        elif stream is not None:
            self._asked(stream, post.sender, body)

    # As the owner of a stream

    def _asked(self, stream: Stream, sender: str, post: ToOwner) -> None:
        """Another replica tells what its client does."""
        match post:
            case posts.Look():
                self._tell(sender, stream.id, _view(stream, post.request))
            case posts.Attach():
                self._attach(stream, sender, post)
            case posts.Moved() | posts.Left():
                if (follower := _follower_at(stream, sender, post.number)) is not None:
                    _moved(stream, follower, post)
            case posts.Delivered() if not self._counts(stream, sender, post):
                log.info("an older delivery's proof was dropped", stream=stream.id[:8])
            case posts.Delivered() if stream.state.is_paged:
                stream.mark_delivered(post.seq)
            case posts.Delivered():
                stream.acknowledge(post.seq)
            case posts.Acked():
                stream.confirm_as(post.session, post.seq)
            case posts.Token():
                stream.progress_token = post.token
            case posts.Touched():
                stream.touch()
            case posts.Told():
                stream.is_reachable = True
            case _:
                self._does(stream, post)

    def _counts(self, stream: Stream, sender: str, post: posts.Delivered) -> bool:
        """Whether what was delivered at another replica moves the delivered mark.

        A newer delivery may have displaced that one before the replica has heard of it.
        """
        reader = stream.reader
        if post.number == 0 or reader is None:  # this owner knows of no delivery yet
            return True
        if isinstance(reader, RemoteReader):
            return reader.place == (sender, post.number)
        # It was sent to the former owner, and the delivery is here: see `_bring_here`.
        return sender in self._names and post.number == stream.newest

    def _does(self, stream: Stream, post: ToOwner) -> None:
        """A client does something with the call itself."""
        match post:
            case posts.Answered():
                self._streams.answer(stream, messages.parse(post.line), post.session)
            case posts.Stopped(is_dropped=True):
                self._streams.drop(stream)
            case posts.Stopped():
                self._streams.cancel(stream)
            case posts.Leave():
                stream.leave()
            case posts.Awaited():
                stream.await_again(post.short_name)

    def _attach(self, stream: Stream, sender: str, post: posts.Attach) -> None:
        if sender in self._names:
            return  # it was sent to the former owner, and the delivery is here: see `_bring_here`
        follower, attached = stream.delivery, _follower_at(stream, sender, post.number)
        if sender not in self._seen:
            self._unseen.add(sender)
        if stream.state.is_tombstone:
            error = posts.error_of(refusal(stream.state.outcome.value))
            self._tell(sender, stream.id, posts.Ended(post.number, error=error))
        elif attached is not None:
            attached.reader.level = post.level
            stream.attach(attached)
        elif follower is not None and self._is_late(post, follower, stream):
            ended = posts.Ended(post.number, superseded_by=follower.taker)
            self._tell(sender, stream.id, ended)
        elif follower is not None and self._is_over(post, follower, stream):
            pass  # the journal has given it all that it waits for
        elif post.is_new:
            self._make_way(stream, post)
            asked_at = self._asked_at(post)
            stream.attach(RemoteFollower(stream, sender, post, asked_at, self._tell))
        # Else it was displaced while its peer was silent, and was told so.

    def _make_way(self, stream: Stream, post: posts.Attach) -> None:
        """Displace the attached delivery for a new one."""
        both_wait = stream.delivery is not None and _both_wait(post, stream.delivery)
        if both_wait and stream.on_displace is not None:
            stream.on_displace(stream)  # an interim answer for the one that is displaced
        displaced = stream.displace()
        if both_wait and stream.state.is_ended and isinstance(displaced, RemoteFollower):
            return  # the journal gives its client the response, too
        if displaced is not None:
            displaced.give_way(post.taker)

    def is_in_order(self, stream_id: str, waited_s: float) -> bool:
        """Whether a request for a stream, which has waited so long, is newer than all before it.

        Else the clocks of the replicas tell which is the newest: after a take-over, and where a
        replica could not reach the store for a while, requests come to the owner in any order.
        """
        return waited_s < WAITED_S and stream_id not in self._adopted

    def _is_late(self, post: posts.Attach, follower: Follower, stream: Stream) -> bool:
        """Whether a delivery must not displace the one that is attached.

        A delivery that its replica attaches again may be over for its client, who has come back by
        another replica: one that the client itself has begun with this owner is newer.
        """
        asked_at = self._asked_at(post)
        if asked_at is not None and asked_at < (follower.asked_at or 0.0):
            return True  # whatever the clocks say
        if _both_wait(post, follower) and not post.is_again:
            return False  # for the same, in whatever order
        is_older = post.at < follower.attached_at
        if post.is_again:
            return is_older or not (isinstance(follower, RemoteFollower) and follower.is_again)
        return is_older and not self.is_in_order(stream.id, post.waited_s)

    def _asked_at(self, post: posts.Attach) -> float | None:
        """When the replica of a delivery saw the stream as it is here, before it attached."""
        seen = post.seen
        if post.is_again or seen is None or seen.owner != self._journal.replica:
            return None
        return seen.at

    def _is_over(self, post: posts.Attach, than: Follower, stream: Stream) -> bool:
        """Whether a delivery that began before the attached one ends without the owner's help.

        Its client may have all of it before the owner hears that it began, and be elsewhere by now.
        If the clocks of the replicas differ, both deliveries come to their ends.
        """
        last = stream.state.answer_after(post.start)
        return post.at < than.attached_at and last is not None and last <= stream.state.durable

    def refused(self, stream_id: str, error: Exception) -> Sequence[Restore]:
        """The journal does not take a change of this stream. Returns what mends that, if anything.

        Another replica owns the stream by now; or the store has lost changes by a failover.
        """
        stream = self._streams.index.get(stream_id)
        if stream is None:
            return ()
        if isinstance(error, _MENDABLE):
            log.warning("the store has lost changes of a stream", stream=stream_id[:8])
            return (stream.restoration(),)
        if not self._is_leaving:
            log.warning("another replica has taken over a call of this one", stream=stream_id[:8])
        self._streams.lose(stream)
        return ()

    def doubt(self) -> None:
        """This replica may own other streams in the journal than here.

        The answer to a claim was lost, or news were, perhaps by a failover.
        """
        self._has_doubts.set()

    async def _clear_doubts(self) -> None:
        """Compare the streams that this replica owns in the journal with those here, for ever."""
        while True:
            await self._has_doubts.wait()
            self._has_doubts = trio.Event()
            listed: set[str] = set()
            unknown: list[str] = []
            after = 0
            while some := await patiently(
                partial(self._journal.owned, after=after, limit=LOOKED_UP_AT_ONCE)
            ):
                after = some[-1].number
                listed.update(record.stream for record in some)
                unknown += [each.stream for each in some if not self._compare(each)]
            for stream in self._streams.index:
                if stream.is_recorded and stream.id not in listed:
                    await self._check(stream)
            if unknown:
                await self._committer.settled()  # some may just be forgotten
                for stream_id in unknown:
                    await patiently(partial(self._streams.cache.find, stream_id))

    def _compare(self, record: Record) -> bool:
        """Put the record of a stream that is owned here back, if need be; False if none is."""
        stream = self._streams.index.get(record.stream)
        if stream is not None and record.last < stream.restoration().record.last:
            self._committer.add(stream.restoration())
        return stream is not None

    async def _check(self, stream: Stream) -> None:
        """The journal has no such stream, another replica owns it, or it is too new."""
        record = await patiently(partial(self._journal.find, stream.id))
        if self._streams.index.get(stream.id) is not stream:
            return
        if record is None:
            self._committer.add(stream.restoration())
        elif record.owner == self._journal.replica:
            self._compare(record)
        else:
            self._streams.lose(stream)

    # As a replica that follows

    def _told(self, stream_id: str, sender: str, post: ToReplica) -> None:
        """An owner, or another replica, tells something."""
        stream = self._followed.get(stream_id)
        match post:
            case posts.View():
                if stream is not None and post.is_known:
                    stream.view(post, sender)
                elif stream is not None:
                    self._refresh_soon(stream)
                if (look := self._looks.get(post.request)) is not None:
                    look.answer.send_nowait(post)
            case posts.Ended():
                if stream is not None:
                    stream.ended(post)
            case posts.Cancelled():
                self._engine.cancel_here(post)
            case posts.SessionChanged():
                self._streams.sessions.changed(post.key, is_over=post.is_over)
                self._nursery.start_soon(self._streams.sessions.refresh_doubtful)
            case posts.Listening():
                self._streams.sessions.listens_elsewhere(post.session, post.at)
            case posts.Notice() if post.resource is None:
                self._engine.tell_here(post)  # now: notifications keep their order
            case posts.Notice():
                self._nursery.start_soon(self._notify_subscribers, post)

    async def _notify_subscribers(self, notice: posts.Notice) -> None:
        await self._streams.sessions.refresh_doubtful()  # some have subscribed elsewhere
        self._engine.tell_here(notice)

    # Sending

    def post(self, stream: str, post: ToOwner) -> None:
        """See `Home.post`."""
        self._send("", stream, post)

    def _tell(self, replica: str, stream: str, post: ToReplica) -> None:
        self._send(replica, stream, post)

    def broadcast(self, post: ToReplica) -> None:
        """Tell all other replicas."""
        self._send(_ALL, "", post)

    def notify(self, notice: posts.Notice) -> None:
        """Send a notification to the clients of all other replicas.

        While the store is away, the latest of each key waits, and the oldest are dropped.
        """
        name = next(self._numbers) if notice.key is None else notice.key
        self._notices.pop(name, None)
        self._notices[name] = notice
        if len(self._notices) > NOTICES_MAX:
            del self._notices[next(iter(self._notices))]
        self._has_notices.set()

    async def _send_notices(self) -> None:
        while True:
            await self._has_notices.wait()
            self._has_notices = trio.Event()
            bodies = [posts.encode(each) for each in self._notices.values()]
            self._notices.clear()
            await self._send_to(_ALL, "", bodies)

    async def _tell_of_session(self, key: str, is_over: bool) -> None:
        """Tell all replicas, also if the client does not wait for it."""
        is_told = trio.Event()

        async def tell() -> None:
            await self._send_to(_ALL, "", [posts.encode(posts.SessionChanged(key, is_over))])
            is_told.set()

        self._nursery.start_soon(tell)
        await is_told.wait()

    async def sent(self) -> None:
        """Wait until the journal has all posts of before, so that no death of ours loses them.

        Raises `StoreAway` after `SENT_S`.
        """
        last = next(reversed(self._sending), None)
        with trio.move_on_after(SENT_S) as waiting:
            while last is not None and self._sending and next(iter(self._sending)) <= last:
                await self._has_sent.park()
        if waiting.cancelled_caught:
            raise StoreAway("the message could not be handed to the replica that runs its call")

    def _send(self, replica: str, stream: str, post: ToOwner | ToReplica) -> None:
        number = next(self._numbers)
        self._sending[number] = None
        self._outbox.send_nowait((number, replica, stream, posts.encode(post)))

    async def _send_posts(self) -> None:
        """Send posts for ever: those for one place together and in their order."""
        async for number, replica, stream, body in self._posts:
            place = replica, stream
            if place not in self._unsent:
                self._unsent[place] = []
                self._nursery.start_soon(self._send_waiting, *place)
            self._unsent[place].append((number, body))

    async def _send_waiting(self, replica: str, stream: str) -> None:
        """Send all that waits for one place, which waits for no other place."""
        await trio.lowlevel.checkpoint()
        while waiting := self._unsent[replica, stream]:
            self._unsent[replica, stream] = []
            await self._send_to(replica, stream, [body for _, body in waiting])
            for number, _ in waiting:
                del self._sending[number]
            self._has_sent.unpark_all()
        del self._unsent[replica, stream]

    async def _send_to(self, replica: str, stream: str, bodies: Sequence[bytes]) -> None:
        for attempt in itertools.count():
            try:
                if replica:
                    to = "" if replica == _ALL else replica
                    await self._journal.send(to, stream, *bodies)
                    return
                if await self._journal.post(stream, *bodies):
                    return
                if not self._is_leaving and await self._handle_own(stream, bodies):
                    return
            except Unavailable as trouble:
                log.debug("a post waits", why=str(trouble))
            await trio.sleep(backoff_s(RETRY_FIRST_S, attempt, RETRY_LAST_S))

    async def _handle_own(self, stream_id: str, bodies: Sequence[bytes]) -> bool:
        """Posts for a stream without an owner: own it. False where another one does by now."""
        record = await self._or_doubt(partial(self._journal.take, stream_id))
        if record is not None and record.owner != self._journal.replica:
            return False  # not by `Cache.find`, which would wait for an answer to a post
        if record is not None and record.due_at is None:
            await self.adopt(record)
        elif record is not None:
            await self._streams.cache.find(stream_id)
        for body in bodies:
            self._receive(Post(self._journal.replica, stream_id, body))
        return True


_ALL: Final = "*"
_MENDABLE: Final = (Gone, Conflict)  # the owner knows more than the store


def _follower_at(stream: Stream, replica: str, number: int) -> RemoteFollower | None:
    """The attached delivery, if it is the one with this number at another replica."""
    follower = stream.delivery
    if isinstance(follower, RemoteFollower) and follower.reader.place == (replica, number):
        return follower
    return None


def _both_wait(post: posts.Attach, follower: Follower) -> bool:
    """Whether two requests only wait for the response, a new one and the one that is attached."""
    is_other = not post.taker.is_same(follower.taker)
    return is_other and post.only_waits and follower.only_waits


def _moved(stream: Stream, follower: RemoteFollower, post: posts.Moved | posts.Left) -> None:
    """The delivery at another replica has come further, or is over."""
    if isinstance(post, posts.Moved):
        follower.position, follower.written = post.position, post.written
        stream.hand_elsewhere(post.position, post.size)
        stream.notify()
    elif post.is_silent:
        stream.fall_silent(follower)
    else:
        stream.detach(follower)


def _view(stream: Stream, request: int) -> posts.View:
    state = stream.state
    idle_s = None if state.idle_since is None else trio.current_time() - state.idle_since
    questions = {
        request_id: (question.seq, question.line)
        for request_id, question in state.questions.items()
        if isinstance(request_id, str) and question.seq <= state.durable
    }
    return posts.View(
        request=request,
        at=trio.current_time(),
        delivered=state.delivered,
        handed=state.handed,
        durable=state.durable,
        outcome=state.outcome,
        idle_s=idle_s,
        asked=stream.asked,
        is_reachable=stream.is_reachable,
        is_findable=stream.is_findable,
        is_left=stream.is_left,
        stays=stream.stays,
        latest_progress=stream.latest_progress,
        questions=questions,
        is_taken=stream.is_taken,
    )
