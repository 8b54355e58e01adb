"""A user's program with all that has a type: a server, a client, handlers and a test of both.

`test_typing.py` has it checked by mypy and pyright, in their strictest settings, and runs it.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import trio

from streams import (
    Call,
    CallFailed,
    CallToolResult,
    Client,
    ClientError,
    CompletionResult,
    HttpEndpoint,
    Image,
    Journal,
    Keyring,
    Limits,
    MemoryJournal,
    Message,
    NotificationHandler,
    Pages,
    Prompt,
    PromptResult,
    Resource,
    ResourcePart,
    Run,
    RunningCall,
    RunningServer,
    Server,
    Standing,
    SyncCall,
    Text,
    Ticket,
    Tool,
    ToolAnnotations,
    ToolFailed,
    open_sqlite_journal,
)
from transports import Dialer, dial, http

HINTS: ToolAnnotations = {"readOnlyHint": True}
server = Server("shop", version="1.0", limits=Limits(streams_max=100), resume_min_s=0)


class Total(msgspec.Struct):
    """Cents."""

    net: int
    gross: int


@dataclass
class Place:
    shelf: str
    row: int = 0


class Row(TypedDict):
    number: int


@server.tool
async def total(prices: list[int], vat: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2) -> Total:
    """Add up an order."""
    net = sum(prices)
    return Total(net, round(net * (1 + vat)))


@server.tool(title="Ship an order", annotations=HINTS, restart=True, overflow="fail")
async def ship(call: Call, order: str) -> str:
    """Ship an order, if the user agrees."""
    await call.log("info", {"order": order})
    await call.progress(1, total=2, message="asking")
    answer = await call.request("elicitation/create", {"message": order, "requestedSchema": {}})
    return "shipped" if answer["action"] == "accept" else "kept"


@server.tool
def label(call: SyncCall, order: str) -> list[Text | Image]:
    """Draw a label."""
    call.progress(1, total=1)
    return [Text(order), Image(b"png", "image/png")]


@server.tool(pages=True, expected_s=1)
def rows(below: int) -> Iterator[list[int]]:
    """Count, a number a page."""
    for number in range(below):
        yield [number]


@server.tool(pages=True)
async def slow_rows(below: int) -> AsyncIterator[Row]:
    """The same, slowly."""
    for number in range(below):
        await trio.lowlevel.checkpoint()
        yield Row(number=number)


async def agree(params: dict[str, Any], call: RunningCall | None) -> dict[str, Any]:
    """Answer a question of the server."""
    name = "?" if call is None else f"{call.name} {call.arguments}"
    print(f"{name}: {params['message']}")
    return {"action": "accept", "content": {}}


async def roots(params: dict[str, Any]) -> dict[str, Any]:
    """Answer another one."""
    return {"roots": [{"uri": Path.cwd().as_uri()}]}


def heard(message: Message) -> None:
    print(message.method, msgspec.json.decode(message.params))


def logged(params: dict[str, Any], call: RunningCall | None) -> None:
    print(params["level"], params["data"])


async def changed(params: dict[str, Any]) -> None:
    print("changed:", params)


async def progressed(progress: float, total: float | None, message: str | None) -> None:
    print(progress, total, message)


async def calls(client: Client) -> Ticket | None:
    """Calls, and what a client can ask for. Returns in a block, as user code does."""
    whole: CallToolResult = await client.call_tool("total", {"prices": [1]})
    assert not whole.is_error, whole.text
    order: Total = await client.call_tool("total", {"prices": [1, 2]}, type=Total)
    text: str = await client.call_tool("ship", {"order": "A-1"}, type=str, on_progress=progressed)
    print(order.gross, text, (await client.call_tool("label", {"order": "A"})).content)
    try:
        await client.call_tool("total", {"prices": "none"}, type=Total)
    except ToolFailed as failed:
        print(failed, failed.result)
    async with client.call("ship", {"order": "A-2"}) as call:
        async for message in call:
            print(message.method, call.ticket)
            break
        async for run in call.runs():
            lines(run)
        print(await call.result(str), await call.result())
        return call.ticket


def lines(run: Run) -> int:
    return len(run.lines)


async def questions(client: Client) -> None:
    tools: list[Tool] = await client.tools()
    print([(tool.name, tool.input_schema, tool.annotations.get("readOnlyHint")) for tool in tools])
    statuses: list[Standing] = await client.poll_all()
    print([each.status for each in statuses], client.server_info, client.capabilities)
    pages: Pages = client.pages("rows", {"below": 2})
    async for page in pages:
        print(page["content"], pages.token)
    tools_again = await client.request("tools/list", type=dict[str, Any])
    print(len(tools_again["tools"]))
    try:
        resources: list[Resource] = await client.resources()
        for resource in resources:
            contents: list[ResourcePart] = await client.read_resource(resource.uri)
            print(contents[0].text, contents[0].blob)
        prompts: list[Prompt] = await client.prompts()
        for prompt in prompts:
            filled: PromptResult = await client.prompt(prompt.name, {})
            found: CompletionResult = await client.complete("order", "A", prompt=prompt.name)
            print(filled.messages[0].text, found.values)
    except CallFailed as failed:
        print(failed.code, failed.message)


async def remote(dialer: Dialer) -> Place | None:
    try:
        async with Client(dialer, on_notification=heard, patience_s=5) as client:
            return await client.call_tool("place", {"order": "A"}, type=Place)
    except ClientError as error:
        print(error)
        return None


async def serve(journal: Journal) -> None:
    async with server.open(journal, Keyring.load(None)) as running, trio.open_nursery() as nursery:
        endpoint = HttpEndpoint(running, "/mcp")
        port: int = await nursery.start(http.serve, endpoint, "127.0.0.1", 0)
        print(await remote(dial(f"http://127.0.0.1:{port}/mcp")), counted(running))
        nursery.cancel_scope.cancel()


def counted(running: RunningServer) -> int:
    return len(running.running_tools)


async def main() -> None:
    log: NotificationHandler = logged
    async with Client(server, answers={"elicitation/create": agree}) as client:
        client.on_request("roots/list", roots)
        client.on_notification("notifications/message", log)
        client.on_notification("notifications/tools/list_changed", changed)
        print(await calls(client))
        await questions(client)
    await serve(MemoryJournal())
    async with open_sqlite_journal(Path("typed.db")) as journal:
        await serve(journal)


if __name__ == "__main__":
    trio.run(main)
