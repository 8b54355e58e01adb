"""The token that a client shows, and where it may be sent.

It is whoever holds it: it goes over TLS, or no further than this machine.
"""

import re
from collections.abc import Callable
from typing import Final

from transports.address import Address
from transports.origins import names_loopback

Token = str | Callable[[], str] | None
"""A token, or what gives it whenever a connection is opened."""

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


def check_place(address: Address, token: Token) -> None:
    """Raises `ValueError` where others could read the token on its way."""
    if token is not None and not (address.is_tls or names_loopback(address.host)):
        raise ValueError(f"{address.url} is no place for a token, which others could read: use TLS")


def bearer_for(address: Address, token: Token) -> str | None:
    """The token to show at an address, if any. Raises `ValueError`, which does not tell it."""
    check_place(address, token)
    if token is None:
        return None
    given = token if isinstance(token, str) else token()
    if not _TOKEN.fullmatch(given):
        raise ValueError("a token is not empty, and of printable ASCII without blanks")
    return given


def authorization(token: str | None) -> list[tuple[str, str]]:
    """The header that shows it, where there is one."""
    return [] if token is None else [("Authorization", f"Bearer {token}")]
