"""The options of a server process.

It is quick to load, because a relay loads it.
"""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from streams.journal.addresses import without_secrets
from streams.limits import LEASE_S, Durability
from streams.process.version import VERSION

Isolation = Literal["session", "none", "call"]
Restart = Literal["on-failure", "always", "never"]
KeepCancelled = Literal["timeout", "always", "never"]
Stderr = Literal["log", "inherit", "null"]

ALGORITHMS: Final = "RS256,PS256,ES256,EdDSA"

REAPING_S: Final = 1.0  # from a SIGKILL of the last child to the end of all tasks about it

TOKEN_VARIABLE: Final = "MCP_STREAMS_TOKEN"  # the bearer token that commands send

NAME_LETTERS_MAX: Final = 500  # of a command in the hello, which has 4 KiB

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
# The names in the lines of the log: `calls`, and the packages that write any.
LOGGERS: Final = (
    "admin",
    "aio",
    "auth",
    "backends",
    "calls",
    "client",
    "engine",
    "journal",
    "process",
    "schemas",
    "server",
    "transports",
    "webhooks",
)

READY: Final = "ready\n"  # an owner sends it to the relay that started it, once it listens
STARTER_VARIABLE: Final = "MCP_STREAMS_STARTER_FD"


class CannotServe(Exception):
    """The server cannot start. The message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Auth:
    """Authentication of callers over --ws and --http.

    Parameters
    ----------
    auth_tokens
        Accept the bearer tokens in this file, which "mcp-streams token" makes and revokes.
    auth_jwks
        Accept JWTs signed with a key of this key set: its https URL, or a file.
    auth_issuer
        The issuer of these JWTs, as their "iss" claim names it.
    auth_audience
        The audience that these JWTs must have; by default --auth-resource.
    auth_algorithms
        The allowed signature algorithms of these JWTs, separated by commas.
    auth_server
        The URL of an authorization server that issues tokens to clients; by default the issuer.
    auth_resource
        The URL by which clients know --http; by default the URL that each of them calls.
    behind_proxy
        Accept unencrypted tokens over --ws and --http: a proxy in front ends TLS. It needs
        --auth-resource.
    """

    auth_tokens: Path | None = None
    auth_jwks: str | None = None
    auth_issuer: str | None = None
    auth_audience: str | None = None
    auth_algorithms: str = ALGORITHMS
    auth_server: tuple[str, ...] = ()
    auth_resource: str | None = None
    behind_proxy: bool = False

    @property
    def is_required(self) -> bool:
        """Whether callers are authenticated."""
        return self.auth_tokens is not None or self.auth_jwks is not None


@dataclass(frozen=True, kw_only=True)
class Webhooks:
    """Messages to other programs when a call ends, or asks while no client is attached.

    Parameters
    ----------
    webhook
        A URL that gets the events of all calls, by Standard Webhooks: call.completed, call.failed
        and call.question.
    webhook_secret_file
        The file with the secrets that sign webhooks, "whsec_…", one a line. By default one is made
        beside the journal, and the log says where.
    webhook_allow
        Where authenticated callers may have the events of their calls sent: a host, or the
        beginning of a URL.
    webhook_content
        Put results, errors and questions into webhooks, up to 16 KiB each.
    webhook_private
        Send webhooks to addresses that are not public too, and without TLS.
    """

    webhook: tuple[str, ...] = ()
    webhook_secret_file: Path | None = None
    webhook_allow: tuple[str, ...] = ()
    webhook_content: bool = False
    webhook_private: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the URLs that get the events of all calls."""
        return tuple(urlsplit(url).netloc for url in self.webhook)

    @property
    def are_on(self) -> bool:
        """Whether any webhook may have to be sent."""
        return bool(self.webhook or self.webhook_allow)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A program that speaks MCP over stdio; `mcp-streams wrap --help` describes the settings.

    `words` are the program and its arguments.
    """

    words: tuple[str, ...]
    cwd: str  # absolute
    env: dict[str, str] = {}  # besides the environment of this process
    isolate: Isolation = "session"
    children_max: int = 32
    child_idle_s: float = 600.0
    restart: Restart = "on-failure"
    rerun: tuple[str, ...] = ()
    start_timeout_s: float = 30.0
    stop_timeout_s: float = 5.0
    stderr: Stderr = "log"

    def __str__(self) -> str:
        return f"`{shlex.join(self.words)}` in {self.cwd}, --isolate {self.isolate}"


class Remote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A server that has a URL; `mcp-streams attach --help` describes the settings."""

    url: str
    token_file: Path | None = None  # absolute
    headers: tuple[tuple[str, str], ...] = ()
    give_up_s: float = 86_400.0
    rerun: tuple[str, ...] = ()
    offline_start: bool = True

    def __str__(self) -> str:
        return self.url


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """For hosts that give up on a call; `mcp-streams serve --help` describes the settings."""

    patience_s: float | None = None
    once: tuple[str, ...] = ()
    keep_cancelled: KeepCancelled = "never"


