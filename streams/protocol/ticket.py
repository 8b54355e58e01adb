"""A ticket: the data with which a client resumes a call, from any process on any machine."""

import base64
import binascii

import msgspec

from streams.messages import RequestId


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position in a call's stream, and the right to resume it.

    `token` is a secret: it is enough to read the call's messages. `after` is the number of the last
    message that the program has taken; None before the first, where the server starts with the
    first message that it does not know to be delivered. Times are seconds: a client should not
    resume before `min_s`, and the server deletes the stream when no client has used it for `max_s`.
    `dialect` is the proposal to resume with; `stream` is empty where the token alone is enough.
    """

    stream: str
    token: str
    request_id: RequestId
    after: int | None = None
    min_s: float = 0.0
    max_s: float | None = None
    dialect: str = "streams"

    def __post_init__(self) -> None:
        if self.after is not None and self.after < 0:
            raise ValueError("after must be 0 or more")
        if not 0 <= self.min_s < float("inf"):
            raise ValueError("min_s must be 0 or more")

    def __str__(self) -> str:
        """The ticket as one word of url-safe characters. It contains the token: do not log it."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).rstrip(b"=").decode()

    def leads_to_same(self, other: "Ticket") -> bool:
        """Whether both are for the same call, whatever their positions."""
        is_named = self.stream != "" and self.stream == other.stream
        return is_named or bool(self.token and self.token == other.token)

    def named(self, stream: str) -> "Ticket":
        """The same ticket with the id of its stream, once that is known."""
        return msgspec.structs.replace(self, stream=stream)

    def __repr__(self) -> str:
        return f"<Ticket {self.stream[:8]}… after {self.after}>"

    @classmethod
    def parse(cls, text: str) -> "Ticket":
        """Read what `str(ticket)` wrote, or the ticket as a JSON object.

        Raises `ValueError` for anything else.
        """
        word = text.strip()
        try:
            if not word.startswith("{"):
                padded = word.encode("ascii") + b"=" * (-len(word) % 4)
                return msgspec.json.decode(base64.b64decode(padded, b"-_", validate=True), type=cls)
            return msgspec.json.decode(word, type=cls)
        except (
            msgspec.DecodeError,
            binascii.Error,
            UnicodeEncodeError,
            RecursionError,
        ) as error:
            raise ValueError(f"Not a ticket: {error}.") from None
