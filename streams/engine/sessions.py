"""Sessions over HTTP: who they are, what their event ids stand for, and that a restart keeps both.

A client's session outlives its connections and the server's process. Its id is a secret, of which
the journal has a hash. An event id names a stream, a place in it, and, where the response is that
of a resume, the grant of that delivery:

    <key>_<seq>            the response to the originating request
    <key>_<seq>_<grant>    the response to a resume

Either is followed by `.end` where the event said that nothing more will come of that response.
"""

import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Final
from weakref import WeakSet

import msgspec
import trio

from streams.clock import wall
from streams.engine.committer import Committer
from streams.engine.delivery import Delivery, Granted
from streams.engine.session import Session
from streams.engine.stream import Stream
from streams.errors import INTERNAL_ERROR, INVALID_PARAMS, Refusal
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
from streams.protocol import extension

GRANTS_MAX: Final = 16  # of one stream in one session; of more resumes, the oldest cannot go on
SEEN_EVERY_S: Final = 3600.0  # how late the journal may be with when a session was last used

END: Final = ".end"
_EVENT_ID: Final = re.compile(
    r"([0-9a-f]{32})_([0-9]{1,18})(?:_([A-Za-z0-9_-]{1,64}))?(\.end)?", re.ASCII
)


class EventId(msgspec.Struct, frozen=True):
    """What an event id stands for, in the session that it was given to."""

    stream: str
    seq: int
    granted: Granted
    is_end: bool


class HttpSession(Session):
    """One client's, over any number of requests: those of the caller who has begun it.

    Where nobody is asked who they are, whoever knows its id is its principal.
    """

    def __init__(self, key: str, caller: str | None = None) -> None:
        """`caller` is the principal of who begins it, where that is known."""
        super().__init__(caller or _nameless(key))
        self.is_anonymous = caller is None
        self._begun: WeakSet[Stream] = WeakSet()
        self.key = key
        self.seen_at = 0.0  # wall time; before it is kept, never
        self.streams: dict[str, _Named] = {}  # by the keys of their event ids
        self.standing: trio.CancelScope | None = None  # of the stream that belongs to no request

    @property
    def is_at_work(self) -> bool:
        """Whether the client waits for anything now."""
        return bool(self.deliveries or self.checking) or self.standing is not None

    def is_of(self, caller: str | None) -> bool:
        """Whether it is this caller's, or anonymous like them."""
        return self.is_anonymous if caller is None else self.principal == caller

    def has_begun(self, stream: Stream) -> bool:
        # What others have begun may have the same principal, and its requests the same ids. Of a
        # stream that comes from the journal only its principal is known.
        return self.is_anonymous or stream in self._begun

    def attach(self, delivery: Delivery) -> None:
        if delivery.reply_id is None:
            self._begun.add(delivery.stream)
        super().attach(delivery)

    def record(self) -> SessionRecord:
        """What is to be kept of it."""
        return SessionRecord(
            key=self.key,
            principal=self.principal,
            revision=self.revision or "",
            capabilities=msgspec.json.encode(self.capabilities),
            level=self.level,
            seen_at=self.seen_at,
        )

    @classmethod
    def of(cls, record: SessionRecord) -> "HttpSession":
        """What was kept."""
        is_anonymous = record.principal == _nameless(record.key)
        session = cls(record.key, None if is_anonymous else record.principal)
        session.revision = record.revision
        # A journal of before may have all that the client has sent.
        capabilities = msgspec.json.decode(record.capabilities, type=dict[str, Any])
        session.capabilities = extension.understood(capabilities)
        session.settings = extension.settings_of(session.capabilities)
        session.level = record.level
        session.seen_at = record.seen_at
        return session


class _Named:
    """A stream that a session was given event ids of."""

    __slots__ = ("granted", "key", "stream")

    def __init__(self, stream: str, key: str) -> None:
        self.stream = stream
        self.key = key  # the newest one
        # The responses, by the names of their grants; that to the originating request has none.
        self.granted: dict[str, Granted] = {}


