"""Lists of a server, such as `resources/list`: named entries, which clients read in pages."""

import base64
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

from streams import messages
from streams.schemas.content import Icon

# Cursors behind entries that were removed stay valid, so that a client in the middle of a list
# reads on. Only an author's own code adds and removes; this bounds one that does so for ever.
REMOVED_MAX: Final = 1_000


class Entry(Protocol):
    """An entry of a list."""

    @property
    def key(self) -> str:
        """Its name, which no other entry of the list has."""

    def shown(self) -> dict[str, Any]:
        """The entry as clients see it."""


_E = TypeVar("_E", bound=Entry)


def require_json(shown: dict[str, Any], what: str) -> None:
    """Raise `ValueError` for an entry that is not JSON: no client could read the list with it."""
    try:
        messages.encode(shown)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: its entry in the list is not JSON: {error}") from error


class Listing(Generic[_E]):
    """Entries in the order in which they were added."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, _E] = {}
        self._places: dict[str, int] = {}  # also of entries that were removed, for their cursors
        self._removed: dict[str, None] = {}
        self._last = 0
        self.is_used = False  # it has had an entry

    def __iter__(self) -> Iterator[_E]:
        return iter(list(self._entries.values()))

    def add(self, entry: _E) -> None:
        """Add an entry. Raises `ValueError` where another one has its key, or it is not JSON."""
        if entry.key in self._entries:
            raise ValueError(f"there is a {self._what} {entry.key} already; remove it first")
        require_json(entry.shown(), f"{self._what} {entry.key}")
        self._removed.pop(entry.key, None)
        self._last += 1
        self._entries[entry.key] = entry
        self._places[entry.key] = self._last
        self.is_used = True

    def remove(self, key: str) -> None:
        """Remove an entry. Raises `ValueError` for an unknown key."""
        if self._entries.pop(key, None) is None:
            raise ValueError(f"there is no {self._what} {key}")
        self._removed[key] = None
        while len(self._removed) > REMOVED_MAX:
            oldest = next(iter(self._removed))
            del self._removed[oldest], self._places[oldest]

    def get(self, key: str) -> _E | None:
        """The entry of this key, or None."""
        return self._entries.get(key)

    def page(self, cursor: str | None, size: int) -> tuple[list[dict[str, Any]], str | None]:
        """Up to `size` entries behind the cursor, and the next cursor; None is the first page.

        A cursor stays valid when entries are added or removed. Raises `ValueError` for an unknown
        one.
        """
        place = 0 if cursor is None else self._place(cursor)
        # From a copy, because a thread of the author's may add and remove entries meanwhile.
        behind = (each for each in self if self._places.get(each.key, 0) > place)
        found = list(itertools.islice(behind, size + 1))
        shown = [entry.shown() for entry in found[:size]]
        return shown, None if len(found) <= size else _cursor_behind(found[size - 1].key)

    def _place(self, cursor: str) -> int:
        try:
            place = self._places.get(base64.urlsafe_b64decode(cursor.encode()).decode())
        except ValueError:
            place = None
        if place is None:
            raise ValueError(
                "unknown cursor: send a nextCursor as received, or none for the first page"
            )
        return place


def icons_of(given: Iterable[Icon] | None, what: str) -> tuple[Icon, ...] | None:
    """The icons of a setting. Raises `TypeError`, beginning with `what`, for anything else."""
    icons = None if given is None else tuple(given)
    if icons is not None and not all(isinstance(icon, Icon) for icon in icons):
        raise TypeError(f"{what}: icons: expected Icon objects")
    return icons or None


def _cursor_behind(key: str) -> str:
    """It holds the key, so that it is valid after a restart."""
    return base64.urlsafe_b64encode(key.encode()).decode()
