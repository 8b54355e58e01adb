"""Sessions over HTTP and their event ids, both of which survive a restart.

A client's session outlives its connections and the server's process. Its id is a secret, of which
the journal has a hash. An event id names a stream, a seq in it, and, in the response to a resume,
the grant of that delivery:

    <key>_<seq>            the response to the original request
    <key>_<seq>_<grant>    the response to a resume

`.end` follows where the event said that nothing more will come of that response.

This is one file because an event id means nothing outside of its session: the session has the right
to resume the response.
"""

import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Final
from weakref import WeakSet

import msgspec
import trio

from streams.clock import WallAhead
from streams.engine.committer import Committer
from streams.engine.connection import Delivery, Granted, Session
from streams.engine.notices import resource_updated
from streams.engine.retry import patiently, surely
from streams.engine.stream import Stream
from streams.errors import INTERNAL_ERROR, INVALID_PARAMS, Refusal, Unavailable
from streams.journal.contract import Journal
from streams.journal.sessions import (
    DropGrant,
    DropSession,
    Grant,
    SaveGrant,
    SaveSession,
    SessionRecord,
)
from streams.keys import Keyring, hashed, new_id, new_request_id
from streams.limits import Limits
from streams.messages import RequestId
from streams.protocol import clients, extension

# Stored among the capabilities, which no client can name so: its names are filtered.
SUBSCRIPTIONS: Final = "mcp-streams/subscriptions"
GRANTS_MAX: Final = 16  # of one stream in one session; a new one replaces the oldest
SEEN_EVERY_S: Final = 3600.0  # how late the journal may learn of the last use of a session

TOGETHER_S: Final = 0.1  # a post that comes within that may be of an older standing stream

END: Final = ".end"
_EVENT_ID: Final = re.compile(
    r"([0-9a-f]{32})_([0-9]{1,18})(?:_([A-Za-z0-9_-]{1,64}))?(\.end)?", re.ASCII
)


class EventId(msgspec.Struct, frozen=True):
    """An event id, resolved in the session that it was given to."""

    stream: str
    seq: int
    granted: Granted
    is_end: bool


class HttpSession(Session):
    """The session of one client over any number of HTTP requests, all by the caller that began it.

    Without authentication the session is a principal of its own, and its id is the authority.
    """

    def __init__(self, key: str, caller: str | None = None) -> None:
        """`caller` is the principal of the caller that begins it; None without authentication."""
        super().__init__(caller or nameless(key))
        self.is_anonymous = caller is None
        self._begun: WeakSet[Stream] = WeakSet()
        self.key = self.name = key
        # When it began, in trio's time; None for one that an earlier process has begun.
        self.began_at: float | None = None
        self.seen_at = 0.0  # when it was used last, in wall time
        self.streams: dict[str, _Named] = {}  # by the keys of their event ids
        # Around the event stream that belongs to no request, while the client has it open.
        self.standing: trio.CancelScope | None = None
        self.standing_since = -math.inf  # in trio's time

    @property
    def is_at_work(self) -> bool:
        """Whether the client has a response open now, or a call that is being checked."""
        return bool(self.deliveries or self.checking) or self.standing is not None

    def is_of(self, caller: str | None) -> bool:
        """Whether this caller has begun it; without authentication, whether it is anonymous."""
        return self.is_anonymous if caller is None else self.principal == caller

    def has_begun(self, stream: Stream) -> bool:
        # Other sessions of the same principal may use the same request ids. The session that began
        # a stream is not known after a restart, so it is not known here either.
        return self.is_anonymous or stream in self._begun

    def responses_to(self, request_id: RequestId) -> Sequence[tuple[str, str]]:
        return [
            (named.stream, name)
            for named in self.streams.values()
            for name, granted in named.granted.items()
            if granted.reply_id == request_id
        ]

    def attach(self, delivery: Delivery) -> None:
        if delivery.reply_id is None and not self.is_anonymous:
            self._begun.add(delivery.stream)
        super().attach(delivery)

    def record(self) -> SessionRecord:
        """The record for the journal."""
        return SessionRecord(
            key=self.key,
            principal=self.principal,
            revision=self.revision or "",
            capabilities=msgspec.json.encode(
                self.capabilities | clients.stored(self.client) | self._subscribed()
            ),
            level=self.level,
            seen_at=self.seen_at,
        )

    def _subscribed(self) -> dict[str, Any]:
        return {SUBSCRIPTIONS: list(self.subscriptions)} if self.subscriptions else {}

    @classmethod
    def of(cls, record: SessionRecord) -> "HttpSession":
        """The session of a record."""
        is_anonymous = record.principal == nameless(record.key)
        session = cls(record.key, None if is_anonymous else record.principal)
        session.revision = record.revision
        # A journal of an older version may have everything that the client sent.
        capabilities = msgspec.json.decode(record.capabilities, type=dict[str, Any])
        session.capabilities = extension.understood(capabilities)
        session.settings = extension.settings_of(session.capabilities)
        for uri in capabilities.get(SUBSCRIPTIONS, ()):
            session.subscriptions[uri] = None
            line, notice = resource_updated(uri)  # it may have changed before or during the restart
            session.notify(line, key=notice)
        session.client = clients.restored(capabilities, record.revision)
        session.level = record.level
        session.seen_at = record.seen_at
        return session

    def refresh(self, record: SessionRecord) -> None:
        """Take over what another replica has changed: the log level and the subscriptions."""
        capabilities = msgspec.json.decode(record.capabilities, type=dict[str, Any])
        self.subscriptions = dict.fromkeys(capabilities.get(SUBSCRIPTIONS, ()))
        self.set_level(record.level)


