"""The response that a connection owes: a server that ends waits for it.

See `streams.exchange.Departure`.
"""

from streams.exchange import Departure


class Debt:
    """Whether a connection owes a response that has not begun; a departure waits for it.

    A new connection owes one: it was made for a request.
    """

    __slots__ = ("_departure", "_is_owed")

    def __init__(self, departure: Departure | None) -> None:
        self._departure = departure
        self._is_owed = False

    def __enter__(self) -> None:
        self.owe()

    def __exit__(self, *_: object) -> None:
        self.settle()

    @property
    def is_last(self) -> bool:
        """Whether no request may follow the one that is answered now."""
        return self._departure is not None and self._departure.has_begun

    def owe(self) -> None:
        """A request comes."""
        if not self._is_owed and self._departure is not None:
            self._is_owed = True
            self._departure.enter()

    def settle(self) -> None:
        """The response has begun, or the connection has ended."""
        if self._is_owed and self._departure is not None:
            self._is_owed = False
            self._departure.leave()
