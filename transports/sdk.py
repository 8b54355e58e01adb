"""`over(url)`: a transport for the official SDK's client that survives cuts.

    async with Client(over("ws://127.0.0.1:8765")) as client:  # `mcp.client.Client`
        result = await client.call_tool("build", {"rows": 3})

The program is unchanged, and runs under asyncio or trio. Against a server of ours its calls outlive
their connections: each message comes once, and a question is asked again until it is answered.
Against another server this is a plain transport that connects again: a call that was lost with its
connection ends in an error, unless the server has event ids.
"""

import importlib
from typing import TYPE_CHECKING

from transports import dial

if TYPE_CHECKING:
    from mcp.client._transport import Transport

    from transports.net.dialing import Token


def over(
    url: str, *, token: "Token" = None, connect_s: float = 0.0, patience_s: float = 300.0
) -> "Transport":
    """A transport for `mcp.client.Client` or `ClientSession`, to the server at this URL.

    The URL and `token` are those of `transports.dial`. Attempts to make the first connection go on
    for `connect_s` seconds, for a server that is just starting. A lost connection is retried for
    `patience_s` seconds; after that, requests end with the error -32000.

    Raises `ValueError` for another URL, `ImportError` where the SDK is not installed.
    """
    dialer = dial(url, token=token)
    try:
        # By name, because the module is above this one: it knows the client, and asyncio.
        home = importlib.import_module("streams.aio.over")
    except ModuleNotFoundError as missing:
        raise ImportError(
            f"over needs the official SDK ({missing}): pip install 'mcp-streams[sdk]'"
        ) from missing
    transport: Transport = home.Over(dialer, connect_s=connect_s, patience_s=patience_s)
    return transport
