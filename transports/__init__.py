"""Transports move lines, nothing else. Each of them keeps this contract:

A transport turns one connection into a `Channel` (`streams.exchange`). It has two functions:
`serve` runs a handler for each connection until it is cancelled, `connect` opens a connection.

- Messages arrive whole, once and in order, or the connection is over. A `send` writes all of its
  lines before the next one begins, or the channel is closed: no message follows half a message.
- `receive` never waits for a `send`, nor `send` for a `receive`. A peer that does not read makes
  only `send` wait, and the bytes that wait are bounded.
- At the end of the peer's output `receive` raises `trio.EndOfChannel`, once everything before was
  received. Where the connection fails, `receive` does the same, and `send` raises
  `trio.BrokenResourceError`.
- A line above the limit of bytes is discarded as it comes, and a `TooLarge` received in its place.
  Where the framing does not allow that, the connection closes as the framing's rules say. A
  transport does not read JSON: a malformed line is received like any other.
- Nothing waits for ever: pings and closes are bounded in time, and all waits can be cancelled.

`dial` finds the transport for a URL. `memory` and `relay` have no URLs.
"""

import os
import sys
import warnings
from functools import partial
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # from `typing`, which would take longer to load than all the rest
if TYPE_CHECKING:
    from typing import Any

    from streams.exchange import Channel as Channel
    from streams.exchange import ClientChannel as ClientChannel
    from streams.exchange import Dialer as Dialer
    from streams.exchange import Handler as Handler
    from transports.net.dialing import Headers, Token


def _warn_if_hidden(other: str) -> None:
    """As in `streams`, which may be the package that another file is imported in place of."""
    loaded = sys.modules.get(other)
    spec = loaded.__spec__ if loaded else PathFinder.find_spec(other)
    found = spec.origin if spec else getattr(loaded, "__file__", None)
    place = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if found and os.path.dirname(os.path.dirname(os.path.abspath(found))) != place:
        warnings.warn(
            f"{found} hides the package {other} of mcp-streams: rename it",
            RuntimeWarning,
            stacklevel=3,
        )


_warn_if_hidden("streams")

_TYPES = ("Channel", "ClientChannel", "Dialer", "Handler")  # of `streams.exchange`, for annotations


def __getattr__(name: str) -> "Any":
    if name not in _TYPES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streams import exchange  # noqa: PLC0415

    return getattr(exchange, name)


def dial(
    url: str,
    *,
    token: "Token" = None,
    headers: "Headers" = (),
    outlast_s: float | None = None,
) -> "Dialer":
    """A `Dialer` for `http://HOST:PORT/PATH` (`/mcp` where there is no path), `https://…`,
    `ws://HOST:PORT/PATH`, `wss://…`, or `stdio:COMMAND`, which starts COMMAND as a child process
    and talks to it over its standard streams.

    `token` is a bearer token, or a function that returns it for each new connection. It is sent
    over TLS or to this machine only, and so are `headers`, which each request over HTTP and each
    WebSocket handshake then has. With `outlast_s` a session over HTTP outlives outages of up to so
    many seconds: see `transports.http.connect`. Raises `ValueError` for another URL, or an unsafe
    one.
    """
    # Imported when they are needed (PLC0415): the relay of stdio imports this package too, and must
    # not wait for trio; a client of one transport needs nothing of the others.
    scheme, _, rest = url.partition(":")
    if scheme in ("http", "https", "ws", "wss"):
        from transports import http, websocket  # noqa: PLC0415
        from transports.net import dialing  # noqa: PLC0415

        is_http = scheme.startswith("http")
        address = dialing.Address(url, dialing.HTTP if is_http else dialing.WEBSOCKET)
        dialing.check_place(address, token)
        dialing.check_headers(address, headers)
        if is_http:
            return partial(http.connect, url, token=token, headers=headers, outlast_s=outlast_s)
        return partial(websocket.connect, url, token=token, headers=headers)
    if scheme == "stdio":
        from transports import stdio  # noqa: PLC0415

        return partial(stdio.connect, stdio.split_command(rest))
    raise ValueError(
        f"cannot dial {url!r}: write http://HOST:PORT, https://HOST, ws://HOST:PORT, wss://HOST or "
        "stdio:COMMAND"
    )