class Sessions:
    """The sessions of one journal."""

    def __init__(
        self,
        committer: Committer,
        keyring: Keyring,
        limits: Limits,
        *,
        on_end: Callable[[HttpSession], None],
    ) -> None:
        self._on_end = on_end
        self._committer = committer
        self._keyring = keyring
        self._limits = limits
        self._by_key: dict[str, HttpSession] = {}  # the one that was used last is the last
        self._of_principal: dict[str, dict[str, HttpSession]] = {}  # of each, by their keys
        self._saved: dict[str, SessionRecord] = {}
        self._holders: dict[str, set[HttpSession]] = {}  # of event ids of each stream
        # Streams from the journal whose principal may have several sessions: which of them had the
        # response is not known. By the keys of their event ids, which one session was told.
        self._unclaimed: dict[str, Stream] = {}
        self._wall_ahead_s = wall() - trio.current_time()

    def _now(self) -> float:
        """Wall time, but for the steps of the clock since the start: they make nobody idle."""
        return trio.current_time() + self._wall_ahead_s

    def restore(
        self,
        records: Iterable[SessionRecord],
        grants: Iterable[Grant],
        streams: Iterable[Stream],
    ) -> None:
        """Take over what the journal has: of streams, those that are in memory."""
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
            self.remember(stream, granted.get(stream.id, ()))

    def remember(self, stream: Stream, grants: Iterable[Grant]) -> None:
        """A stream is in memory again: whoever could go on with it may do so."""
        principal = stream.record.principal
        for owner in self._of_principal.get(principal, {}).values():
            if owner.is_anonymous:
                self._name(owner, stream.id).granted[""] = Granted(None)
            else:
                self._unclaimed |= dict.fromkeys(self._keyring.event_keys(stream.id), stream)
                break
        for grant in grants:
            if session := self._by_key.get(grant.session):
                self._name(session, stream.id).granted[grant.delivery] = Granted(grant)

    # Sessions

    def find(self, session_id: str, caller: str | None = None) -> HttpSession | None:
        """This caller's session of this id, which is in use now; ends those that nobody has used
        for long.
        """
        for session in self._idle():
            self.end(session)
        key = hashed(session_id)
        found = self._by_key.get(key)
        if found is None or not found.is_of(caller):
            return None
        self._by_key[key] = self._by_key.pop(key)
        found.seen_at = self._now()
        if found.seen_at - self._saved[key].seen_at >= SEEN_EVERY_S:
            self._committer.add(self._save(found))
        return found

    async def add(self, session: HttpSession) -> None:
        """Keep a session. Raises `Refusal` where there are too many, or the journal takes none."""
        self._committer.check()
        theirs = self._of_principal.get(session.principal, {})
        # Who has too many gives up one of their own, and nobody else's.
        if len(theirs) >= self._limits.sessions_per_principal_max:
            self._end_idle(theirs)
        elif len(self._by_key) >= self._limits.sessions_max:
            self._end_idle(self._by_key)
        session.seen_at = self._now()
        self._hold(session)
        await self._committer.settled(self._save(session))

    def _hold(self, session: HttpSession) -> None:
        self._by_key[session.key] = session
        self._of_principal.setdefault(session.principal, {})[session.key] = session

    def _end_idle(self, sessions: dict[str, HttpSession]) -> None:
        idle = (each for each in sessions.values() if not each.is_at_work)
        oldest = min(idle, key=attrgetter("seen_at"), default=None)
        if oldest is None:
            raise Refusal(INTERNAL_ERROR, "Too many sessions are in use: try again later.")
        self.end(oldest)

    async def save_level(self, session: HttpSession) -> None:
        """Keep the level of its log: the one thing that a client may change later."""
        saved = self._saved.get(session.key)  # None: it was ended meanwhile
        if saved is not None and session.level != saved.level:
            await self._committer.settled(self._save(session))

    def _save(self, session: HttpSession) -> SaveSession:
        record = self._saved[session.key] = session.record()
        return SaveSession(record)

    async def close(self, session: HttpSession) -> None:
        """End a session for its client. Raises `Refusal` where the journal takes nothing."""
        self._committer.check()
        self.end(session)
        await self._committer.settled()

    def end(self, session: HttpSession) -> None:
        """Forget a session and hang up on it; streams whose tokens it was told live on."""
        if session.standing is not None:
            session.standing.cancel()
        for delivery in list(session.deliveries):
            delivery.connection.hang_up()
        self._by_key.pop(session.key, None)
        self._saved.pop(session.key, None)
        theirs = self._of_principal.get(session.principal, {})
        if theirs.pop(session.key, None) and not theirs:
            del self._of_principal[session.principal]
        for named in session.streams.values():
            self._holders[named.stream].discard(session)
        self._committer.add(DropSession(session.key))
        self._on_end(session)

    def _idle(self) -> list[HttpSession]:
        idle, too_old = [], self._now() - self._limits.session_idle_s
        for session in self._by_key.values():
            if session.seen_at >= too_old:
                break
            if not session.is_at_work:
                idle.append(session)
        return idle

    # Event ids

    def name(self, session: HttpSession, delivery: Delivery) -> tuple[str, str]:
        """What the ids of a delivery's events begin and end with."""
        named = self._name(session, delivery.stream.id)
        if delivery.granted is None:
            if delivery.reply_id is None:
                delivery.granted = named.granted[""] = Granted(None)
            else:
                delivery.granted = self._grant(session, named, delivery, delivery.reply_id)
        return named.key, delivery.granted.name

    def _name(self, session: HttpSession, stream_id: str) -> _Named:
        keys = self._keyring.event_keys(stream_id)
        named = session.streams.get(keys[0])
        if named is None:
            named = _Named(stream_id, keys[0])
            session.streams |= dict.fromkeys(keys, named)
            self._holders.setdefault(stream_id, set()).add(session)
        return named

    def _grant(
        self, session: HttpSession, named: _Named, delivery: Delivery, reply_id: RequestId
    ) -> Granted:
        """Let the session continue this delivery; it must not hear of it before that is durable."""
        name = new_request_id()
        takes_over, start = delivery.takes_over, delivery.start
        grant = Grant(session.key, name, named.stream, reply_id, takes_over, start)
        granted = named.granted[name] = Granted(grant, is_call=delivery.is_call)
        delivery.is_granted = False
        self._committer.add(SaveGrant(grant))
        resumes = list(filter(None, named.granted))
        if len(resumes) > GRANTS_MAX:
            del named.granted[resumes[0]]
            self._committer.add(DropGrant(session.key, resumes[0]))
        self._committer.when_settled(delivery.allow)
        return granted

    def parse(self, session: HttpSession, event_id: str) -> EventId:
        """What an event id stands for. Raises `Refusal` where it is none of this session's."""
        match = _EVENT_ID.fullmatch(event_id)
        named = self._named(session, match[1]) if match else None
        granted = named.granted.get(match[3] or "") if match and named else None
        if match is None or named is None or granted is None:
            raise Refusal(
                INVALID_PARAMS,
                "This Last-Event-ID is none that this session was given: send one that is.",
            )
        return EventId(named.stream, int(match[2]), granted, bool(match[4]))

    def _named(self, session: HttpSession, key: str) -> _Named | None:
        """What a key stands for that this session was given, or another one of its principal's that
        nobody knows any more: then it is this one's from now on.
        """
        stream = self._unclaimed.get(key)
        if stream is not None and stream.record.principal == session.principal:
            self._name(session, stream.id).granted.setdefault("", Granted(None))
        return session.streams.get(key)

    def cursor(self, stream_id: str, event_id: str | None) -> int | None:
        """Up to where an event id, of any session, says that the client has a stream."""
        match = _EVENT_ID.fullmatch(event_id or "")
        if match is None or match[1] not in self._keyring.event_keys(stream_id):
            return None
        return int(match[2])

    def forget(self, stream: Stream) -> None:
        """The stream is in memory no more, and nor is who may go on with it."""
        keys = self._keyring.event_keys(stream.id)
        for key in keys:
            self._unclaimed.pop(key, None)
        for session in self._holders.pop(stream.id, ()):
            for key in keys:
                session.streams.pop(key, None)


def name_in(event_id: str) -> bytes:
    """The name of the stream that an event id stands for (`keys.name_of`), if it is one."""
    match = _EVENT_ID.fullmatch(event_id)
    return bytes.fromhex(match[1]) if match else b""


def new_session(caller: str | None = None) -> tuple[str, HttpSession]:
    """A session of this caller, and the id that the client must know it by."""
    session_id = new_id()
    return session_id, HttpSession(hashed(session_id), caller)


def _nameless(key: str) -> str:
    """The principal of whoever knows a session's id."""
    return f"session({key})"
