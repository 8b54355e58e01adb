"""Helpers of the client's tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from streams import Server
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.messages import Message, decode
from tests.rigs.scripted import Scripted, Stream
from tests.rigs.server import open_house
from transports.memory import MemoryServer

Params = dict[str, Any]


@asynccontextmanager
async def connected(server: Scripted, **options: Any) -> AsyncIterator[Client]:
    with trio.fail_after(3600):  # of a mock clock, or a bound for a test that hangs
        async with server.serving(), Client(server.memory.connect, **options) as client:
            yield client


def said(message: Message) -> Any:
    """The text of a log message."""
    return decode(message.params, dict[str, Any])["data"]


async def count(stream: Stream) -> Any:
    """Send the numbers up to `n`."""
    for number in range(1, stream.arguments["n"] + 1):
        stream.say(str(number))
    return {"content": [], "counted": stream.arguments["n"]}


def counting(**options: Any) -> Scripted:
    server = Scripted(**options)
    server.tools["count"] = count
    return server


class Stepping:
    """A tool that sends a number whenever the test lets it."""

    def __init__(self, server: Scripted, name: str = "step") -> None:
        server.tools[name] = self
        self._send, self.texts = trio.open_memory_channel[str | None](1_000)

    async def __call__(self, stream: Stream) -> Any:
        async for text in self.texts:
            if text is None:
                break
            stream.say(text)
        return {"content": [], "done": True}

    def say(self, *texts: str | None) -> None:
        """Let the tool send this number; None ends it."""
        for text in texts:
            self._send.send_nowait(text)


class Asking:
    """A tool that asks the client, and a handler that answers when the test tells it to."""

    def __init__(self, server: Scripted) -> None:
        server.tools["ask"] = self
        self.asked = 0
        self.may_answer = trio.Event()

    async def __call__(self, stream: Stream) -> Any:
        stream.say("before")
        answer = await stream.ask("elicitation/create", {"message": "Go on?"})
        return {"content": [], "answer": answer}

    async def handler(self, params: Params) -> Params:
        self.asked += 1
        await self.may_answer.wait()
        return {"action": "accept", "to": params["message"]}


async def rest_of(call: RunningCall) -> list[Any]:
    return [said(message) async for message in call]


async def held(nursery: trio.Nursery, dial: Any) -> Client:
    """A client that stays open until the nursery is cancelled."""

    async def hold(task_status: trio.TaskStatus[Client]) -> None:
        async with Client(dial) as client:
            task_status.started(client)
            await trio.sleep_forever()

    client: Client = await nursery.start(hold)
    return client


@asynccontextmanager
async def at_home(server: Server) -> AsyncIterator[MemoryServer]:
    """A real server in this process; the test connects to it and cuts the connections."""
    async with open_house(server) as house, trio.open_nursery() as nursery:
        memory = MemoryServer()
        await nursery.start(memory.serve, house.running.serve)
        yield memory
        nursery.cancel_scope.cancel()
