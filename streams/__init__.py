"""Resumable streams for MCP: a call that outlives its connection."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.client.answers import AnswerHandler as AnswerHandler
    from streams.client.call import RunningCall as RunningCall
    from streams.client.client import Client as Client
    from streams.client.client import Joined as Joined
    from streams.client.client import ProgressHandler as ProgressHandler
    from streams.client.notifications import NotificationHandler as NotificationHandler
    from streams.client.pages import Pages as Pages
    from streams.client.results import Completion as Completion
    from streams.client.results import Prompt as Prompt
    from streams.client.results import PromptArgument as PromptArgument
    from streams.client.results import PromptMessage as PromptMessage
    from streams.client.results import PromptResult as PromptResult
    from streams.client.results import Resource as Resource
    from streams.client.results import ResourceContents as ResourceContents
    from streams.client.results import ResourceTemplate as ResourceTemplate
    from streams.client.results import Tool as Tool
    from streams.client.results import ToolResult as ToolResult
    from streams.errors import CallFailed as CallFailed
    from streams.errors import CallLost as CallLost
    from streams.errors import CannotConnect as CannotConnect
    from streams.errors import ClientError as ClientError
    from streams.errors import Refusal as Refusal
    from streams.errors import StreamGone as StreamGone
    from streams.errors import StreamsError as StreamsError
    from streams.errors import Superseded as Superseded
    from streams.errors import ToolFailed as ToolFailed
    from streams.journal.contract import Journal as Journal
    from streams.journal.memory import MemoryJournal as MemoryJournal
    from streams.journal.ownership import key_path as key_path
    from streams.journal.sqlite import open_sqlite_journal as open_sqlite_journal
    from streams.keys import Keyring as Keyring
    from streams.limits import Limits as Limits
    from streams.messages import Message as Message
    from streams.messages import Run as Run
    from streams.protocol.ticket import Ticket as Ticket
    from streams.protocol.vocabulary import Standing as Standing
    from streams.server.call import Call as Call
    from streams.server.call import SyncCall as SyncCall
    from streams.server.content import Audio as Audio
    from streams.server.content import EmbeddedResource as EmbeddedResource
    from streams.server.content import Image as Image
    from streams.server.content import ResourceLink as ResourceLink
    from streams.server.content import Text as Text
    from streams.server.http.endpoint import HttpEndpoint as HttpEndpoint
    from streams.server.server import RunningServer as RunningServer
    from streams.server.server import Server as Server
    from streams.server.tools import ToolAnnotations as ToolAnnotations

# Loaded with the first use: a relay passes through this package, and must not wait for all of it.
_HOMES = {
    "streams.client.answers": ("AnswerHandler",),
    "streams.client.call": ("RunningCall",),
    "streams.client.client": (
        "Client",
        "Joined",
        "ProgressHandler",
    ),
    "streams.client.notifications": ("NotificationHandler",),
    "streams.client.pages": ("Pages",),
    "streams.client.results": (
        "Completion",
        "Prompt",
        "PromptArgument",
        "PromptMessage",
        "PromptResult",
        "Resource",
        "ResourceContents",
        "ResourceTemplate",
        "Tool",
        "ToolResult",
    ),
    "streams.errors": (
        "CallFailed",
        "CallLost",
        "CannotConnect",
        "ClientError",
        "Refusal",
        "StreamGone",
        "StreamsError",
        "Superseded",
        "ToolFailed",
    ),
    "streams.journal.contract": ("Journal",),
    "streams.journal.memory": ("MemoryJournal",),
    "streams.journal.ownership": ("key_path",),
    "streams.journal.sqlite": ("open_sqlite_journal",),
    "streams.keys": ("Keyring",),
    "streams.limits": ("Limits",),
    "streams.messages": (
        "Message",
        "Run",
    ),
    "streams.protocol.ticket": ("Ticket",),
    "streams.protocol.vocabulary": ("Standing",),
    "streams.server.call": (
        "Call",
        "SyncCall",
    ),
    "streams.server.content": (
        "Audio",
        "EmbeddedResource",
        "Image",
        "ResourceLink",
        "Text",
    ),
    "streams.server.http.endpoint": ("HttpEndpoint",),
    "streams.server.server": (
        "RunningServer",
        "Server",
    ),
    "streams.server.tools": ("ToolAnnotations",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 (mypy and readers have the list above)


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
