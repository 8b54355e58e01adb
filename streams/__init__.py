"""Resumable streams for MCP: a call that outlives its connection."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streams.call import Call as Call
    from streams.call import SyncCall as SyncCall
    from streams.client import Client as Client
    from streams.client import Joined as Joined
    from streams.content import Audio as Audio
    from streams.content import EmbeddedResource as EmbeddedResource
    from streams.content import Image as Image
    from streams.content import ResourceLink as ResourceLink
    from streams.content import Text as Text
    from streams.errors import CallFailed as CallFailed
    from streams.errors import CallLost as CallLost
    from streams.errors import CannotConnect as CannotConnect
    from streams.errors import StreamGone as StreamGone
    from streams.errors import Superseded as Superseded
    from streams.limits import Limits as Limits
    from streams.messages import Message as Message
    from streams.pages import Pages as Pages
    from streams.server import Server as Server
    from streams.ticket import Ticket as Ticket

# Loaded when asked for: a relay passes through this package, and must not wait for all of it.
_HOMES = {
    "streams.call": ("Call", "SyncCall"),
    "streams.client": ("Client", "Joined"),
    "streams.content": ("Audio", "EmbeddedResource", "Image", "ResourceLink", "Text"),
    "streams.errors": ("CallFailed", "CallLost", "CannotConnect", "StreamGone", "Superseded"),
    "streams.limits": ("Limits",),
    "streams.messages": ("Message",),
    "streams.pages": ("Pages",),
    "streams.server": ("Server",),
    "streams.ticket": ("Ticket",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 (mypy and readers have the list above)


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)
