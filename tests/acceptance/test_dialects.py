"""One long call, followed in three ways through cuts and kills: the same messages, one result.

A client of both dialects that counts its messages, one of Streams alone and one of resumable
requests alone are cut off 20 times each. The server is killed twice, when the work is done and many
messages are still to be delivered. Short by default;

    SCALE=full pytest tests/acceptance/test_dialects.py --timeout 900

makes the work take a minute.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.patient_websocket import PatientWebSocketPeer
from tests.wire.process import ServerProcess
from tests.wire.raw import Id, Message, Peer, method_is
from tests.wire.requests_verbs import BOTH_POSITIONS, POLICY, REQUESTS, RESUME, STATUS, text_of
from tests.wire.verbs import CREATE, KINDS, POSITION, STREAMS, counted, opting_in, up_to

APP: Final = f"{Path(__file__).with_name('dialects_server.py')}:server"
STEPS, SECONDS = (6_000, 60.0) if os.environ.get("SCALE") == "full" else (300, 2.0)
CUTS: Final = 20
KILLED_AT: Final = (13, 17)  # at these cuts the server is killed
BY_STREAM: Final = "stream/resume"


class Follower:
    """A client that knows its call from the announcement alone, from the first cut on."""

    def __init__(
        self, server: ServerProcess, kind: str, capabilities: dict[str, Any], *methods: str
    ) -> None:
        self.messages: dict[int, Message] = {}
        self.response: Message | None = None
        self._server = server
        self._kind = kind
        self._capabilities = capabilities
        self._methods = methods  # the methods that it resumes by, in turn
        self._named: dict[str, dict[str, Any]] = {}
        self.dial()
        self._peer.initialize(capabilities)
        self._call = self._peer.call("work", steps=STEPS, seconds=SECONDS)
        self._response_id: Id = self._call
        self._hear_of_it()

    def _hear_of_it(self) -> None:
        """Read how to resume: from the announcement in the words of each method."""
        for method in set(self._methods):
            if method == BY_STREAM:
                stream = self._peer.expect(method_is(CREATE)).params["stream"]
                self._named[method] = {key: stream[key] for key in ("streamId", "resumeToken")}
            else:
                token = self._peer.expect(method_is(POLICY)).params["resumeToken"]
                self._named[method] = {"resumeToken": token}

    def read_to(self, number: int) -> None:
        """Read until the message with this number has come, or the result if that comes first."""
        while number not in self.messages and self.response is None:
            self._take()

    def _take(self) -> None:
        message = self._peer.receive()
        if message.answers(self._response_id):
            assert "result" in message, message
            self.response = message
        for number in counted([message]):
            self._keep(number, message)

    def _keep(self, number: int, message: Message) -> None:
        """Keep messages; some may come twice, unchanged, but none may be missing."""
        known = self.messages.setdefault(number, message)
        assert known.raw == message.raw
        assert number == 1 or number - 1 in self.messages, f"there is a gap ahead of {number}"

    def cut(self) -> None:
        self._peer.cut()

    def dial(self) -> None:
        """Connect without waiting for the answer: a relay needs time to start."""
        if self._kind.startswith("ws"):
            self._peer: Peer = PatientWebSocketPeer(self._server.port, self._kind)
        else:
            self._peer = self._server.connect(self._kind)

    def come_back(self, turn: int) -> None:
        self._peer.initialize(self._capabilities)
        method = self._methods[turn % len(self._methods)]
        resume_id = self._peer.request(method, {**self._named[method], **self._cursor()})
        self._response_id = resume_id if method == RESUME else self._call

    def _cursor(self) -> dict[str, int]:
        return {}

    def wait_until_done(self, peer: Peer) -> None:
        """Wait until the work is done; a kill of the server then loses no work."""
        token = next(iter(self._named.values()))["resumeToken"]
        named = {"requestId": self._call, "resumeToken": token}
        while peer.ask(STATUS, named).result["status"] == "processing":
            pass


class Numbered(Follower):
    """A client that counts its messages and resumes from its cursor: no message comes twice."""

    def __init__(self, *settings: Any) -> None:
        self._seq = 0
        self._left = 0
        super().__init__(*settings)

    def _take(self) -> None:
        message = self._peer.receive()
        if message.method == POSITION:
            assert message.params["seq"] == self._seq + 1, "what it has does not come again"
            self._left = message.params["count"]
            return
        if self._left:
            self._left -= 1
            self._seq += 1
            assert self._seq not in self.messages
        if message.answers(self._response_id):
            self.response = message
        for number in counted([message]):
            assert number == self._seq
            self._keep(number, message)

    def come_back(self, turn: int) -> None:
        self._left = 0
        super().come_back(turn)

    def _cursor(self) -> dict[str, int]:
        return {"after": self._seq}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, app=APP) as server:
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_all_dialects_lead_through_cuts_and_kills_to_the_same(
    server: ServerProcess, kind: str
) -> None:
    followers = [
        Numbered(server, kind, opting_in(kind, BOTH_POSITIONS), BY_STREAM, RESUME),
        Follower(server, kind, opting_in(kind, STREAMS), BY_STREAM),
        Follower(server, kind, REQUESTS, RESUME),
    ]
    dice = random.Random(kind)
    try:
        for turn, number in enumerate(sorted(dice.sample(up_to(STEPS), CUTS))):
            for follower in followers:
                follower.read_to(number)
            if turn in KILLED_AT:
                with server.connect("http-lines") as peer:
                    peer.initialize({})
                    for follower in followers:
                        follower.wait_until_done(peer)
                server.restart()
            for follower in followers:
                follower.cut()
                follower.dial()
            for follower in followers:
                follower.come_back(turn)
        for follower in followers:
            follower.read_to(STEPS + 1)
    finally:
        for follower in followers:
            follower.cut()
    first, *others = followers
    assert list(first.messages) == up_to(STEPS)
    expected = [message.raw for message in first.messages.values()]
    for follower in others:
        assert list(follower.messages) == up_to(STEPS)
        assert [message.raw for message in follower.messages.values()] == expected
    responses = [follower.response for follower in followers]
    results = [text_of(response) for response in responses if response is not None]
    assert results == [f"{STEPS} steps make {STEPS * (STEPS + 1) // 2}"] * 3
