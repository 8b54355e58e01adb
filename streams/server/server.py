"""The server as a tool author sees it: `Server` collects tools, resources, prompts and methods."""

import importlib
import inspect
import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack, overload

import trio

from streams import messages
from streams.engine.events import Events
from streams.engine.hooks import Hooks
from streams.engine.notices import resource_updated
from streams.engine.posts import Notice
from streams.engine.streams import DEFERRAL_S
from streams.exchange import Admit, AsgiApp
from streams.journal.contract import Journal
from streams.keys import Keyring
from streams.limits import LEASE_S, Durability, Limits, LogFormat
from streams.server.features import Features
from streams.server.local import LocalBackend
from streams.server.methods import Methods
from streams.server.patience import PatienceSettings
from streams.server.prompts import PromptSettings, make_prompt
from streams.server.resources import ResourceSettings, make_resource
from streams.server.running import RunningServer, open_backend
from streams.server.tools import Tools, ToolSettings, make_tool, with_settings

# Over HTTP the server notices only after this time, and up to twice that, that a client has left.
ANNOUNCE_AFTER_S_MAX: Final = 1.0

Lifespan = Callable[["Server"], AbstractAsyncContextManager[Any]]

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

    `lifespan` is an async context manager function that is given the server. It is entered before
    the first connection is served and before calls are restarted, and left after all handlers have
    ended. `call.state` is the value that it yields.

    With `mask_errors` a client is told the text of a `ToolError`, and of no other exception of a
    tool: it gets a neutral sentence and an id, and the log has the traceback under that id.
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
        lifespan: Lifespan | None = None,
        mask_errors: bool = False,
    ) -> None:
        if not (0 <= resume_min_s < math.inf and 0 <= resume_max_s < math.inf):
            raise ValueError("resume_min_s and resume_max_s are seconds, 0 or more")
        if page_size < 1:
            raise ValueError(f"page_size: expected at least 1, got {page_size}")
        if not 0 <= announce_after_s <= ANNOUNCE_AFTER_S_MAX:
            raise ValueError(f"announce_after_s is in seconds, 0 to {ANNOUNCE_AFTER_S_MAX:g}")
        if inspect.isasyncgenfunction(lifespan) or inspect.iscoroutinefunction(lifespan):
            raise TypeError("lifespan: decorate it with contextlib.asynccontextmanager")
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
        self.lifespan = lifespan
        self.mask_errors = mask_errors
        self.tools = Tools()
        self.features = Features()
        self.methods = Methods()
        self._running: set[RunningServer] = set()

    @property
    def scopes(self) -> Sequence[str]:
        """The scopes that its tools need, in alphabetical order."""
        return self.tools.scopes

    @overload
    def tool(self, function: Function, /) -> Function: ...
    @overload
    def tool(
        self, function: None = None, /, **settings: Unpack[ToolSettings]
    ) -> Callable[[Function], Function]: ...

    @with_settings
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

        After `timeout_s` seconds the function is cancelled, and the result is an error that says
        so. The thread of a plain function cannot be stopped: the call ends, and the thread goes on
        until it uses its `SyncCall`, or sees `SyncCall.is_over`. With `pages` this is the time for
        each page, with `restart` for each run.

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
        self._list_changed("tools")
        return function

    def resource(
        self, uri: str, **settings: Unpack[ResourceSettings]
    ) -> Callable[[Function], Function]:
        """Make a function the reader of a resource, or of all resources of a URI template.

        The values of a template such as `reports://{id}` are the function's arguments, converted
        and checked by its annotations. It returns str, bytes, other JSON, or `ResourceContents`,
        and raises `ResourceNotFound` where there is nothing. A plain function runs in a thread.

        Raises `TypeError` or `ValueError` where the URI, the function or a setting cannot be used.
        """

        def add(function: Function) -> Function:
            self.features.add_resource(make_resource(uri, function, settings))
            self._list_changed("resources")
            return function

        return add

    def add_tool(self, function: Callable[..., Any], /, **settings: Unpack[ToolSettings]) -> None:
        """Add a tool, as `tool` does, also while the server runs and from any thread.

        All clients are told that the list of tools has changed.
        """
        self.tool(**settings)(function)

    def remove_tool(self, name: str) -> None:
        """Remove a tool, also while the server runs and from any thread; calls of it go on.

        All clients are told that the list of tools has changed. Raises `ValueError` where there is
        no tool of this name.
        """
        self.tools.remove(name)
        self._list_changed("tools")

    def method(self, name: str) -> Callable[[Function], Function]:
        """Make an async function the handler of requests that MCP does not know.

        It may take a `Call`, and the params in any type: by default a dict. It returns the result,
        any JSON. Like a call of a tool, the request can be cancelled and resumed. A
        `Refusal` that it raises is the JSON-RPC error; any other exception is an internal error.

        Raises `TypeError` or `ValueError` for another function, and for a name that is taken by
        MCP, by a proposal for resumable streams or by another handler.
        """

        def add(function: Function) -> Function:
            self.methods.add(name, function, is_request=True)
            return function

        return add

    def remove_resource(self, uri: str) -> None:
        """Remove a resource, or a template. Raises `ValueError` for an unknown one."""
        self.features.resources.remove(uri)
        self._list_changed("resources")

    async def resource_updated(self, uri: str) -> None:
        """Tell the clients that subscribed to this resource that it has changed.

        A client that reads nothing now, or has no connection, is told later, once for each URI.
        """
        line, key = resource_updated(uri)
        self._tell(Notice(line, key, uri))
        await trio.lowlevel.checkpoint()

    @overload
    def prompt(self, function: Function, /) -> Function: ...
    @overload
    def prompt(
        self, function: None = None, /, **settings: Unpack[PromptSettings]
    ) -> Callable[[Function], Function]: ...

    def prompt(self, function: Any = None, /, **settings: Unpack[PromptSettings]) -> Any:
        """Make a function a prompt, described by its name, docstring and annotations.

        Its parameters are the prompt's arguments. It returns str, a content block, `UserMessage`,
        `AssistantMessage`, or a list of these. A plain function runs in a thread.

        Raises `TypeError` or `ValueError` where the function or a setting cannot be used.
        """
        if function is None:
            return partial(self.prompt, **settings)
        self.features.add_prompt(make_prompt(function, settings))
        self._list_changed("prompts")
        return function

    def remove_prompt(self, name: str) -> None:
        """Remove a prompt. Raises `ValueError` for an unknown one."""
        self.features.prompts.remove(name)
        self._list_changed("prompts")

    @overload
    def completion(self, function: Function, /) -> Function: ...
    @overload
    def completion(
        self, of: str | None = None, argument: str | None = None, /
    ) -> Callable[[Function], Function]: ...

    def completion(self, of: Any = None, argument: str | None = None, /) -> Any:
        """Make a function complete an argument of a prompt, or of a resource's template.

        `@server.completion("greet", "name")` completes one argument: the function is given the
        typed value and, if it takes two, the other arguments by name. `@server.completion` alone
        completes all others: the function is given `ref`, `argument` and `context`. It returns a
        list of str, a `Completion`, or None. Arguments whose types list their values (an enum, a
        Literal, a bool) need no function.

        Raises `TypeError` or `ValueError` where the function cannot be used.
        """
        if callable(of):
            return self.completion()(of)
        if (of is None) != (argument is None):
            raise TypeError("completion: give a prompt or a template, and an argument of it")

        def add(function: Function) -> Function:
            named = None if of is None or argument is None else (of, argument)
            self.features.add_completer(function, named)
            return function

        return add

    def notification(self, name: str) -> Callable[[Function], Function]:
        """Make an async function the handler of notifications that MCP does not know.

        It may take a `Context`, and the params in any type. It should be short: the next message of
        the same connection waits for it. Its errors are logged. Raises as `method` does.
        """

        def add(function: Function) -> Function:
            self.methods.add(name, function, is_request=False)
            return function

        return add

    def _list_changed(self, what: str) -> None:
        """Tell all clients that a list has changed."""
        method = f"notifications/{what}/list_changed"
        self._tell(Notice(messages.notification(method), method))

    def _tell(self, notice: Notice) -> None:
        """Notify the clients of all running servers. May be called in any thread."""
        for running in self._running.copy():
            running.tell(notice)

    async def notify_all(self, method: str, params: Any = None) -> None:
        """Notify the clients of all running servers; see `RunningServer.notify_all`."""
        for running in self._running.copy():
            await running.notify_all(method, params)

    def asgi(
        self,
        path: str = "/mcp",
        *,
        journal: str | Path | None = None,
        durability: Durability = "power",
        lease_s: float = LEASE_S,
        replicas_acked: int = 0,
        key_file: str | Path | None = None,
        auth_tokens: str | Path | None = None,
        admit: Admit | None = None,
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
        log_calls: LogFormat | None = None,
        metrics: bool = False,
        grace_s: float = 0.0,
    ) -> AsgiApp:
        """An ASGI application that serves this server over HTTP, at `path` below its own place.

        `app.mount("/tools", server.asgi())` serves it at `/tools/mcp`. Frameworks run the lifespan
        of the outermost application alone, so give them this one's:
        `FastAPI(lifespan=mounted.lifespan)`.

        The other settings are those of `mcp-streams serve`. `journal` is the path of the journal's
        file, or the URL of a store that replicas share; without one, streams live as long as the
        process. `lease_s`, `replicas_acked` and `key_file` are for a store: all its replicas have
        the same. `auth_tokens` is a file of bearer tokens. Any other authentication is an `admit`
        of one's own (`streams.auth.bearer`).

        `log_calls` writes the log of calls to standard error. With `metrics` there are those of
        `AsgiApp.metrics`. At the end running calls have up to `grace_s` seconds to end; a second
        signal ends them at once.
        """
        # By name, because the module is above this one: it knows transports.
        home = importlib.import_module("streams.aio.asgi")
        app: AsgiApp = home.App(
            self,
            path,
            journal=journal,
            durability=durability,
            lease_s=lease_s,
            replicas_acked=replicas_acked,
            key_file=key_file,
            auth_tokens=auth_tokens,
            admit=admit,
            allowed_hosts=allowed_hosts,
            allowed_origins=allowed_origins,
            log_calls=log_calls,
            metrics=metrics,
            grace_s=grace_s,
        )
        return app

    @asynccontextmanager
    async def open(
        self,
        journal: Journal,
        keyring: Keyring,
        *,
        patience: PatienceSettings | None = None,
        events: Events | None = None,
        hooks: Hooks | None = None,
    ) -> AsyncIterator["RunningServer"]:
        """Take over the journal's streams and run the server, for the length of a block.

        `patience` is for clients that do not wait for long (`streams.backends.PatienceSettings`).
        `events` (`streams.engine.events`) tell what happens to calls; listen to them before. Those
        of an `Observer` are logged and counted. `hooks` makes webhooks (`streams.webhooks`).
        Leaving the block shuts the server down within 4 s, and then leaves the lifespan. Raises
        `LifespanFailed` where that fails.
        """
        if not trio.lowlevel.in_trio_task():
            raise RuntimeError(
                "Server.open runs under trio, and this code does not: in an asyncio program mount "
                "server.asgi(), otherwise start with trio.run(main)"
            )
        async with open_backend(
            LocalBackend(self),
            journal,
            keyring,
            self.limits,
            enforce_min=self.enforce_min,
            require_resume_token=self.require_resume_token,
            announce_after_s=self.announce_after_s,
            patience=patience,
            events=events,
            hooks=hooks,
        ) as running:
            self._running.add(running)
            try:
                yield running
            finally:
                self._running.discard(running)
