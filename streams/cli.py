"""The `mcp-streams` command."""

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import cyclopts
from cyclopts import Parameter

from streams import console, serving
from streams.limits import Limits
from streams.sqlite import Durability

app: Final = cyclopts.App(
    name="mcp-streams",
    help="Resumable streams for MCP: a call that outlives its connection.",
    version_flags=["--version"],
    result_action="return_value",
)

DONE, TOOL_FAILED, USAGE, CANNOT_CONNECT, GONE, DETACHED = 0, 1, 2, 3, 4, 130


@app.command
def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    foreground: bool = False,
    ws: str | None = None,
    journal: Path | None = None,
    linger: float = 5.0,
    durability: Durability = "power",
    max_message_bytes: int | None = None,
    limit: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    insecure_anonymous: bool = False,
    allowed_host: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    allowed_origin: Annotated[tuple[str, ...], Parameter(negative=())] = (),
) -> int:
    """Serve a server's tools over stdio, WebSocket, or both.

    With --stdio and a journal, the process that a client spawns is only a relay to the journal's
    owner, which is started where there is none and goes on when the client has gone.

    Parameters
    ----------
    app
        file.py:server or package.module:server.
    stdio
        Serve one client over standard input and output. The default where --ws is not given.
    foreground
        Do the work in this process, also with --stdio and a journal.
    ws
        Serve WebSocket clients at HOST:PORT; port 0 takes a free one and says which.
    journal
        The SQLite file that streams are kept in. Without it they live as long as the process.
    linger
        Seconds for which an owner that has nothing to do waits for the next client.
    durability
        "power" survives a power cut, "process" (faster) the end of the process only.
    max_message_bytes
        The longest message that is taken, 4 MiB by default.
    limit
        NAME=VALUE, one of the server's limits, such as streams_per_principal_max=20000.
    insecure_anonymous
        Let --ws be reached from other machines though nobody is asked who they are.
    allowed_host
        A Host header to accept, besides those of this machine.
    allowed_origin
        An Origin of web pages that may connect, besides those of this machine.
    """
    console.log_to_stderr()
    if max_message_bytes is not None:
        limit = (*limit, f"message_bytes_max={max_message_bytes}")
    options = serving.Options(
        app=app,
        journal=journal,
        stdio=stdio or ws is None,
        foreground=foreground,
        ws=ws,
        linger_s=linger,
        durability=durability,
        insecure_anonymous=insecure_anonymous,
        allowed_hosts=allowed_host,
        allowed_origins=allowed_origin,
        limits=_limits(limit),
    )
    try:
        serving.run(options)
    except serving.CannotServe as error:
        return _complain(str(error))
    return DONE


def _limits(settings: tuple[str, ...]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in Limits.__struct_fields__:
            names = ", ".join(Limits.__struct_fields__)
            raise ValueError(f"no limit {name!r}: there are {names}")
        limits[name] = float(value) if name.endswith("_s") else int(value)
    Limits(**limits)
    return limits


def _complain(why: str, code: int = USAGE) -> int:
    print(why, file=sys.stderr)
    return code


def main() -> None:
    """Run the command and exit with its code."""
    try:
        sys.exit(app())
    except ValueError as error:
        sys.exit(_complain(str(error)))


if __name__ == "__main__":
    main()
