"""Helpers of the tests of resumable requests: the policy, resumes, statuses."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from tests.wire.conftest import Wire
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Id, Message, Peer, answers_to
from tests.wire.verbs import KINDS, PLAIN, STREAMS, Reader, Started, opting_in

POLICY: Final = "notifications/requests/resumePolicy"
RESUME: Final = "requests/resume"
STATUS: Final = "requests/getStatus"


def ours(place: str = "experimental", **settings: object) -> dict[str, Any]:
    """Capabilities that opt in by our extension."""
    return {**PLAIN, place: {"mcp-streams/v1": settings}}


REQUESTS: Final[dict[str, Any]] = {**PLAIN, "resumableRequests": {}}
REQUESTS_POSITIONS: Final = ours(dialects=["resumableRequests"], positions=True)
BOTH_DIALECTS: Final[dict[str, Any]] = {**STREAMS, "resumableRequests": {}}
BOTH_POSITIONS: Final = ours(dialects=["streams", "resumableRequests"], positions=True)


@dataclass(frozen=True)
class Promised:
    """A call that was announced by a resume policy."""

    id: Id
    token: str

    @classmethod
    def by(cls, policy: Message) -> "Promised":
        return cls(policy.params["requestId"], policy.params["resumeToken"])

    @classmethod
    def of(cls, started: Started) -> "Promised":
        """The call behind a stream: "the token is the stream's token" (W§3)."""
        return cls(started.id, started.token)

    @property
    def by_token(self) -> dict[str, Any]:
        return {"resumeToken": self.token}

    @property
    def named(self) -> dict[str, Any]:
        return {"requestId": self.id, "resumeToken": self.token}

    def status(self, status: str, *flags: bool) -> dict[str, Any]:
        """The result of `requests/getStatus`, field by field."""
        pending, asked = flags
        return {
            "requestId": self.id,
            "status": status,
            "hasPendingMessage": pending,
            "hasInputRequest": asked,
        }


def both(wire: Wire) -> Peer:
    """A client of both dialects, with positions."""
    return wire.opened(opting_in(wire.kind, BOTH_POSITIONS))


def promise(peer: Peer, tool: str, id: Id | None = None, **arguments: object) -> Promised:
    """Call a tool and wait for its policy."""
    chosen = peer.call(tool, id, **arguments)

    def is_ours(message: Message) -> bool:
        told = message.params["requestId"] if message.method == POLICY else None
        return type(told) is type(chosen) and told == chosen

    return Promised.by(peer.expect(is_ours))


def held(peer: Peer, gate: Gate, id: Id | None = None, n: int = 5) -> Promised:
    """A call that has sent n messages and waits."""
    promised = promise(peer, "count", id, n=n, gate=gate.path)
    gate.wait_for("sent")
    return promised


def finished(peer: Peer, n: int = 5, id: Id | None = None) -> tuple[Promised, dict[int, Message]]:
    """A positions client's call that is over, with no message confirmed; and its entries."""
    promised = promise(peer, "count", id, n=n)
    reader = Reader(peer)
    reader.response(promised.id)
    return promised, sole(reader)


def return_for(peer: Peer, promised: Promised, id: Id | None = None, **more: object) -> Id:
    """Send a `requests/resume`; its id."""
    return peer.request(RESUME, {**promised.by_token, **more}, id=id)


def regained(peer: Peer, promised: Promised, id: Id | None = None, **more: object) -> list[Message]:
    """Resume and read to the response; all of it, the response at the end."""
    return peer.read_until(answers_to(return_for(peer, promised, id, **more)))


def regained_by_seq(
    peer: Peer, promised: Promised, id: Id | None = None, **more: object
) -> tuple[Reader, Message]:
    """Resume as a positions client; what was read, and the response."""
    reader = Reader(peer)
    return reader, reader.response(return_for(peer, promised, id, **more))


def sole(reader: Reader) -> dict[int, Message]:
    """The entries of the one stream that was read.

    The dialect itself has no name for the stream, and an event stream's ids do not give it.
    """
    assert len(reader.entries) <= 1
    return next(iter(reader.entries.values()), {})


def until_seq(reader: Reader, seq: int) -> None:
    """Read the one stream until this entry is there."""
    while seq not in sole(reader):
        reader.until(lambda _: True)


def status_of(peer: Peer, promised: Promised, **more: object) -> dict[str, Any]:
    result: dict[str, Any] = peer.ask(STATUS, {**promised.named, **more}).result
    return result


def text_of(response: Message) -> str:
    """The text that the tool has returned."""
    text: str = response.result["content"][0]["text"]
    return text


def cancel(peer: Peer, id: Id) -> None:
    peer.notify("notifications/cancelled", {"requestId": id, "reason": "enough"})


@contextlib.contextmanager
def wires_to(server: ServerProcess) -> Iterator[list[Wire]]:
    """Every way to one server, for steps that are too slow to repeat for each: a restart, for
    example.
    """
    with ExitStack() as stack:
        yield [Wire(kind, server, stack) for kind in KINDS]
