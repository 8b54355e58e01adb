"""Requests besides calls: the server's listings, resources and prompts, and any other method."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, overload

import msgspec

from streams.client import wire
from streams.client.reconnect import Reconnector
from streams.client.results import (
    CompletionResult,
    Prompt,
    PromptResult,
    Resource,
    ResourcePart,
    ResourceTemplate,
    Tool,
    one_of,
    page_of,
    read_as,
)
from streams.errors import METHOD_NOT_FOUND, CallFailed, ClientError
from streams.messages import Message
from streams.protocol.vocabulary import Standing

# A listing is given up after this many pages, or bytes.
PAGES_MAX: Final = 10_000
LISTED_BYTES_MAX: Final = 64 * 1024 * 1024

_T = TypeVar("_T")


class Requests:
    """The part of `Client` that asks the server, over whichever connection there is.

    All methods raise `CannotConnect`; `CallFailed` if the server answers with an error, also if it
    does not offer what is asked for; `ClientError` for an answer that does not fit.
    """

    _reconnector: Reconnector

    # The server

    @property
    def protocol_version(self) -> str:
        """The revision of MCP that was negotiated."""
        return self._reconnector.hello.protocol_version

    @property
    def server_info(self) -> dict[str, Any]:
        """The server's name, version and other fields of its `serverInfo`."""
        return self._reconnector.hello.server_info

    @property
    def instructions(self) -> str:
        """The server's advice on its use, for the model; empty if it gives none."""
        return self._reconnector.hello.instructions

    @property
    def capabilities(self) -> dict[str, Any]:
        """The capabilities that the server declares."""
        return self._reconnector.hello.capabilities

    async def ping(self) -> None:
        """Wait for the server to answer a ping."""
        await self._ask("ping")

    async def set_level(self, level: str) -> None:
        """Ask for log messages from `level` on, over this and every later connection."""
        await self._ask("logging/setLevel", {"level": level})
        self._reconnector.level = level

    # Its tools, resources and prompts

    async def tools(self) -> list[Tool]:
        """The server's tools, all pages."""
        return await self._list("tools/list", "tools", Tool)

    async def list_tools(self) -> list[Tool]:
        """The earlier name of `tools`."""
        return await self.tools()

    async def resources(self) -> list[Resource]:
        """The server's resources, all pages."""
        return await self._list("resources/list", "resources", Resource)

    async def resource_templates(self) -> list[ResourceTemplate]:
        """The server's templates of resources, all pages."""
        return await self._list("resources/templates/list", "resourceTemplates", ResourceTemplate)

    async def read_resource(self, uri: str) -> list[ResourcePart]:
        """The contents of a resource: one part, or several (as of a folder)."""
        reply = await self._ask("resources/read", {"uri": uri})
        return read_reply(
            reply, "resources/read", lambda raw: page_of(raw, "contents", ResourcePart)[0]
        )

    async def subscribe(self, uri: str) -> None:
        """Be told of updates of a resource, over this and every later connection.

        The handler of `notifications/resources/updated` is told of them: see `on_notification`.
        After a reconnect it is told of each subscribed resource, since an update may have been
        missed.
        """
        await self._ask(wire.SUBSCRIBE, {"uri": uri})
        self._reconnector.subscribed[uri] = None

    async def unsubscribe(self, uri: str) -> None:
        """Undo `subscribe`."""
        self._reconnector.subscribed.pop(uri, None)
        await self._ask(wire.UNSUBSCRIBE, {"uri": uri})

    async def prompts(self) -> list[Prompt]:
        """The server's prompts, all pages."""
        return await self._list("prompts/list", "prompts", Prompt)

    async def prompt(self, name: str, arguments: Mapping[str, str] | None = None) -> PromptResult:
        """A prompt, filled in with `arguments`."""
        params = {"name": name, "arguments": dict(arguments or {})}
        reply = await self._ask("prompts/get", params)
        return read_reply(reply, "prompts/get", lambda raw: one_of(raw, None, PromptResult))

    async def complete(
        self,
        argument: str,
        value: str,
        *,
        prompt: str | None = None,
        resource: str | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> CompletionResult:
        """Values for `argument`, of which `value` is typed already.

        It is an argument of the prompt named `prompt`, or of the resource template `resource`
        (`reports://{id}`). `arguments` are the others that are known. Raises `TypeError` unless one
        of both is given.
        """
        if (prompt is None) == (resource is None):
            raise TypeError("complete: give either prompt= or resource=")
        ref = {"type": "ref/resource", "uri": resource}
        if prompt is not None:
            ref = {"type": "ref/prompt", "name": prompt}
        params: dict[str, Any] = {"ref": ref, "argument": {"name": argument, "value": value}}
        if arguments:
            params["context"] = {"arguments": dict(arguments)}
        method = "completion/complete"
        reply = await self._ask(method, params)
        return read_reply(reply, method, lambda raw: one_of(raw, "completion", CompletionResult))

    # Any request

    @overload
    async def request(
        self, method: str, params: Mapping[str, Any] | None = None, *, repeat: bool = False
    ) -> Any: ...
    @overload
    async def request(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        type: type[_T],
        repeat: bool = False,
    ) -> _T: ...
    @overload
    async def request(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        type: Any,
        repeat: bool = False,
    ) -> Any: ...

    async def request(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        type: Any = None,
        repeat: bool = False,
    ) -> Any:
        """Send any request, and return its result: decoded, or as a value of `type`.

        If the connection is lost before the response, the request may or may not have run: it is
        sent again over the next connection with `repeat`, or if MCP defines it as one that only
        reads. Otherwise `CallLost` is raised. For tools there is `call`, which loses nothing.
        Raises `ValueError` for `tools/call` and `initialize`.
        """
        if method in _NOT_HERE:
            raise ValueError(f"request: use {_NOT_HERE[method]} in place of {method!r}")
        reply = await self._ask(method, params, may_repeat=repeat or method in wire.HARMLESS)
        return read_reply(reply, method, lambda raw: read_as(raw, Any if type is None else type))

    async def _ask(
        self, method: str, params: Mapping[str, Any] | None = None, *, may_repeat: bool = True
    ) -> Message:
        try:
            return await self._reconnector.ask(method, params or {}, may_repeat=may_repeat)
        except CallFailed as error:
            lacking = wire.missing(method, self.capabilities)
            if error.code != METHOD_NOT_FOUND or method not in wire.HARMLESS or lacking is None:
                raise
            declared = ", ".join(sorted(self.capabilities)) or "nothing"
            why = (
                f"The server does not offer {lacking}, which {method} needs: it offers {declared}."
            )
            raise CallFailed(error.code, why, error.data) from None

    async def _list(self, method: str, field: str, shape: type[_T]) -> list[_T]:
        """All pages of a listing. Raises `ClientError` if they do not seem to end."""
        found: list[_T] = []
        cursors: set[str] = set()
        cursor: str | None = None
        pages = size = 0
        while pages < PAGES_MAX and size <= LISTED_BYTES_MAX and cursor not in cursors:
            if cursor is not None:
                cursors.add(cursor)
            reply = await self._ask(method, {} if cursor is None else {"cursor": cursor})
            items, cursor = read_reply(reply, method, lambda raw: page_of(raw, field, shape))
            found += items
            pages += 1
            size += len(wire.result_of(reply))
            if cursor is None:
                return found
        limit = f"{PAGES_MAX} pages and {LISTED_BYTES_MAX} bytes"
        raise ClientError(f"The server's pages of {method} have no end below {limit}.")

    async def poll_all(self) -> list[Standing]:
        """The status of all streams of this client that run, or were not delivered."""
        return await self._list(wire.poll_all(), "statuses", Standing)


_NOT_HERE: Final = {"tools/call": "call or call_tool", "initialize": "a new Client"}


def read_reply(reply: Message, method: str, hear: Callable[[msgspec.Raw], _T]) -> _T:
    try:
        return hear(wire.result_of(reply))
    except ValueError as error:
        raise ClientError(f"The server's answer to {method} does not fit: {error}.") from None
