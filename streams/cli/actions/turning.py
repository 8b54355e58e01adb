"""What `mcp-streams pages` does: a tool's pages, one after the other, and how to go on."""

import shlex
import signal
from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from streams.cli.actions.call import DETACHED, DONE, TOOL_FAILED, cancel_on, has_failed
from streams.cli.actions.output import as_json_text, print_result, say
from streams.client.client import Client
from streams.client.pages import Pages


class Wanted(msgspec.Struct, frozen=True):
    """Whose pages, and from which on; `words` are the arguments as they were typed."""

    url: str
    tool: str
    words: Sequence[str]
    arguments: dict[str, Any]
    token: str | None


async def turn_pages(client: Client, wanted: Wanted, *, as_json: bool) -> int:
    """Print page after page. Ctrl-C leaves the rest, and says how to go on."""
    pages = client.pages(wanted.tool, wanted.arguments, token=wanted.token)
    code = DETACHED
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on, interrupts, nursery.cancel_scope)
            code = await _print_all(pages, as_json=as_json)
            nursery.cancel_scope.cancel()
    if code == DETACHED:
        say(_way_on(wanted, pages.token, as_json=as_json))
    return code


async def _print_all(pages: Pages, *, as_json: bool) -> int:
    code = DONE
    async for page in pages:
        print_result(page, as_json=as_json)
        print(end="", flush=True)  # the next one may take a while
        if has_failed(page):
            code = TOOL_FAILED
    return code


def _way_on(wanted: Wanted, token: str | None, *, as_json: bool) -> str:
    command = None
    if token is not None:
        words = [wanted.url, wanted.tool, *wanted.words, f"--token={token}"]
        command = f"mcp-streams pages {shlex.join(words)}"
    if as_json:
        return as_json_text({"left": {"pages": command, "token": token}})
    if command is None:
        return "Left before the first page: there is nothing to go on with."
    return f"Left behind the last page that was printed. To go on:\n  {command}"
