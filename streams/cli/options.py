"""The options of the commands that serve, and the process that they run."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from streams.cli.base import DONE, Errors, complain, nearest
from streams.journal.addresses import checked, checked_path, is_url
from streams.limits import DAY_S, LEASE_MAX_S, LEASE_MIN_S, LEASE_S, Durability, Limits, LogFormat
from streams.process.options import (
    Auth,
    CannotServe,
    KeepCancelled,
    Options,
    Patience,
    Webhooks,
    levels_of,
)

ACKED_MAX: Final = 100  # no store has more replicas

SECONDS_MAX: Final = 1_000_000_000.0  # 31 years; no thread can wait for 300

_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(rf"(-?[0-9]+(?:\.[0-9]*)?|-?\.[0-9]+)({'|'.join(_UNITS)})")


def _seconds(_: Any, tokens: Any) -> float:
    text = str(tokens[0].value).strip()
    found = _DURATION.fullmatch(text)
    if not found:
        raise ValueError(f"{text} is no time: write seconds, or a number with ms, s, m, h or d.")
    seconds = float(found[1]) * _UNITS[found[2]]
    if seconds > SECONDS_MAX:
        raise ValueError(f"{text} is too long: write {SECONDS_MAX:.0f} seconds at most.")
    return seconds


Seconds = Annotated[float, Parameter(converter=_seconds, n_tokens=1)]
"""A time in seconds, or with a unit: 30, 30s, 5m, 24h."""


@dataclass(frozen=True, kw_only=True)
class PatienceOptions:
    """Hosts that give up on a call before it ends.

    Parameters
    ----------
    patience
        Seconds after which a call that still runs is answered with a text that says how to get the
        result: the server then has the tools wait_for_call and list_calls too.
    once
        Tools that do not run twice with the same arguments, as globs, or "hinted" for those that
        say that they are read-only or idempotent: a repeated call gets the one that runs, or has
        ended in the last ten minutes. By default none.
    keep_cancelled
        Which calls go on when a client cancels them: "timeout" for those whose reason is its own
        timeout. That is the default with --patience, wrap and attach, else it is "never".
    """

    patience: Seconds | None = None
    once: tuple[str, ...] = ()
    keep_cancelled: KeepCancelled | None = None

    def settings(self, usually: KeepCancelled) -> Patience:
        """The settings of the process; `usually` is the default of the command for patient calls.

        Raises `ValueError`, which says what is wrong.
        """
        if self.patience is not None and not 0 < self.patience < DAY_S:
            raise ValueError("--patience: write seconds, more than 0 and less than a day.")
        return Patience(
            patience_s=self.patience,
            once=parts(self.once, "--once"),
            keep_cancelled=self.keep_cancelled or usually,
        )


def parts(given: Iterable[str], option: str) -> tuple[str, ...]:
    """The values of an option that is repeated, or has commas. Raises `ValueError`."""
    found = tuple(part.strip() for each in given for part in each.split(","))
    if not all(found):
        raise ValueError(f"{option}: a name is empty: write hinted, or globs of tools.")
    return found


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """How streams are kept, and for how long.

    Parameters
    ----------
    foreground
        Do the work in this process, even with --stdio and a journal.
    linger
        Seconds for which an idle owner waits for the next client, 0.5 at least.
    grace
        Seconds that running calls have to end after a SIGTERM, while no new ones are taken. A
        second SIGTERM ends the server at once.
    standby
        Seconds to wait for a journal that another process owns; its clients are served then.
    compact
        Return the disk space of deleted messages while the server runs. Long messages cost more
        then. A journal in a file that was made without it is written anew at the start.
    keep_completed
        Seconds for which calls that are over and need no delivery keep their status, a day by
        default: the limits drained_s and tombstone_s.
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
    log_level
        The least severe lines that are logged: debug, info, warning, error or critical; for one
        logger NAME=LEVEL, as calls=warning. By default info.
    log_format
        Write the log as text or as JSON lines.
    json
        The same as --log-format json.
    otel
        Send traces and metrics of calls by OpenTelemetry, as its OTEL_… variables say.
    """

    foreground: bool = False
    linger: Seconds = 5.0
    grace: Seconds = 0.0
    standby: Seconds = 0.0
    compact: bool = False
    keep_completed: Seconds | None = None
    watchdog: Seconds = 1.0
    durability: Durability = "power"
    max_message_bytes: int | None = None
    limit: tuple[str, ...] = ()
    require_resume_token: bool = False
    log_level: tuple[str, ...] = ()
    log_format: LogFormat = "text"
    json: bool = False
    otel: bool = False

    def options(self, **of_command: Any) -> Options:
        """The options of the process. Raises `ValueError`, which says what is wrong."""
        limit = self.limit
        if self.max_message_bytes is not None:
            limit = (*limit, f"message_bytes_max={self.max_message_bytes}")
        if self.keep_completed is not None:
            if not self.keep_completed > 0:
                raise ValueError("--keep-completed: write seconds, above 0.")
            kept = (f"drained_s={self.keep_completed}", f"tombstone_s={self.keep_completed}")
            limit = (*kept, *limit)
        for name in ("linger", "grace", "standby", "watchdog"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name}: write seconds, 0 or more.")
        levels_of(self.log_level)
        given: dict[str, Any] = {
            "stdio": True,
            "foreground": self.foreground,
            "linger_s": self.linger,
            "grace_s": self.grace,
            "standby_s": self.standby,
            "compact": self.compact,
            "watchdog_s": self.watchdog,
            "durability": self.durability,
            "require_resume_token": self.require_resume_token,
            "limits": _limits(limit),
            "json_log": self.json or self.log_format == "json",
            "log_level": self.log_level,
            "otel": self.otel,
        }
        return Options(**given | of_command)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where to serve, besides stdio.

    Parameters
    ----------
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
    insecure_anonymous
        Let --ws and --http listen for other machines without authentication.
    allow_host
        A Host header to accept, besides those of this machine.
    allow_origin
        An Origin whose web pages may be clients, such as https://app.example.com: its requests are
        accepted, and over HTTP the responses have the CORS headers that a browser needs.
    admin
        HOST:PORT, a port of loopback, or unix:PATH, where balancers ask for /health/live and
        /health/ready, and operators for all else.
    admin_token_file
        A file with the operator's token, which is not one of clients. By default one is made and
        kept for this user, where --admin is on loopback.
    admin_write
        Let operators at --admin answer, cut, cancel and drain. At the socket beside the journal,
        the user of the server always may.
    """

    ws: str | None = None
    http: str | None = None
    http_path: str = "/mcp"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure_anonymous: bool = False
    allow_host: Annotated[tuple[str, ...], Parameter(alias="--allowed-host")] = ()
    allow_origin: Annotated[tuple[str, ...], Parameter(alias="--allowed-origin")] = ()
    admin: str | None = None
    admin_token_file: Path | None = None
    admin_write: bool = False

    def options(self) -> dict[str, Any]:
        """The options of the process. Raises `ValueError`, which says what is wrong."""
        if not self.http_path.startswith("/"):
            raise ValueError("--http-path: begin it with a slash.")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("--tls-key: name the certificate too, with --tls-cert.")
        if self.admin is None and (self.admin_write or self.admin_token_file is not None):
            raise ValueError("--admin-token-file and --admin-write are for --admin: add it.")
        return {
            "stdio": self.ws is None and self.http is None,
            "ws": self.ws,
            "http": self.http,
            "http_path": self.http_path,
            "tls_cert": self.tls_cert,
            "tls_key": self.tls_key,
            "insecure_anonymous": self.insecure_anonymous,
            "allowed_hosts": self.allow_host,
            "allowed_origins": self.allow_origin,
            "admin": self.admin,
            "admin_token_file": self.admin_token_file,
            "admin_write": self.admin_write,
        }


