"""What one client has said of itself, and what it has under way with this server.

On stdio and a WebSocket that lasts as long as the connection; over HTTP it goes on through any
number of requests (`streams.engine.sessions`).
"""

from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from streams.messages import RequestId
from streams.protocol.extension import Settings

if TYPE_CHECKING:
    import trio

    from streams.engine.delivery import Delivery
    from streams.engine.stream import Stream

LogLevel = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
LEVELS: Final[tuple[str, ...]] = get_args(LogLevel)


class Session:
    """One client's, whoever else has the same principal."""

    def __init__(self, principal: str) -> None:
        self.principal = principal
        self.revision: str | None = None  # of MCP; None before `initialize`
        self.capabilities: dict[str, Any] = {}
        self.settings = Settings()
        self.level: str = LEVELS[0]  # of log messages, and above
        self.deliveries: dict[Delivery, None] = {}
        # Calls that have not begun, since their arguments are being checked.
        self.checking: dict[RequestId, trio.CancelScope] = {}
        self._taken: dict[RequestId, int] = {}  # by how many deliveries an id is taken

    def is_taken(self, request_id: RequestId, *, besides: "Stream | None" = None) -> bool:
        """Whether this id stands for something now, `besides` the delivery of a stream that the
        request with this id displaces.

        A client that was cut off may be back, under the same id, before the server has noticed.
        """
        if not self._is_taken_now(request_id, besides):
            return False
        for delivery in list(self.deliveries):
            if not delivery.connection.channel.is_writable():
                delivery.drop()
        return self._is_taken_now(request_id, besides)

    def _is_taken_now(self, request_id: RequestId, besides: "Stream | None") -> bool:
        if request_id in self.checking:
            return True
        displaced = None if besides is None else besides.delivery
        own = displaced.taken_ids if displaced in self.deliveries else ()
        return self._taken.get(request_id, 0) > (request_id in own)

    def has_begun(self, stream: "Stream") -> bool:
        """Whether the stream was begun here, and its request can be cancelled from here even when
        the connection that it came over is gone.
        """
        return False

    def attach(self, delivery: "Delivery") -> None:
        """A stream is delivered to this client from now on."""
        self.deliveries[delivery] = None
        for each in delivery.taken_ids:
            self._taken[each] = self._taken.get(each, 0) + 1

    def detach(self, delivery: "Delivery") -> None:
        """It no longer is. Twice is as good as once."""
        if self.deliveries.pop(delivery, delivery) is None:
            for each in delivery.taken_ids:
                self._taken[each] -= 1
                if not self._taken[each]:
                    del self._taken[each]
