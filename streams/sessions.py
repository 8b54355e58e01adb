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
from typing import Any, Final

import msgspec
import trio

from streams import extension
from streams.clock import wall
from streams.committer import Committer
from streams.delivery import Delivery, Granted
from streams.errors import INTERNAL_ERROR, INVALID_PARAMS, Refusal
from streams.grants import DropGrant, DropSession, Grant, SaveGrant, SaveSession, SessionRecord
from streams.keys import Keyring, hashed, new_id, new_request_id
from streams.limits import Limits
from streams.messages import RequestId
from streams.session import Session
from streams.stream import Stream

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
    """One client's, over any number of requests."""

    outlives_connections = True

    def __init__(self, key: str) -> None:
        super().__init__(f"session({key})")
        self.key = key
        self.seen_at = 0.0  # wall time; before it is kept, never
        self.streams: dict[str, _Named] = {}  # by the keys of their event ids
        self.standing: trio.CancelScope | None = None  # of the stream that belongs to no request

    @property
    def is_at_work(self) -> bool:
        """Whether the client waits for anything now."""
        return bool(self.deliveries) or self.standing is not None

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
        session = cls(record.key)
        session.principal = record.principal
        session.revision = record.revision
        session.capabilities = msgspec.json.decode(record.capabilities, type=dict[str, Any])
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
        self._by_principal: dict[str, HttpSession] = {}
        self._saved: dict[str, SessionRecord] = {}
        self._holders: dict[str, set[HttpSession]] = {}  # of event ids of each stream
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
            self._by_key[session.key], self._saved[session.key] = session, session.record()
            self._by_principal[session.principal] = session
        granted: dict[str, list[Grant]] = {}
        for grant in grants:
            granted.setdefault(grant.stream, []).append(grant)
        for stream in streams:
            self.remember(stream, granted.get(stream.id, ()))

    def remember(self, stream: Stream, grants: Iterable[Grant]) -> None:
        """A stream is in memory again: whoever could go on with it may do so."""
        if owner := self._by_principal.get(stream.record.principal):
            self._name(owner, stream.id).granted[""] = Granted(None)
        for grant in grants:
            if session := self._by_key.get(grant.session):
                self._name(session, stream.id).granted[grant.delivery] = Granted(grant)

    # Sessions

    def find(self, session_id: str) -> HttpSession | None:
        """The session of this id, which is in use now; ends those that nobody has used for long."""
        for session in self._idle():
            self.end(session)
        key = hashed(session_id)
        found = self._by_key.pop(key, None)
        if found is not None:
            self._by_key[key] = found
            found.seen_at = self._now()
            if found.seen_at - self._saved[key].seen_at >= SEEN_EVERY_S:
                self._committer.add(self._save(found))
        return found

    async def add(self, session: HttpSession) -> None:
        """Keep a session. Raises `Refusal` where there are too many, or the journal takes none."""
        self._committer.check()
        if len(self._by_key) >= self._limits.sessions_max:
            idle = next((each for each in self._by_key.values() if not each.is_at_work), None)
            if idle is None:
                raise Refusal(INTERNAL_ERROR, "Too many sessions are in use: try again later.")
            self.end(idle)
        session.seen_at = self._now()
        self._by_key[session.key] = session
        self._by_principal[session.principal] = session
        await self._committer.settled(self._save(session))

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
        self._by_principal.pop(session.principal, None)
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
        named = session.streams.get(match[1]) if match else None
        granted = named.granted.get(match[3] or "") if match and named else None
        if match is None or named is None or granted is None:
            raise Refusal(
                INVALID_PARAMS,
                "This Last-Event-ID is none that this session was given: send one that is.",
            )
        return EventId(named.stream, int(match[2]), granted, bool(match[4]))

    def cursor(self, stream_id: str, event_id: str | None) -> int | None:
        """Up to where an event id, of any session, says that the client has a stream."""
        match = _EVENT_ID.fullmatch(event_id or "")
        if match is None or match[1] not in self._keyring.event_keys(stream_id):
            return None
        return int(match[2])

    def forget(self, stream: Stream) -> None:
        """The stream is in memory no more, and nor is who may go on with it."""
        for session in self._holders.pop(stream.id, ()):
            for key in self._keyring.event_keys(stream.id):
                session.streams.pop(key, None)


def name_in(event_id: str) -> bytes:
    """The name of the stream that an event id stands for (`keys.name_of`), if it is one."""
    match = _EVENT_ID.fullmatch(event_id)
    return bytes.fromhex(match[1]) if match else b""


def new_session() -> tuple[str, HttpSession]:
    """A session, and the id that the client must know it by."""
    session_id = new_id()
    return session_id, HttpSession(hashed(session_id))
