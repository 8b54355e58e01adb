"""This process as one of several replicas, which share a journal.

Each stream has one owner, which runs its handler. The other replicas follow it for the clients that
are attached to them (`streams.engine.followed`). This module does what that takes: it takes over
the streams of a replica that is gone (`streams.engine.leases` tells), receives the news of the
journal, and handles the posts between replicas (`streams.engine.outbox` sends them).

An owner sees a client that is attached at another replica as a `streams.engine.remote`.

It is one file because take-overs, news and posts change the same tables of streams.
"""

import itertools
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, Protocol, TypeVar

import msgspec
import trio

from streams import messages
from streams.engine import posts
from streams.engine.committer import Committer
from streams.engine.connection import RUNS_BYTES, Delivery
from streams.engine.followed import FollowedStream
from streams.engine.leases import BEATS, Leases, anything
from streams.engine.lifecycle import LIVE
from streams.engine.outbox import Outbox
from streams.engine.posts import ToOwner, ToReplica
from streams.engine.remote import RemoteFollower, RemoteReader, follower_at, moved, view_of
from streams.engine.retry import patiently
from streams.engine.sessions import nameless
from streams.engine.stream import Follower, Stream
from streams.engine.streams import Streams
from streams.errors import Conflict, Fenced, Gone, Refusal, StoreAway, Unavailable, refusal
from streams.journal.contract import Journal, News, Post, Wanted
from streams.journal.records import (
    Answered,
    Close,
    Create,
    Outcome,
    Record,
    Restore,
    StreamChange,
)
from streams.keys import Keyring
from streams.limits import Limits
from streams.logs import STREAM_LETTERS, log

# After which parts of a lease the owner of a stream is asked again how it is, until that is given
# up. The first question is lost where the owner has just connected to the store. Two leases pass if
# the owner dies, and the replica that claims its streams as well.
LOOKS: Final = (1 / 8, *[1 / 2] * 4)
SHARED_BEATS: Final = 2  # within so many beats, every replica has taken its share
# Within so many beats, replicas put back what a store that has gone back has lost: each of them
# notices that when it renews its lease.
PUT_BACK_BEATS: Final = 2
WAITED_S: Final = 0.1  # a request that waits no longer than that is overtaken by no other
LOOKED_UP_AT_ONCE: Final = 200  # records of streams
POSITIONS_EVERY_S: Final = 0.005  # at which owners are told how far the clients here are
CANCELS_MAX: Final = 1000  # that may be for a call which has no owner now; the oldest go first


_T = TypeVar("_T")


class _Looking(msgspec.Struct):
    """A question to the owner of a stream, which waits for its answer, by `sender`."""

    number: int
    stream: str
    tell: trio.MemorySendChannel[posts.View]
    answer: trio.MemoryReceiveChannel[posts.View]
    sender: str = ""


class _Cancel(msgspec.Struct):
    """A cancel of a request that was not found where it came to, at this replica if it `is_ours`.

    `at` is trio's time.
    """

    at: float
    cancelled: posts.Cancelled
    is_ours: bool


