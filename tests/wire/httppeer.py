"""A peer that talks HTTP: each message is a POST, and each response body is another place to read.

It speaks either of the two framings, knows MCP's Streamable HTTP and none of this project's code.
It reads one connection at a time, and only while a test waits: it has no threads.
"""

import json
import select
from collections import deque
from typing import Any, Final

from tests.wire.httpclient import HttpClient
from tests.wire.raw import DEADLINE_S, Message, Peer, PeerGone
from tests.wire.rawhttp import BOTH, EVENTS, LINES, Exchange

ACCEPTS: Final = {"http-sse": BOTH, "http-lines": LINES}
_POSITION: Final = "notifications/stream/position"
_CREATE: Final = "notifications/stream/create"


class _Post:
    """A POST, and the messages of its response that were not taken yet."""

    def __init__(self, exchange: Exchange, sent: object) -> None:
        self.exchange = exchange
        self.messages: deque[bytes] = deque()
        self.is_answered = False
        body: dict[str, Any] = sent if isinstance(sent, dict) else {}
        self.method = body.get("method")
        self.id = body.get("id")
        params = body.get("params")
        self._stream = params.get("streamId") if isinstance(params, dict) else None
        self._seq = 0

    @property
    def is_resume(self) -> bool:
        return self.method == "stream/resume"

    def collect(self, *, with_positions: bool) -> None:
        """Move the received messages of the response to `messages`."""
        if self.exchange.media_type == EVENTS:
            while (event := self.exchange.take_event()) is not None:
                if event.data:
                    self._take(event.data.encode(), event.id if with_positions else None)
        elif self.exchange.media_type == LINES:
            while (line := self.exchange.take_line()) is not None:
                self._take(line, None)
        elif self.exchange.status == 502:
            raise PeerGone("the balancer says that the server has ended")
        elif self.exchange.is_whole and self.exchange.status != 202:
            self._take(self.exchange.body(), None)

    def _take(self, raw: bytes, event_id: str | None) -> None:
        message = Message(raw)
        if message.method == _CREATE:
            self._stream = message.params["stream"]["streamId"]
        is_answer = self.id is not None and message.answers(self.id)
        self.is_answered = self.is_answered or is_answer
        if event_id is not None and not (is_answer and self.is_resume):
            self._take_position(event_id)
        self.messages.append(raw)

    def _take_position(self, event_id: str) -> None:
        """Turn an event's id into the position header that newline framing has before the message.

        WIRE §4: `<key>_<seq>` on the response of the originating request, `<key>_<seq>_<delivery>`
        on that of a resume POST.
        """
        seq = int(event_id.split("_", 2)[1])
        if seq > self._seq:
            self._seq = seq
            params = {"streamId": self._stream, "seq": seq, "count": 1}
            header = {"jsonrpc": "2.0", "method": _POSITION, "params": params}
            self.messages.append(json.dumps(header).encode())


class HttpPeer(Peer):
    """A session, and all its POSTs. The messages of one response come in their order."""

    def __init__(self, port: int, kind: str) -> None:
        super().__init__()
        self.http = HttpClient(port, ACCEPTS[kind])
        self.refusals: list[bytes] = []
        self._posts: list[_Post] = []
        self._has_positions = False
        self._in_run: _Post | None = None
        self._left_of_run = 0

    def send_raw(self, data: bytes) -> None:
        """POST a message; for a message that is no request, wait for the status: no other answer
        comes.
        """
        try:
            sent = json.loads(data)
        except (ValueError, RecursionError):  # an invalid message, on purpose
            sent = None
        post = _Post(self.http.send(self.http.post_bytes(data)), sent)
        self._posts.append(post)
        if not isinstance(post.method, str) or post.id is None:
            while not post.exchange.is_over:
                self._read(post)

    def receive_raw(self) -> bytes:
        while True:
            for post in [self._in_run] if self._in_run else self._posts:
                if post.messages:
                    return self._taken(post, post.messages.popleft())
            self._forget_the_finished()
            self._read_some()

    def _taken(self, post: _Post, raw: bytes) -> bytes:
        """WIRE §4: "Nothing comes in between" a header and its messages, on this connection."""
        if self._left_of_run:
            self._left_of_run -= 1
        elif _POSITION.encode() in raw and (message := Message(raw)).method == _POSITION:
            self._left_of_run = message.params["count"]
        self._in_run = post if self._left_of_run else None
        return raw

    def _forget_the_finished(self) -> None:
        if self._in_run and self._in_run.exchange.is_over:
            self._in_run, self._left_of_run = None, 0
            raise PeerGone("cut in the middle of a run")
        self._posts = [post for post in self._posts if not post.exchange.is_over]
        if not self._posts:
            raise PeerGone(f"nothing is under way; what was refused: {self.refusals[-3:]}")

    def _read_some(self, within_s: float = DEADLINE_S) -> bool:
        """Read from the connections that have data, the oldest first; False if none has."""
        waiting = {
            post.exchange.connection: post for post in self._posts if not post.exchange.is_over
        }
        readable = select.select(list(waiting), [], [], within_s)[0]
        if not readable and within_s:
            raise TimeoutError(f"nothing on {len(waiting)} responses")
        for connection in readable:
            self._read(waiting[connection])
        return bool(readable)

    def _read(self, post: _Post) -> None:
        post.exchange.pump()
        post.collect(with_positions=self._has_positions)
        if post.exchange.is_whole and post.exchange.status >= 400:
            self.refusals.append(b"%d " % post.exchange.status + post.exchange.body())
        is_opening = post.method == "initialize" and self.http.session is None
        if is_opening and "mcp-session-id" in post.exchange.headers:
            self.http.session = post.exchange.headers["mcp-session-id"]

    def initialize(
        self, capabilities: dict[str, Any] | None = None, *, revision: str = "2025-11-25"
    ) -> Message:
        for place in ("experimental", "extensions"):
            settings = (capabilities or {}).get(place, {}).get("mcp-streams/v1", {})
            self._has_positions = self._has_positions or settings.get("positions", False)
        return super().initialize(capabilities, revision=revision)

    def negotiated(self, revision: str) -> None:
        self.http.revision = revision

    def notify(self, method: str, params: object = None) -> None:
        super().notify(method, params)
        self._expect_accepted()

    def answer(self, id: object, result: object) -> None:
        super().answer(id, result)
        self._expect_accepted()

    def _expect_accepted(self) -> None:
        """MCP, Streamable HTTP: "the server MUST return HTTP status code 202 Accepted with no
        body" for a response or a notification."""
        exchange = self._posts[-1].exchange
        if exchange.is_cut:
            raise PeerGone("cut off before it said 202")
        assert (exchange.status, exchange.body()) == (202, b"")

    def arrived(self) -> None:
        """Wait until every request has the head of its response, or has failed."""
        for post in self._posts:
            while not post.exchange.status and not post.exchange.is_over:
                self._read(post)

    def settle(self) -> list[Message]:
        """As for every peer, and until the responses that hold an answer have ended."""
        before = super().settle()
        while any(post.is_answered and not post.exchange.is_over for post in self._posts):
            self._read_some()
        while self._read_some(within_s=0):
            pass
        return [*before, *(Message(raw) for post in self._posts for raw in self._all_of(post))]

    @staticmethod
    def _all_of(post: _Post) -> list[bytes]:
        taken = list(post.messages)
        post.messages.clear()
        return taken

    def cut(self) -> None:
        for post in self._posts:
            post.exchange.cut()
        self.http.close()
