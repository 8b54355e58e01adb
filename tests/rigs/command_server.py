"""The server file of the command's tests."""

from typing import Any

from streams import Call, EmbeddedResource, Image, Server, Text
from tests.wire import tools_server

server = Server("command-tests", version="1", resume_min_s=0)
server.tool(tools_server.count)
server.tool(tools_server.progress)
server.tool(tools_server.blocks)
server.tool(tools_server.forever)
server.tool(resume_max_s=0.1)(tools_server.brief)


@server.tool
async def echo(value: Any, other: str = "") -> dict[str, Any]:
    """Return the arguments as they came."""
    return {"value": value, "other": other}


@server.tool
async def fail() -> str:
    """Raise."""
    raise ValueError("the tool says no")


@server.tool
async def ask(call: Call) -> str:
    """Ask the client for something."""
    await call.request("elicitation/create", tools_server.ELICITATION)
    return "answered"


@server.tool
async def show_off(call: Call) -> list[Text | EmbeddedResource | Image]:
    """Send and return text that could disturb a terminal or a careless parser."""
    await call.log("info", "[/red] :100: \x1b[2J")
    await call.progress(1, total=2, message="[/blue]")
    await call.progress(2, total=2, message="\x1b[2Jdone")
    await call.notify("notifications/odd", {"odd": ["no", "object"]})
    return [Text(text="[bold] :100:"), Image(data=b"hello", mime_type="image/png")]