class Engine(Protocol):
    """The engine, as its replicas see it."""

    def go_on(self, stream: Stream) -> None:
        """Restart the call of a stream that was taken over, or end it as interrupted."""

    def hang_up(self, part: float = 1.0) -> None:
        """Close this part of the connections, so that their clients go to another replica."""

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
        self._streams = streams
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self._engine = engine
        self._followed: dict[str, FollowedStream] = {}
        self._moved: dict[str, FollowedStream] = {}  # whose owners will be told of a position
        self._has_moved = trio.Event()
        self._looks: dict[int, _Looking] = {}
        self._turns: dict[str, trio.Lock] = {}
        self._adopted: dict[str, float] = {}  # streams that were taken over not long ago
        self._cancels = deque[_Cancel](maxlen=CANCELS_MAX)
        self._whole_at = -math.inf  # when the store has what it may have lost, in trio's time
        self._numbers = itertools.count(1)
        # Posts for streams that are being taken over, until that is done.
        self._adopting: dict[str, list[Post]] = {}
        # Owners whose streams are free, and which of these this replica wants: None for its share.
        self._claims: dict[str, Wanted | None] = {"": None}
        self._has_claims = trio.Event()
        self._has_claims.set()
        self._has_doubts = trio.Event()  # about which streams this replica owns
        self.leases = Leases(journal, committer, self)
        self.outbox = Outbox(journal, self._handle_own)
        self._nursery: trio.Nursery
        streams.replicas = self
        streams.sessions.tell_others = self._tell_of_session
        streams.sessions.on_listening = self._tell_of_listening
        streams.sessions.count_replicas = lambda: self.leases.lives
        streams.sessions.has_waited = self.has_waited
        committer.on_refused = self.refused

    async def run(self) -> None:
        """Live as a replica, for ever."""
        async with trio.open_nursery() as self._nursery:
            for task in (
                self.leases.run,
                self.outbox.run,
                self._listen,
                self._tell_positions,
                self._claim_free,
                self._clear_doubts,
            ):
                self._nursery.start_soon(task)

    async def release(self) -> None:
        """Give up all streams, so that other replicas take them over at once.

        From then on this replica renews no lease: what it cannot give up, others claim then.
        """
        if self.leases.is_leaving:
            return
        self.leases.is_leaving = self._streams.cache.is_leaving = True
        try:
            await self._journal.release()
        except Unavailable as trouble:  # they wait for the end of the lease
            log.warning("the calls of this replica could not be handed over", why=str(trouble))

    # Leases

    def gone(self, replica: str) -> None:
        """See `LeaseListener.gone`. Its clients are detached, and its streams are claimed."""
        for stream in self._streams.index:
            follower = stream.delivery
            if isinstance(follower, RemoteFollower) and follower.replica == replica:
                stream.detach(follower)
        self._claim(replica)
        self._claim("")  # it may have died while it released some

    def lost_all(self) -> None:
        """See `LeaseListener.lost_all`."""
        name = self._journal.replica
        lost = [each for each in self._streams.index if each.record.owner != name]
        log.warning("other replicas have taken over all calls of this one", calls=len(lost))
        for stream in lost:
            self._streams.lose(stream)
        # Owners have detached what was attached here under the former name.
        for followed in list(self._followed.values()):
            self._leave(followed)
            self._nursery.start_soon(self._unfollow, followed.id)
        for look in self._looks.values():
            self._ask(look)  # the answer would go to the former name
        self._engine.hang_up()

    def cut_off(self, part: float) -> None:
        """See `LeaseListener.cut_off`."""
        self._engine.hang_up(part)

    def counted(self, replicas: int) -> None:
        """See `LeaseListener.counted`."""
        self._engine.share(replicas)

    def beaten(self) -> None:
        """Follow no stream any more that no client is attached to; read the others now and then.

        So news that were lost, for whatever reason, delay a message for one lease at most.
        """
        oldest = trio.current_time() - 2 * self._journal.lease_s
        self._adopted = {each: at for each, at in self._adopted.items() if at > oldest}
        while self._cancels and self._cancels[0].at <= oldest:
            self._cancels.popleft()
        for stream_id, stream in list(self._followed.items()):
            idle_since = stream.state.idle_since
            is_idle = idle_since is not None and stream.delivery is None and not stream.is_waiting
            if is_idle and trio.current_time() - stream.seen_at > self._journal.lease_s:
                self._leave(stream)
                self._nursery.start_soon(self._unfollow, stream_id)
            elif trio.current_time() - stream.refreshed_at > self._journal.lease_s:
                self._refresh_soon(stream)
                stream.report()

    def _leave(self, stream: FollowedStream) -> None:
        del self._followed[stream.id]
        stream.forget_questions()
        self._streams.sessions.forget(stream)

    async def _unfollow(self, stream_id: str) -> None:
        try:
            await self._journal.unfollow(stream_id)
            if stream_id in self._followed:  # again, meanwhile
                await self._journal.follow(stream_id)
        except Unavailable as trouble:  # its news are ignored
            log.debug("a stream is still followed", why=str(trouble))

    # Taking over

    def _claim(self, owner: str, wanted: Wanted | None = None) -> None:
        """Claim what is wanted of the streams of an owner, or the share of this replica."""
        self._claims[owner] = wanted
        self._has_claims.set()

    async def _claim_rest(self, owner: str) -> None:
        """Claim what the others have left of their shares. Some are perhaps gone, too."""
        await trio.sleep(SHARED_BEATS * self._journal.lease_s / BEATS)
        self._claim(owner, anything)

    async def _claim_free(self) -> None:
        """Take over the streams that are free, for ever."""
        while True:
            await self._has_claims.wait()
            self._has_claims = trio.Event()
            while self._claims and not self.leases.is_leaving:
                owner = next(iter(self._claims))
                wanted = self._claims.pop(owner)  # first: what gets free meanwhile is claimed, too
                if wanted is None:
                    wanted = await patiently(partial(self.leases.share, owner))
                claim = partial(self._journal.claim, owner, wanted)
                records = await patiently(partial(self._or_doubt, claim))
                if records:
                    self._claims.setdefault(owner, wanted)
                    running = sum(each.outcome is Outcome.LIVE for each in records)
                    told = {"running": running, "ended": len(records) - running}
                    log.info("took over calls", of=owner or "released", **told)
                    await self._adopt_in_time(records)
                elif wanted is not anything:
                    self._nursery.start_soon(self._claim_rest, owner)

    async def _or_doubt(self, own: Callable[[], Awaitable[_T]]) -> _T:
        """Own streams. Where the answer is lost, they may be ours all the same."""
        try:
            return await own()
        except Unavailable:
            self.doubt()
            raise

    async def _adopt_in_time(self, records: Sequence[Record]) -> None:
        """Adopt some streams before more are claimed. A damaged one may take for ever: it waits."""
        has_adopted = trio.Event()

        async def adopt() -> None:
            await self._adopt(records)
            has_adopted.set()

        self._nursery.start_soon(adopt)
        with trio.move_on_after(self._journal.lease_s):
            await has_adopted.wait()

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
        for each in self._cancels:
            if each.cancelled.request_id == stream.request_id:
                self._nursery.start_soon(self._cancel, each.cancelled)
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
        for look in self._looks.values():
            if look.stream == record.stream:
                look.tell.send_nowait(view_of(held, look.number))
        return held

    def _bring_here(self, stream: Stream) -> None:
        """Go on with the delivery of a stream that was followed, and is owned from now on."""
        followed = self._followed.pop(stream.id, None)
        if followed is None:
            return
        self._nursery.start_soon(self._unfollow, stream.id)
        followed.tell_wishes_again()
        if (delivery := followed.delivery) is None:
            return
        assert isinstance(delivery, Delivery)
        stream.ended_responses = followed.ended_responses
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
        with self._looking(record.stream) as look:
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
                    events=self._streams.events,
                )
                self._followed[record.stream] = stream
            else:
                self._learn(stream, record)
            stream.seen_at = trio.current_time()
            view = await self._seen(look)
        followed = self._followed.get(record.stream)  # it may have been taken over meanwhile
        if view.is_known and followed is stream and stream.seen is None:
            stream.view(view, look.sender)  # it came before the news of the stream did
        owned = self._streams.index.get(record.stream)
        return owned or (followed if view.is_known else None)

    @contextmanager
    def _looking(self, stream_id: str) -> Iterator[_Looking]:
        """Ask the owner of a stream how it is; the answer may come until the block ends."""
        number = next(self._numbers)
        channel = trio.open_memory_channel[posts.View](math.inf)
        self._looks[number] = look = _Looking(number, stream_id, *channel)
        try:
            self._ask(look)
            yield look
        finally:
            del self._looks[number]

    def _ask(self, look: _Looking, *, is_again: bool = False) -> None:
        self.post(look.stream, posts.Look(look.number, is_kept=is_again))

    async def _seen(self, look: _Looking) -> posts.View:
        """The answer of the owner, which is asked again. One that has died is asked through its
        heir.
        """
        for number, part in enumerate(LOOKS):
            if number:
                self._ask(look, is_again=True)
            with trio.move_on_after(part * self._journal.lease_s):
                return await look.answer.receive()
        raise StoreAway("the replica that runs the call does not answer")

    def introduce(self, stream: FollowedStream) -> None:
        """See `Home.introduce`."""
        if (delivery := stream.delivery) is not None and delivery.position < stream.state.durable:
            self._journal.expect(stream.id, delivery.position, bytes_max=RUNS_BYTES)
        self._nursery.start_soon(self._introduce, stream)

    async def _introduce(self, stream: FollowedStream) -> None:
        patience, look_at = trio.move_on_after(self._journal.lease_s), self._looking(stream.id)
        with patience, suppress(StoreAway), look_at as look:
            await self._seen(look)
        stream.introduced()

    def moved(self, stream: FollowedStream) -> None:
        """See `Home.moved`."""
        self._moved[stream.id] = stream
        self._has_moved.set()

    async def _tell_positions(self) -> None:
        """Tell owners how far the clients here are, for ever."""
        while True:
            await self._has_moved.wait()
            self._has_moved, moved = trio.Event(), list(self._moved.values())
            self._moved.clear()
            for stream in moved:
                stream.tell_position()
            await trio.sleep(POSITIONS_EVERY_S)

    def left(self, stream: FollowedStream) -> None:
        """See `Home.left`."""
        stream.seen_at = trio.current_time()

    async def _refresh(self, stream_id: str, *, is_followed: bool) -> None:
        """A followed stream may have changed."""
        stream = self._followed.get(stream_id)
        if stream is None:
            return
        stream.refreshed_at = trio.current_time()
        look_up = self._journal.find if is_followed else self._journal.follow
        record = await patiently(partial(look_up, stream_id))
        if record is None and await self.has_waited():
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
        if record.owner in (was, self._journal.replica):
            return
        if record.owner:
            stream.tell_again()
        for look in self._looks.values():
            if look.stream == stream.id:  # the owner has died perhaps while it had the question
                self._ask(look)  # without an owner, whoever asks becomes it

    async def _own(self, stream_id: str) -> None:
        """Own a stream that has no owner, for the client that is attached to it here."""
        if self.leases.is_leaving:
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
        for replica in news.released:
            self.leases.has_left(replica)
            self._claim("")
        changed = sorted(news.changed)  # so that a simulation repeats
        if news.is_all:
            changed = list(self._followed)
            beat_s = self._journal.lease_s / BEATS
            self._whole_at = trio.current_time() + PUT_BACK_BEATS * beat_s
            self._tell_again()
            self._streams.sessions.doubt()
            self._claim("")
            self.doubt()
        for stream_id in changed:
            if (stream := self._followed.get(stream_id)) is not None:
                self._refresh_soon(stream, is_followed=not news.is_all)

    def _tell_again(self) -> None:
        """The store may have lost posts."""
        for stream in self._followed.values():
            if stream.owner:  # else the next one is told
                stream.tell_again()
        for each in self._cancels:
            if each.is_ours:
                self.outbox.broadcast(each.cancelled)

    def _refresh_soon(self, stream: FollowedStream, *, is_followed: bool = False) -> None:
        """Read the record soon. `is_followed`: the store has just sent news of it."""
        if not stream.is_refreshing:
            stream.is_refreshing = True
            self._nursery.start_soon(self._refresh_once, stream, is_followed)

    async def _refresh_once(self, stream: FollowedStream, is_followed: bool) -> None:
        await trio.lowlevel.checkpoint()
        stream.is_refreshing = False  # what changes from now on needs another look
        await self._refresh(stream.id, is_followed=is_followed)

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
            view = posts.View(body.request, is_known=False)
            self.outbox.tell(post.sender, post.stream, view, is_kept=body.is_kept)
            self.doubt()  # in the journal it is ours
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
                view = view_of(stream, post.request)
                self.outbox.tell(sender, stream.id, view, is_kept=post.is_kept)
            case posts.Attach():
                self._attach(stream, sender, post)
            case posts.Moved() | posts.Left():
                if (follower := follower_at(stream, sender, post.number)) is not None:
                    moved(stream, follower, post)
            case posts.Delivered() if not self._counts(stream, sender, post):
                log.info("an older delivery's proof was dropped", stream=stream.id[:STREAM_LETTERS])
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
                self._does(stream, sender, post)

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
        return sender in self.leases.names and post.number == stream.newest

    def _does(self, stream: Stream, sender: str, post: ToOwner) -> None:
        """A client does something with the call itself."""
        match post:
            case posts.Answered():
                self._streams.answer(stream, messages.parse(post.line), post.session)
            case posts.Stopped() if not self._may_stop(stream, sender, post):
                log.info(
                    "the cancel of a displaced client was dropped",
                    stream=stream.id[:STREAM_LETTERS],
                )
            case posts.Stopped(is_dropped=True) if stream.state.is_ended:
                self._streams.replace(stream)
            case posts.Stopped(is_dropped=True):
                self._streams.drop(stream)
            case posts.Stopped():
                self._streams.cancel(stream, is_told=post.is_told)
            case posts.Leave():
                stream.leave()
            case posts.ResponseEnded():
                stream.end_response(post.session, post.response, post.why)
            case posts.Awaited():
                stream.await_again(post.short_name)

    def _may_stop(self, stream: Stream, sender: str, post: posts.Stopped) -> bool:
        """Whether the client that wants a call no more has not been displaced."""
        if post.is_late:
            return stream.delivery is None
        if post.number == 0 or follower_at(stream, sender, post.number) is not None:
            return True
        is_here = stream.delivery is not None and sender in self.leases.names
        return is_here and post.number == stream.newest

    def _attach(self, stream: Stream, sender: str, post: posts.Attach) -> None:
        if sender in self.leases.names:
            return  # it was sent to the former owner, and the delivery is here: see `_bring_here`
        follower, attached = stream.delivery, follower_at(stream, sender, post.number)
        self.leases.heard_of(sender)
        if stream.state.is_tombstone:
            error = posts.error_of(refusal(stream.state.outcome.value))
            self.outbox.tell(sender, stream.id, posts.Ended(post.number, error=error))
        elif attached is not None:
            attached.reader.level = post.level
            stream.attach(attached)
        elif follower is not None and self._is_late(post, sender, follower, stream):
            ended = posts.Ended(post.number, superseded_by=follower.taker)
            self.outbox.tell(sender, stream.id, ended)
        elif follower is not None and self._is_over(post, follower, stream):
            pass  # the journal has given it all that it waits for
        elif post.is_new:
            self._make_way(stream, post)
            asked_at = self._asked_at(post)
            stream.attach(RemoteFollower(stream, sender, post, asked_at, self.outbox.tell))
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

    def _is_late(self, post: posts.Attach, sender: str, follower: Follower, stream: Stream) -> bool:
        """Whether a delivery must not displace the one that is attached.

        A delivery that its replica attaches again may be over for its client, who has come back by
        another replica: one that the client itself has begun with this owner is newer.
        """
        if isinstance(follower, RemoteFollower) and follower.replica == sender:
            return False  # posts of one replica come in order
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

    def refused(self, change: StreamChange, error: Exception) -> Sequence[Restore]:
        """The journal does not take this change. Returns what mends that, if anything.

        Another replica owns the stream by now; or the store has lost changes by a failover.
        """
        if isinstance(error, Fenced):
            self._pass_to_owner(change)
        stream_id = change.stream
        stream = self._streams.index.get(stream_id)
        fence = change.record.fence if isinstance(change, Create) else change.fence
        if stream is None or stream.record.fence > fence:
            return ()  # another one had it meanwhile, and it has come back
        if isinstance(error, _MENDABLE):
            log.warning("the store has lost changes of a stream", stream=stream_id[:STREAM_LETTERS])
            return (stream.restoration(),)
        if not self.leases.is_leaving:
            log.warning(
                "another replica has taken over a call of this one",
                stream=stream_id[:STREAM_LETTERS],
            )
        self._streams.lose(stream)
        return ()

    def _pass_to_owner(self, change: StreamChange) -> None:
        """A client has told us an answer or a cancel after we have lost the stream."""
        match change:
            case Answered():
                self.post(change.stream, posts.Answered(change.line))
            case Close(outcome=Outcome.CANCELLED):
                self.post(change.stream, posts.Stopped(is_late=True))

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
                    look.sender = sender
                    look.tell.send_nowait(post)
            case posts.Ended():
                if stream is not None:
                    stream.ended(post)
            case _:
                self._told_all(post)

    def _told_all(self, post: ToReplica) -> None:
        """Another replica tells something to all."""
        match post:
            case posts.Cancelled():
                self._cancels.append(_Cancel(trio.current_time(), post, is_ours=False))
                self._nursery.start_soon(self._cancel, post)
            case posts.SessionAnswered():
                if (session := self._streams.sessions.held(post.session)) is not None:
                    session.answered(messages.parse(post.line))
            case posts.SessionChanged():
                self._streams.sessions.changed(post.key, is_over=post.is_over)
                self._nursery.start_soon(self._streams.sessions.refresh_doubtful)
            case posts.Listening():
                self._streams.sessions.listens_elsewhere(post.session, post.at)
            case posts.Notice() if post.resource is None:
                self._engine.tell_here(post)  # now: notifications keep their order
            case posts.Notice():
                self._nursery.start_soon(self._notify_subscribers, post)

    def cancel(self, cancelled: posts.Cancelled) -> None:
        """The client of a session cancels a request that is not here: tell the other replicas.

        If its replica has died, the heir of the call is one of us.
        """
        self._cancels.append(_Cancel(trio.current_time(), cancelled, is_ours=True))
        self.outbox.broadcast(cancelled)

    async def _cancel(self, cancelled: posts.Cancelled) -> None:
        """Cancel a request that came to another replica, or came before its call was ours."""
        sessions, key = self._streams.sessions, cancelled.session
        # An heir of its calls may not have seen the session yet.
        if sessions.held(key) is None and self._streams.index.wanted(nameless(key)):
            await patiently(partial(sessions.refresh, key))
        self._engine.cancel_here(cancelled)

    async def _notify_subscribers(self, notice: posts.Notice) -> None:
        await self._streams.sessions.refresh_doubtful()  # some have subscribed elsewhere
        self._engine.tell_here(notice)

    async def be_sure(self) -> None:
        """See `Owner.be_sure`."""
        await self.leases.be_sure()

    async def has_waited(self) -> bool:
        """See `Others.has_waited`."""
        if trio.current_time() >= self._whole_at:
            return False
        await trio.sleep_until(self._whole_at)
        return True

    def post(self, stream: str, post: ToOwner) -> None:
        """See `Home.post`."""
        self.outbox.post(stream, post)

    def broadcast(self, post: ToReplica) -> None:
        """See `Others.broadcast`."""
        self.outbox.broadcast(post)

    async def _tell_of_session(self, key: str, is_over: bool) -> None:
        await self.outbox.broadcast_surely(posts.SessionChanged(key, is_over))

    def _tell_of_listening(self, key: str, at: float) -> None:
        self.outbox.broadcast(posts.Listening(key, at))

    async def _handle_own(self, stream_id: str, bodies: Sequence[bytes]) -> bool:
        """Posts for a stream without an owner: own it. False where another one does by now."""
        if self.leases.is_leaving:
            return False
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


_MENDABLE: Final = (Gone, Conflict)  # the owner knows more than the store


def _both_wait(post: posts.Attach, follower: Follower) -> bool:
    """Whether two requests only wait for the response, a new one and the one that is attached."""
    is_other = not post.taker.is_same(follower.taker)
    return is_other and post.only_waits and follower.only_waits
