"""Transports: they move lines, nothing else. The contract that each of them keeps:

A transport turns one connection into a `Channel` (`streams.messages`). It has the same two verbs as
every other: `serve`, which runs a handler for each connection until it is cancelled, and `connect`,
which opens one.

- Messages arrive whole, once and in order, or the connection is over. What one `send` took is
  written before what the next one takes, and is finished or the channel is closed: half a message
  is never followed by another.
- `receive` never waits for a `send`, nor `send` for a `receive`. A peer that does not read makes
  `send` wait, and nobody else; what waits is bounded.
- The end of the peer's output is `trio.EndOfChannel`, once everything before it was received. A
  connection that fails in any other way ends the same: `EndOfChannel` for who receives,
  `trio.BrokenResourceError` for who sends.
- A line above the limit of bytes is thrown away as it comes and stands as `TooLarge` in its place,
  where the framing allows to go on; else the connection closes as the framing's own rules say. What
  a line says is nobody's business here: bad JSON is passed on like good.
- Nothing waits for ever: a ping, a farewell and a close are bounded in time, and cancellation ends
  all of them.

`dial` finds the transport for a URL; the others have their arguments.
"""

from functools import partial

TYPE_CHECKING = False  # as in typing, which takes longer to load than all the rest
if TYPE_CHECKING:
    from streams.exchange import Dialer
    from transports.net.dialing import Token


def dial(url: str, *, token: "Token" = None) -> "Dialer":
    """A `Dialer` for `http://HOST:PORT/PATH` (`/mcp` where there is no path), `https://…`,
    `ws://HOST:PORT/PATH`, `wss://…`, or `stdio:COMMAND`, which starts COMMAND as a child process
    and talks to it over its standard streams.

    `token` is the bearer token to show, or what gives it whenever a connection is opened: over TLS,
    or to this machine. Raises `ValueError` for anything else.
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
        return partial((http if is_http else websocket).connect, url, token=token)
    if scheme == "stdio":
        from transports import stdio  # noqa: PLC0415

        return partial(stdio.connect, stdio.split_command(rest))
    raise ValueError(
        f"cannot dial {url!r}: write http://HOST:PORT, https://HOST, ws://HOST:PORT, wss://HOST or "
        "stdio:COMMAND"
    )
