"""What must be so before a stream is delivered: each of these raises the `Refusal` that says why it
is not.
"""

import msgspec

from streams import messages
from streams.engine.identity import call_digest
from streams.engine.session import Session
from streams.engine.stream import Stream
from streams.errors import INVALID_PARAMS, INVALID_REQUEST, Refusal, refusal
from streams.messages import RequestId


def check_free(session: Session, request_id: RequestId, *, besides: Stream | None = None) -> None:
    """A new request needs an id of its own, unless it displaces what has that id: `besides`."""
    if session.is_taken(request_id, besides=besides):
        raise Refusal(INVALID_REQUEST, "This id is in use on this connection: use a new one.")


def check_ids(stream: Stream, session: Session) -> None:
    """The response is replayed under the id of the original request, which must be free."""
    if session.is_taken(stream.request_id, besides=stream):
        raise refusal("id_in_use")


def check_answerable(stream: Stream, after: int) -> None:
    """A client that waits for the response itself cannot be told just that it has it already."""
    if stream.state.is_finished(after):
        raise refusal("messages_gone", earliestSeq=stream.state.delivered + 1).saying(
            "Nothing is left to resume: all of it, the response too, is confirmed."
        )


def check_same_call(stream: Stream, params: msgspec.Raw) -> None:
    """An idempotency key stands for one call, whatever its `_meta`."""
    first = messages.parse(stream.record.origin).params
    if call_digest(params, "") != call_digest(first, ""):
        raise Refusal(
            INVALID_PARAMS, "This idempotencyKey was used for another call: use a new one."
        )


def check_undelivered(stream: Stream, after: int) -> None:
    """Of a tool's pages, the first is what the call is made for; the others have their tokens."""
    if stream.state.is_finished(after) or (stream.state.is_paged and after):
        raise refusal("messages_gone", earliestSeq=after + 1).saying(
            "The result of the call with this idempotencyKey was delivered already: "
            "use a new key to make the call once more."
        )


def check_cursor(stream: Stream, after: int | None) -> None:
    """ "after: N": I have processed everything up to N. Never a silent gap."""
    if after is None:
        return
    if after > stream.state.durable:
        raise refusal("cursor_ahead", lastSeq=stream.state.durable)
    if after < stream.state.delivered:
        raise refusal("messages_gone", earliestSeq=stream.state.delivered + 1)
