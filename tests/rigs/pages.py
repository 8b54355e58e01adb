"""A tool that yields pages, and a client in the middle of them."""

from collections.abc import AsyncIterator
from typing import Any, Final

from streams import Call, Server
from tests.rigs.server import PLAIN, House, Json, Talker, next_of

MAX_S: Final = 600.0


def counting(**settings: Any) -> Server:
    """A server whose tool `count` yields the numbers up to `to`, and sends each one before."""
    server = Server("tested", **({"resume_max_s": MAX_S} | settings))

    @server.tool(pages=True)
    async def count(call: Call, to: int = 5, why: Any = None) -> AsyncIterator[str]:
        for number in range(1, to + 1):
            await call.log("info", number)
            yield str(number)

    @server.tool
    async def lone() -> str:
        return "no pages"

    return server


async def begun(
    house: House, capabilities: Json = PLAIN, principal: str = "os(0)"
) -> tuple[Talker, list[str]]:
    """A client that has three pages of `count`, and the page tokens that followed each."""
    talker = await house.dial(capabilities, principal)
    tokens = [next_of(await talker.page("p1", "count"))]
    for number in (2, 3):
        tokens.append(next_of(await talker.page(f"p{number}", "count", tokens[-1])))
    talker.seen.clear()
    return talker, tokens
