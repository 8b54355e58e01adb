"""What a tool author sees: a server, and its tools."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, Unpack, overload

from streams.engine.connection import Session
from streams.engine.engine import Engine, open_engine
from streams.errors import JournalUnusable
from streams.exchange import Channel
from streams.journal.contract import Journal
from streams.keys import Keyring
from streams.limits import Limits
from streams.logs import log
from streams.server.handlers import Handlers
from streams.server.peer import Peer, Profile
from streams.server.tools import Tools, ToolSettings, make_tool

Function = TypeVar("Function", bound=Callable[..., Any])


class Server:
    """An MCP server of tools whose calls outlive their connections.

    `resume_min_s` and `resume_max_s` are the Streams proposal's `resumeInterval`: how long a client
    waits before it comes back, and for how long its streams are kept when it does not. A `max` of 0
    means that calls are cancelled when their connection is lost. `enforce_min` refuses a client
    that comes too early instead of serving it. `require_resume_token` refuses a streamId without
    its resumeToken to any caller but the principal that made the stream; by default it is enough
    for a stream of an anonymous caller.
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
        require_resume_token: bool = False,
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
        self.require_resume_token = require_resume_token
        self.limits = limits or Limits()
        self.page_size = page_size
        self.tools = Tools()

    @overload
    def tool(self, function: Function, /) -> Function: ...
    @overload
    def tool(
        self, function: None = None, /, **settings: Unpack[ToolSettings]
    ) -> Callable[[Function], Function]: ...

    def tool(self, function: Any = None, /, **settings: Any) -> Any:
        """Make a function a tool: its name, docstring and annotations say what it is.

        A plain function runs in a thread. `overflow="fail"` ends a call whose client is too far
        behind, instead of making the tool wait. `expected_s` tells clients how many seconds a call
        is likely to take. With `pages` the function is a generator, and each call gets one of the
        results that it yields, with a token for the next one: they are made `pages_ahead` of the
        calls, and an empty one is given where there is none within `page_wait_s` seconds. With
        `restart` a call is run again when its server has died: `Call.checkpoint` says what the
        function must see to. To call a tool with `scopes`, a bearer needs a token that was given
        all of them. Users of this machine can call it over stdio without one; other callers cannot.

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
        handlers = Handlers(self.tools)
        try:
            async with open_engine(
                journal,
                keyring,
                self.limits,
                enforce_min=self.enforce_min,
                require_token=self.require_resume_token,
                restart_handler=handlers.restart_handler,
            ) as engine:
                yield RunningServer(self, engine, handlers)
        finally:
            await handlers.aclose()


class RunningServer:
    """A server at work. Hand `serve` to a transport."""

    def __init__(self, server: Server, engine: Engine, handlers: Handlers) -> None:
        self.server = server
        self.engine = engine
        self._handlers = handlers
        self._profile = Profile(
            name=server.name,
            version=server.version,
            instructions=server.instructions,
            tools=server.tools,
            page_size=server.page_size,
            resume_min_s=server.resume_min_s,
            resume_max_s=server.resume_max_s,
        )

    @property
    def running_tools(self) -> list[str]:
        """The names of the tools whose calls have not ended, each once."""
        return self._handlers.running_tools

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
        return Peer(self._profile, self.engine, session, self._handlers)
