"""What a running call needs of its client."""

from typing import TYPE_CHECKING, Protocol

from streams.messages import Message, RequestId

if TYPE_CHECKING:
    from streams.client.call import RunningCall


class Home(Protocol):
    """Who begins and resumes calls, answers the server and confirms to it."""

    async def begin(self, call: "RunningCall") -> None:
        """Send the call's request, or make sure that it is resumed. Raises `CannotConnect`."""

    def leave(self, call: "RunningCall") -> None:
        """Its caller listens no longer."""

    async def cancel(self, call: "RunningCall") -> None:
        """Tell the server to stop the work. Raises `CannotConnect`."""

    def asked(self, message: Message, request_id: RequestId) -> None:
        """A request of the server was taken from the call's messages."""

    def asked_again(self, request_id: RequestId) -> None:
        """A request that came before, and may not have been taken, has come again."""

    def want_ack(self, call: "RunningCall", *, now: bool) -> None:
        """More was taken: tell the server, now or within a second."""

    def ended(self, call: "RunningCall") -> None:
        """The final response is here."""
