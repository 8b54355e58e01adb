"""A `Server` as a backend: its tools, resources, prompts and methods answer the client."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from streams import messages
from streams.engine.engine import StreamHandler
from streams.engine.stream import Stream
from streams.errors import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, Refusal
from streams.exchange import Scopes
from streams.messages import LEVELS
from streams.protocol import dialects
from streams.protocol.vocabulary import read_params
from streams.server.backend import CallTool, Received, Run, SessionInfo, Standing
from streams.server.features import RUN, Features
from streams.server.handlers import Handlers
from streams.server.lifespan import entered
from streams.server.methods import Method, Methods, log_dropped, progress_token
from streams.server.tools import Tool, Tools, error_result
from streams.turns import work_on

_CALL: Final = "tools/call"


class _List(msgspec.Struct):
    cursor: str | None = None


class _SetLevel(msgspec.Struct):
    level: str


class Profile(Protocol):
    """A server as its author describes it: a `Server`."""

    name: str
    version: str
    instructions: str | None
    tools: Tools
    features: Features
    methods: Methods
    lifespan: Any
    mask_errors: bool
    page_size: int  # of lists
    resume_min_s: float
    resume_max_s: float


class LocalBackend:
    """One `Server`. All sessions share its guest, since it keeps nothing of any of them."""

    def __init__(self, server: Profile) -> None:
        self._server = server
        self._handlers: Handlers
        self._guest: _LocalGuest

    @property
    def running_tools(self) -> Sequence[str]:
        return self._handlers.running_tools

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = self._server
        async with entered(server.lifespan, server) as state:
            handlers = Handlers(server.tools, masks_errors=server.mask_errors, state=state)
            self._handlers, self._guest = handlers, _LocalGuest(server, handlers)
            try:
                yield
            finally:
                await handlers.aclose()

    @property
    def passes_page_tokens(self) -> bool:
        return False

    def delivers(self, method: str) -> bool:
        server = self._server
        return method in server.methods.requests or (
            method in RUN and method in server.features.methods()
        )

    async def open(self, session: SessionInfo, standing: Standing) -> "_LocalGuest":
        return self._guest

    def reopen(self, session: SessionInfo, standing: Standing) -> "_LocalGuest":
        return self._guest

    def restart_handler(self, stream: Stream) -> StreamHandler | None:
        return self._handlers.restart_handler(stream)


class _LocalGuest:
    def __init__(self, server: Profile, handlers: Handlers) -> None:
        self._server = server
        self._tools = server.tools
        self._features = server.features
        self._methods = server.methods
        self._handlers = handlers

    @property
    def hello(self) -> Mapping[str, Any]:
        server = self._server
        hello: dict[str, Any] = {
            "capabilities": {
                "tools": {"listChanged": True},
                "logging": {},
                **self._features.capabilities(),
            },
            "serverInfo": {"name": server.name, "version": server.version},
        }
        if server.instructions is not None:
            hello["instructions"] = server.instructions
        return hello

    def tool(self, name: str) -> Tool | None:
        return self._tools.get(name)

    def check_resume(self, request: bytes, granted: Scopes) -> None:
        if self._tools.may_need_scopes:
            origin = messages.parse(request)
            if origin.method == _CALL:
                name = read_params(origin.params, CallTool).name
                self._tools.check_scopes(name, granted)

    def close(self) -> None:
        """Nothing is kept of a session."""

    # Calls

    async def call(self, received: Received, params: CallTool) -> Run | Any:
        tool = self._tools.get(params.name)
        if tool is None:
            raise Refusal(INVALID_PARAMS, f"Unknown tool {params.name[:100]!r}: see tools/list.")
        try:
            given = params.given
        except ValueError as error:
            raise Refusal(INVALID_PARAMS, f"Bad params: {error}.") from None
        try:
            arguments = await self._handlers.arguments(tool, given, received.session.principal)
        except ValueError as error:
            # SEP-1303: this is a result, not a protocol error, so that the model sees what is wrong
            # and can correct its arguments.
            return error_result(f"Bad arguments for {tool.name}: {error}")
        server = self._server
        return Run(
            handler=self._handlers.handler(tool, arguments, received.caller),
            progress_token=params.meta.progress_token,
            min_s=server.resume_min_s if tool.resume_min_s is None else tool.resume_min_s,
            max_s=server.resume_max_s if tool.resume_max_s is None else tool.resume_max_s,
            overflow=tool.overflow,
            is_paged=tool.paged is not None,
            is_restartable=tool.restart,
            is_repeatable=tool.is_repeatable,
        )

    # Other requests

    async def request(self, received: Received) -> Run | Any:
        method = str(received.message.method)
        if (own := self._methods.requests.get(method)) is not None:
            return await self._method(own, received)
        if (answer := _ANSWERS.get(method)) is not None:
            return await _work(received, partial(answer, self, received))
        if (kind := self._features.methods().get(method)) is None:
            raise Refusal(
                METHOD_NOT_FOUND,
                f"Unknown method {method[:100]!r}: this server has {', '.join(self._known)}.",
            )
        if method in RUN:
            return await self._feature(received)
        find = self._change if kind == "change" else self._list
        return await _work(received, partial(find, received))

    async def _method(self, method: Method, received: Received) -> Run:
        params = await self._params(method, received)
        token = await _work(received, partial(progress_token, received.message.params))
        return Run(
            handler=self._handlers.method_handler(method, params, received.caller),
            progress_token=token,
            min_s=self._server.resume_min_s,
            max_s=self._server.resume_max_s,
        )

    async def _params(self, method: Method, received: Received) -> Any:
        """The params in the handler's type. Raises `Refusal` where they do not fit."""
        given = received.message.params
        await self._handlers.params(method, given, received.session.principal)
        return await _work(received, partial(method.read, given))

    async def _feature(self, received: Received) -> Run:
        """A read, a prompt or a completion: it ends with its connection."""
        work = await _work(received, partial(self._features.work, received.message))
        handler = self._handlers.request_handler(work, received.caller)
        return Run(handler=handler, progress_token=work.progress_token)

    def _change(self, received: Received) -> dict[str, Any]:
        self._features.change(received.session, received.message)
        return {}

    def _list(self, received: Received) -> dict[str, Any]:
        message = received.message
        cursor = read_params(message.params, _List).cursor
        try:
            return self._features.list(str(message.method), cursor, self._server.page_size)
        except ValueError as error:
            raise Refusal(INVALID_PARAMS, f"{error}.") from None

    def _list_tools(self, received: Received) -> dict[str, Any]:
        cursor = read_params(received.message.params, _List).cursor
        try:
            tools, following = self._tools.page(cursor, self._server.page_size)
        except ValueError as error:
            raise Refusal(INVALID_PARAMS, f"{error}.") from None
        return {"tools": tools} if following is None else {"tools": tools, "nextCursor": following}

    def _set_level(self, received: Received) -> dict[str, Any]:
        level = read_params(received.message.params, _SetLevel).level
        if level not in LEVELS:
            raise Refusal(
                INVALID_PARAMS, f"Unknown level {level[:40]!r}: use one of {', '.join(LEVELS)}."
            )
        received.session.set_level(level)
        return {}

    @property
    def _known(self) -> list[str]:
        """The methods of all requests that the server takes, those of its peers too."""
        proposals = (*dialects.questions(), *dialects.resumings())
        own = (*self._methods.requests, *self._features.methods())
        return sorted({"initialize", "ping", _CALL, *_ANSWERS, *proposals, *own})

    # Notifications

    async def notify(self, received: Received) -> None:
        name = str(received.message.method)
        method = self._methods.notifications.get(name)
        if method is None:
            if name in self._known:
                raise Refusal(INVALID_REQUEST, f"{name} is a request: send it with an id.")
            return
        try:
            params = await self._params(method, received)
        except Refusal as refused:
            log_dropped(name, refused)
        else:
            await self._handlers.notify(method, params, received.caller)


_ANSWERS = {"tools/list": _LocalGuest._list_tools, "logging/setLevel": _LocalGuest._set_level}


async def _work(received: Received, work: Any) -> Any:
    return await work_on(received.line, received.session.principal, work)
