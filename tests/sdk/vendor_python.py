"""The official Python SDK's client over HTTP, with the two proposals spoken through it.

Given `{"talks": [{"url", "declares", "steps"}], "stays", "patience_s", "quiet_s"}`, as its sibling
in TypeScript is. It holds all talks at once, each in a session of its own, and prints its records
of them as one line of JSON. Then it closes the sessions, or, where it `stays`, waits to be killed.

A step does what its `do` says, a method of `Talk`, within `patience_s`; its result is kept under
its name, `as`. A step with `behind` is not waited for; `await` waits for it later. A request of
ours that names neither token nor request takes both from the session's last `resumePolicy`.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from mcp import Client, ClientSession, MCPError, types
from mcp.client import ClientExtension, NotificationBinding
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel, TypeAdapter

POLICY: Final = "notifications/requests/resumePolicy"
TOKEN: Final = "mcp-streams/resumeToken"
NEXT: Final = "mcp-streams/nextResumeToken"
INFO: Final = types.Implementation(name="vendor", version="1.0")

Json = dict[str, Any]
Vendor = types.Request[Json, str]  # a request that the SDK does not define
ANY: Final = TypeAdapter(Json)


class Params(BaseModel, extra="allow"):
    """The params of any notification."""


class ResumableRequests(ClientExtension):
    """Makes the SDK's client declare the dialect, and receive its policies.

    Notifications that the SDK does not know are dropped unless they are bound like this; the
    `message_handler` never sees them.
    """

    identifier = "mcp-streams/v1"

    def __init__(self, talk: "Talk") -> None:
        self._talk = talk

    def settings(self) -> Json:
        return {"dialects": ["resumableRequests"]}

    def notifications(self) -> Sequence[NotificationBinding[Any]]:
        return [NotificationBinding(method=POLICY, params_type=Params, handler=self._learn)]

    async def _learn(self, policy: Params) -> None:
        self._talk.hear(self._talk.policies, policy.model_dump())


class Talk:
    """One session, and its records."""

    def __init__(
        self, url: str, declares: Json, patience: tuple[float, float], policy: Json | None = None
    ) -> None:
        self.policies: list[Json] = [] if policy is None else [policy]
        self.progress: list[tuple[str | int, float]] = []
        self.logs: list[Any] = []
        self.outcomes: dict[str, Json] = {}
        self.is_over = asyncio.Event()
        self._url = url
        self._declares = declares
        self._patience_s, self._quiet_s = patience
        self._known = len(self.policies)
        self._behind: dict[str, asyncio.Task[Json]] = {}
        self._news = asyncio.Event()

    def seen(self) -> Json:
        return {
            "policies": self.policies[self._known :],
            "progress": self.progress,
            "logs": self.logs,
            "outcomes": self.outcomes,
            "problems": [],
        }

    def hear(self, heard: list[Any], what: Any) -> None:
        heard.append(what)
        self._news.set()

    async def hold(self, steps: list[Json], leave: asyncio.Event) -> None:
        """Take all steps, then keep the session until every talk may end."""
        async with self._session() as session:
            for step in steps:
                name = step.get("as", step["do"])
                coming = self._outcome(getattr(self, f"_{step['do']}")(session, step))
                if step.get("behind"):
                    self._behind[name] = asyncio.create_task(coming)
                else:
                    self.outcomes[name] = await coming
            self.is_over.set()
            await leave.wait()
            for task in self._behind.values():
                task.cancel()

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[ClientSession]:
        """A session, with the SDK's handshake for no capability or the extension, else with one of
        its own.
        """
        extension = ResumableRequests(self)
        if self._declares == {} or "extensions" in self._declares:
            extensions = [extension] if self._declares else []
            async with Client(
                self._url,
                client_info=INFO,
                message_handler=self._handle,
                extensions=extensions,
            ) as client:
                yield client.session
            return
        async with (
            streamable_http_client(self._url) as (read, write),
            ClientSession(
                read,
                write,
                message_handler=self._handle,
                notification_bindings=extension.notifications(),
            ) as session,
        ):
            params = {
                "protocolVersion": "2025-11-25",
                "capabilities": self._declares,
                "clientInfo": INFO.model_dump(exclude_none=True),
            }
            initialize = Vendor(method="initialize", params=params)
            session.adopt(await session.send_request(initialize, types.InitializeResult))
            await session.send_notification(types.InitializedNotification())
            yield session

    async def _handle(self, message: object) -> None:
        """Record each notification, also of a call that another session made."""
        match message:
            case types.ProgressNotification(params=told):
                self.hear(self.progress, (told.progress_token, told.progress))
            case types.LoggingMessageNotification(params=said):
                self.hear(self.logs, said.data)

    async def _outcome(self, coming: Coroutine[Any, Any, Any]) -> Json:
        try:
            async with asyncio.timeout(self._patience_s):
                return {"result": await coming}
        except MCPError as error:
            wrong = error.error
            return {"error": {"code": wrong.code, "message": wrong.message, "data": wrong.data}}
        except (RuntimeError, TimeoutError) as error:  # the SDK's about a result; our own
            return {"error": {"code": None, "message": repr(error), "data": None}}

    async def _call(self, session: ClientSession, step: Json) -> Json:
        """Make a call with a progress token of its own, and not the SDK's request id."""
        meta: Any = {"progressToken": step["name"]}
        return _plain(await session.call_tool(step["tool"], step["arguments"], meta=meta))

    async def _pages(self, session: ClientSession, step: Json) -> list[Json]:
        """Fetch pages up to the last, or `at_most` so many; `to` names the step with the first page
        token.
        """
        token = step.get("token")
        if "to" in step:
            token = self._next_of(step["to"])
        pages: list[Json] = []
        while len(pages) < step.get("at_most", 1000):
            meta: Any = {"progressToken": step["name"]}
            meta |= {TOKEN: token} if token is not None else {}
            result = await session.call_tool(step["tool"], step["arguments"], meta=meta)
            pages.append(_plain(result))
            token = (result.meta or {}).get(NEXT)
            if token is None:
                break
        return pages

    def _next_of(self, name: str) -> str:
        """The page token in a step's result."""
        result = self.outcomes[name]["result"]
        page = result[-1] if isinstance(result, list) else result
        token: str = page["_meta"][NEXT]
        return token

    async def _request(self, session: ClientSession, step: Json) -> Json:
        """Send a request that the SDK does not know."""
        known = {"requests/resume": ["resumeToken"]}
        fields = known.get(step["method"], ["requestId", "resumeToken"])
        learned = {name: self.policies[-1][name] for name in fields if self.policies}
        request = Vendor(method=step["method"], params=learned | step.get("params", {}))
        return await session.send_request(
            request, ANY, request_read_timeout_seconds=step.get("timeout_s")
        )

    async def _list(self, session: ClientSession, step: Json) -> Json:
        return {tool.name: tool.meta for tool in (await session.list_tools()).tools}

    async def _hear(self, session: ClientSession, step: Json) -> None:
        """Wait until there are a policy and so many log messages."""
        while not self.policies or len(self.logs) < step["logs"]:
            self._news.clear()
            await self._news.wait()

    async def _await(self, session: ClientSession, step: Json) -> Any:
        outcome = await self._behind[step["for"]]
        self.outcomes[step["for"]] = outcome
        return None

    _lose = _await  # a call that the SDK has abandoned counts as failed

    async def _touch(self, session: ClientSession, step: Json) -> None:
        for path in step["paths"]:
            Path(path).touch()

    async def _linger(self, session: ClientSession, step: Json) -> None:
        await asyncio.sleep(self._quiet_s)

    async def _elsewhere(self, session: ClientSession, step: Json) -> Json:
        """Another session, with the policies of this one."""
        patience = (self._patience_s, self._quiet_s)
        talk = Talk(step["url"], step["declares"], patience, self.policies[-1])
        at_once = asyncio.Event()
        at_once.set()
        await talk.hold(step["steps"], at_once)
        return talk.seen()


def _plain(result: types.CallToolResult) -> Json:
    """The SDK's view of a result, in the wire's spelling."""
    return result.model_dump(by_alias=True, mode="json", exclude_none=True)


async def main() -> None:
    """Hold all talks."""
    given = json.loads(sys.argv[1])
    patience = (given["patience_s"], given["quiet_s"])
    talks = [Talk(talk["url"], talk["declares"], patience) for talk in given["talks"]]
    leave = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for talk, wanted in zip(talks, given["talks"], strict=True):
            group.create_task(talk.hold(wanted["steps"], leave))
        for talk in talks:
            await talk.is_over.wait()
        print(json.dumps([talk.seen() for talk in talks]), flush=True)
        if not given["stays"]:
            leave.set()


asyncio.run(main())
