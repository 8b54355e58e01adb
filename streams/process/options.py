"""How a server process is to run, and which server that is.

Quick to load: a relay needs nothing else.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from streams.limits import Durability

ALGORITHMS: Final = "RS256,PS256,ES256,EdDSA"

READY: Final = "ready\n"  # what an owner tells the relay that started it, once it listens
STARTER_VARIABLE: Final = "MCP_STREAMS_STARTER_FD"


class CannotServe(Exception):
    """The server cannot start; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Auth:
    """Who may come in by --ws and --http.

    Parameters
    ----------
    auth_tokens
        Take the tokens in this file, which "mcp-streams token" makes and revokes.
    auth_jwks
        Take JWTs signed with a key of this key set: its https URL, or a file.
    auth_issuer
        The issuer of those JWTs, as they name it.
    auth_audience
        The audience that they must be made for; by default --auth-resource.
    auth_algorithms
        How they may be signed, separated by commas.
    auth_server
        The URL of an authorization server that clients get tokens from; by default the issuer.
    auth_resource
        The URL that clients know --http by; by default what each of them has called.
    behind_proxy
        Let --ws and --http take tokens in the clear: a proxy before them ends TLS. --auth-resource
        says then by which URL clients know it.
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
        """Whether anybody is asked who they are."""
        return self.auth_tokens is not None or self.auth_jwks is not None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to serve an app; `mcp-streams serve --help` says what each of them means."""

    app: str
    journal: Path | None = None
    stdio: bool = False
    foreground: bool = False
    ws: str | None = None
    http: str | None = None
    http_path: str = "/mcp"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    linger_s: float = 5.0
    watchdog_s: float = 1.0  # 0: none
    durability: Durability = "power"
    require_resume_token: bool = False
    insecure_anonymous: bool = False
    auth: Auth = Auth()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limits: dict[str, float] = {}
    json_log: bool = False

    @property
    def is_relay(self) -> bool:
        """Whether this process only brings a client to the journal's owner."""
        is_server = self.foreground or self.is_listening
        return self.stdio and self.journal is not None and not is_server

    @property
    def is_listening(self) -> bool:
        """Whether clients reach this process by the network."""
        return self.ws is not None or self.http is not None

    def for_owner(self) -> str:
        """The options of the owner that a relay with these starts, as text."""
        return msgspec.json.encode(
            msgspec.structs.replace(self, stdio=False, foreground=True), enc_hook=str
        ).decode()

    @classmethod
    def parse(cls, text: str) -> "Options":
        """Read what `for_owner` wrote."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, path: kind(path))

    def hello(self) -> dict[str, object]:
        """What a relay and its owner must agree on."""
        place, _, name = self.app.rpartition(":")
        if place.endswith(".py"):
            place = str(Path(place).resolve())
        return {"app": f"{place}:{name}", "version": version("mcp-streams")}
