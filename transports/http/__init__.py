"""Streamable HTTP: `serve` and `connect`. Each is loaded with its first use, so that a client
starts without loading the server.
"""

import importlib
from typing import TYPE_CHECKING, Any

from streams.errors import explained

if TYPE_CHECKING:
    from transports.http.client import connect as connect
    from transports.http.server import serve as serve

_HOME_OF = {"connect": "transports.http.client", "serve": "transports.http.server"}

__all__ = ["connect", "serve"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    except ImportError as error:
        raise explained(error, f"transports.http.{name}") from None
