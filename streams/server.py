"""What a tool author sees: a server, and its tools."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar, overload

import trio

from streams import messages
from streams.call import Call, SyncCall
from streams.engine import Engine, Handler, open_engine
from streams.errors import JournalUnusable, StreamsError
from streams.journal import Journal
from streams.keys import Keyring
from streams.limits import Limits
from streams.logs import log
from streams.messages import Channel
from streams.paging import Paging
from streams.peer import Peer
from streams.session import Session
from streams.stream import Overflow, Stream
from streams.tools import Tool, ToolAnnotations, Tools, error_result, make_tool, to_result

# Sync tools run in threads: what they may have at once, apart from everything else's threads.
THREADS_MAX: Final = 40
# A plain generator keeps its thread from the first page to the last, and mostly sleeps.
PAGING_THREADS_MAX: Final = 1_000

Function = TypeVar("Function", bound=Callable[..., Any])


class Server:
    """An MCP server of tools whose calls outlive their connections.

    `resume_min_s` and `resume_max_s` are the Streams proposal's `resumeInterval`: how long a client
    waits before it comes back, and for how long its streams are kept when it does not. A `max` of 0
    means that calls are cancelled when their connection is lost. `enforce_min` refuses who comes
    too early instead of serving them.
    """

    def __init__(
        self,
        name: str,
        *,
        version: str = "0",
        instructions: str | None = None,
        resume_min_s: float = 1.0,
        resume_max_s: float = 3600.0,
        enforce_min: bool = False,
        limits: Limits | None = None,
        page_size: int = 100,
    ) -> None:
        if not resume_min_s >= 0 or not resume_max_s >= 0:
            raise ValueError("resume_min_s and resume_max_s are seconds, 0 or more")
        self.name = name
        self.version = version
        self.instructions = instructions
        self.resume_min_s = resume_min_s
        self.resume_max_s = resume_max_s
        self.enforce_min = enforce_min
        self.limits = limits or Limits()
        self.page_size = page_size
        self.tools = Tools()

    @overload
    def tool(self, function: Function, /) -> Function: ...
    @overload
    def tool(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        input_schema: Mapping[str, Any] | None = None,
        output_schema: Mapping[str, Any] | None = None,
        annotations: ToolAnnotations | None = None,
        resume_min_s: float | None = None,
        resume_max_s: float | None = None,
        overflow: Overflow = "block",
        pages: bool = False,
        pages_ahead: int = 1,
        page_wait_s: float = 10.0,
        expected_s: float | None = None,
    ) -> Callable[[Function], Function]: ...

    def tool(self, function: Any = None, /, **settings: Any) -> Any:
        """Make a function a tool: its name, docstring and annotations say what it is.

        A plain function runs in a thread. `overflow="fail"` ends a call whose client is too far
        behind, instead of making the tool wait. `expected_s` tells clients how many seconds a call
        is likely to take. With `pages` the function is a generator, and each call gets one of the
        results that it yields, with a token for the next one: they are made `pages_ahead` of the
        calls, and an empty one is given where there is none within `page_wait_s` seconds.

        Raises `TypeError` or `ValueError` for what cannot be a tool.
        """
        if function is None:
            return partial(self.tool, **settings)
        tool = make_tool(function, **settings)
        if tool.paged and tool.resume_max_s is None and self.resume_max_s == 0:
            raise ValueError(f"tool {tool.name}: pages need a resume_max_s above 0")
        self.tools.add(tool)
        return function

    @asynccontextmanager
    async def open(self, journal: Journal, keyring: Keyring) -> AsyncIterator["RunningServer"]:
        """Take over the journal's streams and work, for the length of a block.

        Leaving it shuts down in good order, within 4 s.
        """
        async with open_engine(
            journal, keyring, self.limits, enforce_min=self.enforce_min
        ) as engine:
            yield RunningServer(self, engine)


def tool_at(frame: FrameType) -> str | None:
    """The tool that runs in this frame, if it is the one that knows."""
    if frame.f_code is not RunningServer._result.__code__:
        return None
    tool = frame.f_locals["tool"]
    return tool.name if isinstance(tool, Tool) else None


class RunningServer:
    """A server at work. Hand `serve` to a transport."""

    def __init__(self, server: Server, engine: Engine) -> None:
        self.server = server
        self.engine = engine
        self._limiter = trio.CapacityLimiter(THREADS_MAX)
        self._paging_limiter = trio.CapacityLimiter(PAGING_THREADS_MAX)

    async def serve(self, channel: Channel) -> None:
        """Serve one connection until it is over."""
        try:
            async with self.engine.connect(channel) as connection:
                await self.peer(connection.session).run(connection)
        except* JournalUnusable:
            raise  # nobody can be served any more
        except* Exception:
            # Whatever it was, it is this connection's alone.
            log.exception("a connection failed", principal=channel.principal[:12])

    def peer(self, session: Session) -> Peer:
        """What talks to one client."""
        return Peer(self.server, self.engine, session, self._handler)

    def _handler(
        self,
        tool: Tool,
        arguments: Mapping[str, Any],
        session: Session,
    ) -> Handler:

        async def handle(stream: Stream) -> tuple[bytes, bool]:
            call = Call(stream, tool=tool.name, session=session)
            result = await self._result(tool, arguments, call, stream)
            return messages.result(stream.request_id, result), bool(result.get("isError"))

        return handle

    async def _result(
        self, tool: Tool, arguments: Mapping[str, Any], call: Call, stream: Stream
    ) -> dict[str, Any]:
        """The tool's result; its exception becomes one too, and its traceback goes to the log."""
        first = (call if tool.is_async else SyncCall(call),) if tool.takes_call else ()
        work = partial(tool.function, *first, **arguments)
        try:
            if tool.paged is not None:
                paging = Paging(stream, partial(to_result, tool=tool), tool.paged)
                return await paging.run(work(), self._paging_limiter)
            if tool.is_async:
                return to_result(await work(), tool)
            value = await trio.to_thread.run_sync(
                work, abandon_on_cancel=True, limiter=self._limiter
            )
            return to_result(value, tool)
        except Exception as error:
            if isinstance(error, StreamsError):
                log.warning("a tool gave up", tool=tool.name, why=str(error))
            else:
                log.exception("a tool failed", tool=tool.name)
            return error_result(str(error) or type(error).__name__)
