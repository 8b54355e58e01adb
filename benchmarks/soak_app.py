"""The soaked server: it keeps data for seconds only, so that a leak shows within minutes."""

from collections.abc import AsyncIterator

from benchmarks import app
from streams import Call, Server
from streams.limits import MIB, Limits

MAX_S = 20.0  # how long a stream is kept that no client resumes

server = Server(
    "soak",
    version="1",
    resume_min_s=0,
    resume_max_s=MAX_S,
    limits=Limits(
        unsent_entries_max=20_000,
        unsent_bytes_max=4 * MIB,
        undelivered_bytes_max=4 * MIB,
        streams_per_principal_max=10_000,
        resident_max=50,
        message_bytes_max=MIB // 4,
        session_idle_s=15.0,
        tombstone_s=10.0,
        drained_s=10.0,
        last_page_s=5.0,
    ),
)

server.tool(app.fill)
server.tool(app.pace)
server.tool(app.wait)


@server.tool
async def ask(call: Call, count: int) -> list[int]:
    """Ask the client `count` times, and return its answers."""
    answers = []
    for number in range(count):
        params = {"message": str(number), "requestedSchema": {"type": "object", "properties": {}}}
        answer = await call.request("elicitation/create", params)
        answers.append(answer["content"]["n"])
    return answers


@server.tool(pages=True)
async def pages(count: int) -> AsyncIterator[str]:
    """Yield `count` numbered pages."""
    for number in range(count):
        yield str(number)
