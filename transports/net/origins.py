"""The checks of `Host` and `Origin`, which keep web pages away from a listener.

Any web page can open a WebSocket to loopback: its `Origin` shows that. DNS rebinding can point a
page's own name to loopback: the `Host` shows that. Programs other than browsers send no `Origin`.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]\\]+)(:[0-9]*)?")


class Origins(msgspec.Struct, frozen=True):
    """The allowed `hosts`, names without a port, and `origins`, such as `https://example.com`.

    A listener on loopback also allows every name of loopback. Any other listener allows every
    `Host` if `hosts` is empty, and only the listed origins. Case is ignored.
    """

    is_loopback: bool
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    takes_any_host: bool = False  # and any origin, and requests without either

    def why_refused(self, host: str, origins: Sequence[str]) -> str | None:
        """One sentence for a request that is not allowed (HTTP 403), else None."""
        if self.takes_any_host:
            return None
        if not self._allows_host(host):
            return (
                "This Host is not served here: name it with --allow-host, or allowed_hosts in "
                "Python, if it should be."
            )
        if not all(self._allows_origin(origin) for origin in origins):
            return (
                "This Origin may not connect: name it with --allow-origin, or allowed_origins in "
                "Python, if it should."
            )
        return None

    def _allows_host(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].lower()
        if name in self.hosts:
            return True
        return names_loopback(name) if self.is_loopback else not self.hosts

    def _allows_origin(self, origin: str) -> bool:
        if origin.lower() in self.origins:
            return True
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return self.is_loopback and name is not None and names_loopback(name)


@lru_cache(maxsize=64)  # called for each request, mostly with the same name
def names_loopback(name: str) -> bool:
    """Whether a host name or address, with or without brackets, can only be this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
