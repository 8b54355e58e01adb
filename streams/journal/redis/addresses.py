"""Where a store is: its URL.

redis://[user[:password]@]host[:port][/db][?prefix=…]
rediss://…?ca=/path/of/a/certificate      over TLS; also valkey:// and valkeys://
unix:///path/of/a/socket[?db=…]
redis+sentinel://host:port,host:port/SERVICE[/db]
redis+cluster://host:port,host:port       or redis://…?cluster=1
"""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from streams.errors import JournalUnusable
from streams.journal.addresses import without_secrets

DEFAULT_PORT: Final = 6379
DEFAULT_SENTINEL_PORT: Final = 26379
DEFAULT_PREFIX: Final = "mcp-streams"
PREFIX_LETTERS_MAX: Final = 100  # each key has it

Kind = Literal["single", "sentinel", "cluster", "unix"]
Host = tuple[str, int]

_KINDS: Final[dict[str, Kind]] = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}
_SCHEME: Final = re.compile(r"(redis|valkey)(s?)(?:\+(sentinel|cluster))?")
_UNIX: Final = ("unix", "redis+unix")
_QUERY: Final = frozenset({"ca", "cluster", "db", "prefix", "sentinel_user", "sentinel_password"})
ENCODED: Final = "/ as %2F, ? as %3F, # as %23, @ as %40 and % as %25"
_EXAMPLE: Final = "redis://host:6379, rediss://, redis+sentinel://host:port,host:port/SERVICE"


class Address(msgspec.Struct, frozen=True):
    """The parts of a URL."""

    url: str  # without the password
    kind: Kind
    hosts: tuple[Host, ...]
    path: str = ""  # of a unix socket
    service: str = ""
    user: str | None = None
    password: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = None
    db: int = 0
    prefix: str = DEFAULT_PREFIX
    is_tls: bool = False
    ca: str | None = None

    def __str__(self) -> str:
        return self.url

    def tls(self) -> ssl.SSLContext | None:
        """The settings of TLS; None without. Raises `JournalUnusable`."""
        if not self.is_tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise JournalUnusable(
                f"{self}: the certificate in ca={self.ca} cannot be read ({error}): name a file "
                "of a certificate in PEM."
            ) from error


def parse(url: str, prefix: str | None = None) -> Address:
    """Parse a URL; `prefix` is used if the URL has no other.

    Raises `JournalUnusable`, which names the URL without its password.
    """
    shown = without_secrets(url)
    try:
        return _parse(url, shown, prefix or DEFAULT_PREFIX)
    except ValueError as error:
        raise JournalUnusable(f"{shown} is no URL of a store: {error}.") from None


def _parse(url: str, shown: str, prefix: str) -> Address:
    scheme, _, rest = url.partition("://")
    found = _SCHEME.fullmatch(scheme)
    if scheme not in _UNIX and found is None:
        raise ValueError(f"its scheme is {scheme!r}, write for instance {_EXAMPLE}")
    is_tls = bool(found and found[2])
    parts = urlsplit(f"x://{rest}")
    if found and ("@" in parts.path + parts.fragment or _is_cut(parts.netloc, parts.query)):
        raise ValueError(f"write {ENCODED} in the user and the password")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    kind: Kind = "unix" if found is None else _KINDS[found[3] or ""]
    if query.get("cluster", "0") not in ("", "0", "false") and kind == "single":
        kind = "cluster"
    _check_query(query, is_tls=is_tls)
    login, _, netloc = parts.netloc.rpartition("@")
    user, has_password, password = login.partition(":")
    segments = [unquote(part) for part in parts.path.split("/") if part and kind != "unix"]
    if kind == "sentinel" and not segments:
        raise ValueError("the service is missing, as in redis+sentinel://host:26379/SERVICE")
    service = segments.pop(0) if kind == "sentinel" else ""
    db = query.get("db", segments[0] if segments else "0")
    if not db.isdecimal() or len(segments) > 1:
        raise ValueError("behind the host it may have one number, that of the database")
    if kind == "cluster" and int(db):
        raise ValueError("a cluster has the database 0 only")
    return Address(
        url=shown,
        kind=kind,
        hosts=_hosts(netloc, kind),
        path=unquote(parts.path) if kind == "unix" else "",
        service=service,
        user=unquote(user) or None,
        password=unquote(password) if has_password else None,
        sentinel_user=query.get("sentinel_user"),
        sentinel_password=query.get("sentinel_password"),
        db=int(db),
        prefix=_checked_prefix(query.get("prefix", prefix)),
        is_tls=is_tls,
        ca=query.get("ca"),
    )


def _is_cut(netloc: str, query: str) -> bool:
    """Whether a question mark within the password seems to begin the query."""
    port = netloc.partition(":")[2]
    return "@" in query and "@" not in netloc and port.isalnum() and not port.isdecimal()


def _check_query(query: Mapping[str, str], *, is_tls: bool) -> None:
    if unknown := set(query) - _QUERY:
        # A password with a question mark may have come here.
        what = "an unknown parameter" if "@" in str(query) else f"{min(unknown)}="
        raise ValueError(f"it has {what}, the known ones are {', '.join(sorted(_QUERY))}")
    if "ca" in query and not is_tls:
        raise ValueError("ca= is for TLS, write rediss:// or valkeys://")
    if "ca" in query and not Path(query["ca"]).is_file():
        raise ValueError(f"there is no file {query['ca']} with a certificate")


def _checked_prefix(prefix: str) -> str:
    if (
        not 0 < len(prefix) <= PREFIX_LETTERS_MAX
        or not prefix.isprintable()
        or set(prefix) & {*"{}"}
    ):
        raise ValueError(
            f"the prefix {prefix!r} must have 1 to {PREFIX_LETTERS_MAX} letters and no braces"
        )
    return prefix


def _hosts(netloc: str, kind: Kind) -> tuple[Host, ...]:
    if kind == "unix":
        return ()
    port = DEFAULT_SENTINEL_PORT if kind == "sentinel" else DEFAULT_PORT
    hosts = tuple(_host(each, port) for each in netloc.split(","))
    if len(hosts) > 1 and kind == "single":
        raise ValueError("it has several hosts, write redis+sentinel:// or redis+cluster://")
    return hosts


def _host(text: str, port: int) -> Host:
    """`host`, `host:port` or `[ipv6]:port`."""
    parts = urlsplit(f"x://{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    try:
        return unquote(parts.hostname), parts.port or port
    except ValueError:  # which shows the text, and that may be a part of a password
        raise ValueError("the port of a host must be a number up to 65535") from None