@dataclass(frozen=True, kw_only=True)
class ShareOptions:
    """A journal that several replicas share.

    Parameters
    ----------
    lease
        Seconds after which other replicas take over the streams of one that is silent, 2 by
        default, the same for all replicas.
    replicas_acked
        How many replicas of the store must have a change before it counts as durable: WAITAOF, or
        with --durability process WAIT. By default the store's own settings decide.
    key_file
        The file with the keys of resume tokens, the same for all replicas. By default the first
        replica makes them and the store keeps them; with a file as journal, they lie beside it.
    """

    lease: Seconds | None = None
    replicas_acked: int | None = None
    key_file: Path | None = None

    def options(self, journal: str | None) -> dict[str, Any]:
        """The options of the process, with the journal. Raises `ValueError`."""
        given = {"key_file": self.key_file}
        if journal is None or not is_url(journal):
            for name in ("lease", "replicas_acked"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"--{name.replace('_', '-')} is for a journal that replicas share: name a "
                        "store with --journal redis://HOST:PORT/0."
                    )
            return {**given, "journal": None if journal is None else checked_path(journal)}
        lease_s = LEASE_S if self.lease is None else self.lease
        if not LEASE_MIN_S <= lease_s <= LEASE_MAX_S:
            raise ValueError(f"--lease: write seconds, {LEASE_MIN_S:g} to {LEASE_MAX_S:g}.")
        if self.replicas_acked is not None and not 0 <= self.replicas_acked <= ACKED_MAX:
            raise ValueError(f"--replicas-acked: write a number, 0 to {ACKED_MAX}.")
        return {
            **given,
            "store": checked(journal),
            "lease_s": lease_s,
            "replicas_acked": self.replicas_acked or 0,
        }


