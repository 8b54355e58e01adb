"""The URLs of stores that several replicas share, and how they are shown.

A URL may have a password, which must be in no log and in no error. It is quick to load, because a
relay loads it.
"""

import re
from pathlib import Path
from typing import Final

SCHEMES: Final = "redis://, rediss://, valkey://, valkeys://, redis+sentinel:// or redis+cluster://"
_URL: Final = re.compile(r"(?:redis|valkey)s?(?:\+(?:sentinel|cluster))?://", re.IGNORECASE)
_SOCKET: Final = re.compile(r"(?:redis\+)?unix:///", re.IGNORECASE)
# Like an address without its scheme, or a URL that lacks a slash.
_ALMOST: Final = re.compile(r"[\w.-]+:[0-9]{1,5}(?:/[0-9]*)?$|(?:redis|valkey)s?(?:\+\w+)?:/")
_SHOWN_PARAMETERS: Final = ("prefix", "db", "ca", "cluster")  # any other may be a secret


def is_url(journal: str) -> bool:
    """Whether a journal is named by a URL, and not by the path of a file."""
    return "://" in journal


def checked_path(journal: str) -> Path:
    """The path of a file. Raises `ValueError` for what looks like a store, unless it exists."""
    path = Path(journal)
    if _ALMOST.match(journal) and not path.exists():
        raise ValueError(
            "--journal: this is no path of a file, and no URL of a store: write "
            "redis://HOST:PORT/0 for a store, or ./NAME for a file."
        )
    return path


def checked(url: str) -> str:
    """The URL of a store. Raises `ValueError`, which says what is wrong without its secrets."""
    if _SOCKET.match(url):
        return url
    if not _URL.match(url):
        scheme = url.partition("://")[0]
        raise ValueError(f"{scheme}://… is no store: name a file, or a URL with {SCHEMES}.")
    place = without_secrets(url).partition("://")[2]
    if not re.match(r"[^/?#]", place):
        raise ValueError(f"{without_secrets(url)}: there is no host: write redis://HOST:PORT/0.")
    return url


def without_secrets(url: str) -> str:
    """The URL without the user, the password, and parameters that may be secrets."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    # Up to the last @, even behind a slash: a password may have any letter.
    place = re.split(r"[@]", f"{rest}?{query}")[-1] if "@" in query else rest.rpartition("@")[2]
    place = place.partition("#")[0].partition("?")[0]
    named = [each.partition("=") for each in query.partition("#")[0].split("&")]
    shown = [f"{name}={value}" for name, _, value in named if name in _SHOWN_PARAMETERS]
    return f"{scheme}://{place}{'?' if shown else ''}{'&'.join(shown)}"
