"""A command as a backend: a child process that speaks MCP over stdio answers the clients.

All messages pass as they are, except for ids and progress tokens; methods that are unknown today
pass too. By default each client session has a child of its own, so sessions share no state.

This is one file because `_Guest` and `_Crowd` both decide which client gets a message of a child,
and share the state of its sessions.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.backends import attribution
from streams.backends.conversation import Conversation, Died, Question, one_line
from streams.backends.process import ChildSettings
from streams.backends.supervision import Lists, Places, Supervisor
from streams.engine.connection import Session
from streams.engine.engine import StreamHandler
from streams.engine.stream import Stream
from streams.errors import INTERNAL_ERROR, METHOD_NOT_FOUND, Refusal, refusal
from streams.exchange import Scopes
from streams.logs import STREAM_LETTERS, log
from streams.messages import LEVELS, Message, RequestId
from streams.protocol.listings import CHANGED, matches
from streams.protocol.revisions import REVISIONS
from streams.server.backend import CallTool, Received, Run, SessionInfo, Standing
from streams.server.caller import CallerInfo

__all__ = ["ChildBackend", "ChildSettings"]

CALL: Final = "tools/call"
SET_LEVEL: Final = "logging/setLevel"
SUBSCRIBE: Final = "resources/subscribe"
UNSUBSCRIBE: Final = "resources/unsubscribe"
INITIALIZED: Final = "notifications/initialized"
TASKS: Final = "tasks/"  # what the names of methods of tasks begin with
ROOTS_CHANGED: Final = "notifications/roots/list_changed"
# The capability of a client that each question needs.
NEEDS: Final = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}
# The questions of a child that serves all sessions. A question for a client that lacks
# the capability is refused here.
ALL_CAPABILITIES: Final = {
    "elicitation": {"form": {}, "url": {}},
    "sampling": {},
    "roots": {"listChanged": True},
}
OURS: Final = {"name": "mcp-streams", "version": "1"}
# Notifications of a client for the child that has asked for them.
_OF_THIS_CHILD: Final = (ROOTS_CHANGED, attribution.PROGRESS)
# Of one session. More are passed on, and forgotten when the child is started again.
SUBSCRIPTIONS_MAX: Final = 1_000
URI_LETTERS_MAX: Final = 2_000
SWEEP_S_MAX: Final = 30.0  # how late an idle child may end


class ChildBackend:
    """A command, run as children. A `Backend`."""

    def __init__(
        self, settings: ChildSettings, *, on_down: Callable[[], None] = lambda: None
    ) -> None:
        """`on_down` is called when the child of all sessions is not started any more."""
        self.settings = settings
        self.guests: dict[_Guest, None] = {}
        self.places = Places(settings.children_max)
        self.nursery: trio.Nursery
        self._on_down = on_down
        self.shared: Supervisor

    @property
    def running_tools(self) -> Sequence[str]:
        return ()  # they run in children, which are killed in time

    @property
    def children(self) -> list[int]:
        """The ids of the processes that run now."""
        found = (each.current for each in self.places.supervisors)
        return [
            each.pid for each in found if each is not None and not each.process.has_ended.is_set()
        ]

    def child_counts(self) -> tuple[int, int]:
        """How many children run, and how many were started in place of one that had died."""
        return len(self.children), self.places.restarts

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as self.nursery:
            if self.settings.isolate == "none":
                crowd = _Crowd(self)
                self.shared = self.supervisor(
                    crowd,
                    _greeting_of_all(),
                    is_shared=True,
                    replay=crowd.replay,
                    on_down=self._on_down,
                )
            self.nursery.start_soon(self._end_idle)
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await self._stop_all()
                self.nursery.cancel_scope.cancel()

    async def _stop_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for each in list(self.places.supervisors):
                nursery.start_soon(each.stop)

    async def _end_idle(self) -> None:
        """End children that were not used for `child_idle_s`. A client that listens uses one."""
        idle_s = self.settings.child_idle_s
        while True:
            await trio.sleep(min(SWEEP_S_MAX, idle_s / 4))
            now = trio.current_time()
            for each in list(self.places.supervisors):
                if each.has_listener:
                    each.used_at = now
                elif each.is_idle and each.used_at <= now - idle_s:
                    each.begin_stop()

    def supervisor(self, audience: Any, greeting: Mapping[str, Any], **more: Any) -> Supervisor:
        """A supervisor of one more child, which it does not start yet."""
        made = Supervisor(self.settings, self.places, self.nursery, audience, greeting, **more)
        self.places.supervisors[made] = None
        return made

    async def run(
        self, find: Callable[[], Supervisor], session: Session, tool: str, stream: Stream
    ) -> tuple[bytes, bool]:
        """Run a request on the child of the supervisor that `find` returns.

        `tool` is the name of the tool that it calls, if it calls one.
        """
        supervisor = find()
        supervisor.enter()
        try:
            conversation = await supervisor.ready()
            while True:
                try:
                    return await conversation.exchange(stream, session)
                except Died as died:
                    try:
                        conversation = await self._next(supervisor, tool, stream, died)
                    finally:
                        died.close_questions()
        finally:
            supervisor.leave()

    async def _next(
        self, supervisor: Supervisor, tool: str, stream: Stream, died: Died
    ) -> Conversation:
        """The next child, for a call that is sent again. Raises `Refusal` for any other."""
        if died.exchange is None:
            return await supervisor.ready()  # it was not sent yet
        if stream.rerun is None:
            raise died.ending.interrupted()
        try:
            conversation = await supervisor.ready()
            may_rerun = await supervisor.may_rerun(tool)
        except Refusal:
            raise died.ending.interrupted() from None
        if not may_rerun:
            raise died.ending.interrupted()
        await stream.run_again()
        log.info("a call is sent again", tool=tool, stream=stream.id[:STREAM_LETTERS])
        return conversation

    @property
    def passes_page_tokens(self) -> bool:
        return True  # the command may speak this proposal

    def delivers(self, method: str) -> bool:
        return True

    async def open(self, session: SessionInfo, standing: Standing) -> "_Guest":
        guest = self.reopen(session, standing)
        guest.supervisor.has_new_client = not guest.is_shared
        try:
            await guest.supervisor.ready()
        except BaseException:
            guest.close()
            raise
        return guest

    def reopen(self, session: SessionInfo, standing: Standing) -> "_Guest":
        guest = _Guest(self, session, standing)
        self.guests[guest] = None
        return guest

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        restart = stream.record.restart
        try:
            origin = messages.parse(stream.record.origin)
            params = messages.decode(origin.params, CallTool)
        except (Refusal, ValueError) as error:
            log.warning(
                "a call cannot be restarted", stream=stream.id[:STREAM_LETTERS], why=str(error)
            )
            return None
        if restart is None or not self.may_rerun(params.name, None):
            return None
        stream.progress_token = params.meta.progress_token
        caller = CallerInfo.kept_as(stream.record.principal, restart.caller)
        session = Session(caller.name)
        session.client = caller.client
        return partial(self._restart, session, params.name)

    async def _restart(self, session: Session, tool: str, stream: Stream) -> tuple[bytes, bool]:
        """Run a call that was running when this process died, on a child of its own."""
        guest = _Guest(self, SessionInfo.of(session), session)
        guest.session = session
        supervisor = guest.supervisor
        supervisor.take_over()
        supervisor.enter()
        try:
            if not await supervisor.may_rerun(tool):
                raise refusal("interrupted")
            return await self.run(lambda: supervisor, guest.session, tool, stream)
        finally:
            guest.close()
            supervisor.leave()

    def may_rerun(self, tool: str, lists: Lists | None) -> bool:
        """Whether a call of this tool might be sent again, as far as that is known."""
        may_be_hinted = lists is None or lists.is_hinted(tool) is not False
        return matches(self.settings.rerun, tool, may_be_hinted)


class _Guest:
    """One session of a client. The `Audience` of its child, unless that serves all sessions."""

    def __init__(self, backend: ChildBackend, info: SessionInfo, standing: Standing) -> None:
        self.standing = standing
        self.info = info
        self.session: Session | None = None  # known from its first message on
        self.has_level = False  # the client has set one
        self._backend = backend
        self._settings = backend.settings
        self._is_open = True
        self.is_shared = self._settings.isolate == "none"
        self.supervisor = (
            backend.shared
            if self.is_shared
            else backend.supervisor(self, greeting_of(info), replay=self.replay)
        )

    @property
    def hello(self) -> Mapping[str, Any]:
        hello: dict[str, Any] = dict(self.supervisor.hello)
        if self.is_shared:  # its revision is not the one that this client has asked for
            theirs = messages.decode(hello.get("protocolVersion", b'""'), str)
            hello["protocolVersion"] = min(theirs, self.info.revision)
        if self._settings.isolate != "session" and "capabilities" in hello:
            # A child of one call ends with that call, and its tasks with it. A shared child does
            # not say which client a task belongs to.
            with suppress(ValueError):  # not an object, as some servers write an empty one
                capabilities = messages.decode(hello["capabilities"], dict[str, msgspec.Raw])
                capabilities.pop("tasks", None)
                hello["capabilities"] = capabilities
        return hello

    def tool(self, name: str) -> None:
        return None

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        """A child has no scopes."""

    def close(self) -> None:
        self._is_open = False
        self._backend.guests.pop(self, None)
        if not self.is_shared:
            self.supervisor.abandon()

    # Messages of the client

    async def call(self, received: Received, params: CallTool) -> Run:
        self.session = received.session
        settings = self._settings
        return Run(
            handler=partial(self._backend.run, self._for_call(), received.session, params.name),
            progress_token=params.meta.progress_token,
            min_s=settings.resume_min_s,
            max_s=settings.resume_max_s,
            # A stream without room must not stop a child that other clients use.
            overflow="fail" if self.is_shared else "block",
            is_rerunnable=self._backend.may_rerun(params.name, self.supervisor.lists),
        )

    def _for_call(self) -> Callable[[], Supervisor]:
        if self._settings.isolate == "call":
            return self._own_child
        return lambda: self.supervisor

    def _own_child(self) -> Supervisor:
        """The supervisor of a child that no session wants: it ends with its only stream."""
        made = self._backend.supervisor(self, greeting_of(self.info))
        made.is_wanted = False
        return made

    async def request(self, received: Received) -> Run | Any:
        self.session = received.session
        method, params = str(received.message.method), received.message.params
        if self.is_shared and method.startswith(TASKS):
            raise Refusal(
                METHOD_NOT_FOUND, f"{method}: a server that all clients share has no tasks."
            )
        if self.is_shared and method == UNSUBSCRIBE and self._is_shared_subscription(params):
            self._unsubscribe(received.session, attribution.uri_of(params))
            await received.session.save()
            return {}
        return Run(
            handler=partial(self._run_request, received),
            progress_token=_params(params).meta.progress_token,
            overflow="fail" if self.is_shared else "block",
        )

    async def _run_request(self, received: Received, stream: Stream) -> tuple[bytes, bool]:
        line, is_error = await self._backend.run(
            lambda: self.supervisor, received.session, "", stream
        )
        if not is_error and (note := _NOTES.get(str(received.message.method))) is not None:
            await note(self, received, line)
        return line, is_error

    async def notify(self, received: Received) -> None:
        self.session = received.session
        method = received.message.method
        child = self.supervisor.current
        if method == INITIALIZED and (self.is_shared or child is None or child.is_initialized):
            return  # the child was told already, or will be when it starts
        if method in _OF_THIS_CHILD and (child is None or not child.is_alive):
            return  # the next child has not asked for it
        if child is not None and method == INITIALIZED:
            child.is_initialized = True
        self.supervisor.tell(one_line(received.line.rstrip(b"\r\n")) + b"\n")

    # The state of the session, for the next child

    async def _note_list(self, received: Received, line: bytes) -> None:
        result = messages.look(line).result
        if isinstance(result, msgspec.Raw):
            cursor = _params(received.message.params).cursor
            self.supervisor.lists.note(str(received.message.method), cursor, result)

    async def _note_level(self, received: Received, line: bytes) -> None:
        level = _params(received.message.params).level
        if level in LEVELS:
            self.has_level = True
            received.session.set_level(level)
            await received.session.save()

    async def _note_subscription(self, received: Received, line: bytes) -> None:
        session, uri = received.session, attribution.uri_of(received.message.params)
        if received.message.method == UNSUBSCRIBE:
            self._unsubscribe(session, uri)
        elif len(session.subscriptions) < SUBSCRIPTIONS_MAX and len(uri) <= URI_LETTERS_MAX:
            session.subscriptions[uri] = None
            session.has_changed = True
        await session.save()

    def _unsubscribe(self, session: Session, uri: str) -> None:
        session.subscriptions.pop(uri, None)
        session.has_changed = True

    def _is_shared_subscription(self, params: msgspec.Raw) -> bool:
        uri = attribution.uri_of(params)
        others = (each.session for each in self._backend.guests if each is not self)
        return any(each is not None and uri in each.subscriptions for each in others)

    def replay(self) -> list[tuple[str, Any]]:
        """The requests for a new child that make it what its predecessor was."""
        session = self.session
        if session is None:
            return []
        has_level = self.has_level or session.level != LEVELS[0]
        level: list[tuple[str, Any]] = [(SET_LEVEL, {"level": session.level})] if has_level else []
        return level + [(SUBSCRIBE, {"uri": uri}) for uri in session.subscriptions]

    # As the audience of its own child

    def stray(self, message: Message, line: bytes) -> None:
        method = str(message.method)
        is_latest_enough = attribution.is_news(method) or not self.standing.is_listening
        key = attribution.key_of(method, message.params) if is_latest_enough else None
        self.standing.notify(line + b"\n", key=key)

    async def ask(self, question: Question, on_sent: Callable[[RequestId], None]) -> Message:
        if not self._is_open:
            raise Refusal(INTERNAL_ERROR, "The client has gone.")
        return await self.standing.ask(question.method, question.sent, on_sent=on_sent)

    def check_question(self, question: Question, session: Session) -> None:
        """The child knows what its client can."""

    def wants_log(self, message: Message, session: Session) -> bool:
        return True  # the child was told the level

    def has_listener(self) -> bool:
        session = self.session
        return session is not None and bool(session.subscriptions) and self.standing.is_listening


_NOTES: Final = {
    **dict.fromkeys(CHANGED, _Guest._note_list),  # compared after a restart
    SET_LEVEL: _Guest._note_level,
    SUBSCRIBE: _Guest._note_subscription,
    UNSUBSCRIBE: _Guest._note_subscription,
}


class _Crowd:
    """All sessions, as the audience of one child. A message that names no session reaches none.

    A child does not say for whom it asks or logs, so that is dropped where it could be of another
    client: questions never cross principals.
    """

    def __init__(self, backend: ChildBackend) -> None:
        self._backend = backend

    def stray(self, message: Message, line: bytes) -> None:
        method = str(message.method)
        uri = attribution.uri_of(message.params) if method == attribution.UPDATED else None
        for guest in list(self._backend.guests):
            session = guest.session
            if uri is not None:
                is_for = session is not None and uri in session.subscriptions
            else:
                is_for = attribution.is_news(method) and not attribution.is_task_news(method)
            if is_for:
                guest.stray(message, line)

    async def ask(self, question: Question, on_sent: Callable[[RequestId], None]) -> Message:
        raise Refusal(INTERNAL_ERROR, "The question belongs to no request that runs alone.")

    def check_question(self, question: Question, session: Session) -> None:
        method = question.method
        needed = NEEDS.get(method)
        if method == "elicitation/create" and _params(question.params).mode == "url":
            needed = "elicitation.url"
        if needed is not None and (session.client is None or not session.client.has(needed)):
            raise Refusal(
                METHOD_NOT_FOUND,
                f"The client cannot answer {method}: it has not declared {needed}.",
            )

    def wants_log(self, message: Message, session: Session) -> bool:
        level = _params(message.params).level
        return level not in LEVELS or LEVELS.index(level) >= LEVELS.index(session.level)

    def has_listener(self) -> bool:
        return any(each.has_listener() for each in self._backend.guests)

    def replay(self) -> list[tuple[str, Any]]:
        """See `_Guest.replay`: for all sessions together."""
        guests = [each for each in self._backend.guests if each.session is not None]
        levels = [each.session.level for each in guests if each.session and each.has_level]
        uris = {uri: None for each in guests if each.session for uri in each.session.subscriptions}
        lowest = [(SET_LEVEL, {"level": min(levels, key=LEVELS.index)})] if levels else []
        return [*lowest, *((SUBSCRIBE, {"uri": uri}) for uri in uris)]


def greeting_of(info: SessionInfo) -> dict[str, Any]:
    """The params of `initialize`, as the session's own client has sent them."""
    return {
        "protocolVersion": info.revision,
        "capabilities": info.capabilities,
        "clientInfo": _client_info(info.client_info),
        **info.more,
    }


def _client_info(given: msgspec.Raw) -> Any:
    """The client's name, as it gave it. Ours, where that is not known after a restart."""
    try:
        known = messages.decode(given, dict[str, Any])
    except ValueError:
        return given
    if not known.get("name"):
        return OURS
    return (
        given if None not in known.values() else {k: v for k, v in known.items() if v is not None}
    )


def _greeting_of_all() -> dict[str, Any]:
    return {"protocolVersion": REVISIONS[0], "capabilities": ALL_CAPABILITIES, "clientInfo": OURS}


class _Meta(msgspec.Struct, rename="camel"):
    progress_token: RequestId | None = None


class _Params(msgspec.Struct):
    cursor: str | None = None
    level: str = ""
    mode: str = ""
    meta: _Meta = msgspec.field(name="_meta", default_factory=_Meta)


def _params(raw: msgspec.Raw) -> _Params:
    try:
        return messages.decode(raw, _Params)
    except ValueError:
        return _Params()  # the child itself checks them
