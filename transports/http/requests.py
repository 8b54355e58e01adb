"""HTTP/1.1 on a server, without I/O: bytes become requests, responses become bytes.

h11 has the protocol. This module adds limits of size, refuses framing that two readers could
understand in two ways, and words the refusals.
"""

import enum
import http
import sys
from collections.abc import Mapping, Sequence
from typing import Final, cast
from urllib.parse import urlsplit

import h11

from streams.errors import refusal
from streams.exchange import Head, Headers, HttpError, Request
from transports.net.heads import plain_head
from transports.net.origins import Origins

# Some bearer tokens have several kilobytes. No usual head needs more.
HEAD_BYTES_MAX: Final = 16 * 1024

# Each header costs memory beyond its bytes. A browser behind two proxies sends some forty.
HEADERS_MAX: Final = 128

# A newline at the end of a body does not count: a message of exactly the limit is accepted.
NEWLINE_BYTES: Final = 2

# The framing of chunks may take as many bytes as their content, and so many more. Without a limit,
# chunks of one byte would cost six times their size on the wire, and far more in work.
CHUNKING_BYTES_MAX: Final = 64 * 1024

# How many parts of a request are parsed before other tasks run: a chunk of one byte takes 20 µs.
EVENTS_MAX: Final = 8

_PHRASES: Final = {status.value: status.phrase.encode() for status in http.HTTPStatus}
_VERSIONS: Final = (b"1.0", b"1.1")
_HAS_NO_BODY: Final = (204, 304)


class Phase(enum.Enum):
    """How far the next request has come."""

    NOTHING = "nothing"
    HEAD = "head"
    BODY = "body"


