"""The token that a client shows, and where it may be sent.

It is whoever holds it: it goes over TLS, or no further than this machine.
"""

import re
from collections.abc import Callable
from typing import Final

from transports.net.dialing import Address
from transports.net.origins import names_loopback

Token = str | Callable[[], str] | None
"""A token, or what gives it whenever a connection is opened."""

_TOKEN: Final = re.compile(r"[\x21-\x7e]+")


def check_place(address: Address, token: Token) -> None:
    """Raises `ValueError` for what is no token, or where others could read it on its way."""
    if isinstance(token, str) and not _TOKEN.fullmatch(token):
        raise ValueError("a token is not empty, and of printable ASCII without blanks")
    if token is not None and not (address.is_tls or names_loopback(address.host)):
        raise ValueError(f"{address.url} is no place for a token, which others could read: use TLS")


def bearer_for(address: Address, token: Token) -> str | None:
    """The token to show at an address, if any.

    Raises `ValueError` as `check_place` does, or `OSError` where it cannot be had now.
    """
    check_place(address, token)
    if token is None:
        return None
    given = token if isinstance(token, str) else token()
    if not _TOKEN.fullmatch(given):  # it may be another one the next time
        raise ConnectionError(f"{address.url}: there is no token to show, or it is none")
    return given


def authorization(token: str | None) -> list[tuple[str, str]]:
    """The header that shows it, where there is one."""
    return [] if token is None else [("Authorization", f"Bearer {token}")]
