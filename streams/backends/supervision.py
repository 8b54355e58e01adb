"""Keeps one child running: starts it, greets it, and starts the next one when it dies.

A new child hears what its predecessor was told: `initialize` with the same client, the log level
and the subscriptions. Lists that the client has read are compared, so that it hears of changes.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.backends.conversation import Audience, Conversation, Died
from streams.backends.process import ChildSettings, Ending, start
from streams.clock import backoff_s
from streams.errors import INTERNAL_ERROR, Refusal, refusal
from streams.keys import hashed
from streams.logs import log
from streams.messages import Message
from streams.protocol.listings import CHANGED, HINTED, TOOLS, matches, next_cursor, tools_on

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 30.0
RESET_S: Final = 10.0  # a child that ran so long has not failed because of its start
DEATHS_MAX: Final = 10  # in `DEATHS_S`; then no further child is started
DEATHS_S: Final = 300.0
LISTS_MAX: Final = 100  # pages of lists that are compared after a restart
PENDING_MAX: Final = 100  # notifications of clients that wait for a child that starts
LIST_S: Final = 30.0  # how long a new child may take to answer for one of them


class Restarts:
    """When the next child may start, after those before have died."""

    def __init__(self) -> None:
        self._failures = 0
        self._deaths: deque[float] = deque()
        self.next_at = 0.0

    def died(self, now: float, uptime_s: float) -> None:
        """A child has died, or did not start, at this time."""
        if uptime_s >= RESET_S:
            self._failures = 0
        self.next_at = now + backoff_s(BACKOFF_FIRST_S, self._failures, BACKOFF_MAX_S)
        self._failures += 1
        self._deaths.append(now)
        while self._deaths[0] <= now - DEATHS_S:
            self._deaths.popleft()

    @property
    def is_over(self) -> bool:
        """Whether too many have died in too short a time."""
        return len(self._deaths) >= DEATHS_MAX


class Places:
    """The places of all children of a backend: at most `children_max`."""

    def __init__(self, most: int) -> None:
        self.supervisors: dict[Supervisor, None] = {}
        self.taken = 0
        self.restarts = 0  # children that were started in place of one that had died
        self._most = most
        self._left = trio.lowlevel.ParkingLot()

    async def take(self) -> None:
        """Take a place for a child. Raises `Refusal` where no idle child can make room.

        The idle child that was used least recently ends for it. A child whose client listens for
        updates ends last.
        """
        while self.taken >= self._most:
            idle = [each for each in self.supervisors if each.is_idle]
            if idle:
                min(idle, key=lambda each: (each.has_listener, each.used_at)).begin_stop()
            elif not any(each.is_stopping for each in self.supervisors):
                raise refusal("too_many_children", limit=self._most)
            await self._left.park()
        self.taken += 1

    def leave(self) -> None:
        """Free the place of a child that has ended."""
        self.taken -= 1
        self._left.unpark_all()
        for each in [each for each in self.supervisors if each.is_over]:
            del self.supervisors[each]


class Lists:
    """The lists of a server that its client has read, and the hints about its tools."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, str | None], str] = {}  # the hashes of pages
        self._hints: dict[str, bool] = {}

    def note(self, method: str, cursor: str | None, result: msgspec.Raw) -> bool:
        """Take note of a page. Returns whether it has changed since it was read before."""
        if method == TOOLS:
            self.note_hints(result)
        digest = hashed(bytes(result).decode(errors="replace"))
        before = self.read.get((method, cursor))
        if before is not None or len(self.read) < LISTS_MAX:
            self.read[method, cursor] = digest
        return before not in (None, digest)

    def note_hints(self, result: msgspec.Raw) -> None:
        for tool in tools_on(result):
            self._hints[tool.name] = tool.is_hinted

    def is_hinted(self, tool: str) -> bool | None:
        """Whether a tool says that it may run twice; None where it was not listed."""
        return self._hints.get(tool)


