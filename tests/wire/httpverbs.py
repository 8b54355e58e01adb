"""The vocabulary of the tests that read HTTP itself: event ids, priming events, refusals."""

from dataclasses import dataclass
from typing import Any, Final

from tests.wire.httpclient import HttpClient
from tests.wire.process import Gate
from tests.wire.raw import Id, Message
from tests.wire.rawhttp import EVENTS, JSON, Event, Exchange
from tests.wire.verbs import CREATE, Started

RESPONSE: Final = "mcp-streams/response"  # in the `_meta` of a resume's reply


@dataclass(frozen=True)
class EventId:
    """WIRE §4: `<key>_<seq>` on the response of the originating request; `<key>_<seq>_<delivery>`
    on that of a resume POST."""

    key: str
    seq: int
    delivery: str = ""

    @classmethod
    def of_call(cls, event: Event | str) -> "EventId":
        key, seq = _text(event).split("_")
        return cls(key, int(seq))

    @classmethod
    def of_resume(cls, event: Event | str) -> "EventId":
        key, seq, delivery = _text(event).split("_", 2)
        assert delivery
        return cls(key, int(seq), delivery)

    def at(self, seq: int) -> str:
        """The id of another event of the same response."""
        tail = f"_{self.delivery}" if self.delivery else ""
        return f"{self.key}_{seq}{tail}"


def _text(event: Event | str) -> str:
    if isinstance(event, str):
        return event
    assert event.id, f"an event without an id: {event}"
    return event.id


def streamed(exchange: Exchange) -> Exchange:
    """Check that the response is an event stream."""
    exchange.head()
    assert exchange.status == 200, exchange.body()
    assert exchange.media_type == EVENTS, exchange.headers
    return exchange


def primed(exchange: Exchange) -> Event:
    """The priming event, which an event stream of 2025-11-25 begins with."""
    event = streamed(exchange).next_event()
    assert event.data == ""
    assert event.id
    assert event.retry is not None
    return event


def messages_of(events: list[Event]) -> list[Message]:
    return [event.message for event in events if event.data]


def read_until(exchange: Exchange, method: str) -> list[Event]:
    """Events up to the first message of this method, that one included."""
    taken = [exchange.next_event()]
    while not taken[-1].data or taken[-1].message.method != method:
        taken.append(exchange.next_event())
    return taken


def read_to_n(exchange: Exchange, n: int) -> list[Event]:
    """Events up to the tools' own message with this number."""
    taken = read_until(exchange, "notifications/message")
    while taken[-1].message.params["data"]["n"] != n:
        taken += read_until(exchange, "notifications/message")
    return taken


def announced(events: list[Event]) -> Started:
    """The stream that these events announce."""
    (create,) = [one for one in messages_of(events) if one.method == CREATE]
    stream = create.params["stream"]
    return Started(stream["requestId"], stream["streamId"], stream["resumeToken"])


def cut_after(client: HttpClient, gate: Gate, n: int, of: int = 6) -> EventId:
    """A call of `steps` that was cut off after its n-th message; the id that came last."""
    exchange = client.call("steps", 7, n=of, gate=gate.path)
    gate.release(n)
    last = read_to_n(exchange, n)[-1] if n else primed(exchange)
    exchange.cut()
    return EventId.of_call(last)


def resumed(
    client: HttpClient,
    params: dict[str, Any],
    id: Id = "resume",
    last_event_id: str | None = None,
    **more: object,
) -> Exchange:
    return client.request(
        "stream/resume", {**params, **more}, id=id, more={"Last-Event-ID": last_event_id}
    )


def text_of(response: Message) -> str:
    """The text that the tool has returned."""
    text: str = response.result["content"][0]["text"]
    return text


def refusal(exchange: Exchange, status: int, code: int | None = None) -> Message:
    """Check a refusal. WIRE §6: "every 4xx body is a JSON-RPC error"; §9: with a message."""
    exchange.head()
    assert exchange.status == status, exchange.first
    assert exchange.media_type == JSON
    message = exchange.message()
    assert message["jsonrpc"] == "2.0"
    assert message.error["message"]
    assert isinstance(message.error["code"], int)
    assert code in (None, message.error["code"]), message
    return message
