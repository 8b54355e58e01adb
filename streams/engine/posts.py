"""Messages between the replicas of a server about streams, over their journal.

A stream has one owner. Another replica whose client has attached to the stream tells the owner what
that client does; the owner tells it what becomes of the delivery. These messages may come twice,
and the last ones of a replica that has died may never come: each of them says how things are, and
not what is to be added.
"""

from typing import Any

import msgspec

from streams.errors import Refusal
from streams.journal.records import Outcome
from streams.messages import RequestId


class Taker(msgspec.Struct, frozen=True):
    """The client of a new delivery, which takes the place of an older one."""

    session: str  # the name of its session, see `Session.name`
    waiting_id: RequestId  # of the request that the delivery answers
    response: str | None = None  # the name of the grant by which it continues a response

    def is_same(self, other: "Taker") -> bool:
        """Whether both continue one response, or answer one request id of one client."""
        if self.response is not None and other.response is not None:
            return (self.session, self.response) == (other.session, other.response)
        return (self.session, self.waiting_id) == (other.session, other.waiting_id)


class _Post(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# From a replica that follows a stream to its owner


class Look(_Post, frozen=True):
    """How is the stream? The answer is a `View`, to `request`.

    The store keeps neither, unless this is asked again: see `Journal.post`.
    """

    request: int
    is_kept: bool = False


class Seen(msgspec.Struct, frozen=True):
    """When an owner told how its stream is, on the owner's own clock.

    A request that saw a stream so is newer than all that its client did before, and older than all
    that the client did once it had received anything: so the owner can put requests in order, and
    no clocks of two replicas are compared.
    """

    owner: str
    at: float  # trio's time there


class Attach(_Post, frozen=True):
    """A delivery of the replica has attached, or is attached again after its peer was silent."""

    number: int  # of the delivery, among those of this stream at this replica
    taker: Taker
    start: int
    position: int
    reply_id: RequestId | None
    level: str
    confirms: bool
    is_new: bool  # else it was attached before
    at: float  # when its client asked for it, in wall time
    is_again: bool = False  # it was attached before, to another owner or as far as the store knew
    waited_s: float = 0.0  # how long its client's request had waited until it was attached
    only_waits: bool = False  # its client cannot come back
    seen: Seen | None = None  # what its replica knew of the stream
    wait_s: float | None = None  # how long its client wants to wait at most


class Moved(_Post, frozen=True):
    """A delivery has handed the stream up to `position` to its sender.

    `written` is how far the transport has confirmed it. The store keeps what other posts rely on.
    """

    number: int
    position: int
    written: int
    is_kept: bool


class Left(_Post, frozen=True):
    """A delivery is detached, or its peer `is_silent`."""

    number: int
    is_silent: bool = False


class Delivered(_Post, frozen=True):
    """The client has everything up to `seq`.

    It is the client of the delivery with this `number`, or the cursor of a new request says so.
    """

    seq: int
    number: int = 0


class Acked(_Post, frozen=True):
    """A client has everything up to `seq`. Its ack came to a replica that does not serve it."""

    seq: int
    session: str


class Answered(_Post, frozen=True):
    """The client's answer to a request of the stream: a JSON-RPC response, as a line.

    With `session`, the owner alone knows whether that client may answer.
    """

    line: bytes
    session: str | None = None


class Stopped(_Post, frozen=True):
    """The client wants the call no more: it is cancelled, or with `is_dropped` nothing is kept.

    `number` is that of the client's delivery. If another one has displaced it meanwhile, the client
    has no say in the call. 0: the client began the call. With `is_told` an operator cancels it, and
    the client is told so. `is_late`: it came to a replica that had lost the call already, and whose
    clients may have resumed it elsewhere.
    """

    is_dropped: bool = False
    number: int = 0
    is_told: bool = False
    is_late: bool = False


class Touched(_Post, frozen=True):
    """See `Stream.touch`."""


class Leave(_Post, frozen=True):
    """See `Stream.leave`."""


class Awaited(_Post, frozen=True):
    """A client waits for a call by `Operations.join`: see `Stream.await_again`."""

    short_name: str = ""


class ResponseEnded(_Post, frozen=True):
    """See `Stream.end_response`."""

    session: str
    response: str
    why: str


class Token(_Post, frozen=True):
    """The progress token of the client that is attached now."""

    token: RequestId | None


class Told(_Post, frozen=True):
    """The client was given a page token: see `Stream.tell_page`."""

    seq: int


ToOwner = (
    Look
    | Attach
    | Moved
    | Left
    | Delivered
    | Acked
    | Answered
    | Stopped
    | Touched
    | Leave
    | Awaited
    | ResponseEnded
    | Token
    | Told
)


# From the owner to a replica


class View(_Post, frozen=True):
    """The state of a stream that its owner knows and its record does not tell."""

    request: int  # the number of the `Look`; 0 for news that was not asked for
    is_known: bool = True  # False: the sender does not own the stream
    delivered: int = 0
    handed: int = 0
    durable: int = 0
    outcome: Outcome = Outcome.LIVE
    idle_s: float | None = None  # since it was attached last; None while it is
    asked: int = 0
    is_reachable: bool = True
    is_findable: bool = False
    is_left: bool = False
    stays: bool = False
    latest_progress: bytes = b""
    at: float = 0.0  # when it was so, see `Seen`
    questions: dict[str, tuple[int, bytes]] = {}  # open requests: the seqs and lines, by ids
    is_taken: bool = False  # see `Stream.is_taken`
    ended_responses: list[tuple[str, str, str]] = []  # see `Stream.end_response`
    numbered: int = 0  # see `Stream.numbered`


class Ended(_Post, frozen=True):
    """A delivery is over.

    `error` is an error for its client: code, message, data; `answer` is a line for it. Without
    either nothing more is sent to the client; with `is_released` the client may come back.
    """

    number: int
    error: tuple[int, str, dict[str, Any] | None] | None = None
    answer: bytes | None = None
    superseded_by: Taker | None = None
    is_released: bool = False


# To all replicas


class Cancelled(_Post, frozen=True):
    """The client of a session over HTTP cancels a request, which was made at another replica."""

    session: str
    request_id: RequestId
    reason: Any = None


class SessionAnswered(_Post, frozen=True):
    """The client of a session over HTTP answers a request that belongs to no call."""

    session: str
    line: bytes


class SessionChanged(_Post, frozen=True):
    """A session over HTTP has other settings, or was ended."""

    key: str
    is_over: bool = False


class Listening(_Post, frozen=True):
    """The client of a session has opened its standing stream, in wall time `at`."""

    session: str
    at: float


class Notice(_Post, frozen=True):
    """A notification for all clients, or for the subscribers of a resource."""

    line: bytes
    key: str | None = None  # see `Session.notify`
    resource: str | None = None  # a URI


ToReplica = View | Ended | Cancelled | SessionAnswered | SessionChanged | Listening | Notice

# JSON: clients choose numbers, and msgpack has none above 2**64.
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[ToOwner | ToReplica] = msgspec.json.Decoder(ToOwner | ToReplica)


def encode(post: ToOwner | ToReplica) -> bytes:
    """A post as bytes."""
    return _encoder.encode(post)


def decode(body: bytes) -> ToOwner | ToReplica:
    """The post in these bytes. Raises `msgspec.DecodeError`: a newer replica may have sent it."""
    return _decoder.decode(body)


def error_of(refused: Refusal) -> tuple[int, str, dict[str, Any] | None]:
    """A refusal as `Ended` has it."""
    return refused.code, refused.message, refused.data