def file_of(journal: str | None) -> Path | None:
    """The journal of a command that has no replicas. Raises `ValueError` for that of a store."""
    if journal is not None and is_url(journal):
        raise ValueError(
            "--journal: the calls of a wrapped server are bound to the machine that runs it, so "
            "their journal is a file: name one, or leave the option out. Stores are for `serve`."
        )
    return None if journal is None else checked_path(journal)


# The groups of a command line without options.
NO_AUTH: Final = Auth()
LISTEN: Final = ListenOptions()
KEEP: Final = KeepOptions()
PATIENCE: Final = PatienceOptions()
SHARE: Final = ShareOptions()
WEBHOOKS: Final = Webhooks()

FLAT: Final = Parameter(name="*")  # the options of a group are options of the command


def run(options: Options) -> int:
    """Serve, or relay to the journal's owner, to the end; returns the exit code."""
    # A relay has no use for systemd's sockets: a process that serves says what is wrong.
    has_sockets = os.environ.get("LISTEN_PID") == str(os.getpid())
    Errors.are_json |= options.json_log  # the last line of a log of JSON lines is one, too
    try:
        if options.is_relay and not has_sockets:
            from streams.process import relay

            relay.run(options)
        else:
            from streams.process.garbage import limit_garbage

            limit_garbage()
            from streams.process import log, serve

            log.log_as(options)
            serve.run(options)
    except CannotServe as error:
        return complain(str(error))
    return DONE


def _limits(settings: tuple[str, ...]) -> dict[str, Any]:
    given: dict[str, str] = {}
    for setting in settings:
        name, separator, given[name] = setting.partition("=")
        if name not in Limits.__struct_fields__:
            raise ValueError(f"--limit: {_unknown_limit(name)}")
        if not separator:
            raise ValueError(f"--limit: {name}: write {name}=VALUE.")
    try:
        limits = msgspec.convert(given, Limits, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"--limit: {error}.") from None
    return {name: getattr(limits, name) for name in given}


def _unknown_limit(name: str) -> str:
    known = Limits.__struct_fields__
    close = nearest(name, known)
    meant = close.replace("; d", " D") if "did you mean" in close else ""
    return f"unknown {name}; known are {', '.join(known)}.{meant}"
