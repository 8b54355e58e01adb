"""A server that asks, notifies and changes while it runs, as its author would write it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pydantic
import trio

from streams import AcceptedElicitation, Call, Server, SyncCall, ToolError


@asynccontextmanager
async def lifespan(server: Server) -> AsyncIterator[dict[str, int]]:
    yield {"tea": 250}


server = Server("asking", lifespan=lifespan, mask_errors=True)


class Confirm(pydantic.BaseModel):
    sure: Annotated[bool, pydantic.Field(description="Ship it?")]
    note: str = ""


@server.tool
async def ship(call: Call, order: str) -> str:
    result = await call.elicit(f"Ship {order}?", Confirm)
    if isinstance(result, AcceptedElicitation):
        return f"{result.data.sure} {result.data.note}"
    return result.action


@server.tool
def pay(call: SyncCall) -> str:
    return call.elicit_url("Pay there.", "https://pay.example/7", "pay-7").action


@server.tool
async def ask_model(call: Call) -> str:
    sample = await call.sample("How are you?", max_tokens=50, system_prompt="Be brief.")
    return f"{sample.text} {sample.model}"


@server.tool
async def folders(call: Call) -> list[str]:
    return [root.uri for root in await call.roots()]


@server.tool
async def caller(call: Call) -> dict[str, Any]:
    return {
        "client": call.client.info.name,
        "revision": call.client.revision,
        "elicits": call.client.has("elicitation"),
        "issuer": call.principal.issuer,
        "is_anonymous": call.principal.is_anonymous,
        "tea": call.state["tea"],
    }


@server.tool
async def fail(call: Call, how: str) -> str:
    async with trio.open_nursery():
        raise ToolError("Closed today.") if how == "told" else ValueError("dsn=secret")


@server.tool(timeout_s=0.2)
async def hang() -> str:
    await trio.sleep_forever()
    return "never"


@server.tool
async def learn() -> str:
    async def learned() -> str:
        return "new"

    server.add_tool(learned)
    return "learned"


@server.tool
async def announce() -> str:
    await server.notify_all("notifications/resources/updated", {"uri": "acme://news"})
    return "announced"


@server.tool
async def forget() -> str:
    server.remove_tool("learned")
    return "forgotten"


@server.method("acme/search")
async def search(call: Call, params: dict[str, Any]) -> dict[str, Any]:
    if not params["words"]:
        raise ToolError("Closed today.")
    return {"found": params["words"], "state": call.state}
