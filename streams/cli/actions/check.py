"""The action of `wrap --check`: start a server, initialize, list what it has, stop it."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import trio

from streams.cli.actions.output import as_json_text, harmless, one_line
from streams.cli.base import DONE, FAILED, complain
from streams.client.client import Client
from streams.errors import StreamsError, first_of
from streams.process.loading import Servable
from streams.process.options import CannotServe

NAMES_MAX: Final = 20  # in one line
LISTS_S: Final = 30.0  # for all lists together


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
    except* (CannotServe, StreamsError, OSError, trio.TooSlowError) as errors:
        failure = first_of(errors)
    if failure is not None:
        return complain(failure, FAILED)
    print(as_json_text(found) if as_json else harmless(_described(found)))
    return DONE


async def _look(server: Servable, start_timeout_s: float) -> Found:
    began_at = trio.current_time()
    async with Client(server, connect_timeout_s=start_timeout_s) as client:
        start_s = trio.current_time() - began_at
        with trio.fail_after(LISTS_S):
            return await _listed(client, round(start_s, 2))


async def _listed(client: Client, start_s: float) -> Found:
    about = client.server_info
    declared = client.capabilities
    lists: dict[str, Any] = {}
    if "tools" in declared:
        tools = await client.tools()
        lists |= {"tools": len(tools), "tool_names": [each.name for each in tools]}
    if "resources" in declared:
        lists["resources"] = len(await client.resources())
        lists["resource_templates"] = len(await client.resource_templates())
    if "prompts" in declared:
        lists["prompts"] = len(await client.prompts())
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
    lines = [f"{found.name} {found.version}, MCP {found.protocol}, after {found.start_s} s"]
    lines += [f"{name}: {count}" for name, count in counted if count is not None]
    if found.tool_names:
        more = ", …" if len(found.tool_names) > NAMES_MAX else ""
        lines[1] += f" ({', '.join(found.tool_names[:NAMES_MAX])}{more})"
    return "\n".join(map(one_line, lines))
