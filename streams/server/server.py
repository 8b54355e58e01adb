"""The server as a tool author sees it: `Server` collects tools, `RunningServer` serves them."""

import importlib
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack, overload

from streams.engine.connection import Session
from streams.engine.engine import Engine, open_engine
from streams.engine.streams import DEFERRAL_S
from streams.errors import JournalUnusable
from streams.exchange import Admit, AsgiApp, Channel
from streams.journal.contract import Journal
from streams.keys import Keyring
from streams.limits import Durability, Limits
from streams.logs import log
from streams.server.handlers import Handlers
from streams.server.peer import Peer, Profile
from streams.server.tools import Tools, ToolSettings, make_tool

# Over HTTP the server notices only after this time, and up to twice that, that a client has left.
ANNOUNCE_AFTER_S_MAX: Final = 1.0

Function = TypeVar("Function", bound=Callable[..., Any])


class Server:
    """An MCP server of tools whose calls outlive their connections.

    `resume_min_s` and `resume_max_s` are the `resumeInterval` of the Streams proposal: a client
    waits `resume_min_s` before it resumes, and its streams are kept for `resume_max_s` after it is
    detached. With a `resume_max_s` of 0, calls are cancelled when their connection is lost.
    `enforce_min` refuses a client that resumes too early, instead of serving it.

    A caller resumes its own streams by their streamId. Other callers need the resumeToken too. For
    a stream of an anonymous caller they need it only if `require_resume_token` is set.

    A call that ends within `announce_after_s` seconds, and sends nothing but its result, is
    answered as by any MCP server: its client is not told how to resume, and nothing is stored. With
    0 every call is stored and announced. Calls with pages always are, and calls with an idempotency
    key unless the tool has the hint `readOnlyHint` or `idempotentHint`.
    """

    def __init__(
        self,
        name: str,
        *,
        version: str = "0",
        instructions: str | None = None,
        resume_min_s: float = 1.0,
        resume_max_s: float = 3600.0,
        announce_after_s: float = DEFERRAL_S,
        enforce_min: bool = False,
        require_resume_token: bool = False,
        limits: Limits | None = None,
        page_size: int = 100,
    ) -> None:
        if not resume_min_s >= 0 or not resume_max_s >= 0:
            raise ValueError("resume_min_s and resume_max_s are seconds, 0 or more")
        if not 0 <= announce_after_s <= ANNOUNCE_AFTER_S_MAX:
            raise ValueError(f"announce_after_s is in seconds, 0 to {ANNOUNCE_AFTER_S_MAX:g}")
        self.name = name
        self.version = version
        self.instructions = instructions
        self.resume_min_s = resume_min_s
        self.resume_max_s = resume_max_s
        self.announce_after_s = announce_after_s
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
        """Make a function a tool, described by its name, docstring and annotations.

        A plain function runs in a thread. `overflow="fail"` ends a call whose client is too far
        behind, instead of making the tool wait. `expected_s` tells clients how many seconds a call
        is likely to take.

        With `pages` the function is a generator. Each call gets one of the results that it yields,
        with a page token for the next one. The function runs up to `pages_ahead` results ahead of
        the calls. A call gets an empty page if no result is ready within `page_wait_s` seconds.

        With `restart` a call is restarted after its server died; `Call.checkpoint` says what the
        function must do for that.

        A tool with `scopes` needs a bearer token that was granted all of them. Users of this
        machine can call it over stdio without a token. Other callers without one cannot.

        Raises `TypeError` or `ValueError` where the function or a setting cannot be used.
        """
        if function is None:
            return partial(self.tool, **settings)
        tool = make_tool(function, **settings)
        if tool.paged and tool.resume_max_s is None and self.resume_max_s == 0:
            raise ValueError(f"tool {tool.name}: pages need a resume_max_s above 0")
        self.tools.add(tool)
        return function

    def asgi(
        self,
        path: str = "/mcp",
        *,
        journal: str | Path | None = None,
        durability: Durability = "power",
        auth_tokens: str | Path | None = None,
        admit: Admit | None = None,
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
    ) -> AsgiApp:
        """An ASGI application that serves this server over HTTP, at `path` below its own place.

        `app.mount("/tools", server.asgi())` serves it at `/tools/mcp`. Frameworks run the lifespan
        of the outermost application alone, so give them this one's:
        `FastAPI(lifespan=mounted.lifespan)`.

        The other settings are those of `mcp-streams serve`. `journal` is the path of the journal's
        file; without one, streams live as long as the process. `auth_tokens` is a file of bearer
        tokens. Any other authentication is an `admit` of one's own (`streams.auth.bearer`).
        """
        # By name, because the module is above this one: it knows transports.
        home = importlib.import_module("streams.aio.asgi")
        app: AsgiApp = home.App(
            self,
            path,
            journal=journal,
            durability=durability,
            auth_tokens=auth_tokens,
            admit=admit,
            allowed_hosts=allowed_hosts,
            allowed_origins=allowed_origins,
        )
        return app

    @asynccontextmanager
    async def open(self, journal: Journal, keyring: Keyring) -> AsyncIterator["RunningServer"]:
        """Take over the journal's streams and run the server, for the length of a block.

        Leaving the block shuts the server down within 4 s.
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
                deferral_s=self.announce_after_s,
            ) as engine:
                yield RunningServer(self, engine, handlers)
        finally:
            await handlers.aclose()


class RunningServer:
    """A server that runs. Pass its `serve` to a transport."""

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
        """The names of the tools whose calls have not ended."""
        return self._handlers.running_tools

    async def serve(self, channel: Channel) -> None:
        """Serve one connection until it ends."""
        try:
            async with self.engine.connect(channel) as connection:
                await self.peer(connection.session).run(connection)
        except* JournalUnusable:
            raise  # without its journal, the server can serve no connection
        except* Exception:
            # A failure here concerns one connection. The server goes on with the others.
            log.exception("a connection failed", principal=channel.principal[:12])

    def peer(self, session: Session) -> Peer:
        """The conversation with one client."""
        return Peer(self._profile, self.engine, session, self._handlers)
