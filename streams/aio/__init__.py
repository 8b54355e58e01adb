"""mcp-streams in asyncio programs: the same `Client`, and what a mounted server's tools may need.

    from streams.aio import Client

    async with Client(dial("http://127.0.0.1:8080/mcp")) as client:
        async with client.call("build", {"rows": 3}) as call:
            async for message in call:
                ...
            result = await call.result()

The client runs on trio, as a guest of the asyncio loop, in the same thread.
"""

from typing import TYPE_CHECKING

from streams.aio.client import Client
from streams.aio.guest import run_asyncio

if TYPE_CHECKING:  # the methods of `Client` are annotated with those that these derive from
    from streams.client.call import RunningCall
    from streams.client.pages import Pages
else:
    from streams.aio.client import Pages, RunningCall

__all__ = ["Client", "Pages", "RunningCall", "run_asyncio"]
