"""A child behind a server, for tests: the naughty one unless a test says otherwise."""

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from streams.backends.child import ChildBackend, ChildSettings
from streams.exchange import Caller
from streams.journal.contract import Journal
from streams.journal.memory import MemoryJournal
from streams.keys import Keyring
from streams.limits import Limits
from streams.server.running import open_backend
from tests.rigs.server import House, Json, Talker
from tests.rigs.web import EVENTS, JSON, Answer, Browser

NAUGHTY: Final = str(Path(__file__).parent / "naughty.py")
PATIENCE_S: Final = 20  # a bound for a test that hangs


def settings(**given: Any) -> ChildSettings:
    """Settings of the naughty child. `env` has the names without their prefix, in small letters."""
    env = {f"NAUGHTY_{name.upper()}": str(value) for name, value in given.pop("does", {}).items()}
    command = (sys.executable, "-I", "-S", NAUGHTY)
    return ChildSettings(**{"command": command, "env": env, "stop_timeout_s": 2.0} | given)


@asynccontextmanager
async def wrapped(
    given: ChildSettings | None = None,
    *,
    journal: Journal | None = None,
    limits: Limits | None = None,
    keyring: Keyring | None = None,
    **more: Any,
) -> AsyncIterator[tuple[House, ChildBackend]]:
    """A server in front of children, for the length of a block."""
    backend = ChildBackend(settings(**more) if given is None else given)
    journal = MemoryJournal() if journal is None else journal
    keyring = Keyring.load(None) if keyring is None else keyring
    with trio.fail_after(PATIENCE_S):
        async with (
            open_backend(backend, journal, keyring, limits) as running,
            trio.open_nursery() as nursery,
        ):
            yield House(running, journal, nursery), backend
            nursery.cancel_scope.cancel()


def said(answer: Json) -> Any:
    """The JSON in the text of a result."""
    return json.loads(answer["content"][0]["text"])


def text(answer: Json) -> str:
    """The text of a result."""
    found: str = answer["content"][0]["text"]
    return found


async def call(talker: Talker, tool: str, id: int = 1, **arguments: Any) -> Json:
    """The result of a call, or its error."""
    return await talker.request(id, "tools/call", name=tool, arguments=arguments)


async def state(talker: Talker, id: int = 90) -> Json:
    """The naughty child's memory."""
    found: Json = said(await call(talker, "state", id))
    return found


async def until(talker: Talker, is_so: Callable[[Json], object]) -> Json:
    """The state of the child when it is so."""
    number = 1000
    while not is_so(found := await state(talker, number)):
        number += 1
        await trio.sleep(0.02)
    return found


class Patient(Answer):
    """A response that a test waits for: a child takes its time."""

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait until this holds."""
        while not is_so():
            await trio.sleep(0.01)

    async def whole(self) -> Json:
        """Wait for the end of the response; returns its last message."""
        await self.until(lambda: self.is_whole)
        return self.json if self.type == JSON else self.messages[-1]

    @property
    def messages(self) -> list[Json]:
        """The messages that have come as events."""
        return [message for _, message in self.events if message]

    async def find(self, is_it: Callable[[Json], object]) -> Json:
        """Wait for a message."""
        await self.until(lambda: self.status and any(map(is_it, self.messages)))
        return next(filter(is_it, self.messages))


class Web(Browser):
    """A client over HTTP of a house whose answers take their time."""

    make_answer = Patient

    async def greet(self, capabilities: Json, revision: str = "2025-11-25") -> None:
        hello = {"protocolVersion": revision, "capabilities": capabilities}
        params = hello | {"clientInfo": {"name": "web", "version": "1"}}
        answer = await self.request("initialize", **params)
        assert answer["protocolVersion"] == revision
        await self.tell("notifications/initialized")

    async def request(self, method: str, **params: Any) -> Json:
        """The result of a request, or its error."""
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = self.ask("POST", message)
        assert isinstance(answer, Patient)
        said = await answer.whole()
        self.session = answer.headers.get("mcp-session-id", self.session)
        found: Json = said["result"] if "result" in said else said["error"]
        return found

    async def call_tool(self, tool: str, **arguments: Any) -> Json:
        """The result of a call, or its error."""
        return await self.request("tools/call", name=tool, arguments=arguments)

    async def standing(self) -> Patient:
        """The event stream of the session."""
        answer = self.ask("GET", accept=EVENTS)
        assert isinstance(answer, Patient)
        return answer


@asynccontextmanager
async def surfing(
    house: House, capabilities: Json, caller: Caller | None = None
) -> AsyncIterator[Web]:
    """A client over HTTP with a session, for the length of a block."""
    async with trio.open_nursery() as nursery:
        web = Web(house, nursery, caller=caller)
        await web.greet(capabilities)
        yield web
        nursery.cancel_scope.cancel()
