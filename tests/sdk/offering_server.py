"""A server of the official Python SDK with all that a client may ask for, over stdio or HTTP.

`--http` serves Streamable HTTP and prints its port. `--bare` offers tools alone.
"""

import asyncio
import socket
import sys
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import Completion
from pydantic import BaseModel

server = MCPServer("offering", instructions="Ask.", version="3")


class Weather(BaseModel):
    """Structured content with an output schema."""

    city: str
    degrees: float


class Choice(BaseModel):
    """The answer to a question."""

    yes: bool


@server.tool(title="The weather")
async def weather(city: str) -> Weather:
    """Look outside."""
    return Weather(city=city, degrees=3.5)


@server.tool()
async def numbers(below: int) -> list[int]:
    """Count; a list comes wrapped."""
    return list(range(below))


@server.tool()
async def fail() -> str:
    """Fail."""
    raise ValueError("no")


@server.tool()
async def ask(ctx: Context, what: str) -> str:
    """Log, report progress and ask the user."""
    await ctx.info(f"about {what}")
    await ctx.report_progress(1, 2, what)
    answer = await ctx.elicit(what, Choice)
    return answer.action


if "--bare" not in sys.argv:

    @server.resource("reports://index", mime_type="text/plain")
    def index() -> str:
        """The index."""
        return "one"

    @server.resource("reports://{name}", mime_type="image/png")
    def report(name: str) -> bytes:
        """A report."""
        return name.encode()

    @server.prompt(title="Review")
    def review(language: str, style: str = "kind") -> str:
        """Review code."""
        return f"Review this {language}, be {style}."

    @server.completion()
    async def complete(ref: Any, argument: Any, context: Any) -> Completion | None:
        """Complete a language."""
        known = ["python", "pytorch", "rust"]
        return Completion(values=[each for each in known if each.startswith(argument.value)])


async def serve_http() -> None:
    """Serve until the process is ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    app = server.streamable_http_app()
    await uvicorn.Server(uvicorn.Config(app, log_level="warning")).serve([listener])


if "--http" in sys.argv:
    asyncio.run(serve_http())
else:
    server.run()
