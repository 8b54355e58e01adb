"""The calls and connections of a server, for those that look: the registry changes nothing.

A call that is in memory is read from the engine, any other one from the journal. So every journal
will do: a file, memory, or a store, whose replicas all see all calls. Without an engine, the
registry shows a journal alone.

Operators see the first letters of a streamId: with all of it, a client could resume a stream whose
caller is anonymous.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final, Literal, Protocol

import msgspec
import trio

from streams import messages
from streams.clock import wall
from streams.engine.connection import Connection, Delivery
from streams.engine.engine import Engine
from streams.engine.followed import FollowedStream
from streams.engine.lifecycle import Question
from streams.engine.remote import RemoteFollower
from streams.engine.stream import Stream
from streams.errors import Unavailable
from streams.journal.records import Outcome, Record
from streams.keys import SHOWN_LETTERS
from streams.messages import RequestId, Run
from streams.observe.lines import NULL
from streams.protocol.origin import tool_in

NAME_LETTERS_MAX: Final = 200  # of a tool or a principal
PAGE_MAX: Final = 1_000  # calls
# Calls that one request for a page looks at, where it wants few of them: about 100 ms, in pieces.
SCANNED_MAX: Final = 2_000
TEXT_LETTERS_MAX: Final = 200  # of a text that is looked for
SCANNED_AT_ONCE: Final = 100  # records in one read of the journal, in 3 to 6 ms

State = Literal["running", "asking", "stopped", "completed", "failed", "abandoned", "cancelled"]
"""`asking`: the call waits for its client's answer. `stopped`: it has not ended, and no process
runs it. `failed`: it ended with an error, or with a result that says `isError`."""

LIVE_STATES: Final[frozenset[State]] = frozenset(["running", "asking", "stopped"])

ANSWER_S: Final = 0.5  # other replicas have so long to answer; without one less is shown

_number = attrgetter("number")

_Known = dict[str, Stream | None]
"""The streams of other replicas' calls by their ids, as these know them; None without an answer."""


