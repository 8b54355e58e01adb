"""WebSocket (RFC 6455): `serve` and `connect`."""

from transports.websocket.adapter import connect as connect
from transports.websocket.adapter import serve as serve

__all__ = ["connect", "serve"]