def levels_of(given: Iterable[str]) -> dict[str, str]:
    """The levels of loggers, of texts such as "warning" and "calls=debug,journal=info".

    The level of all others has the name "". Raises `ValueError`, which says what is wrong.
    """
    found = {}
    for part in (part.strip() for each in given for part in each.split(",")):
        name, separator, level = part.rpartition("=")
        if separator and name not in LOGGERS:
            raise ValueError(
                f"--log-level: unknown logger {name or 'without a name'}: write one of "
                f"{', '.join(LOGGERS)}, or a level alone for all."
            )
        if level not in LOG_LEVELS:
            raise ValueError(f"--log-level: {level}: write one of {', '.join(LOG_LEVELS)}.")
        found[name] = level
    return found


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to serve an app; `mcp-streams serve --help` says what each of them means.

    `app` is `file.py:server` or `package.module:server`, or what is served in place of a Python
    object. `key` is a digest of what an owner must have in common with its relays, besides `app`:
    the environment of a command, or the credentials for a URL.

    The journal is a file (`journal`) or in a store that replicas share (`store`, a URL, which may
    have a password). `beside` is where an owner of a store's journal has its side files: with a
    file they lie beside that.
    """

    app: str | Command | Remote
    key: str = ""
    journal: Path | None = None
    store: str | None = None
    beside: Path | None = None
    lease_s: float = LEASE_S
    replicas_acked: int = 0
    key_file: Path | None = None
    admin: str | None = None
    admin_token_file: Path | None = None
    admin_write: bool = False
    stdio: bool = False
    foreground: bool = False
    ws: str | None = None
    http: str | None = None
    http_path: str = "/mcp"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    linger_s: float = 5.0
    grace_s: float = 0.0  # for running calls to end, after a SIGTERM
    compact: bool = False
    standby_s: float = 0.0  # to wait for a journal that another process owns
    watchdog_s: float = 1.0  # 0: none
    durability: Durability = "power"
    require_resume_token: bool = False
    insecure_anonymous: bool = False
    patience: Patience = Patience()
    auth: Auth = Auth()
    webhooks: Webhooks = Webhooks()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limits: dict[str, int | float] = {}
    json_log: bool = False
    otel: bool = False
    log_level: tuple[str, ...] = ()  # see `levels_of`

    @property
    def is_relay(self) -> bool:
        """Whether this process only connects a client to the journal's owner."""
        is_server = self.foreground or self.is_listening
        return self.stdio and self.is_kept and not is_server

    @property
    def is_kept(self) -> bool:
        """Whether a journal keeps the streams when this process has ended."""
        return self.journal is not None or self.store is not None

    @property
    def owned(self) -> Path | None:
        """Where the side files of the journal's owner lie; None for a process that owns none.

        A replica of a store owns no journal, unless relays have it as theirs.
        """
        return self.journal if self.store is None else self.beside

    @property
    def journal_shown(self) -> str:
        """The journal as a text without secrets."""
        return str(self.journal) if self.store is None else without_secrets(self.store)

    @property
    def is_listening(self) -> bool:
        """Whether clients reach this process over the network."""
        return self.ws is not None or self.http is not None

    @property
    def stopping_s(self) -> float:
        """How long a shutdown may take besides the server's own: until the children have ended."""
        if not isinstance(self.app, Command):
            return 0.0
        return 2 * self.app.stop_timeout_s + REAPING_S  # its input ends; SIGTERM; SIGKILL

    @property
    def what_differs(self) -> str:
        """The end of a sentence about an owner that has another `key`."""
        is_remote = isinstance(self.app, Remote)
        return "with other credentials" if is_remote else "in another environment"

    def for_owner(self) -> str:
        """The options for the owner that a relay with these options starts, as text."""
        return msgspec.json.encode(
            msgspec.structs.replace(self, stdio=False, foreground=True), enc_hook=str
        ).decode()

    @classmethod
    def parse(cls, text: str) -> "Options":
        """Read what `for_owner` wrote."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, path: kind(path))

    def hello(self) -> dict[str, object]:
        """The app and version, on which a relay and its owner must agree."""
        return {"app": self._named, "key": self.key, "version": VERSION}

    @property
    def _named(self) -> str:
        if not isinstance(self.app, str):
            return str(self.app)[:NAME_LETTERS_MAX]  # `key` has all of it
        place, _, name = self.app.rpartition(":")
        if place.endswith(".py"):
            place = str(Path(place).resolve())
        return f"{place}:{name}"
