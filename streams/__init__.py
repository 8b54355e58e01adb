"""Resumable streams for MCP: a call that outlives its connection."""

from streams.call import Call, SyncCall
from streams.content import Audio, EmbeddedResource, Image, ResourceLink, Text
from streams.limits import Limits
from streams.server import Server

__all__ = [
    "Audio",
    "Call",
    "EmbeddedResource",
    "Image",
    "Limits",
    "ResourceLink",
    "Server",
    "SyncCall",
    "Text",
]