class _Named:
    """A stream whose event ids a session was given."""

    __slots__ = ("granted", "key", "stream")

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.key = ""  # of its event ids, made with the newest key of the keyring
        # The responses, by the names of their grants; "" for the original request's.
        self.granted: dict[str, Granted] = {}


class _Given:
    """A stream of which some sessions have, or may claim, event ids."""

    __slots__ = ("holders", "keys")

    def __init__(self) -> None:
        self.holders: set[HttpSession] = set()
        # Of its event ids, made with all keys that the keyring has had meanwhile, the newest first.
        self.keys: tuple[str, ...] = ()


class Sessions:
    """The sessions of one journal."""

    def __init__(
        self,
        journal: Journal,
        committer: Committer,
        keyring: Keyring,
        limits: Limits,
        *,
        on_end: Callable[[HttpSession], None],
    ) -> None:
        self._on_end = on_end
        self._journal = journal
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self._by_key: dict[str, HttpSession] = {}  # in the order of their last use
        self._of_principal: dict[str, dict[str, HttpSession]] = {}  # of each, by their keys
        self._saved: dict[str, SessionRecord] = {}
        self._given: dict[str, _Given] = {}  # by stream
        # Streams from the journal, by the keys of their event ids. Their principals may have
        # several sessions, and which of these had the response is not known.
        self._unclaimed: dict[str, Stream] = {}
        self._wall_ahead_s = WallAhead(trio.current_time)
        # The next four are for a shared journal. The other replicas are told that the session with
        # this key has changed or, if that is True, has ended.
        self.tell_others: Callable[[str, bool], Awaitable[None]] | None = None
        # They are told that a standing stream of the session has opened, and when, in wall time.
        self.on_listening: Callable[[str, float], None] = lambda key, at: None
        self.count_replicas: Callable[[], int] = lambda: 1
        self.has_waited: Callable[[], Awaitable[bool]]  # see `Others.has_waited`
        self._ending: Counter[str] = Counter()  # sessions whose end is not durable yet
        self._saving: Counter[str] = Counter()  # how many changes of a session are not durable yet
        # The sessions that another replica may have changed, with the number of the change.
        self._doubtful: dict[str, int] = {}
        self._changes = count(1)
        # The notices that a list has changed since the start of this replica, by their keys. A
        # session that comes from another replica may not have received them there.
        self.changed_lists: dict[str, bytes] = {}

    def _now(self) -> float:
        """Wall time without the steps of the clock since the start, which make no session idle."""
        return trio.current_time() + self._wall_ahead_s()

    def take_over(
        self,
        records: Iterable[SessionRecord],
        grants: Iterable[Grant],
        streams: Iterable[Stream],
    ) -> None:
        """Take over the sessions of the journal, and their grants for streams in memory."""
        for record in records:
            session = HttpSession.of(record)
            session.seen_at = min(record.seen_at, self._now())  # the clock may have been ahead
            self._saved[session.key] = session.record()
            self._hold(session)
            if len(self._saved[session.key].capabilities) < len(record.capabilities):
                self._committer.add(self._save(session))
        granted: dict[str, list[Grant]] = {}
        for grant in grants:
            granted.setdefault(grant.stream, []).append(grant)
        for stream in streams:
            self.load(stream, granted.get(stream.id, ()))

    def load(self, stream: Stream, grants: Iterable[Grant]) -> None:
        """A stream was loaded: the sessions that could resume it may do so again."""
        principal = stream.record.principal
        for owner in self._of_principal.get(principal, {}).values():
            if owner.is_anonymous:
                self._name(owner, stream.id).granted.setdefault("", Granted(None))
            else:
                self._unclaimed |= dict.fromkeys(self._give(stream.id).keys, stream)
                break
        for grant in grants:
            if session := self._by_key.get(grant.session):
                self._name(session, stream.id).granted.setdefault(grant.delivery, Granted(grant))

    # Sessions

    @property
    def is_shared(self) -> bool:
        """Whether other replicas have sessions that are not in memory here."""
        return self.tell_others is not None

    def held(self, key: str) -> HttpSession | None:
        """The session with this key, if it is in memory."""
        return self._by_key.get(key)

    async def fetch(self, session_id: str) -> None:
        """Load the session of this id, if the journal is shared and another replica has it.

        "The server MAY terminate the session at any time, after which it MUST respond to requests
        containing that session ID with HTTP 404 Not Found": at every replica, and at once. Posts
        between replicas may come later than the client's next request.
        """
        if self.tell_others is None:
            return
        key = hashed(session_id)
        if key not in self._by_key or key in self._doubtful:
            await self.refresh(key)
        elif self.count_replicas() > 1:
            with suppress(Unavailable):  # the session goes on, as far as is known here
                await self._look_at(key)

    async def _look_at(self, key: str) -> None:
        """Learn what another replica has changed in a session that is held here."""
        was_saved, was_saving = self._saved.get(key), self._saving[key]
        record = await self._read(key)
        held, saved = self._by_key.get(key), self._saved.get(key)
        if held is None or saved is None:
            return
        if record is None:
            self.unload(held)
            return
        is_ours = self._saving[key] or held.has_changed or held.level != saved.level
        is_ours = is_ours or was_saving or saved is not was_saved  # it was read before that
        is_same = (record.level, record.capabilities) == (saved.level, saved.capabilities)
        if not is_ours and not is_same:
            self._saved[key] = record
            held.refresh(record)

    async def refresh(self, key: str) -> None:
        """Read a session, which another replica has begun or may have changed, from the journal."""
        change = self._doubtful.get(key)
        record = await self._read(key)
        if self._doubtful.get(key) == change:  # else it was changed once more
            self._doubtful.pop(key, None)
        held = self._by_key.get(key)
        if record is None:
            if held is not None:
                self.unload(held)
        elif held is None:
            session = HttpSession.of(record)
            for notice, line in self.changed_lists.items():
                session.notify(line, key=notice)
            self._saved[key] = session.record()
            self._hold(session)
        else:
            self._saved[key] = record
            held.refresh(record)

    async def _read(self, key: str) -> SessionRecord | None:
        record = await surely(partial(self._journal.session, key), self.has_waited)
        return None if self._ending[key] else record

    def doubt(self) -> None:
        """News were lost: look each session up when it is used next."""
        self._doubtful = {key: next(self._changes) for key in self._by_key}

    async def refresh_doubtful(self) -> None:
        """Read all sessions that another replica may have changed."""
        for key in list(self._doubtful):
            if key in self._by_key:
                await patiently(partial(self.refresh, key))

    def changed(self, key: str, *, is_over: bool) -> None:
        """Another replica has changed or ended a session."""
        session = self._by_key.get(key)
        if session is None:
            return
        if is_over:
            self._end_here(session)
        else:
            self._doubtful[key] = next(self._changes)

    def listen(self, session: HttpSession) -> trio.CancelScope:
        """A standing stream opens within the scope that is returned: the newest wins."""
        if session.standing is not None:
            session.standing.cancel()
        session.standing, session.standing_since = trio.CancelScope(), trio.current_time()
        self.on_listening(session.key, self._now())
        return session.standing

    def listens_elsewhere(self, key: str, at: float) -> None:
        """A standing stream of a session has opened at another replica.

        That is the newest to be heard of. The wall clocks of replicas tell which is newer where
        both have opened at about the same time.
        """
        session = self._by_key.get(key)
        if session is None or session.standing is None:
            return
        is_young = trio.current_time() - session.standing_since < TOGETHER_S
        if not is_young or session.standing_since + self._wall_ahead_s() <= at:
            session.standing.cancel()

    def unload(self, session: HttpSession) -> None:
        """Let a session leave memory, and close its connections; the journal keeps it."""
        self._leave(session)
        session.end()

    def find(self, session_id: str, caller: str | None = None) -> HttpSession | None:
        """This caller's session of this id, which counts as used now. Idle sessions are ended."""
        now = self._now()
        for session in self._idle(now):
            self._end_unused(session)
        key = hashed(session_id)
        found = self._by_key.get(key)
        if found is None or not found.is_of(caller):
            return None
        self._by_key[key] = self._by_key.pop(key)
        found.seen_at = now
        if now - self._saved[key].seen_at >= SEEN_EVERY_S:
            self._committer.add(self._save(found))
        return found

    async def add(self, session: HttpSession) -> None:
        """Add a session. Raises `Refusal` where there are too many, or the journal takes none."""
        self._committer.check()
        if self.tell_others is not None:
            await self._check_number(session.principal)
        theirs = self._of_principal.get(session.principal, {})
        # A principal with too many sessions loses one of its own.
        if len(theirs) >= self._limits.sessions_per_principal_max:
            self._end_idle(theirs)
        elif len(self._by_key) >= self._limits.sessions_max:
            self._end_idle(self._by_key)
        session.seen_at = self._now()
        self._hold(session)
        await self._committer.settled(self._save(session))

    async def _check_number(self, principal: str) -> None:
        """Raise `Refusal` where all replicas together have too many sessions."""
        limits, count = self._limits, self._journal.count_sessions
        if await count(principal) >= limits.sessions_per_principal_max:
            raise Refusal(INTERNAL_ERROR, "You have too many sessions: end one (DELETE) first.")
        if await count() >= limits.sessions_max:
            raise Refusal(INTERNAL_ERROR, "Too many sessions are in use: try again later.")

    def _hold(self, session: HttpSession) -> None:
        session.on_change = partial(self.save_settings, session)
        self._by_key[session.key] = session
        self._of_principal.setdefault(session.principal, {})[session.key] = session

    def _end_idle(self, sessions: dict[str, HttpSession]) -> None:
        idle = (each for each in sessions.values() if not each.is_at_work)
        oldest = min(idle, key=attrgetter("seen_at"), default=None)
        if oldest is None:
            raise Refusal(INTERNAL_ERROR, "Too many sessions are in use: try again later.")
        self._end_unused(oldest)

    def _end_unused(self, session: HttpSession) -> None:
        """End a session that is not in use here; in a shared journal it may be in use elsewhere."""
        if self.tell_others is None:
            self.end(session)
        else:
            self.unload(session)

    async def save_settings(self, session: HttpSession) -> None:
        """Store the log level and the subscriptions of a session, if the client changed them."""
        saved = self._saved.get(session.key)  # None where the session was ended meanwhile
        if saved is not None and (session.has_changed or session.level != saved.level):
            session.has_changed = False
            self._saving[session.key] += 1
            try:
                await self._committer.settled(self._save(session))
            finally:
                self._saving -= Counter([session.key])
            if self.tell_others is not None:
                await self.tell_others(session.key, False)

    def _save(self, session: HttpSession) -> SaveSession:
        record = self._saved[session.key] = session.record()
        return SaveSession(record)

    async def close(self, session: HttpSession) -> None:
        """End a session for its client.

        Raises `Refusal` where the journal takes nothing, and `Unavailable`.
        """
        self._committer.check(is_freeing=True)
        if self.tell_others is not None:
            await self._journal.session(session.key)  # is the store there?
        self.end(session)
        await self._committer.settled()
        if self.tell_others is not None:
            await self.tell_others(session.key, True)

    def end(self, session: HttpSession) -> None:
        """Forget a session and close its connections. `on_end` decides about its streams.

        It may be over already: a client may have ended it twice at once.
        """
        self._ending[session.key] += 1
        self._committer.when_settled(partial(self._ended, session.key), DropSession(session.key))
        if (held := self._by_key.get(session.key)) is not None:
            self._end_here(held)

    def _ended(self, key: str) -> None:
        self._ending -= Counter([key])

    def _end_here(self, session: HttpSession) -> None:
        self._leave(session)
        self._on_end(session)
        session.end()

    def _leave(self, session: HttpSession) -> None:
        if session.standing is not None:
            session.standing.cancel()
        for delivery in list(session.deliveries):
            delivery.connection.hang_up()
        self._by_key.pop(session.key, None)
        self._saved.pop(session.key, None)
        self._doubtful.pop(session.key, None)
        theirs = self._of_principal.get(session.principal, {})
        if theirs.pop(session.key, None) and not theirs:
            del self._of_principal[session.principal]
        for named in session.streams.values():
            self._given[named.stream].holders.discard(session)

    def __iter__(self) -> Iterator[HttpSession]:
        return iter(list(self._by_key.values()))

    def _idle(self, now: float) -> list[HttpSession]:
        idle, too_old = [], now - self._limits.session_idle_s
        for session in self._by_key.values():
            if session.seen_at >= too_old:
                break
            if not session.is_at_work:
                idle.append(session)
        return idle

    # Event ids

    def event_ids(self, session: HttpSession, last_event_id: str | None) -> "SessionEventIds":
        """The event ids of one request of a session, which has this `Last-Event-ID`."""
        return SessionEventIds(self, session, last_event_id)

    def grant(self, session: HttpSession, delivery: Delivery, key: str) -> bytes:
        """Let the session resume this delivery; see `EventIds.grant`.

        `key` is that of the request's `Last-Event-ID`, if it has one.
        """
        # A response that continues has a name already, which takes a keyed hash to make.
        named = session.streams.get(key) if delivery.granted is not None else None
        if named is None or named.stream != delivery.stream.id:
            named = self._name(session, delivery.stream.id)
        if delivery.granted is None:
            if delivery.reply_id is None:
                delivery.granted = named.granted[""] = Granted(None)
            else:
                delivery.granted = self._grant(session, named, delivery, delivery.reply_id)
        name = delivery.granted.name
        return f"{named.key}_%d{name and '_'}{name}".encode()

    def _name(self, session: HttpSession, stream_id: str) -> _Named:
        given = self._give(stream_id)
        named = session.streams.get(given.keys[-1]) or _Named(stream_id)
        named.key = given.keys[0]
        session.streams |= dict.fromkeys(given.keys, named)
        given.holders.add(session)
        return named

    def _give(self, stream_id: str) -> _Given:
        given = self._given.setdefault(stream_id, _Given())
        given.keys = tuple(dict.fromkeys([*self._keyring.event_keys(stream_id), *given.keys]))
        return given

    def _grant(
        self, session: HttpSession, named: _Named, delivery: Delivery, reply_id: RequestId
    ) -> Granted:
        """Let the session resume this delivery, and hold that back until the grant is durable."""
        name = new_request_id()
        takes_over, start = delivery.takes_over, delivery.start
        grant = Grant(session.key, name, named.stream, reply_id, takes_over, start)
        granted = named.granted[name] = Granted(
            grant, is_call=delivery.is_call, is_wait=delivery.is_wait
        )
        delivery.is_granted = False
        self._committer.add(SaveGrant(grant))
        resumes = list(filter(None, named.granted))
        if len(resumes) > GRANTS_MAX:
            del named.granted[resumes[0]]
            self._committer.add(DropGrant(session.key, resumes[0]))
        self._committer.when_settled(delivery.allow)
        return granted

    def parse(self, session: HttpSession, event_id: str) -> EventId:
        """Resolve an event id. Raises `Refusal` where this session was never given it."""
        match = _EVENT_ID.fullmatch(event_id)
        named = self._named(session, match[1]) if match else None
        granted = named.granted.get(match[3] or "") if match and named else None
        if match is None or named is None or granted is None:
            raise Refusal(
                INVALID_PARAMS,
                "Unknown Last-Event-ID: send the id of an event that this session has received.",
            )
        return EventId(named.stream, int(match[2]), granted, bool(match[4]))

    def _named(self, session: HttpSession, key: str) -> _Named | None:
        """The stream of a key that this session was given.

        After a restart, any session of the principal may claim the response to the original
        request: the first one that uses its event ids has it from then on.
        """
        stream = self._unclaimed.get(key)
        if stream is not None and stream.record.principal == session.principal:
            self._name(session, stream.id).granted.setdefault("", Granted(None))
        return session.streams.get(key)

    def cursor(self, stream_id: str, event_id: str | None) -> int | None:
        """The position in a stream that an event id, of any session, names."""
        match = _EVENT_ID.fullmatch(event_id or "")
        if match is None or match[1] not in self._keyring.event_keys(stream_id):
            return None
        return int(match[2])

    def forget(self, stream: Stream) -> None:
        """A stream has left memory, and with it the rights to resume it there."""
        if (given := self._given.pop(stream.id, None)) is not None:
            for key in given.keys:
                self._unclaimed.pop(key, None)
                for session in given.holders:
                    session.streams.pop(key, None)


class SessionEventIds:
    """The `EventIds` of one request of a session."""

    def __init__(self, sessions: Sessions, session: HttpSession, last: str | None) -> None:
        self._sessions = sessions
        self._session = session
        self._last = last

    def cursor(self, stream_id: str) -> int | None:
        return self._sessions.cursor(stream_id, self._last)

    def grant(self, delivery: Delivery) -> bytes:
        key = (self._last or "").partition("_")[0]
        return self._sessions.grant(self._session, delivery, key)


def parts_of(event_id: str) -> tuple[bytes, int]:
    """The name (`keys.name_of`) of the stream of an event id, and the seq; else nothing and 0."""
    match = _EVENT_ID.fullmatch(event_id)
    return (bytes.fromhex(match[1]), int(match[2])) if match else (b"", 0)


def new_session(caller: str | None = None) -> tuple[str, HttpSession]:
    """A new session of this caller, and its id for the client."""
    session_id = new_id()
    session = HttpSession(hashed(session_id), caller)
    session.began_at = trio.current_time()
    return session_id, session


def nameless(key: str) -> str:
    """The principal of a session without authentication."""
    return f"session({key})"
