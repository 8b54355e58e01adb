"""Mounted servers for ASGI servers: `JOURNAL` and `TOKENS` name their files."""

import asyncio
import os

import trio
from fastapi import FastAPI, Request, Response
from starlette.applications import Starlette
from starlette.routing import Mount

from streams import Call, Server
from streams.aio import run_asyncio
from tests.rigs.aio_server import server
from tests.sdk.cut_server import server as journeys

LINE = "x" * 10_000


@server.tool
async def wait(call: Call, first: int = 1) -> str:
    """Send a few messages, then keep the stream open."""
    for number in range(first):
        await call.log("info", number + 1)
    await trio.sleep_forever()
    return ""


@server.tool
async def flood(call: Call, lines: int) -> str:
    """Send a lot: 10 KB a line."""
    for number in range(lines):
        await call.log("info", {"number": number + 1, "line": LINE})
    return f"{lines} lines"


@server.tool
async def in_asyncio(call: Call) -> str:
    """Use the loop of the ASGI server."""

    async def of_the_loop() -> str:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop()).__module__

    return str(await run_asyncio(of_the_loop))


def asgi(served: Server = server, path: str = "/mcp"):  # type: ignore[no-untyped-def]
    return served.asgi(
        path, journal=os.environ.get("JOURNAL"), auth_tokens=os.environ.get("TOKENS")
    )


alone = asgi()
journeying = asgi(journeys)
mounted_app = asgi()
mounted = FastAPI(lifespan=mounted_app.lifespan)
mounted.mount("/tools", mounted_app)


@mounted.get("/")
async def root() -> dict[str, bool]:
    return {"here": True}


naive = Starlette(routes=[Mount("/tools", asgi())])


@server.tool
async def held(call: Call, gate: str) -> str:
    """Send a message, and end once the file `gate` is there."""
    await call.log("info", 1)
    while not await trio.Path(gate).exists():
        await trio.sleep(0.01)
    return "released"


operated_app = server.asgi(
    journal=os.environ.get("JOURNAL"),
    log_calls="json",
    metrics=True,
    grace_s=float(os.environ.get("GRACE_S", "0")),
)
operated = FastAPI(lifespan=operated_app.lifespan)
operated.mount("/tools", operated_app)


@operated.get("/metrics")
async def metrics(request: Request) -> Response:
    text, media_type = await operated_app.metrics(request.headers.get("accept", ""))
    return Response(text, media_type=media_type)
