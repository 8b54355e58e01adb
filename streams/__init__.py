"""Resumable streams for MCP: a call that outlives its connection.

A server: `Server` has the tools, `Call` and `SyncCall` are a tool's call while it runs. `Text`,
`Image`, `Audio`, `ResourceLink` and `EmbeddedResource` are content. `RunningServer` and
`HttpEndpoint` serve connections in a program of your own, with `open_sqlite_journal` or
`MemoryJournal`, a `Keyring` and `Limits`; an `Observer` logs and counts their calls.

A client: `Client` connects to `transports.dial(url)`, or to a `Server` in a test. `RunningCall` is
a call, which gives each `Message` once, or each `Run` of messages. `Ticket` leads back to it from
anywhere, `Standing` is its status, and `Pages` iterates over the pages of a tool. `CallToolResult`,
`Tool`, `Resource` and `Prompt` are answers of a server.

Errors of a client derive from `ClientError`, all errors from `StreamsError`.
"""

import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.client.answers import AnswerHandler as AnswerHandler
    from streams.client.call import RunningCall as RunningCall
    from streams.client.client import Client as Client
    from streams.client.client import Joined as Joined
    from streams.client.client import ProgressHandler as ProgressHandler
    from streams.client.notifications import NotificationHandler as NotificationHandler
    from streams.client.pages import Pages as Pages
    from streams.client.results import CallToolResult as CallToolResult
    from streams.client.results import CompletionResult as CompletionResult
    from streams.client.results import Prompt as Prompt
    from streams.client.results import PromptArgument as PromptArgument
    from streams.client.results import PromptMessage as PromptMessage
    from streams.client.results import PromptResult as PromptResult
    from streams.client.results import Resource as Resource
    from streams.client.results import ResourcePart as ResourcePart
    from streams.client.results import ResourceTemplate as ResourceTemplate
    from streams.client.results import Tool as Tool
    from streams.errors import CallFailed as CallFailed
    from streams.errors import CallLost as CallLost
    from streams.errors import CannotConnect as CannotConnect
    from streams.errors import ClientError as ClientError
    from streams.errors import InvalidAnswer as InvalidAnswer
    from streams.errors import LifespanFailed as LifespanFailed
    from streams.errors import MissingCapability as MissingCapability
    from streams.errors import Refusal as Refusal
    from streams.errors import ResourceNotFound as ResourceNotFound
    from streams.errors import StreamGone as StreamGone
    from streams.errors import StreamsError as StreamsError
    from streams.errors import Superseded as Superseded
    from streams.errors import ToolError as ToolError
    from streams.errors import ToolFailed as ToolFailed
    from streams.journal.contract import Journal as Journal
    from streams.journal.memory import MemoryJournal as MemoryJournal
    from streams.journal.ownership import key_path as key_path
    from streams.journal.sqlite import open_sqlite_journal as open_sqlite_journal
    from streams.keys import Keyring as Keyring
    from streams.limits import Limits as Limits
    from streams.messages import Message as Message
    from streams.messages import Run as Run
    from streams.observe.observer import Observer as Observer
    from streams.protocol.clients import ClientInfo as ClientInfo
    from streams.protocol.ticket import Ticket as Ticket
    from streams.protocol.vocabulary import Standing as Standing
    from streams.schemas.content import Annotations as Annotations
    from streams.schemas.content import Audio as Audio
    from streams.schemas.content import EmbeddedResource as EmbeddedResource
    from streams.schemas.content import Icon as Icon
    from streams.schemas.content import Image as Image
    from streams.schemas.content import ResourceContents as ResourceContents
    from streams.schemas.content import ResourceLink as ResourceLink
    from streams.schemas.content import Text as Text
    from streams.schemas.content import ToolResult as ToolResult
    from streams.server.call import Call as Call
    from streams.server.call import Context as Context
    from streams.server.call import SyncCall as SyncCall
    from streams.server.caller import Principal as Principal
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
    from streams.server.running import RunningServer as RunningServer
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
        "CallToolResult",
        "CompletionResult",
        "Prompt",
        "PromptArgument",
        "PromptMessage",
        "PromptResult",
        "Resource",
        "ResourcePart",
        "ResourceTemplate",
        "Tool",
    ),
    "streams.errors": (
        "CallFailed",
        "CallLost",
        "CannotConnect",
        "ClientError",
        "InvalidAnswer",
        "LifespanFailed",
        "MissingCapability",
        "Refusal",
        "ResourceNotFound",
        "StreamGone",
        "StreamsError",
        "Superseded",
        "ToolError",
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
    "streams.observe.observer": ("Observer",),
    "streams.protocol.clients": ("ClientInfo",),
    "streams.protocol.ticket": ("Ticket",),
    "streams.protocol.vocabulary": ("Standing",),
    "streams.server.call": (
        "Call",
        "Context",
        "SyncCall",
    ),
    "streams.server.caller": ("Principal",),
    "streams.schemas.content": (
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
    "streams.server.prompts": (
        "AssistantMessage",
        "UserMessage",
    ),
    "streams.server.questions": (
        "AcceptedElicitation",
        "CancelledElicitation",
        "DeclinedElicitation",
        "ElicitationResult",
        "Root",
        "Sample",
    ),
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
    try:
        return getattr(importlib.import_module(home), name)
    except ImportError as error:
        from streams.errors import explained  # noqa: PLC0415 (not needed otherwise)

        raise explained(error, f"streams.{name}") from None


def __dir__() -> list[str]:
    return list(filter(_is_here, __all__))


def _is_here(name: str) -> bool:
    """Whether this name can be imported. The server needs POSIX, and is absent on Windows."""
    try:
        return __getattr__(name) is not None
    except ImportError:
        return False


class _Package(types.ModuleType):
    """This package. To pydoc it has no modules, so `help(streams)` shows the public names alone."""

    @property
    def __path__(self) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "pydoc":
            raise AttributeError("__path__")
        return vars(self)["__path__"]

    @__path__.setter
    def __path__(self, path: Any) -> None:
        vars(self)["__path__"] = path


def _warn_if_hidden(other: str) -> None:
    """Warn if another file, such as one of the user's, is imported in place of our other package.

    Each of both packages looks for the other one: it may be the first that is imported.
    """
    loaded = sys.modules.get(other)
    spec = loaded.__spec__ if loaded else importlib.machinery.PathFinder.find_spec(other)
    found = spec.origin if spec else getattr(loaded, "__file__", None)
    place = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if found and os.path.dirname(os.path.dirname(os.path.abspath(found))) != place:
        warnings.warn(
            f"{found} hides the package {other} of mcp-streams: rename it",
            RuntimeWarning,
            stacklevel=3,
        )


sys.modules[__name__].__class__ = _Package
_warn_if_hidden("transports")
