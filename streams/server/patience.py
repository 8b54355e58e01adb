"""Patience: for hosts that stop waiting for a call, and whose models then call again.

`Patience` is a layer around any backend. A call that has not ended after `patience_s` is answered
with an *interim answer*: a normal result that tells a short name of the call. The journal does not
have it. The call's stream goes on without a client. `wait_for_call`, a tool that is added to the
listing, delivers the rest of it under the id of its own request. `list_calls` shows the calls of
the caller's principal. A call that is made `once` joins the same call that runs already, and a
client that cancels because of its own timeout leaves the call running.

A client that joins a call which another client waits for has a stream of its own. That *follows*
the first: it ends with the same result. So each client may cancel, or get an interim answer, by
itself. The call that they share goes on until all have cancelled.

A client that has declared a dialect of the proposals, or positions, waits by itself and can resume.
It gets no interim answers.

Short names are made from stream ids, so a restarted server knows them. They lead only to calls of
the caller's own principal.

This is one file because each part relies on the others: what is left must be found, and what is
found is answered in time.
"""

import hashlib
import itertools
import math
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Literal

import msgspec
import trio

from streams import messages
from streams.clock import WallAhead, wall
from streams.engine.connection import Connection, Delivery, Session
from streams.engine.deadlines import Deadlines
from streams.engine.engine import StreamHandler
from streams.engine.followed import FollowedStream
from streams.engine.lifecycle import ProgressToken
from streams.engine.operations import Operations, check_free, latest_progress
from streams.engine.retry import patiently
from streams.engine.stream import Reader, Stream
from streams.errors import Fenced, JournalError, Refusal, Unavailable, refusal
from streams.exchange import Scopes
from streams.journal.records import Outcome, Record
from streams.logs import log
from streams.messages import Message, RequestId
from streams.protocol.listings import HINTED, ListedTool, matches, tools_on
from streams.protocol.vocabulary import read_params
from streams.server.backend import (
    Backend,
    CallTool,
    Guest,
    Received,
    Run,
    SessionInfo,
    Standing,
    ToolTraits,
)
from streams.server.tools import error_result

CALL: Final = "mcp-streams/call"  # in the `_meta` of an interim answer: the short name

# How long a call without a client is kept: a working day and the night after it.
KEPT_S: Final = 86_400.0
ONCE_S: Final = 600.0  # how long after its end a call answers the same call
WAIT_S: Final = 45.0  # of `wait_for_call`, unless its caller says otherwise: hosts wait for 60 s
FIND_S: Final = 1.0  # for a call to be found, even if its client wants to wait for less
SETTLE_S: Final = 0.5  # for the messages before an interim answer to be written
RETRY_S: Final = 1.0  # before an interim answer is tried again
FOLLOW_S: Final = 1.0  # between looks at the progress and the questions of a call that is followed
HANDOVER_S: Final = 1.0  # for a result that is being delivered, before another delivery of it
LISTED_MAX: Final = 50  # calls in the answer of `list_calls`
ARGUMENTS_BYTES: Final = 100  # of a call in that answer
TOOLS_MAX: Final = 10_000  # of a backend whose names are remembered
CANCELLED_MAX: Final = 1_000  # calls that are remembered as cancelled after they were told of

_NAME_LETTERS: Final = 4  # of a short name, or more where two calls would share it
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's: no I, L, O, U
_ALIKE: Final = str.maketrans("OIL", "011")

_WAIT: Final = "wait_for_call"
_LIST: Final = "list_calls"
_PREFIX: Final = "mcp_streams_"  # of our tools where the backend has tools of their names
_TOOLS_LIST: Final = "tools/list"

# The reasons that clients give: "McpError: MCP error -32001: Request timed out" (TypeScript SDK 1),
# "SdkError: Request timed out" (2), "timed out after 2.0s" (Python SDK), "TimeoutError: The
# operation was aborted due to timeout" (AbortSignal.timeout), "context deadline exceeded" (Go).
_TIMEOUT: Final = re.compile(r"time[ds]?[\s_-]*out|deadline|-32001", re.IGNORECASE)

KeepCancelled = Literal["timeout", "always", "never"]
_KEEP_CANCELLED: Final = ("timeout", "always", "never")


class PatienceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server serves clients that do not wait for long. By default as any MCP server.

    `patience_s` is after how many seconds a call gets an interim answer; None for never. `once` are
    patterns of the names of tools (`*`, `?`, `[…]`), or "hinted" for the tools with `readOnlyHint`
    or `idempotentHint`: the same call of these runs once, until ten minutes after its end.
    `keep_cancelled`: a call that its client cancels goes on where the reason speaks of a timeout,
    always, or never. Raises `ValueError` for other values.
    """

    patience_s: float | None = None
    once: tuple[str, ...] = ()
    keep_cancelled: KeepCancelled = "never"

    def __post_init__(self) -> None:
        if self.patience_s is not None and not 0 < self.patience_s < KEPT_S:
            raise ValueError(
                f"patience_s must be above 0 and below {KEPT_S:g}, not {self.patience_s}"
            )
        if isinstance(self.once, str) or not all(self.once):
            raise ValueError(f"once must be patterns of names of tools, not {self.once!r}")
        if self.keep_cancelled not in _KEEP_CANCELLED:
            raise ValueError(
                f"keep_cancelled must be one of {', '.join(_KEEP_CANCELLED)}, "
                f"not {self.keep_cancelled!r}"
            )

    @property
    def is_on(self) -> bool:
        """Whether anything differs from any MCP server."""
        return self.patience_s is not None or bool(self.once) or self.keep_cancelled != "never"

    def keeps(self, reason: Any) -> bool:
        """Whether a call goes on that its client cancels for this reason."""
        if self.keep_cancelled == "timeout":
            return isinstance(reason, str) and _TIMEOUT.search(reason) is not None
        return self.keep_cancelled == "always"


class _WaitFor(msgspec.Struct):
    """The arguments of `wait_for_call`."""

    call: str
    wait_s: float = WAIT_S


class _Cursor(msgspec.Struct):
    cursor: str | None = None


class _Progress(msgspec.Struct):
    progress: float
    total: float | None = None
    message: str | None = None


class _Asked(msgspec.Struct, eq=False):
    """The newest request for a running call: the call itself, or one that joined it."""

    stream: Stream
    client: Reader | None = None
    request_id: RequestId | None = None
    due_at: float = math.inf  # in trio's time
    # The names of two clients that had an interim answer: there is one besides any client then.
    told: set[str] = msgspec.field(default_factory=set)
    followers: set[Stream] = msgspec.field(default_factory=set)
    has_begun: bool = False  # its handler runs, and removes it
    is_unwanted: bool = False  # its own client has cancelled, and only followers want it
    ended: trio.Event = msgspec.field(default_factory=trio.Event)
    response: tuple[bytes, bool] | None = None
    failure: Refusal | None = None

    @property
    def is_void(self) -> bool:
        """Whether its handler will never run."""
        return not self.has_begun and self.stream.state.outcome is not Outcome.LIVE

    @property
    def deadline(self) -> float:
        """When it gets an interim answer."""
        return self.due_at


class _Kept(msgspec.Struct, frozen=True):
    """A call of a principal that the server keeps, for a listing."""

    stream: str
    tool: str
    arguments: str  # the beginning
    created_at: float
    state: str
    progress: str = ""


class Patience:
    """A backend with patience, around another backend."""

    def __init__(self, backend: Backend, settings: PatienceSettings) -> None:
        self.settings = settings
        self.backend = backend
        self.operations: Operations  # of the engine; set when that is open
        # The tools in the listings of the backend, and whether their hints allow a second run.
        self.tools: dict[str, bool] = {}
        self._patience_s = math.inf if settings.patience_s is None else settings.patience_s
        self._asked: dict[Stream, _Asked] = {}
        self._leaders: dict[Stream, _Asked] = {}  # of the streams that follow a call
        self._cancelled: dict[tuple[str, str], None] = {}  # principals, letters; the oldest first
        # When calls that run once have ended, in trio's time; by their streams, the oldest first.
        self._ended: dict[str, float] = {}
        self._deadlines: Deadlines[_Asked] = Deadlines(self._due)
        self._nursery: trio.Nursery
        self._wall_ahead_s = WallAhead(trio.current_time)

    # The backend

    @property
    def running_tools(self) -> Sequence[str]:
        return self.backend.running_tools

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self.backend.running(), trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._deadlines.run)
            yield
            self._nursery.cancel_scope.cancel()

    @property
    def passes_page_tokens(self) -> bool:
        return self.backend.passes_page_tokens

    def delivers(self, method: str) -> bool:
        return self.backend.delivers(method)

    async def open(self, session: SessionInfo, standing: Standing) -> "PatientGuest":
        return PatientGuest(self, await self.backend.open(session, standing), standing)

    def reopen(self, session: SessionInfo, standing: Standing) -> "PatientGuest":
        return PatientGuest(self, self.backend.reopen(session, standing), standing)

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        handler = self.backend.restart_handler(stream)
        return None if handler is None else self.watched(handler, trio.current_time())

    # Interim answers

    def watched(self, handler: StreamHandler, began_at: float) -> StreamHandler:
        """The same handler; its client gets an interim answer if it runs for too long."""
        due_at = began_at + self._patience_s

        async def handle(stream: Stream) -> tuple[bytes, bool]:
            delivery = stream.delivery
            request_id = None if delivery is None else delivery.taker.waiting_id
            client = None if delivery is None else delivery.reader
            asked = self._asked.setdefault(stream, _Asked(stream))
            asked.has_begun = True
            asked.client, asked.request_id, asked.due_at = client, request_id, due_at
            stream.on_attach, stream.on_displace = self._attached, self._displaced
            self._deadlines.watch(asked)
            try:
                asked.response = response = await handler(stream)
            except Refusal as failure:
                asked.failure = failure
                raise
            else:
                return response
            finally:
                asked.ended.set()
                if asked.told and stream.state.outcome is Outcome.CANCELLED:
                    self._note_cancelled(stream)
                stream.on_attach = stream.on_displace = None
                self._deadlines.forget(asked)
                self._asked.pop(stream, None)
                if stream.mark is not None and stream.mark.is_once:
                    self._note_end(stream)

        return handle

    def _note_end(self, stream: Stream) -> None:
        now = trio.current_time()
        self._ended[stream.id] = now
        for each in list(itertools.takewhile(lambda e: now - self._ended[e] > ONCE_S, self._ended)):
            del self._ended[each]

    def _note_cancelled(self, stream: Stream) -> None:
        self._cancelled[stream.record.principal, _code(stream.id)] = None
        if len(self._cancelled) > CANCELLED_MAX:
            del self._cancelled[next(iter(self._cancelled))]

    def _age_s(self, stream: Stream) -> float:
        """How long ago a call has ended; 0 while it runs."""
        if not stream.state.is_ended:
            return 0.0
        if (ended_at := self._ended.get(stream.id)) is not None:
            return trio.current_time() - ended_at
        return wall() - stream.state.ended_at  # elsewhere, or long ago

    def _attached(self, stream: Stream) -> None:
        """A client follows a running call. Each request has patience of its own, from its begin."""
        asked, delivery = self._asked[stream], stream.delivery
        assert delivery is not None
        request_id = delivery.taker.waiting_id
        if (asked.client, asked.request_id) != (delivery.reader, request_id):
            asked.client, asked.request_id = delivery.reader, request_id
            wait_s = math.inf if delivery.wait_s is None else max(0.0, delivery.wait_s)
            asked.due_at = trio.current_time() + min(self._patience_s, wait_s)
        asked.is_unwanted = False
        self._deadlines.watch(asked)

    def _due(self, asked: _Asked) -> None:
        delivery = asked.stream.delivery
        if delivery is not None and delivery.only_waits:
            self._nursery.start_soon(self._answer, asked)

    async def _answer(self, asked: _Asked) -> None:
        """Give the interim answer, or try again where the journal takes or tells nothing now."""
        try:
            await self._answer_once_durable(asked)
        except JournalError as trouble:
            log.info("an interim answer is late", why=str(trouble))
            if self._asked.get(asked.stream) is asked:
                asked.due_at = trio.current_time() + RETRY_S
                self._deadlines.watch(asked)

    async def _answer_once_durable(self, asked: _Asked) -> None:
        """Give the interim answer, when the call is durable and what it has sent is written."""
        stream = asked.stream
        await stream.recorded()
        with trio.move_on_after(SETTLE_S):
            await stream.flush()
            await stream.written(stream.state.last)
        name = await self._name(stream)
        is_awaited = self._asked.get(stream) is asked and asked.due_at <= trio.current_time()
        if is_awaited and not stream.state.is_ended:
            self._dismiss(stream, name)

    def _dismiss(self, stream: Stream, name: str) -> None:
        """Answer the client that waits for a running call, which goes on without it."""
        delivery = stream.delivery
        if delivery is not None and delivery.only_waits:
            interim = self._interim(_told(stream), name)
            asked = self._asked.get(stream)
            if asked is not None and len(asked.told) < 2:
                asked.told.add(delivery.reader.name)
            stream.leave()
            delivery.answer(messages.result(delivery.taker.waiting_id, interim))

    def _displaced(self, stream: Stream) -> None:
        """A client that waits at another replica displaces the one that is attached."""
        if stream.short_name and not stream.state.is_ended:
            self._dismiss(stream, stream.short_name)

    def _interim(self, told: str, name: str) -> dict[str, Any]:
        how = f'Call `{self.name_of(_WAIT)}` with call="{name}" to get the result; it is not lost.'
        return _text(f"{told} {how}") | {"_meta": {CALL: name}}

    # Our tools

    def name_of(self, tool: str) -> str:
        """The name of one of our tools, beside the tools of the backend."""
        while tool in self.tools:
            tool = _PREFIX + tool
        return tool

    async def answers(
        self, guest: Guest, received: Received, params: CallTool, connection: Connection
    ) -> bool:
        """Answer a call of one of our own tools. False, and nothing done, for any other tool.

        Raises `Refusal`.
        """
        assert isinstance(guest, PatientGuest)
        tool = guest.own_tool(params.name)
        if tool is None:
            return False
        request_id, session = received.message.id, received.session
        assert isinstance(request_id, int | str)
        check_free(session, request_id)
        answer: dict[str, Any] | None
        if tool == _LIST:
            answer = await self._list(session.principal)
        else:
            token = params.meta.progress_token
            answer = await self._wait(guest, params, connection, request_id, token)
        if answer is not None:
            connection.reply(messages.result(request_id, answer))
        return True

    async def _list(self, principal: str) -> dict[str, Any]:
        found = await self.operations.calls(principal)
        ids = [_id_of(each) for each in found]
        newest = filter(None, map(_kept_of, reversed(found)))
        kept = list(itertools.islice(newest, LISTED_MAX))
        if not kept:
            return _text("No calls of yours are kept.") | {"structuredContent": {"calls": []}}
        now, lines, calls = trio.current_time() + self._wall_ahead_s(), [], []
        for each in kept:
            name, age_s = _name(each.stream, ids), max(0.0, now - each.created_at)
            state = each.state + (each.progress and f" ({each.progress})")
            lines.append(f"- {name}: {each.tool} {each.arguments}, {_age(age_s)} ago: {state}")
            calls.append(
                {
                    "call": name,
                    "tool": each.tool,
                    "arguments": each.arguments,
                    "ageS": round(age_s, 1),
                    "state": each.state,
                    "progress": each.progress,
                }
            )
        if next(newest, None) is not None:
            lines.append("- and older ones")
        lines.append(f"Call `{self.name_of(_WAIT)}` with one of these names to get its result.")
        return _text("\n".join(lines)) | {"structuredContent": {"calls": calls}}

    async def _wait(
        self,
        guest: "PatientGuest",
        params: CallTool,
        connection: Connection,
        request_id: RequestId,
        token: ProgressToken | None,
    ) -> dict[str, Any] | None:
        """Deliver a call. Returns an answer instead, where it cannot be delivered."""
        try:
            asked = messages.decode(params.given, _WaitFor)
        except ValueError as error:
            return error_result(f"Bad arguments for {params.name}: {error}")
        principal = connection.session.principal
        stream = None
        with trio.move_on_after(min(self._patience_s, max(FIND_S, asked.wait_s))) as finding:
            stream = await self._find(principal, asked.call)
        if finding.cancelled_caught:
            silent = "The server process that runs this call does not answer now."
            return self._interim(silent, asked.call)
        if stream is None and self._was_cancelled(principal, asked.call):
            return error_result(f"Call {asked.call[:40]!r} was cancelled: make it again.")
        if stream is None:
            return error_result(
                f"No call {asked.call[:40]!r} of yours is kept: "
                f"`{self.name_of(_LIST)}` shows those that are."
            )
        guest.check_resume(stream.record.origin, connection.channel.scopes)
        if stream.is_taken:
            # It must not lose its place: it has patience of its own, and is told all of the call.
            return _text("Another client of yours is connected to this call and gets its result.")
        await self._join(stream, connection, request_id, token, is_wait=True, wait_s=asked.wait_s)
        return None

    async def _join(
        self,
        stream: Stream,
        connection: Connection,
        request_id: RequestId,
        token: ProgressToken | None,
        *,
        is_wait: bool,
        wait_s: float | None = None,
    ) -> None:
        """Deliver a call over this connection. Another client that waits gets an interim answer."""
        check_free(connection.session, request_id, besides=stream)
        current, name = stream.delivery, ""
        if self.settings.patience_s is not None and isinstance(stream, FollowedStream):
            name = await self._name(stream)  # for a client that waits at yet another replica
        if current is not None and current.only_waits:
            is_same = (current.reader, current.taker.waiting_id) == (connection.session, request_id)
            if stream.state.is_ended:
                with trio.move_on_after(HANDOVER_S):
                    while stream.delivery is current:
                        await stream.change()
            elif not is_same and self.settings.patience_s is not None:
                self._dismiss(stream, await self._name(stream))
        await self.operations.join(
            connection,
            stream,
            reply_id=request_id,
            token=token,
            is_wait=is_wait,
            short_name=name,
            wait_s=wait_s,
        )

    async def _find(self, principal: str, name: str) -> Stream | None:
        """The call of this short name. Where two share it, the newer one was told a longer name."""
        wanted = _read(name)
        if len(wanted) < _NAME_LETTERS:
            return None
        for each in map(_id_of, await self.operations.calls(principal)):
            if _code(each).startswith(wanted):
                stream = await self.operations.load_call(each)
                return stream if stream is not None and _is_call(stream) else None
        return None

    def _was_cancelled(self, principal: str, name: str) -> bool:
        wanted = _read(name)
        return len(wanted) >= _NAME_LETTERS and any(
            each == principal and code.startswith(wanted) for each, code in self._cancelled
        )

    async def _name(self, stream: Stream) -> str:
        kept = await self.operations.calls(stream.record.principal)
        return _name(stream.id, map(_id_of, kept))

    # Calls that run once

    async def is_once(self, guest: Guest, received: Received, tool: str) -> bool:
        """Whether the same call of this tool, by the same principal, runs once."""
        patterns = self.settings.once
        if HINTED in patterns:
            assert isinstance(guest, PatientGuest)
            await guest.learn(received)
        return matches(patterns, tool, self.tools.get(tool, False))

    def following(
        self,
        stream: Stream,
        connection: Connection,
        request_id: RequestId,
        token: ProgressToken | None,
    ) -> Run | None:
        """A run that ends with the result of a call which another request waits for.

        None where no other request does: then `joins` delivers the call itself. So it does for a
        call with pages, each of which a client must ask for.
        """
        delivery, is_live = stream.delivery, stream.state.outcome is Outcome.LIVE
        if not (is_live and isinstance(delivery, Delivery)) or stream.state.is_paged:
            return None
        if (delivery.reader, delivery.waiting_id) == (connection.session, request_id):
            return None
        has_interim = self.settings.patience_s is not None
        only_waits = connection.session.only_waits
        leader = self._asked.get(stream) or self._asked_ahead(stream)
        return Run(
            handler=self.watched(partial(self._follow, leader), trio.current_time()),
            progress_token=token,
            min_s=stream.record.min_s,
            max_s=stream.record.max_s if has_interim or not only_waits else 0.0,
            is_findable=only_waits and has_interim,
        )

    def _asked_ahead(self, stream: Stream) -> _Asked:
        """Note a call whose handler has not begun; and drop others whose handlers never will."""
        for void in [each for each in self._asked.values() if each.is_void]:
            del self._asked[void.stream]
        asked = self._asked[stream] = _Asked(stream)
        return asked

    async def _follow(self, leader: _Asked, stream: Stream) -> tuple[bytes, bool]:
        self._lead(leader, stream)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_on, stream)
                leader = await self._ended_leader(stream)
                nursery.cancel_scope.cancel()
        finally:
            leader = self._leaders.pop(stream)
            self._leave(leader, stream)
            is_last = leader.is_unwanted and not leader.followers
            if is_last and stream.state.outcome is Outcome.CANCELLED:
                self.operations.stop(leader.stream)
        if leader.failure is not None:
            raise leader.failure
        state, response = leader.stream.state, leader.response
        if response is None and state.outcome.is_end:
            # Its handler is at another replica, or still cleans up.
            response = await patiently(partial(self.operations.response_of, leader.stream))
        if response is None:
            raise refusal(state.outcome.value) if state.is_tombstone else _forgotten()
        line, is_error = response
        return messages.readdressed(line, stream.request_id), is_error

    def _lead(self, leader: _Asked, stream: Stream) -> None:
        """This stream follows that call from now on."""
        self._leaders[stream] = leader
        leader.followers.add(stream)

    def _leave(self, leader: _Asked, stream: Stream) -> None:
        """This stream follows that call no more."""
        leader.followers.discard(stream)
        # A call of another replica never has a handler here.
        is_elsewhere = isinstance(leader.stream, FollowedStream) and not leader.followers
        if leader.is_void or is_elsewhere:
            self._asked.pop(leader.stream, None)

    async def _ended_leader(self, stream: Stream) -> _Asked:
        """Wait for the durable end of the call that this stream follows: what is known of it."""
        while True:
            leader = self._leaders[stream]
            is_answered = leader.response is not None or leader.failure is not None
            # It may also have been cancelled before its handler began.
            if is_answered or leader.stream.state.outcome is not Outcome.LIVE:
                with suppress(Fenced):  # it goes on at another replica
                    await leader.stream.flush()  # no client has a result that a crash would undo
                    return leader
            if not self.operations.is_here(leader.stream):
                with suppress(Unavailable):  # it is looked for again
                    await self._look_for(leader, stream)
            if leader.ended.is_set():  # and the call goes on at another replica, or after a restart
                await trio.sleep(FOLLOW_S)
            with trio.move_on_after(FOLLOW_S):
                await self._leaders[stream].ended.wait()

    async def _look_for(self, leader: _Asked, stream: Stream) -> None:
        """Follow a call on, of which this replica has another object now, or none.

        It was taken over, or no client was attached to it here for a while. Raises `Unavailable`.
        """
        found = await self.operations.load_call(leader.stream.id)
        if found is None:
            leader.failure = _forgotten()
            leader.ended.set()
            return
        newer = self._asked.get(found) or self._asked_ahead(found)
        newer.is_unwanted |= leader.is_unwanted and found.delivery is None
        self._leave(leader, stream)
        self._lead(newer, stream)

    async def _pass_on(self, stream: Stream) -> None:
        """Give a follower the latest progress, and the questions that no other client is asked."""
        told = b""
        try:
            while True:
                leader, token = self._leaders[stream].stream, stream.progress_token
                if token is not None and leader.latest_progress != told:
                    told = leader.latest_progress
                    for line in latest_progress(leader, token):
                        await stream.send_progress(token, line)
                for request_id, question in list(leader.state.questions.items()):
                    if leader.delivery is None:
                        await self._pass_question(leader, stream, request_id, question.line)
                await trio.sleep(FOLLOW_S)
        except Refusal as refused:
            log.info("a call that follows another gets no more of it", why=refused.message[:200])

    async def _pass_question(
        self, leader: Stream, stream: Stream, request_id: RequestId, line: bytes
    ) -> None:
        asked = messages.parse(line)
        given = await stream.ask(str(asked.method), asked.params)
        self.operations.answer_as(leader, msgspec.structs.replace(given, id=request_id))

    def detaches(self, stream: Stream, session: Session, reason: Any) -> bool:
        """Whether a call goes on that this client cancels: for this reason, or for other clients.

        Others are those that follow the call, and those that were told that it is not lost.
        """
        is_kept = self.settings.keeps(reason)
        if (leader := self._leaders.get(stream)) is not None:
            leader.is_unwanted &= not is_kept  # the call is likely to be made again
            return False  # only this request ends
        asked = self._asked.get(stream)
        if is_kept or asked is None:
            return is_kept
        asked.is_unwanted = not asked.told - {session.name}
        return bool(asked.followers or asked.told - {session.name})

    async def joins(
        self,
        stream: Stream,
        connection: Connection,
        request_id: RequestId,
        token: ProgressToken | None,
    ) -> bool:
        """Join the same call that was made before. False where it may run again: it is forgotten.

        An error of the protocol, `interrupted` among them, lets it run again at once. So does a
        result that says `isError`, once a client was sent it. Any other result answers the same
        call for ten minutes.
        """
        if not (_answers_again(stream) and self._age_s(stream) < ONCE_S):
            with trio.move_on_after(HANDOVER_S):  # a client may wait for the response
                while stream.delivery is not None:
                    await stream.change()
            self.operations.replace(stream)
            return False
        await self._join(stream, connection, request_id, token, is_wait=False)
        return True


class PatientGuest:
    """A guest whose calls may outlast their clients."""

    def __init__(self, patience: Patience, inner: Guest, standing: Standing) -> None:
        self._patience = patience
        self._inner = inner
        self._session = standing

    @property
    def hello(self) -> Mapping[str, Any]:
        return self._inner.hello

    def tool(self, name: str) -> ToolTraits | None:
        return self._inner.tool(name)

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        self._inner.check_resume(request, granted)

    async def notify(self, received: Received) -> None:
        await self._inner.notify(received)

    def close(self) -> None:
        session = self._session
        # The principal of an anonymous connection ends with it, and nobody can ask for its calls.
        if isinstance(session, Session) and session.principal.startswith("conn("):
            self._patience.operations.end_connection(session)
        self._inner.close()

    def own_tool(self, name: str) -> str | None:
        """Which of our tools has this name; None for a tool of the backend."""
        if self._patience.settings.patience_s is None or name in self._patience.tools:
            return None
        bare = name
        while bare.startswith(_PREFIX):
            bare = bare.removeprefix(_PREFIX)
        return bare if bare in (_WAIT, _LIST) and self._inner.tool(name) is None else None

    async def call(self, received: Received, params: CallTool) -> Run | Any:
        patience, settings = self._patience, self._patience.settings
        began_at = trio.current_time()
        run = await self._inner.call(received, params)
        if not isinstance(run, Run):
            return run
        is_once = await patience.is_once(self, received, params.name)
        has_interim = settings.patience_s is not None
        if not (has_interim or is_once or settings.keep_cancelled != "never"):
            return run
        only_waits = received.session.only_waits
        kept_s = KEPT_S if only_waits else ONCE_S if is_once else 0.0
        return msgspec.structs.replace(
            run,
            handler=patience.watched(run.handler, began_at),
            max_s=max(run.max_s, kept_s),
            is_findable=only_waits and has_interim,
        )

    # Listings

    async def request(self, received: Received) -> Run | Any:
        begun = await self._inner.request(received)
        if received.message.method != _TOOLS_LIST:
            return begun
        is_first = not read_params(received.message.params, _Cursor).cursor
        if isinstance(begun, Run):
            return msgspec.structs.replace(
                begun, handler=partial(self._run_list, begun.handler, is_first)
            )
        return self._listed(msgspec.Raw(messages.encode(begun)), is_first=is_first)

    async def _run_list(
        self, handler: StreamHandler, is_first: bool, stream: Stream
    ) -> tuple[bytes, bool]:
        line, is_error = await handler(stream)
        response = messages.parse(line)
        if not isinstance(response.result, msgspec.Raw):
            return line, is_error
        listed = self._listed(response.result, is_first=is_first)
        return messages.result(stream.request_id, listed), is_error

    def _listed(self, result: msgspec.Raw, *, is_first: bool) -> Any:
        """A page of the listing. Ours are on the first page.

        With interim answers there is no `outputSchema`: clients check results against it, and an
        interim answer does not fit.
        """
        try:
            page = messages.decode(result, dict[str, msgspec.Raw])
            raw = messages.decode(page["tools"], list[msgspec.Raw])
            for listed in tools_on(result):
                self._learned(listed)
            if self._patience.settings.patience_s is None:
                return result
            tools = [messages.decode(each, dict[str, msgspec.Raw]) for each in raw]
        except (ValueError, KeyError) as error:
            log.warning("the listing of the tools cannot be read", why=str(error)[:200])
            return result
        for tool in tools:
            tool.pop("outputSchema", None)
        own = self._own_tools() if is_first else ()
        return page | {"tools": [*tools, *own]}

    def _learned(self, tool: ListedTool) -> None:
        tools = self._patience.tools
        if len(tools) < TOOLS_MAX or tool.name in tools:
            if tool.name in (_WAIT, _LIST) and tool.name not in tools:
                log.warning("the backend has a tool of this name: ours is renamed", tool=tool.name)
            tools[tool.name] = tool.is_hinted

    async def learn(self, received: Received) -> None:
        """Read the listing, if no client has asked for it yet and that needs no stream."""
        patience = self._patience
        if not (patience.tools or patience.backend.delivers(_TOOLS_LIST)):
            line = messages.request(0, _TOOLS_LIST, {})
            message = messages.parse(line)
            asked = Received(message, line, received.session, received.caller)
            try:
                await self.request(asked)
            except Refusal as refused:
                log.info("the tools cannot be listed", why=refused.message[:200])

    def _own_tools(self) -> Iterable[dict[str, Any]]:
        patience = self._patience
        wait, listing = patience.name_of(_WAIT), patience.name_of(_LIST)
        yield {
            "name": wait,
            "title": "Wait for a call",
            "description": (
                "Get the result of an earlier call that was still running when it was answered. "
                "Returns the result of that call, or that it is still running: then call this "
                f"again. `{listing}` shows the calls."
            ),
            "inputSchema": {
                "type": "object",
                "properties": {
                    "call": {
                        "type": "string",
                        "description": 'The name of the call, such as "K7Q2".',
                    },
                    "wait_s": {
                        "type": "number",
                        "minimum": 0,
                        "default": WAIT_S,
                        "description": "For how many seconds to wait for the result.",
                    },
                },
                "required": ["call"],
            },
            "annotations": {"readOnlyHint": True, "openWorldHint": False},
        }
        yield {
            "name": listing,
            "title": "List calls",
            "description": (
                "List the calls that still run and those whose results are kept, also calls of "
                f"earlier conversations. `{wait}` gets their results."
            ),
            "inputSchema": {"type": "object", "properties": {}},
            "annotations": {"readOnlyHint": True, "openWorldHint": False},
        }


def _forgotten() -> Refusal:
    """The answer to a request that waits for a call which another client has made anew."""
    return refusal("stream_not_found").saying(
        "This call has ended with an error, and the error is not kept: make the call again."
    )


def _answers_again(stream: Stream) -> bool:
    """Whether a call answers the same call once more, if that is made soon enough."""
    state = stream.state
    if state.is_tombstone or state.outcome is Outcome.FAILED:
        return False
    if not state.is_ended:
        return True
    is_seen = state.handed == state.last
    return state.delivered < state.last and not (state.has_failed and is_seen)


def _is_call(stream: Stream) -> bool:
    """Whether a stream is that of a tool, and not of another request."""
    return messages.parse(stream.record.origin).method == "tools/call"


def _id_of(found: Stream | Record) -> str:
    return found.id if isinstance(found, Stream) else found.stream


def _kept_of(found: Stream | Record) -> _Kept | None:
    """A kept call; None for a stream of another request."""
    record = found.record if isinstance(found, Stream) else found
    origin: Message = messages.parse(record.origin)
    if origin.method != "tools/call":
        return None
    if isinstance(found, Stream):
        outcome, has_failed = found.state.outcome, found.state.has_failed
        is_asking = bool(found.state.questions)
    else:
        outcome, is_asking = found.outcome, False
        has_failed = found.last_error == found.last
    if outcome is Outcome.LIVE:
        state = "waiting for an answer" if is_asking else "running"
    else:
        state = "failed" if has_failed else "done"
    params = messages.decode(origin.params, CallTool)
    return _Kept(
        stream=record.stream,
        tool=params.name,
        arguments=bytes(params.arguments)[:ARGUMENTS_BYTES].decode(errors="ignore"),
        created_at=record.created_at,
        state=state,
        progress=_progress(found) if isinstance(found, Stream) and state == "running" else "",
    )


def _read(name: str) -> str:
    """The letters of a short name as a model has written it."""
    return name.strip(" \"'`").upper().translate(_ALIKE)


def _code(stream_id: str) -> str:
    """The letters of a stream's short name. They do not reveal its id, which is a secret.

    The first is no digit, since a model might write a name of digits as a number.
    """
    first, *rest = hashlib.sha256(b"call:" + stream_id.encode()).digest()
    letters = _ALPHABET[10:]
    return letters[first % len(letters)] + "".join(_ALPHABET[byte % 32] for byte in rest)


def _told(stream: Stream) -> str:
    """The words about a running call."""
    progress = _progress(stream)
    told = f"Still running{progress and f' ({progress})'}."
    if stream.state.questions:
        told += " It waits for an answer, and asks for it again when you wait for the call."
    return told


def _name(stream_id: str, kept: Iterable[str]) -> str:
    """The short name of a call: as few letters, from four on, as it shares with no other call.

    `kept` are the ids of all streams of its principal.
    """
    code = _code(stream_id)
    others = [_code(each) for each in kept if each != stream_id]
    length = _NAME_LETTERS
    while any(each.startswith(code[:length]) for each in others):
        length += 1
    return code[:length]


def _progress(stream: Stream) -> str:
    """The latest progress of a call, such as `12/40 compiling`."""
    if not stream.latest_progress:
        return ""
    try:
        told = messages.decode(messages.parse(stream.latest_progress).params, _Progress)
    except (ValueError, Refusal):
        return ""  # a backend may send progress of another shape
    total = "" if told.total is None else f"/{told.total:g}"
    return f"{told.progress:g}{total} {told.message or ''}".rstrip()


def _age(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _text(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}