class Readable(Protocol):
    """The part of a `streams.journal.contract.Journal` that the registry reads."""

    async def find(self, stream: str) -> Record | None:
        """See `Lookups.find`."""

    async def newest(self, *, before: int | None = None, limit: int) -> Sequence[Record]:
        """See `Lookups.newest`."""

    async def beginning_with(self, prefix: str, *, limit: int) -> Sequence[str]:
        """See `Lookups.beginning_with`."""

    async def read(self, stream: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """See `Journal.read`."""


class OpenQuestion(msgspec.Struct, frozen=True, rename="camel"):
    """A request to the client that has no answer yet. `params` are as they were sent."""

    request_id: RequestId
    seq: int
    method: str
    params: msgspec.Raw


class CallView(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One call as operators see it. Times are wall-clock seconds since 1970.

    `numbered`, `durable`, `handed`, `written` and `delivered` are the marks of the stream;
    `written` is that of the attached connection. Bytes are None where they are not known.
    """

    id: str
    number: int
    tool: str  # or the method of a request that is no call of a tool
    principal: str
    state: State
    began_at: float
    ended_at: float | None
    numbered: int
    durable: int
    handed: int
    written: int | None
    delivered: int
    pending: int  # messages that the client has not confirmed
    pending_bytes: int | None
    questions: tuple[OpenQuestion, ...] = ()
    transport: str = ""  # of the attached connection; "" while none is attached
    connection: int | None = None  # its number
    expires_at: float | None = None  # None while a connection is attached
    is_in_memory: bool
    owner: str = ""  # the replica that runs it, in a shared journal
    # Whether its client is connected to another replica; None where that is not known.
    client_is_elsewhere: bool | None = None
    restarts: int | None = None  # None for a call that is not restarted when its server dies

    @property
    def is_attached(self) -> bool:
        """Whether a client is connected for it, at this process."""
        return self.connection is not None

    @property
    def is_elsewhere(self) -> bool:
        """Whether another replica runs it: it alone knows its client and open questions."""
        is_ours = self.is_in_memory or self.is_attached
        return self.state in LIVE_STATES and bool(self.owner) and not is_ours

    @property
    def is_client_unknown(self) -> bool:
        """Whether another replica runs it that has not told of its client."""
        return self.is_elsewhere and self.client_is_elsewhere is None


class ConnectionView(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """One open connection; over HTTP, one response. `client` is what the client calls itself."""

    number: int
    transport: str
    principal: str
    client: str
    opened_s: float  # ago
    calls: tuple[str, ...]  # the ids of those that are delivered over it
    unsent_bytes: int | None


class Counts(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The numbers of what lives in this process."""

    running: int
    asking: int  # of the running ones, those that wait for an answer
    attached: int
    ended: int  # in memory
    evicted: int
    pending: int  # messages, of all calls in memory
    pending_bytes: int
    uncounted: int  # of the pending messages, those whose bytes are not in `pending_bytes`
    questions: int
    connections: dict[str, int]  # by transport
    sessions: int  # over HTTP


class Page(msgspec.Struct, frozen=True, rename="camel"):
    """Some calls, the newest first. `before` leads to the next page; None behind the last one."""

    calls: tuple[CallView, ...]
    before: int | None


class Wanted(msgspec.Struct, frozen=True):
    """Which calls are wanted: all of them, those in some states, or those with a text.

    The text is looked for in the id, the tool and the principal, without regard to case.
    """

    states: frozenset[State] = frozenset()
    text: str = ""

    def has(self, call: CallView) -> bool:
        """Whether this call is wanted."""
        if self.states and call.state not in self.states:
            return False
        text = self.text.casefold()
        return not text or any(
            text in each.casefold() for each in (call.id, call.tool, call.principal)
        )


ALL: Final = Wanted()


class NoSuchCall(LookupError):
    """No call, or more than one, has an id that begins so. The message says what to do."""


class Registry:
    """The calls and connections of one process, and all calls of its journal."""

    def __init__(
        self,
        journal: Readable,
        engine: Engine | None = None,
        *,
        is_served: bool = True,
    ) -> None:
        """`is_served`: a process serves the journal, so calls that have not ended run."""
        self._journal = journal
        self._engine = engine
        # Calls in a shared journal run only while they have an owner.
        self._is_served = is_served and not (engine is not None and engine.index.is_shared)

    # In memory: this costs no read

    def live(self) -> Iterator[Stream]:
        """The streams in memory."""
        return iter(()) if self._engine is None else iter(self._engine.index)

    def here(self, stream_id: str) -> Stream | None:
        """The stream of this id, if it is in memory."""
        return None if self._engine is None else self._engine.here(stream_id)

    def connections(self) -> list[ConnectionView]:
        """The open connections, in the order of their arrival."""
        return [self._connection(each) for each in self._open]

    @property
    def _open(self) -> Collection[Connection]:
        return () if self._engine is None else self._engine.connections

    def connection(self, number: int) -> Connection | None:
        """The open connection of this number."""
        return next((each for each in self._open if each.number == number), None)

    def counts(self) -> Counts:
        """The numbers of what lives in this process. They take about 1 µs for each call."""
        running = asking = attached = ended = pending = size = uncounted = questions = 0
        for stream in self.live():
            state = stream.state
            if state.outcome is Outcome.LIVE:
                running += 1
                if state.questions:
                    asking += 1
                    questions += len(state.questions)
            else:
                ended += 1
            attached += stream.delivery is not None
            if not state.is_tombstone:
                pending += state.last - state.delivered
                size += state.kept_bytes
                uncounted += state.unmeasured
        by_transport: dict[str, int] = {}
        for connection in self._open:
            name = connection.transport
            by_transport[name] = by_transport.get(name, 0) + 1
        engine = self._engine
        return Counts(
            running=running,
            asking=asking,
            attached=attached,
            ended=ended,
            evicted=0 if engine is None else engine.index.evicted,
            pending=pending,
            pending_bytes=size,
            uncounted=uncounted,
            questions=questions,
            connections=by_transport,
            sessions=0 if engine is None else sum(1 for _ in engine.sessions),
        )

    # Calls, wherever they are

    async def calls(
        self, *, before: int | None = None, limit: int = 100, wanted: Wanted = ALL
    ) -> Page:
        """The newest calls with numbers below `before`.

        Where few are wanted, a page may have fewer than `limit` calls, or none, although more
        follow: `Page.before` tells.
        """
        limit = max(1, min(limit, PAGE_MAX))
        found: list[Stream | Record] = []
        known: _Known = {}
        scanned = 0
        while len(found) < limit and scanned < SCANNED_MAX:
            size = SCANNED_AT_ONCE
            if wanted is ALL:
                size = min(limit - len(found), size)
            some = await self._newest(before, size, wanted)
            scanned += len(some)
            if wanted.states:
                await self._ask(known, (each for each in some if _may_ask(each)))
            for each in some:
                before = each.number
                if wanted.has(self._view(each, known)):
                    found.append(each)
                    if len(found) == limit:
                        break
            if len(some) < size:
                if len(found) < limit:
                    before = None
                break
        await self._ask(known, found)
        return Page(tuple(self._view(each, known) for each in found), before)

    async def _ask(self, known: _Known, calls: Iterable[Stream | Record]) -> None:
        """Ask the owners of other replicas' calls that run how these are.

        They alone know open questions and clients. The answers of those that give one soon are
        added to `known`; none is asked twice.
        """
        asked = [
            each
            for each in calls
            if isinstance(each, Record)
            and each.owner
            and each.outcome is Outcome.LIVE
            and each.stream not in known
        ]
        if self._engine is None or not asked:
            return
        known.update(dict.fromkeys(each.stream for each in asked))
        with trio.move_on_after(ANSWER_S):
            async with trio.open_nursery() as nursery:
                for each in asked:
                    nursery.start_soon(self._ask_one, self._engine, known, each)

    @staticmethod
    async def _ask_one(engine: Engine, known: _Known, record: Record) -> None:
        with suppress(Unavailable):
            known[record.stream] = await engine.ask_owner(record)

    async def _newest(
        self, before: int | None, limit: int, wanted: Wanted
    ) -> list[Stream | Record]:
        """The newest calls, those in memory as streams."""
        here = (each for each in self.live() if before is None or each.number < before)
        newest: list[Stream | Record] = [*heapq.nlargest(limit, here, key=_number)]
        await trio.lowlevel.checkpoint()
        engine = self._engine
        # In a journal with one owner all calls that have not ended are in memory.
        is_alone = engine is not None and not engine.index.is_shared
        if not (is_alone and wanted.states and wanted.states <= LIVE_STATES):
            for record in await self._journal.newest(before=before, limit=limit):
                if engine is None or engine.index.get(record.stream) is None:
                    newest.append(record)
        return heapq.nlargest(limit, newest, key=_number)

    async def find(self, prefix: str) -> str:
        """The streamId that begins with `prefix`. Raises `NoSuchCall`.

        Without a limit, the letters that stay secret could be found by asking, one after the other.
        """
        if len(prefix) > SHOWN_LETTERS:
            raise NoSuchCall(f"Write {SHOWN_LETTERS} letters of an id at most.")
        found = {each.id for each in self.live() if each.id.startswith(prefix)}
        found.update(await self._journal.beginning_with(prefix, limit=2))
        if not found or not prefix:
            raise NoSuchCall(
                f"No call has an id that begins with {prefix}: mcp-streams ls lists them."
            )
        if len(found) > 1:
            raise NoSuchCall(f"Several calls have ids that begin with {prefix}: write more.")
        return found.pop()

    async def call(self, stream_id: str) -> CallView:
        """The call of a whole streamId. Raises `NoSuchCall`."""
        stream = None if self._engine is None else self._engine.index.get(stream_id)
        found: Stream | Record | None = stream or await self._journal.find(stream_id)
        if found is None:
            raise NoSuchCall(f"The call {stream_id[:SHOWN_LETTERS]} is forgotten.")
        known: _Known = {}
        await self._ask(known, [found])
        return self._view(found, known)

    async def record(self, stream_id: str) -> Record | None:
        """The record of a call as the journal has it; None where it has none yet, or no more."""
        return await self._journal.find(stream_id)

    async def runs(self, stream_id: str, after: int, *, bytes_max: int) -> Sequence[Run]:
        """The kept messages of a call behind `after`: see `Journal.read`."""
        record = await self._journal.find(stream_id)
        if record is None or record.outcome.is_tombstone:
            return ()
        after = max(after, record.trimmed)
        if after >= record.last:
            return ()
        return await self._journal.read(stream_id, after, bytes_max=bytes_max)

    # Views

    def _connection(self, connection: Connection) -> ConnectionView:
        session = connection.session
        client = session.client
        return ConnectionView(
            number=connection.number,
            transport=connection.transport,
            principal=session.principal[:NAME_LETTERS_MAX],
            client="" if client is None else client.info.name[:NAME_LETTERS_MAX],
            opened_s=max(0.0, trio.current_time() - connection.opened_at),
            calls=tuple(each.stream.id[:SHOWN_LETTERS] for each in connection.deliveries),
            unsent_bytes=connection.channel.unsent_bytes(),
        )

    def _view(self, found: Stream | Record, known: _Known) -> CallView:
        if not isinstance(found, Record):
            return self.view(found)
        asked = known.get(found.stream)
        if asked is None:
            return self._of_record(found, self.here(found.stream))
        if not isinstance(asked, FollowedStream):  # it was taken over meanwhile
            return self.view(asked)
        return self._of_asked(asked)

    def view(self, stream: Stream) -> CallView:
        """A stream in memory, as operators see it: its record knows less of what has happened."""
        state, delivery, deadline = stream.state, stream.delivery, stream.state.deadline
        live: State = "asking" if state.questions else "running"
        return msgspec.structs.replace(
            self._of_record(stream.record, stream),
            state=_state(state.outcome, live, has_failed=state.has_failed),
            ended_at=state.ended_at or None,
            numbered=state.last,
            durable=state.durable,
            handed=state.handed,
            written=None if delivery is None else max(0, delivery.written),
            delivered=state.delivered,
            pending=0 if state.is_tombstone else state.last - state.delivered,
            pending_bytes=None if state.unmeasured else state.kept_bytes,
            expires_at=None if deadline is None else wall() + deadline - trio.current_time(),
            is_in_memory=True,
            client_is_elsewhere=isinstance(delivery, RemoteFollower) and state.idle_since is None,
        )

    def _of_asked(self, asked: FollowedStream) -> CallView:
        """A call as another replica has just told it."""
        found, state = self._of_record(asked.record, asked), asked.state
        is_unknown = found.client_is_elsewhere is None
        return msgspec.structs.replace(
            found,
            numbered=state.durable,
            durable=state.durable,
            handed=state.handed,
            delivered=state.delivered,
            pending=0 if asked.record.outcome.is_tombstone else state.durable - state.delivered,
            client_is_elsewhere=is_unknown and asked.has_client,
        )

    def _of_record(self, record: Record, stream: Stream | None) -> CallView:
        """A call as its record has it. `stream` is the one of this process, if there is one."""
        connection = None if stream is None else connection_of(stream)
        questions = () if stream is None else tuple(map(_question, stream.state.questions.items()))
        live: State = "running" if self._is_served or record.owner else "stopped"
        if questions and live == "running":
            live = "asking"
        has_failed = 0 < record.last == record.last_error
        is_owned = bool(record.owner) and record.outcome is Outcome.LIVE
        return CallView(
            id=record.stream[:SHOWN_LETTERS],
            number=record.number,
            tool=_tool_of(record),
            principal=record.principal[:NAME_LETTERS_MAX],
            state=_state(record.outcome, live, has_failed=has_failed),
            began_at=record.created_at,
            ended_at=record.ended_at or None,
            numbered=record.last,
            durable=record.last,
            handed=record.last if record.is_read else record.acked,
            written=None,
            delivered=record.acked,
            pending=0 if record.outcome.is_tombstone else record.last - record.acked,
            pending_bytes=None,
            questions=questions,
            transport="" if connection is None else connection.transport,
            connection=None if connection is None else connection.number,
            expires_at=record.due_at,
            is_in_memory=False,
            owner=record.owner,
            client_is_elsewhere=None if connection is None and is_owned else False,
            restarts=None if record.restart is None else record.restart.attempts,
        )


def connection_of(stream: Stream) -> Connection | None:
    """The connection of this process that a stream is attached to."""
    delivery = stream.delivery
    return delivery.connection if isinstance(delivery, Delivery) else None


def _may_ask(call: Stream | Record) -> bool:
    """Whether a call of the journal may wait for an answer: it has sent a request."""
    return isinstance(call, Record) and call.last_request > 0


def _tool_of(record: Record) -> str:
    return tool_in(record.origin)[:NAME_LETTERS_MAX] or "unknown"


_STATES: Final[dict[Outcome, State]] = {
    Outcome.COMPLETED: "completed",
    Outcome.FAILED: "failed",
    Outcome.ABANDONED: "abandoned",
    Outcome.CANCELLED: "cancelled",
}


def _state(outcome: Outcome, live: State, *, has_failed: bool) -> State:
    """The state of a call. One whose result says `isError` has failed."""
    if outcome is Outcome.LIVE:
        return live
    return "failed" if outcome.is_end and has_failed else _STATES[outcome]


def _question(found: tuple[RequestId, Question]) -> OpenQuestion:
    request_id, question = found
    try:
        message = messages.look(question.line)
    except RecursionError:  # nested too deeply
        return OpenQuestion(request_id, question.seq, "", NULL)
    method = message.method if isinstance(message.method, str) else ""
    return OpenQuestion(request_id, question.seq, method, message.params)
