"""Who may knock: the `Host` and `Origin` checks of a listener that browsers can reach.

Any web page can open a WebSocket to loopback, and DNS rebinding can point a page's own name there:
the first is told by its `Origin`, the second by its `Host`. A program that is no browser sends no
`Origin`.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:@/?#\[\]\\]+)(:[0-9]*)?")


class Origins(msgspec.Struct, frozen=True):
    """What is let in: `hosts` are names without a port, `origins` whole (`https://example.com`).

    Bound to loopback, whatever names loopback is let in besides. Bound to anything else, any `Host`
    will do unless `hosts` names some, and a browser's `Origin` must be listed. Case is ignored.
    """

    is_loopback: bool
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def why_refused(self, host: str, origins: Sequence[str]) -> str | None:
        """One sentence for a request that must not get in (HTTP 403), else None."""
        if not self._allows_host(host):
            return "This Host is not served here: name it with allowed_hosts if it should be."
        if not all(self._allows_origin(origin) for origin in origins):
            return "This Origin may not connect: name it with allowed_origins if it should."
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


@lru_cache(maxsize=64)  # it is asked of each request, mostly of the same name
def names_loopback(name: str) -> bool:
    """Whether a host name or address, with or without brackets, can only be this machine."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