class Supervisor:
    """The child of one client session, or of all of them, or of one call."""

    def __init__(
        self,
        settings: ChildSettings,
        places: Places,
        nursery: trio.Nursery,
        audience: Audience,
        greeting: Mapping[str, Any],
        *,
        is_shared: bool = False,
        replay: Callable[[], Sequence[tuple[str, Any]]] = tuple,
        on_down: Callable[[], None] = lambda: None,
    ) -> None:
        """`greeting` has the params of `initialize`; `replay` returns requests for each new child.

        With `is_shared` the child serves sessions of several principals.
        """
        self.lists = Lists()
        self.current: Conversation | None = None
        self.hello: Mapping[str, msgspec.Raw] = {}
        self.used_at = trio.current_time()
        self.running = 0  # streams
        self.is_wanted = True  # a session uses it
        self.has_new_client = False  # its client itself says `initialized` to the first child
        self._settings = settings
        self._places = places
        self._nursery = nursery
        self._audience = audience
        self._greeting = greeting
        self._is_shared = is_shared
        self._replay = replay
        self._on_down = on_down
        self._restarts = Restarts()
        self._turn = trio.Lock()
        self._down: Refusal | None = None
        self._has_started = False
        self._has_died = False  # the last child, and no other one was started since
        self._pending: list[bytes] = []  # notifications for the next child
        self._has_dropped = False  # some of them, since the last child started

    # Its streams

    def enter(self) -> None:
        """A stream begins to use it."""
        self.running += 1
        self.used_at = trio.current_time()

    def leave(self) -> None:
        """A stream uses it no longer. A child that no session wants ends with its last stream."""
        self.running -= 1
        self.used_at = trio.current_time()
        if not (self.running or self.is_wanted):
            self.begin_stop()

    def take_over(self) -> None:
        """Its client was served by an earlier process of ours.

        So a child that does not start is tried again, as after a death.
        """
        self._has_started = True

    def abandon(self) -> None:
        """The session has ended: the child ends with its last stream."""
        self.is_wanted = False
        if self.current is not None:
            self.current.close_strays()
        if not self.running:
            self.begin_stop()

    @property
    def is_idle(self) -> bool:
        """Whether it has a child that runs no request and waits for no answer of a client."""
        child = self.current
        if child is None or not child.is_alive or not child.is_greeted:
            return False
        return not (self.running or child.has_questions)

    @property
    def has_listener(self) -> bool:
        """Whether a client waits for updates of its child: an idle child that is still needed."""
        return self._audience.has_listener()

    @property
    def is_stopping(self) -> bool:
        """Whether its child was told to end, and has not ended."""
        child = self.current
        return child is not None and child.is_ending and not child.process.has_ended.is_set()

    @property
    def is_over(self) -> bool:
        """Whether it has no child, and needs none."""
        child = self.current
        is_gone = child is None or child.process.has_ended.is_set()
        return is_gone and not (self.is_wanted or self.running or self._turn.locked())

    # Its child

    async def ready(self) -> Conversation:
        """The running child, or the next one. Raises `Refusal`."""
        if self.current is not None and self.current.is_alive and self.current.is_greeted:
            return self.current
        async with self._turn:
            while True:
                if self.current is not None and self.current.is_alive:
                    return self.current
                if self._down is not None:
                    raise self._down
                await trio.sleep_until(self._restarts.next_at)
                await self._places.take()
                try:
                    return await self._start()
                except Refusal as refused:
                    self._died(refused, uptime_s=0.0)
                    if not self._has_started:
                        raise

    def _died(self, why: Refusal, uptime_s: float) -> None:
        """A child has died, or did not start."""
        self._restarts.died(trio.current_time(), uptime_s)
        is_final = self._settings.restart == "never" and self._has_started
        if is_final or self._restarts.is_over:
            self._down = refusal("backend_down", **_details(why)).saying(
                f"{why.message.rstrip('.')}. It is not started again: open a new session."
            )
            self._on_down()

    async def _start(self) -> Conversation:
        conversation = None
        try:
            process = await start(self._settings)
            self._places.restarts += self._has_died
            self._has_died = False
            conversation = Conversation(
                process, self._settings, self._audience, self._nursery, is_shared=self._is_shared
            )
            self._nursery.start_soon(self._live, conversation)
        finally:
            if conversation is None:
                self._places.leave()
        try:
            self.hello = await self._greeted(conversation)
        except BaseException:
            conversation.is_ending = True
            process.kill("it was not needed any more")
            raise
        self.current = conversation
        if self._has_started or not self.has_new_client:
            self._catch_up(conversation)
        conversation.is_greeted = self._has_started = True
        for line in self._pending:
            conversation.tell(line)
        self._pending.clear()
        self._has_dropped = False
        return conversation

    async def _greeted(self, conversation: Conversation) -> Mapping[str, msgspec.Raw]:
        """The child's answer to `initialize`."""
        limit = self._settings.start_timeout_s
        answer = None
        try:
            with trio.move_on_after(limit):
                answer = await conversation.ask("initialize", self._greeting)
            if answer is not None and answer.result is msgspec.UNSET:
                raise _error_of(answer)
            if answer is not None:
                messages.decode(_result(answer), _Hello)
                return messages.decode(_result(answer), dict[str, msgspec.Raw])
            await conversation.killed(f"it has not answered initialize within {limit:g} s")
        except Died as died:
            raise _not_started(died.ending) from None
        except ValueError as error:
            raise refusal("start_failed").saying(
                f"The wrapped server did not start: unreadable answer to initialize: {error}."
            ) from None
        raise _not_started(conversation.ending)

    def _catch_up(self, conversation: Conversation) -> None:
        """Tell a new child what its predecessor was told."""
        conversation.is_initialized = True
        conversation.tell(messages.notification("notifications/initialized"))
        for method, params in self._replay():
            conversation.post(method, params)
        if self.lists.read:
            self._nursery.start_soon(self._compare, conversation)

    async def _compare(self, conversation: Conversation) -> None:
        """Read the lists that the client has read once more, and tell it what has changed."""
        changed = set[str]()
        for method, cursor in list(self.lists.read):
            params = {} if cursor is None else {"cursor": cursor}
            answer = await _asked(conversation, method, params)
            if answer is None:
                return
            if self.lists.note(method, cursor, _result(answer)):
                changed.add(CHANGED[method])
        for method in sorted(changed):
            line = messages.notification(method).rstrip(b"\n")
            self._audience.stray(messages.look(line), line)

    async def _live(self, conversation: Conversation) -> None:
        began_at = trio.current_time()
        try:
            await conversation.run()
        finally:
            self._places.leave()
        ending = conversation.process.ending
        if ending is None or conversation.is_ending or not conversation.is_greeted:
            return
        log.warning("a child ended", child=conversation.pid, how=ending.words)
        self._has_died = True
        is_failure = ending.is_failure or self._settings.restart != "on-failure"
        if is_failure:
            self._died(_not_running(ending), trio.current_time() - began_at)
            if self.is_wanted and self._down is None:
                await self._restart()

    async def _restart(self) -> None:
        try:
            await self.ready()
        except Refusal as refused:
            log.warning("a child was not started again", why=refused.message[:500])

    def tell(self, line: bytes) -> None:
        """Send a notification to the child. A child that does not run yet gets it at its start.

        Beyond `PENDING_MAX` notifications it is dropped, with one warning.
        """
        if self.current is not None and self.current.is_alive and self.current.is_greeted:
            self.used_at = trio.current_time()
            self.current.tell(line)
        elif len(self._pending) < PENDING_MAX:
            self._pending.append(line)
            self._nursery.start_soon(self._restart)
        elif not self._has_dropped:
            self._has_dropped = True
            log.warning("notifications are dropped: a child has not started", limit=PENDING_MAX)

    def begin_stop(self) -> None:
        """End the child, in the background."""
        child = self.current
        if child is not None and child.is_alive:
            child.is_ending = True
            self._nursery.start_soon(child.process.stop, self._settings.stop_timeout_s)
        elif self.is_over:  # no child of it will ever leave
            self._places.supervisors.pop(self, None)

    async def stop(self) -> None:
        """End the child, and wait until it has ended."""
        self.is_wanted = False
        child = self.current
        if child is not None:
            child.is_ending = True
            await child.process.stop(self._settings.stop_timeout_s)

    # Calls that are sent again

    async def may_rerun(self, tool: str) -> bool:
        """Whether a call of this tool is sent to the next child. Asks that for its hints."""
        globs = self._settings.rerun
        if matches(globs, tool, hint=False):
            return True
        if HINTED not in globs:
            return False
        while self.lists.is_hinted(tool) is None:
            child = await self.ready()
            for page in await listed_tools(child):
                self.lists.note_hints(page)
            if child.is_alive:
                break  # else it may have died before it has listed this tool: the next one is asked
        return self.lists.is_hinted(tool) is True


