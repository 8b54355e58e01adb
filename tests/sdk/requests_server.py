"""The server file for official clients whose user speaks the two proposals.

It has the tool of cut_server.py, whose call is lost and resumed, and tools with pages.
"""

from collections.abc import AsyncIterator
from typing import Final

import trio
from cut_server import POLL_S, server  # a server file may import modules of its own folder

from streams import Call

EXPECTED_S: Final = 2.5
PAGE_WAIT_S: Final = 0.2
LONG_S: Final = 100.0  # no call gets an empty page for a slow machine


async def _pass(gates: str, number: int) -> None:
    """Wait for a file of this number, where there is a folder for it."""
    while gates and not await (trio.Path(gates) / str(number)).exists():
        await trio.sleep(POLL_S)


@server.tool(pages=True, expected_s=EXPECTED_S, page_wait_s=LONG_S)
async def rows(call: Call, pages: int, gates: str = "") -> AsyncIterator[list[str]]:
    """Yield so many pages of two rows; each is reported twice before it comes."""
    for page in range(1, pages + 1):
        await _pass(gates, page)
        await call.progress(page, total=pages)
        await call.log("info", {"step": page})
        yield [f"{page}.1", f"{page}.2"]


@server.tool(pages=True, page_wait_s=PAGE_WAIT_S)
async def counts(pages: int, gates: str = "") -> AsyncIterator[dict[str, int]]:
    """Yield so many pages of structured content; a call that comes too early gets an empty page."""
    for page in range(1, pages + 1):
        await _pass(gates, page)
        yield {"page": page}
