"""A client as it declares itself in `initialize`: for tools, and for the record of its session."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from streams import messages

# A session keeps no more than this of what its client declares. Usual clients declare 300 bytes.
INFO_BYTES_MAX: Final = 1024
CAPABILITIES_BYTES_MAX: Final = 1024
KNOWN_BYTES_MAX: Final = 200  # of each of those that are kept all the same
_KNOWN: Final = ("elicitation", "sampling", "roots", "tasks")
_STORED: Final = "mcp-streams/client"  # beside the capabilities that are stored with a session


class Implementation(msgspec.Struct, frozen=True):
    """The name of a client, as it gives it."""

    name: str = ""
    version: str = ""
    title: str | None = None


class ClientInfo(msgspec.Struct, frozen=True):
    """The declarations of a client in `initialize`.

    All of it is empty for a client that did not initialize, and where it is unknown.
    """

    info: Implementation = Implementation()
    declared: bytes = b"{}"  # the capabilities as JSON
    revision: str = ""  # of MCP, as the server has answered it

    @property
    def capabilities(self) -> dict[str, Any]:
        """The capabilities; of more than 1 KiB only those that MCP knows."""
        capabilities: dict[str, Any] = messages.decode(self.declared, dict[str, Any])
        return capabilities

    def has(self, capability: str) -> bool:
        """Whether the client has declared this capability, such as `sampling`.

        `elicitation.url` is the member of `elicitation`. A client that declares `elicitation` and
        no member of it has `elicitation.form`.
        """
        name, _, member = capability.partition(".")
        declared = self.capabilities.get(name)
        if declared is None or not member:
            return declared is not None
        members = declared if isinstance(declared, dict) else {}
        is_implied = member == "form" and not members.keys() & {"form", "url"}
        return is_implied or members.get(member) is not None


class _Stored(msgspec.Struct):
    info: Implementation
    capabilities: msgspec.Raw


def described(
    info: msgspec.Raw, capabilities: Mapping[str, msgspec.Raw], revision: str
) -> ClientInfo:
    """The declarations of a client, as far as they have a usual size and shape."""
    size = sum(len(name) + len(bytes(raw)) for name, raw in capabilities.items())
    if size > CAPABILITIES_BYTES_MAX:
        few = {name: capabilities[name] for name in _KNOWN if name in capabilities}
        capabilities = {
            name: raw for name, raw in few.items() if len(bytes(raw)) <= KNOWN_BYTES_MAX
        }
    encoded = messages.encode(capabilities)
    try:
        messages.decode(encoded, dict[str, Any])
    except (ValueError, RecursionError):  # nested too deeply
        encoded = b"{}"
    return ClientInfo(_implementation(bytes(info)), encoded, revision)


def _implementation(info: bytes) -> Implementation:
    if len(info) > INFO_BYTES_MAX:
        return Implementation()
    try:
        return messages.decode(info, Implementation)
    except (ValueError, RecursionError):
        return Implementation()  # MCP says what it must be; nothing here depends on it


def stored(client: ClientInfo | None) -> dict[str, Any]:
    """The part of a session's record about its client, beside the capabilities."""
    if client is None:
        return {}
    return {_STORED: _Stored(client.info, msgspec.Raw(client.declared))}


def restored(capabilities: Mapping[str, Any], revision: str) -> ClientInfo | None:
    """The client of a stored session; None where an older version has stored it."""
    try:
        found = msgspec.convert(capabilities.get(_STORED), dict[str, Any])
        info = msgspec.convert(found["info"], Implementation)
        return ClientInfo(info, messages.encode(found["capabilities"]), revision)
    except (KeyError, ValueError):
        return None
