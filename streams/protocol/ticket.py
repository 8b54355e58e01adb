"""What is needed to come back to a call: plain data, to be kept anywhere and used from anywhere."""

import base64
import binascii

import msgspec

from streams.messages import RequestId


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a call stands and the right to resume it.

    `token` is a secret: whoever has it may read the call's messages. `after` is the number of the
    last message that was handed out, None before the first: then the server starts with whatever it
    does not know to have arrived. Times are seconds: the server wants nobody back before `min_s`
    and deletes the stream when nobody came for `max_s`. `dialect` is the proposal that leads back
    to it; where the token is all that this takes, `stream` is empty.
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
        """One word of url-safe letters. It holds the token: not for logs."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).rstrip(b"=").decode()

    def leads_to_same(self, other: "Ticket") -> bool:
        """Whether both are for the same call, wherever they stand and whoever told of it."""
        is_named = self.stream != "" and self.stream == other.stream
        return is_named or bool(self.token and self.token == other.token)

    def named(self, stream: str) -> "Ticket":
        """The same ticket, now that one knows to which stream its token leads."""
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
            raise ValueError(f"This is no ticket: {error}.") from None
