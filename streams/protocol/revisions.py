"""The revisions of MCP that server and client speak."""

from typing import Final

# Newest first. A server offers the newest one to a client that asks for an unknown one. The
# revisions do not differ in what our client uses.
REVISIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