async def _asked(conversation: Conversation, method: str, params: Any) -> Message | None:
    """The child's answer to a request of our own; None if it gives none."""
    try:
        with trio.move_on_after(LIST_S):
            return await conversation.ask(method, params)
    except Died:
        return None
    log.warning("a child has not answered", child=conversation.pid, method=method)
    return None


def _result(answer: Message) -> msgspec.Raw:
    return msgspec.Raw(b"null") if answer.result is msgspec.UNSET else answer.result


async def listed_tools(conversation: Conversation) -> list[msgspec.Raw]:
    """The pages of the child's list of tools; none of a child that has no list."""
    pages: list[msgspec.Raw] = []
    cursor: str | None = None
    while len(pages) < LISTS_MAX:
        params = {} if cursor is None else {"cursor": cursor}
        answer = await _asked(conversation, TOOLS, params)
        if answer is None or answer.result is msgspec.UNSET:
            break
        assert isinstance(answer.result, msgspec.Raw)
        pages.append(answer.result)
        cursor = next_cursor(answer.result)
        if cursor is None:
            break
    return pages


class _Hello(msgspec.Struct, rename="camel"):
    """The member of the answer to `initialize` that a session cannot begin without."""

    protocol_version: str = ""


class _Error(msgspec.Struct):
    code: int = INTERNAL_ERROR
    message: str = ""
    data: Any = None


def _error_of(answer: Message) -> Refusal:
    """The child's own error, as a refusal."""
    try:
        error = messages.decode(bytes(answer.error or b"{}"), _Error)
    except ValueError:
        return Refusal(INTERNAL_ERROR, "The wrapped server has refused to initialize.")
    return Refusal(error.code, error.message, error.data)


def _not_started(ending: Ending) -> Refusal:
    return refusal("start_failed", **ending.details).saying(
        f"The wrapped server did not start ({ending.story}): see the log, and try its command by "
        "hand."
    )


def _not_running(ending: Ending) -> Refusal:
    return refusal("interrupted", **ending.details).saying(
        f"The wrapped server ended ({ending.story})."
    )


def _details(why: Refusal) -> dict[str, Any]:
    data = why.data if isinstance(why.data, dict) else {}  # a child's own error may have any
    return {name: value for name, value in data.items() if name != "reason"}
