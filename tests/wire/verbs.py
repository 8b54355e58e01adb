"""Helpers of the wire tests: opt in, start, resume, and read by numbers."""

import contextlib
import json
from dataclasses import dataclass
from typing import Any, Final

from tests.wire.raw import Fits, Id, Message, Peer, PeerGone, answers_to, method_is

CREATE: Final = "notifications/stream/create"
END: Final = "notifications/stream/end"
POSITION: Final = "notifications/stream/position"
ACK: Final = "notifications/stream/ack"

PLAIN: Final[dict[str, Any]] = {"elicitation": {}}
STREAMS: Final[dict[str, Any]] = {**PLAIN, "streams": {}}
POSITIONS: Final[dict[str, Any]] = {
    **PLAIN,
    "experimental": {"mcp-streams/v1": {"positions": True}},
}
# Every transport over a journal, and the transports that consecutive tests use in turn.
KINDS: Final = ("ws-mcp", "ws-streams", "stdio", "http-sse", "http-lines")

MIB: Final = 1024 * 1024
UNKNOWN: Final = "x" * 43
COMPLETED: Final = {"_meta": {"mcp-streams/ended": "completed"}}
SUPERSEDED: Final = {"_meta": {"mcp-streams/ended": "superseded"}}


def opting_in(kind: str, capabilities: dict[str, Any]) -> dict[str, Any]:
    """These capabilities; over HTTP with `replayResponse`, so that an original response comes as it
    was.

    WIRE §2: "over HTTP it travels inside the reply […] unless the client set `replayResponse`";
    with it set, the Streams proposal reads the same over every transport.
    """
    if not kind.startswith("http"):
        return capabilities
    places = capabilities.get("experimental", {})
    settings = {**places.get("mcp-streams/v1", {}), "replayResponse": True}
    return {**capabilities, "experimental": {**places, "mcp-streams/v1": settings}}


@dataclass(frozen=True)
class Started:
    """A call that was announced as a stream."""

    id: Id
    stream: str
    token: str

    @property
    def with_token(self) -> dict[str, Any]:
        return {"streamId": self.stream, "resumeToken": self.token}

    @property
    def by_id(self) -> dict[str, Any]:
        return {"streamId": self.stream}


def start(peer: Peer, tool: str, id: Id | None = None, **arguments: object) -> Started:
    """Call a tool and wait for its stream to be announced."""
    chosen = peer.call(tool, id, **arguments)

    def is_ours(message: Message) -> bool:
        is_created = message.method == CREATE
        return message.answers(chosen) or (
            is_created and message.params["stream"]["requestId"] == chosen
        )

    announced = peer.expect(is_ours)
    assert announced.method == CREATE, f"not announced: {announced}"
    stream = announced.params["stream"]
    return Started(chosen, stream["streamId"], stream["resumeToken"])


def called(peer: Peer, tool: str, **arguments: object) -> Message:
    """Call a tool and wait for the response."""
    return peer.response(peer.call(tool, **arguments))


def ack(peer: Peer, stream: str, seq: object) -> None:
    peer.notify(ACK, {"streamId": stream, "seq": seq})


def counted(messages: list[Message]) -> list[int]:
    """The numbers that the tools' own messages carry, in order."""
    return [
        message.params["data"]["n"]
        for message in messages
        if message.method == "notifications/message"
    ]


def up_to(last: int) -> list[int]:
    return list(range(1, last + 1))


class Reader:
    """A positions client: reads whole runs, and checks the rule of the header.

    WIRE §4: "one header ahead of each run of entries of one stream […]; the K messages that follow
    it on this connection are that stream's N … N+K-1 […]. Nothing comes in between."
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.entries: dict[str, dict[int, Message]] = {}
        self.others: list[Message] = []
        self.all: list[Message] = []

    def _take(self) -> list[Message]:
        message = self.peer.receive()
        if message.method != POSITION:
            self.others.append(message)
            self.all.append(message)
            return [message]
        assert "id" not in message
        assert set(message.params) == {"streamId", "seq", "count"}, message
        return self._take_run(*(message.params[key] for key in ("streamId", "seq", "count")))

    def _take_run(self, stream: str, first: int, count: int) -> list[Message]:
        known = self.entries.setdefault(stream, {})
        assert count >= 1
        assert first == max(known, default=first - 1) + 1, f"{first} does not follow {max(known)}"
        for seq in range(first, first + count):  # one by one: a cut keeps the messages before it
            message = self.peer.receive()
            assert message.method not in (POSITION, CREATE, END), "something in between"
            known[seq] = message
            self.all.append(message)
        return self.all[-count:]

    def until(self, fits: Fits) -> Message:
        """Read until a message fits, as an entry or not, and to the end of its run."""
        while True:
            for message in self._take():
                if fits(message):
                    return message

    def response(self, id: Id) -> Message:
        return self.until(answers_to(id))

    def until_seq(self, stream: str, seq: int) -> None:
        """Read until this entry is there."""
        while seq not in self.entries.get(stream, {}):
            self._take()

    def drain(self) -> None:
        """Read the messages that came before the connection was lost."""
        with contextlib.suppress(PeerGone):
            while True:
                self._take()

    def settle(self) -> None:
        """Read the server's answers to all earlier messages (see `Peer.settle`)."""
        for _ in range(2):
            self.response(self.peer.request("ping"))

    def seqs(self, stream: str) -> list[int]:
        return list(self.entries.get(stream, {}))

    def is_announced(self) -> bool:
        return any(map(method_is(CREATE), self.others))


def resume(peer: Peer, params: dict[str, Any], **more: object) -> list[Message]:
    """Resume and read until the reply, which comes last; returns all messages."""
    resume_id = peer.request("stream/resume", {**params, **more})
    return peer.read_until(answers_to(resume_id))


def read_stream(peer: Peer, params: dict[str, Any], **more: object) -> tuple[Reader, Message]:
    """Resume as a positions client; returns the messages and the reply."""
    reader = Reader(peer)
    reply = reader.response(peer.request("stream/resume", {**params, **more}))
    return reader, reply


def refused(message: Message, reason: str, code: int = -32602) -> dict[str, Any]:
    """Check a refusal by WIRE §9, and return its `data`."""
    assert message.error["code"] == code, message
    assert message.reason == reason, message
    assert isinstance(message.error["message"], str)
    assert message.error["message"], "WIRE §9: a one-sentence `message`"
    data: dict[str, Any] = message.error["data"]
    return data


def ping_of(size: int, id: int = 7) -> bytes:
    """A ping of exactly so many bytes."""
    body = {"jsonrpc": "2.0", "id": id, "method": "ping", "params": {"_meta": {"pad": ""}}}
    bare = json.dumps(body).encode()
    return bare.replace(b'"pad": ""', b'"pad": "%s"' % (b"x" * (size - len(bare))))
