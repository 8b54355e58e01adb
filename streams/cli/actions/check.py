"""The action of `wrap --check`: start a server, initialize, list what it has, stop it."""

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import trio

from streams.cli.actions.output import as_json_text, harmless, one_line
from streams.cli.base import DONE, FAILED, complain
from streams.client.client import Client
from streams.errors import ServerRefused, StreamsError, first_of
from streams.process.loading import Servable
from streams.process.options import CannotServe

NAMES_MAX: Final = 20  # in one line
CONNECT_S: Final = 5.0  # for all of `initialize` besides the child's own part of it

_T = TypeVar("_T")


class Found(msgspec.Struct, frozen=True, rename="camel"):
    """A server as it describes itself: lists that it has not declared are None."""

    name: str
    version: str
    protocol: str
    capabilities: list[str]
    tools: int | None = None
    tool_names: list[str] = []
    resources: int | None = None
    resource_templates: int | None = None
    prompts: int | None = None
    start_s: float = 0.0


def run(make: Callable[[], Servable], start_timeout_s: float, *, as_json: bool) -> int:
    """Print what was found; returns the exit code, `FAILED` where the server cannot be used."""
    failure: BaseException | None = None
    try:
        found = trio.run(partial(_look, make(), start_timeout_s))
    except* (CannotServe, StreamsError, OSError) as errors:
        failure = first_of(errors)
    if failure is not None:
        if isinstance(failure.__cause__, ServerRefused):
            sys.stderr.write(harmless(str(failure.__cause__.data.get("stderrTail", ""))))
        return complain(failure, FAILED)
    print(as_json_text(found) if as_json else harmless(_described(found)))
    return DONE


async def _look(server: Servable, start_timeout_s: float) -> Found:
    began_at = trio.current_time()
    async with Client(server, connect_timeout_s=start_timeout_s + CONNECT_S) as client:
        start_s = trio.current_time() - began_at
        return await _listed(client, round(start_s, 2), start_timeout_s)


async def _listed(client: Client, start_s: float, within_s: float) -> Found:
    """Raises `CannotServe` where all lists together take longer than `within_s`."""
    listing_until = trio.current_time() + within_s

    async def listed(what: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        try:
            with trio.fail_at(listing_until):
                return await ask()
        except trio.TooSlowError:
            raise CannotServe(
                f"The server has answered initialize, but not {what} within {within_s:g} s: give "
                "it more time with --start-timeout, or mend it."
            ) from None

    about = client.server_info
    declared = client.capabilities
    lists: dict[str, Any] = {}
    if "tools" in declared:
        tools = await listed("tools/list", client.tools)
        lists |= {"tools": len(tools), "tool_names": [each.name for each in tools]}
    if "resources" in declared:
        lists["resources"] = len(await listed("resources/list", client.resources))
        templates = await listed("resources/templates/list", client.resource_templates)
        lists["resource_templates"] = len(templates)
    if "prompts" in declared:
        lists["prompts"] = len(await listed("prompts/list", client.prompts))
    return Found(
        name=str(about.get("name", "")),
        version=str(about.get("version", "")),
        protocol=client.protocol_version,
        capabilities=sorted(set(declared) - {"experimental", "extensions"}),
        start_s=start_s,
        **lists,
    )


def _described(found: Found) -> str:
    counts = ("tools", "resources", "resource_templates", "prompts")
    counted = [(name.replace("_", " "), getattr(found, name)) for name in counts]
    named = f"{found.name or 'a server without a name'} {found.version}".rstrip()
    lines = [f"{named}, MCP {found.protocol}, after {found.start_s} s"]
    lines += [f"{name}: {count}" for name, count in counted if count is not None]
    if found.tool_names:
        more = ", …" if len(found.tool_names) > NAMES_MAX else ""
        lines[1] += f" ({', '.join(found.tool_names[:NAMES_MAX])}{more})"
    return "\n".join(map(one_line, lines))