class Requests:
    """One connection as a sequence of requests and their responses, strictly in turn.

    Call `feed` and `next_request`; then compose the response, either with `whole` or with `begin`,
    `more` and `end`; then call `next_cycle`. After an `HttpError`, only its response may follow.
    """

    def __init__(self, origins: Origins, body_bytes_max: int) -> None:
        self._origins = origins
        self._body_bytes_max = body_bytes_max
        self._limit = body_bytes_max  # of the body that is being read
        self._h11: h11.Connection | None = None
        self._unseen = b""  # all that came of the request, while h11 has not read it
        self._is_plain = False  # the request was read without h11
        self._head: h11.Request | None = None
        self._fields: dict[str, list[str]] = {}  # its header, names in lower case
        self._body = bytearray()
        self.has_more = False  # some of the fed bytes are not parsed yet
        self._fed_bytes = 0  # of the current head or body, and of all that came behind it
        self._may_have_body = True  # of the response
        self._ends_with_connection = False  # of the response

    # -- reading

    def feed(self, data: bytes) -> None:
        """Add bytes that were read. At the end of the input, `phase` tells what is incomplete."""
        if not self._fed_bytes and self._head is None:
            self._unseen = data
        else:
            self._protocol.receive_data(data)
        self._fed_bytes += len(data)

    @property
    def _protocol(self) -> h11.Connection:
        """h11, created when it is needed, with all bytes that have come."""
        if self._h11 is None:
            self._h11 = h11.Connection(h11.SERVER, HEAD_BYTES_MAX)
        if self._unseen:
            self._h11.receive_data(self._unseen)
            self._unseen = b""
        return self._h11

    @property
    def phase(self) -> Phase:
        if self._head is not None:
            return Phase.BODY
        return Phase.HEAD if self._fed_bytes else Phase.NOTHING

    @property
    def head(self) -> Head | None:
        """The head of a request whose body is incomplete."""
        return None if self._head is None else Head(*self._told(self._head))

    def limit_body(self, bytes_max: int) -> None:
        """Limit the body of this request to so many bytes. Raises `HttpError`."""
        self._limit = min(bytes_max, self._body_bytes_max)
        lengths = self._fields.get("content-length", ["0"])
        if max(int(lengths[0]), len(self._body)) > self._limit + NEWLINE_BYTES:
            raise self._too_large()

    def next_request(self, events_max: int = sys.maxsize) -> Request | None:
        """The next request once it is complete. Raises `HttpError`.

        None: feed more bytes. With `has_more`, call this again instead: `events_max` parts of the
        request were parsed.
        """
        self.has_more = False
        if self._unseen and (request := self._plain_request(self._unseen)):
            return request
        try:
            for _ in range(events_max):
                event = self._protocol.next_event()
                if isinstance(event, h11.Request):
                    self._begin(event)
                elif isinstance(event, h11.Data):
                    self._add(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return self._complete()
                else:
                    self._check_chunking()
                    return None
        except h11.RemoteProtocolError as error:
            raise _malformed(error) from None
        self.has_more = True
        self._check_chunking()
        return None

    def _plain_request(self, data: bytes) -> Request | None:
        """A usual request that came in one piece, read without h11.

        h11 reads it later, if its response needs that.
        """
        head = plain_head(data, HEAD_BYTES_MAX, HEADERS_MAX)
        if head is None or head.method == "HEAD" or head.size + head.body_bytes != len(data):
            return None
        self._check_names(head.fields["host"], head.fields.get("origin", ()))
        body = data[head.size :]
        if len(body.rstrip(b"\r\n")) > self._body_bytes_max:
            raise self._too_large()
        self._fed_bytes = 0
        self._may_have_body = True
        self._is_plain = True
        return Request(head.method, _path_of(head.target), _joined(head.fields), body)

    def go_ahead(self) -> bytes:
        """The 100 response for a client that waits for it; empty for any other."""
        if not self._protocol.they_are_waiting_for_100_continue:
            return b""
        return self._send(
            h11.InformationalResponse(status_code=100, headers=[], reason=_PHRASES[100])
        )

    def _begin(self, head: h11.Request) -> None:
        before, self._fed_bytes = self._fed_bytes, len(self._protocol.trailing_data[0])
        if before - self._fed_bytes > HEAD_BYTES_MAX:  # h11 checks incomplete heads only
            raise _head_too_long()
        if head.http_version not in _VERSIONS:
            raise HttpError(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here: send one of them.")
        if len(head.headers) > HEADERS_MAX:
            raise HttpError(431, f"More than {HEADERS_MAX} header fields: send fewer.")
        self._fields = {}
        for name, value in head.headers:
            self._fields.setdefault(name.decode(), []).append(value.decode("latin-1"))
        self._check_origins(head)
        self._check_framing(head)
        self._head = head

    def _check_framing(self, head: h11.Request) -> None:
        lengths = self._fields.get("content-length")
        if "transfer-encoding" in self._fields:
            # RFC 9112, 6.1: both together, or a transfer coding in HTTP/1.0, "might indicate an
            # attempt to perform request smuggling".
            if lengths or head.http_version < b"1.1":
                raise HttpError(
                    400, "Send either a Content-Length or, in HTTP/1.1, Transfer-Encoding: chunked."
                )
        elif lengths and int(lengths[0]) > self._limit + NEWLINE_BYTES:
            raise self._too_large()

    def _check_origins(self, head: h11.Request) -> None:
        """Check the `Host`, and the host of the target where it has one."""
        names = self._fields.get("host", [""])
        if not head.target.startswith(b"/") and head.target != b"*":
            names = [*names, _authority_of(head)]
        self._check_names(names, self._fields.get("origin", ()))

    def _check_names(self, names: Sequence[str], origins: Sequence[str]) -> None:
        for name in names:
            if why := self._origins.why_refused(name, origins):
                raise HttpError(403, why)

    def _add(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._limit + NEWLINE_BYTES:
            raise self._too_large()

    def _check_chunking(self) -> None:
        is_body = self._head is not None
        if is_body and self._fed_bytes > 2 * len(self._body) + CHUNKING_BYTES_MAX:
            raise HttpError(400, "Too little in too many chunks: send the body in larger ones.")

    def _too_large(self) -> HttpError:
        return HttpError(413, refusal("too_large", limit=self._limit))

    def _complete(self) -> Request:
        assert self._head is not None  # h11 ends no message that has not begun
        head, body = self._head, bytes(self._body)
        self._head = None
        self._body = bytearray()
        if len(body.rstrip(b"\r\n")) > self._limit:
            raise self._too_large()
        self._limit = self._body_bytes_max
        self._fed_bytes = len(self._protocol.trailing_data[0])
        self._may_have_body = head.method != b"HEAD"
        return Request(*self._told(head), body)

    def _told(self, head: h11.Request) -> tuple[str, str, dict[str, str]]:
        """Method, path and headers of a head."""
        return head.method.decode(), _path_of(head.target.decode()), _joined(self._fields)

    # -- writing; raises `h11.LocalProtocolError` for a response that HTTP does not allow

    def whole(self, status: int, headers: Headers, body: bytes) -> bytes:
        """A whole response."""
        fields = list(headers)
        if status not in _HAS_NO_BODY:
            fields.append(("Content-Length", str(len(body))))
        return b"".join((self._start(status, fields), *self.more(body), self.end()))

    def begin(self, status: int, headers: Headers) -> bytes:
        """The head of a response of unknown length: chunked, or until the connection closes."""
        if ("connection", "close") not in headers:
            return self._start(status, headers)
        self._ends_with_connection = True  # h11 would chunk it as well
        lines = [f"HTTP/1.1 {status} ".encode() + _PHRASES[status]]
        lines += [f"{name}: {value}".encode("latin-1") for name, value in headers]
        return b"\r\n".join([*lines, b"", b""])

    def more(self, *data: bytes) -> Sequence[bytes]:
        """A part of the body in pieces: one chunk, where the response is chunked."""
        if not self._may_have_body or self._ends_with_connection:
            return data if self._may_have_body else ()
        body = _Pieces(data)
        framed = self._protocol.send_with_data_passthrough(h11.Data(data=cast(bytes, body)))
        return [
            piece
            for each in framed or ()
            for piece in (data if isinstance(each, _Pieces) else (each,))
        ]

    def end(self) -> bytes:
        return b"" if self._ends_with_connection else self._send(h11.EndOfMessage())

    def next_cycle(self) -> bool:
        """Prepare for the next request; False when the connection must close."""
        is_done = {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
        if self._ends_with_connection or self._protocol.states != is_done:
            return False
        self._protocol.start_next_cycle()
        return True

    def _start(self, status: int, headers: Headers) -> bytes:
        if self._is_plain:
            self._is_plain = False
            while not isinstance(self._protocol.next_event(), h11.EndOfMessage):
                pass
        if status in _HAS_NO_BODY:
            self._may_have_body = False
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        reason = _PHRASES.get(status, b"")
        return self._send(h11.Response(status_code=status, headers=fields, reason=reason))

    def _send(
        self, event: h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
    ) -> bytes:
        return self._protocol.send(event)


class _Pieces:
    """Pieces of a body for h11, which only needs their length."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._length = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._length


def _authority_of(head: h11.Request) -> str:
    """The host of a target in absolute form, which replaces the header (RFC 9112, 3.2.2)."""
    try:
        parts = urlsplit(head.target.decode())
    except ValueError:
        parts = None
    if head.method == b"CONNECT" or parts is None or parts.scheme not in ("http", "https"):
        raise HttpError(400, "The request's target is not a path: send the path of the endpoint.")
    return parts.netloc


def _joined(fields: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: ", ".join(values) for name, values in fields.items()}


def _path_of(target: str) -> str:
    if not target.startswith(("/", "*")):
        target = urlsplit(target)._replace(scheme="", netloc="").geturl() or "/"
    return target.partition("?")[0] or "/"


def _malformed(error: h11.RemoteProtocolError) -> HttpError:
    """The refusal for an error of h11, without the peer's own words behind the colon."""
    status = error.error_status_hint
    if status == 431:
        return _head_too_long()
    if status == 501:
        return HttpError(501, "No transfer coding but chunked is understood: send the body so.")
    why = str(error).partition(":")[0]
    return HttpError(400, f"No HTTP/1.1 request ({why}): correct it, or try https instead of http.")


def _head_too_long() -> HttpError:
    return HttpError(
        431, f"More than {HEAD_BYTES_MAX} bytes of headers: send fewer or shorter ones."
    )
