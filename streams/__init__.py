"""Resumable streams for MCP: a call that outlives its connection."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.client.client import Client as Client
    from streams.client.client import Joined as Joined
    from streams.client.pages import Pages as Pages
    from streams.errors import CallFailed as CallFailed
    from streams.errors import CallLost as CallLost
    from streams.errors import CannotConnect as CannotConnect
    from streams.errors import InvalidAnswer as InvalidAnswer
    from streams.errors import LifespanFailed as LifespanFailed
    from streams.errors import MissingCapability as MissingCapability
    from streams.errors import Refusal as Refusal
    from streams.errors import ResourceNotFound as ResourceNotFound
    from streams.errors import StreamGone as StreamGone
    from streams.errors import Superseded as Superseded
    from streams.errors import ToolError as ToolError
    from streams.journal.memory import MemoryJournal as MemoryJournal
    from streams.journal.ownership import key_path as key_path
    from streams.journal.sqlite import open_sqlite_journal as open_sqlite_journal
    from streams.keys import Keyring as Keyring
    from streams.limits import Limits as Limits
    from streams.messages import Message as Message
    from streams.protocol.clients import ClientInfo as ClientInfo
    from streams.protocol.ticket import Ticket as Ticket
    from streams.server.call import Call as Call
    from streams.server.call import Context as Context
    from streams.server.call import SyncCall as SyncCall
    from streams.server.caller import Principal as Principal
    from streams.server.content import Annotations as Annotations
    from streams.server.content import Audio as Audio
    from streams.server.content import EmbeddedResource as EmbeddedResource
    from streams.server.content import Icon as Icon
    from streams.server.content import Image as Image
    from streams.server.content import ResourceContents as ResourceContents
    from streams.server.content import ResourceLink as ResourceLink
    from streams.server.content import Text as Text
    from streams.server.content import ToolResult as ToolResult
    from streams.server.features import Completion as Completion
    from streams.server.http.endpoint import HttpEndpoint as HttpEndpoint
    from streams.server.prompts import AssistantMessage as AssistantMessage
    from streams.server.prompts import UserMessage as UserMessage
    from streams.server.questions import AcceptedElicitation as AcceptedElicitation
    from streams.server.questions import CancelledElicitation as CancelledElicitation
    from streams.server.questions import DeclinedElicitation as DeclinedElicitation
    from streams.server.questions import ElicitationResult as ElicitationResult
    from streams.server.questions import Root as Root
    from streams.server.questions import Sample as Sample
    from streams.server.server import Server as Server

# Loaded with the first use: a relay passes through this package, and must not wait for all of it.
_HOMES = {
    "streams.client.client": ("Client", "Joined"),
    "streams.client.pages": ("Pages",),
    "streams.errors": (
        "CallFailed",
        "CallLost",
        "CannotConnect",
        "InvalidAnswer",
        "LifespanFailed",
        "MissingCapability",
        "Refusal",
        "ResourceNotFound",
        "StreamGone",
        "Superseded",
        "ToolError",
    ),
    "streams.journal.memory": ("MemoryJournal",),
    "streams.journal.ownership": ("key_path",),
    "streams.journal.sqlite": ("open_sqlite_journal",),
    "streams.keys": ("Keyring",),
    "streams.limits": ("Limits",),
    "streams.messages": ("Message",),
    "streams.protocol.ticket": ("Ticket",),
    "streams.protocol.clients": ("ClientInfo",),
    "streams.server.call": ("Call", "Context", "SyncCall"),
    "streams.server.caller": ("Principal",),
    "streams.server.content": (
        "Annotations",
        "Audio",
        "EmbeddedResource",
        "Icon",
        "Image",
        "ResourceContents",
        "ResourceLink",
        "Text",
        "ToolResult",
    ),
    "streams.server.features": ("Completion",),
    "streams.server.http.endpoint": ("HttpEndpoint",),
    "streams.server.prompts": ("AssistantMessage", "UserMessage"),
    "streams.server.questions": (
        "AcceptedElicitation",
        "CancelledElicitation",
        "DeclinedElicitation",
        "ElicitationResult",
        "Root",
        "Sample",
    ),
    "streams.server.server": ("Server",),
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
