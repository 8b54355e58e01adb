"""`mcp-streams serve`."""

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from streams.cli.base import DONE, app, complain, nearest
from streams.limits import Durability, Limits
from streams.process.options import Auth, CannotServe, Options

NO_AUTH: Final = Auth()


@app.command
def serve(
    app: str,
    /,
    *,
    stdio: bool = False,
    foreground: bool = False,
    ws: str | None = None,
    http: str | None = None,
    http_path: str = "/mcp",
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    journal: Path | None = None,
    linger: float = 5.0,
    watchdog: float = 1.0,
    durability: Durability = "power",
    max_message_bytes: int | None = None,
    limit: tuple[str, ...] = (),
    require_resume_token: bool = False,
    insecure_anonymous: bool = False,
    auth: Annotated[Auth, Parameter(name="*")] = NO_AUTH,
    allow_host: Annotated[tuple[str, ...], Parameter(alias="--allowed-host")] = (),
    allow_origin: Annotated[tuple[str, ...], Parameter(alias="--allowed-origin")] = (),
    json: bool = False,
) -> int:
    """Serve a server's tools over stdio, WebSocket and HTTP, or any of them.

    With --stdio and a journal, the process that a client spawns is only a relay to the journal's
    owner: a process that is started if none runs, and that survives the client.

    Parameters
    ----------
    app
        file.py:server or package.module:server.
    stdio
        Serve one client over standard input and output. The default if neither --ws nor --http is
        given.
    foreground
        Run the tools in this process, even with --stdio and a journal.
    ws
        Serve WebSocket clients at HOST:PORT; port 0 takes a free port and prints it.
    http
        Serve HTTP clients (MCP's Streamable HTTP) at HOST:PORT; port 0 as with --ws.
    http_path
        The path of the MCP endpoint for --http.
    tls_cert
        A file with the certificate chain, to serve --ws and --http with TLS.
    tls_key
        The file with the certificate's key, if that is not in the same file.
    journal
        The SQLite file that keeps the streams. Without it they live as long as the process.
    linger
        Seconds for which an idle owner waits for the next client, 0.5 at least.
    watchdog
        Seconds after which the log names a tool that blocks the server; 0 for never.
    durability
        "power" survives a power cut; "process" (faster) survives only a kill of the process.
    max_message_bytes
        The largest message that is accepted, 4 MiB by default.
    limit
        NAME=VALUE, one of the server's limits, such as streams_per_principal_max=20000.
    require_resume_token
        Refuse a streamId without its resumeToken to any caller but the one that made the stream.
        Without this option the id is enough where that caller was anonymous.
    insecure_anonymous
        Let --ws and --http listen for other machines without authentication.
    allow_host
        A Host header to accept, besides those of this machine.
    allow_origin
        An Origin whose web pages may be clients, such as https://app.example.com: its requests are
        accepted, and over HTTP the responses have the CORS headers that a browser needs.
    json
        Write the log as JSON lines.
    """
    if max_message_bytes is not None:
        limit = (*limit, f"message_bytes_max={max_message_bytes}")
    try:
        limits = _limits(limit)
    except ValueError as error:
        return complain(f"--limit: {error}")
    if not linger >= 0:
        return complain("--linger: write seconds, 0 or more.")
    if not watchdog >= 0:
        return complain("--watchdog: write seconds, 0 or more.")
    if not http_path.startswith("/"):
        return complain("--http-path: begin it with a slash.")
    if tls_key is not None and tls_cert is None:
        return complain("--tls-key: name the certificate too, with --tls-cert.")
    options = Options(
        app=app,
        journal=journal,
        stdio=stdio or (ws is None and http is None),
        foreground=foreground,
        ws=ws,
        http=http,
        http_path=http_path,
        tls_cert=tls_cert,
        tls_key=tls_key,
        linger_s=linger,
        watchdog_s=watchdog,
        durability=durability,
        require_resume_token=require_resume_token,
        insecure_anonymous=insecure_anonymous,
        auth=auth,
        allowed_hosts=allow_host,
        allowed_origins=allow_origin,
        limits=limits,
        json_log=json,
    )
    try:
        _run_server(options)
    except CannotServe as error:
        return complain(str(error))
    return DONE


def _run_server(options: Options) -> None:
    if options.is_relay:
        from streams.process import relay

        relay.run(options)
        return
    from streams import logs
    from streams.process import serve as serving

    logs.log_to_stderr(as_json=options.json_log)
    serving.run(options)


def _unknown_limit(name: str) -> str:
    known = Limits.__struct_fields__
    close = nearest(name, known)
    meant = close.replace("; d", " D") if "did you mean" in close else ""
    return f"unknown {name}; known are {', '.join(known)}.{meant}"


def _limits(settings: tuple[str, ...]) -> dict[str, Any]:
    given: dict[str, str] = {}
    for setting in settings:
        name, separator, given[name] = setting.partition("=")
        if name not in Limits.__struct_fields__:
            raise ValueError(_unknown_limit(name))
        if not separator:
            raise ValueError(f"{name}: write {name}=VALUE.")
    try:
        limits = msgspec.convert(given, Limits, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}.") from None
    return {name: getattr(limits, name) for name in given}
