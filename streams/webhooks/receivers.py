"""Where webhooks may be sent: the URLs that callers may name, and the addresses behind names.

A caller who may name any URL could have this server post into the network that it runs in (SSRF).
So a caller's URL must be on the list of the operator, and a name must lead to public addresses
alone. The connection is made to an address that was checked, so that a name which leads elsewhere
at the next look (DNS rebinding) gains nothing.
"""

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

import trio

URL_LETTERS_MAX: Final = 2000
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]+")
_PORTS: Final = {"https": 443, "http": 80}
# All public addresses of IPv6 are here. NAT64 and other forms that lead to an address of IPv4,
# which may be private, are elsewhere, except 6to4 and Teredo.
_UNICAST: Final = ip_network("2000::/3")
_SPECIAL: Final = [
    ip_network(net)
    for net in (
        "2001::/23",  # protocols, with Teredo
        "2001:db8::/32",  # examples
        "2002::/16",  # 6to4
        "3fff::/20",  # examples
        "192.0.0.0/24",  # protocols
        "192.88.99.0/24",  # relays of 6to4
    )
]


class NotPublic(OSError):
    """A name leads to an address that is not public."""


class Receivers:
    """The URLs that callers may name, as the operator lists them: hosts, and prefixes of URLs."""

    def __init__(self, allowed: Sequence[str], *, is_private_allowed: bool) -> None:
        """Raises `ValueError`, which says what is wrong."""
        self.is_private_allowed = is_private_allowed
        self._hosts: set[tuple[str, int | None]] = set()
        self._prefixes: list[SplitResult] = []
        for each in allowed:
            if "://" in each:
                prefix = self.checked(each)
                if prefix.query:  # a URL below it has a query of its own
                    raise ValueError(f"{each!r}: write the beginning of a URL without a query")
                self._prefixes.append(prefix)
            else:
                self._hosts.add(_host(each))

    def checked(self, url: str) -> SplitResult:
        """The parts of a URL. Raises `ValueError` where it can be none of a receiver."""
        if len(url) > URL_LETTERS_MAX or not _PRINTABLE.fullmatch(url):
            raise ValueError(f"write a URL of at most {URL_LETTERS_MAX} ASCII characters")
        parts = _parts(url)
        if parts.scheme == "http" and not self.is_private_allowed:
            raise ValueError("write https: http is for private networks (--webhook-private)")
        if "@" in parts.netloc or "\\" in url or parts.fragment:
            raise ValueError("write a URL without a password, a backslash and a fragment")
        if ".." in unquote(parts.path).replace("\\", "/").split("/"):
            raise ValueError("write a path without ..")
        parts.port  # noqa: B018 (raises ValueError for a port that is no number)
        (parts.hostname or "").encode("idna")  # raises UnicodeError, which is a ValueError
        return parts

    def allow(self, url: str) -> bool:
        """Whether a caller may name this URL."""
        try:
            parts = self.checked(url)
        except ValueError:
            return False
        host, port = parts.hostname, _port(parts)
        is_usual = port == _PORTS[parts.scheme]
        if (host, port) in self._hosts or (is_usual and (host, None) in self._hosts):
            return True
        return any(_begins(parts, prefix) for prefix in self._prefixes)


def _host(given: str) -> tuple[str, int | None]:
    parts = urlsplit(f"//{given}")
    if not parts.hostname or parts.path or parts.query or "@" in given:
        raise ValueError(f"{given!r}: write HOST, HOST:PORT or the beginning of a URL")
    return parts.hostname, parts.port


def _port(parts: SplitResult) -> int:
    return parts.port or _PORTS[parts.scheme]


def _begins(parts: SplitResult, prefix: SplitResult) -> bool:
    """Whether a URL is below a prefix, whose path ends at a slash."""
    if (parts.scheme, parts.hostname, _port(parts)) != (
        prefix.scheme,
        prefix.hostname,
        _port(prefix),
    ):
        return False
    path = prefix.path.rstrip("/")
    return parts.path == path or parts.path.startswith(f"{path}/")


def receiver(url: str) -> str:
    """The host and port of a URL: for the log, because the rest of it may be a secret."""
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""  # an invalid URL has none


def origin(url: str) -> str:
    """The scheme, host and port of a URL: the same for all ways to write them.

    An invalid URL is returned as it is.
    """
    try:
        parts = _parts(url)
        host = (parts.hostname or "").rstrip(".").encode("idna").decode()
        return f"{parts.scheme}://{host}:{_port(parts)}"
    except ValueError:
        return url


def _parts(url: str) -> SplitResult:
    """Raises `ValueError` where it is no URL of a receiver at all."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("write a URL such as https://HOST/PATH")
    return parts


async def addresses_of(url: str, *, is_private_allowed: bool) -> Sequence[str]:
    """The IP addresses that a URL leads to.

    Raises `ValueError` for an invalid URL, or `OSError`: `NotPublic` if any address is not public.
    """
    parts = _parts(url)
    kind = trio.socket.SOCK_STREAM
    found = await trio.socket.getaddrinfo(parts.hostname, _port(parts), type=kind)
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    private = [each for each in addresses if not is_public(each)]
    if private and not is_private_allowed:
        raise NotPublic(f"{parts.hostname} leads to {private[0]}, which is not public")
    return addresses


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet."""
    found: IPv4Address | IPv6Address = ip_address(address)
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found not in _UNICAST:
            return False
    is_special = any(found in net for net in _SPECIAL)
    return found.is_global and not found.is_multicast and not is_special
