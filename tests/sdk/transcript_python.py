"""The official Python SDK's client makes a conversation, and prints all of it as a line of JSON.

Its argument is JSON: where to connect, and the steps: see `Conversation` in `transcripts.py`.
"""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final

import anyio
from mcp import Client, MCPError, types
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from transports.sdk import over

Json = dict[str, Any]

STEP_S: Final = 20
ANSWERS: Final = json.loads(sys.argv[2])


class Recorder:
    """Every message of a connection, in the order in which the SDK sends and receives them."""

    def __init__(self) -> None:
        self.sent: list[Json] = []
        self.received: list[Json] = []
        self.heard: Counter[str] = Counter()
        self._changed = anyio.Event()

    @asynccontextmanager
    async def around(self, transport: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        """The same transport, recorded."""
        async with transport as (read, write), anyio.create_task_group() as tasks:
            out, incoming = anyio.create_memory_object_stream[Any]()
            outgoing, into = anyio.create_memory_object_stream[Any]()
            tasks.start_soon(self._pass, read, out, self.received)
            tasks.start_soon(self._pass, into, write, self.sent)
            yield incoming, outgoing
            tasks.cancel_scope.cancel()

    async def _pass(self, source: Any, sink: Any, into: list[Json]) -> None:
        async with source, sink:
            async for message in source:
                if not isinstance(message, Exception):
                    self._note(into, message.message.model_dump(by_alias=True, exclude_unset=True))
                try:
                    await sink.send(message)
                except anyio.BrokenResourceError:
                    if into is self.received:
                        return  # the client has left: it reads no more
                    raise

    def _note(self, into: list[Json], message: Json) -> None:
        into.append(message)
        if into is self.received and "method" in message:
            self.heard[message["method"]] += 1
            self._changed.set()
            self._changed = anyio.Event()

    async def wait_for(self, wanted: Json) -> None:
        """Wait until so many messages of each method have come."""
        while any(self.heard[method] < number for method, number in wanted.items()):
            await self._changed.wait()


def opened(where: Json) -> AbstractAsyncContextManager[Any]:
    """The transport to a command or a URL."""
    if "command" in where:
        command, *arguments = where["command"]
        return stdio_client(
            StdioServerParameters(command=command, args=arguments, env=where["environment"])
        )
    if where["url"].startswith("ws"):
        return over(where["url"])
    return streamable_http_client(where["url"])


async def sample(_: Any, params: Any) -> types.CreateMessageResult:
    return types.CreateMessageResult.model_validate(ANSWERS["sampling/createMessage"])


async def elicit(_: Any, params: Any) -> types.ElicitResult:
    return types.ElicitResult.model_validate(ANSWERS["elicitation/create"])


async def roots(_: Any) -> types.ListRootsResult:
    return types.ListRootsResult.model_validate(ANSWERS["roots/list"])


async def take(client: Client, recorder: Recorder, step: Json) -> None:
    """Take one step; what comes of it is in the record."""
    if wanted := step.get("await"):
        await recorder.wait_for(wanted)
        return
    if step["method"] == "notifications/roots/list_changed":
        await client.send_roots_list_changed()
        return
    with anyio.CancelScope() as scope:

        async def progressed(*_: object) -> None:
            if step.get("cancel"):
                scope.cancel()

        # The server's answer is in the record.
        with suppress(MCPError, RuntimeError, ValueError):
            await request(client, step["method"], step["params"], progressed)


async def request(client: Client, method: str, params: Json, progressed: Any) -> None:
    """Call the SDK's function for a method, or send the request as it is."""
    match method:
        case "tools/list":
            await client.list_tools()
        case "resources/list":
            await client.list_resources()
        case "resources/templates/list":
            await client.list_resource_templates()
        case "prompts/list":
            await client.list_prompts()
        case "tools/call":
            await client.call_tool(
                params["name"], params["arguments"], progress_callback=progressed
            )
        case "resources/read":
            await client.read_resource(params["uri"])
        case "resources/subscribe":
            await client.subscribe_resource(params["uri"])
        case "resources/unsubscribe":
            await client.unsubscribe_resource(params["uri"])
        case "prompts/get":
            await client.get_prompt(params["name"], params.get("arguments"))
        case "ping":
            await client.send_ping()
        case "logging/setLevel" if params["level"] != "nonsense":
            await client.set_logging_level(params["level"])
        case _:
            plain = types.Request[Any, Any](method=method, params=params)
            await client.session.send_request(plain, types.EmptyResult)


async def main() -> None:
    """Make the conversation."""
    given = json.loads(sys.argv[1])
    recorder = Recorder()
    client = Client(
        recorder.around(opened(given["where"])),  # type: ignore[arg-type]
        mode=given["mode"],
        client_info=types.Implementation(name="transcript", version="1"),
        sampling_callback=sample,
        elicitation_callback=elicit,
        list_roots_callback=roots,
    )
    async with client:
        for step in given["steps"]:
            with anyio.move_on_after(STEP_S) as waiting:
                await take(client, recorder, step)
            if waiting.cancelled_caught:
                raise SystemExit(f"no end of {step}; heard {recorder.heard}")
    print(json.dumps({"sent": recorder.sent, "received": recorder.received}))


anyio.run(main)
