"""`mcp-streams webhook`."""

from pathlib import Path
from typing import Final

import cyclopts

from streams.cli.base import complain

PORT_MAX: Final = 65_535

webhook: Final = cyclopts.App(
    name="webhook",
    help="Try the webhooks that serve --webhook and wrap --webhook send.",
)


@webhook.command
def listen(
    *,
    port: int = 8790,
    secret_file: Path | None = None,
    fail: int = 0,
    hang: bool = False,
    json: bool = False,
) -> int:
    """Receive webhooks at http://127.0.0.1:PORT/, check their signatures, and print them.

    A server sends to this address only with --webhook-private.

    Parameters
    ----------
    port
        The port of loopback to listen at; 0 takes a free one.
    secret_file
        The file with the secret that signs; the log of the server names it. Without it, signatures
        are not checked. Webhooks with another signature are refused.
    fail
        Answer the first so many requests with 503, to see that they come again.
    hang
        Answer no request.
    json
        Print each webhook as a line of JSON.
    """
    if not 0 <= port <= PORT_MAX:
        return complain(f"--port: write a number, 0 to {PORT_MAX}.")
    if fail < 0:
        return complain("--fail: write a number, 0 or more.")
    from streams.cli.actions import webhook
    from streams.process.options import CannotServe

    try:
        return webhook.listen(port, secret_file, fail=fail, hangs=hang, as_json=json)
    except CannotServe as error:
        return complain(error)
