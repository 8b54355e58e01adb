"""The tools in a server's answers to `tools/list`: their names, their hints and the next page.

Servers make mistakes in these answers. A tool that cannot be read does not hide the others, and a
hint counts only if it is the JSON value `true`: a tool that is hinted may run twice.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from streams import messages

TOOLS: Final = "tools/list"
CHANGED: Final = {  # the notification that a list has changed, by the method that reads the list
    TOOLS: "notifications/tools/list_changed",
    "prompts/list": "notifications/prompts/list_changed",
    "resources/list": "notifications/resources/list_changed",
    "resources/templates/list": "notifications/resources/list_changed",
}
HINTED: Final = "hinted"  # among globs: the tools with readOnlyHint or idempotentHint
NULL: Final = msgspec.Raw(b"null")


class ListedTool(msgspec.Struct, frozen=True):
    """A tool on a page."""

    name: str
    is_hinted: bool  # it says that it is read-only or idempotent


class _Hints(msgspec.Struct, rename="camel"):
    read_only_hint: msgspec.Raw = NULL
    idempotent_hint: msgspec.Raw = NULL


class _Tool(msgspec.Struct):
    name: str
    annotations: msgspec.Raw = NULL


class _Tools(msgspec.Struct):
    tools: list[msgspec.Raw] = []


class _Next(msgspec.Struct, rename="camel"):
    next_cursor: str | None = None


def tools_on(page: msgspec.Raw) -> list[ListedTool]:
    """The tools on a page, which is a result of `tools/list`."""
    try:
        tools = messages.decode(page, _Tools).tools
    except ValueError:
        return []
    found: list[ListedTool] = []
    for raw in tools:
        try:
            tool = messages.decode(raw, _Tool)
        except ValueError:
            continue
        found.append(ListedTool(tool.name, _is_hinted(tool.annotations)))
    return found


def _is_hinted(annotations: msgspec.Raw) -> bool:
    try:
        hints = messages.decode(annotations, _Hints)
    except ValueError:
        return False
    return b"true" in (bytes(hints.read_only_hint), bytes(hints.idempotent_hint))


def next_cursor(page: msgspec.Raw) -> str | None:
    """The cursor of the next page of a list; None after the last."""
    try:
        return messages.decode(page, _Next).next_cursor
    except ValueError:
        return None


def matches(globs: Iterable[str], tool: str, hint: bool) -> bool:
    """Whether `--rerun` or `--once` selects this tool: by a glob, or with "hinted" by its hint."""
    return any(hint if glob == HINTED else fnmatchcase(tool, glob) for glob in globs)
