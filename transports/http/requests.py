"""HTTP/1.1 on a server, without I/O: bytes become requests, responses become bytes.

Usual requests are read by `transports.net.heads` and their Content-Length, all others, and so all
errors, by h11. This module adds limits of size, refuses framing that two readers could understand
in two ways, and words the refusals. Responses are composed here.
"""

import enum
import http
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import h11

from streams.errors import refusal
from streams.exchange import Head, Headers, HttpError, Request
from transports.http.cors import cors_headers
from transports.net.heads import PlainHead, RememberedHead, plain_head
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

_PHRASES: Final = {status.value: status.phrase for status in http.HTTPStatus}
_VERSIONS: Final = (b"1.0", b"1.1")
_HAS_NO_BODY: Final = (204, 304)
# RFC 9110, 5.5 and 5.6.2: a field of a response, which is one line. This module adds the framing.
_FIELD: Final = re.compile(
    r"(?!(?i:content-length|transfer-encoding):)[-!#$%&'*+.^_`|~0-9A-Za-z]+: [\t -~\x80-\xff]*"
)


class Phase(enum.IntEnum):  # others are hashed in Python, and each wait looks one up
    """How far the next request has come."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class Requests:
    """One connection as a sequence of requests and their responses, strictly in turn.

    Call `feed` and `next_request`; then compose the response, either with `whole` or with `begin`,
    `more` and `end`; then call `next_cycle`. After an `HttpError`, only its response may follow.
    """

    def __init__(self, origins: Origins, body_bytes_max: int) -> None:
        self._origins = origins
        self._body_bytes_max = body_bytes_max
        self._limit = body_bytes_max  # of the body that is being read
        self._unread = b""  # what came before the current request was begun, or behind its end
        self._plain: PlainHead | None = None  # of the current request, where h11 does not read it
        self._remembered: RememberedHead | None = None  # of a request before it, which was checked
        self._h11: h11.Connection | None = None  # reads the current request, where that is unusual
        self._head: h11.Request | None = None  # of that request
        self._fields: Mapping[str, Sequence[str]] = {}  # its header, names in lower case
        self._body = bytearray()
        self.has_more = False  # some of the fed bytes are not parsed yet
        self._fed_bytes = 0  # to h11: of the current head or body, and of all that came behind it
        self._is_alone = False  # the connection ends with the response
        self._may_have_body = True  # the response
        self._is_chunked = True  # the response, if its length is unknown
        self._is_answered = False

    # -- reading

    def feed(self, data: bytes) -> None:
        """Add bytes that were read. At the end of the input, `phase` tells what is incomplete."""
        if self._h11 is not None:
            self._h11.receive_data(data)
            self._fed_bytes += len(data)
        elif self._plain is not None:
            self._body += data
        else:
            self._unread += data

    @property
    def phase(self) -> Phase:
        if self._plain is not None or self._head is not None:
            return Phase.BODY
        return Phase.HEAD if self._unread or self._fed_bytes else Phase.NOTHING

    @property
    def head(self) -> Head | None:
        """The head of a request whose body is incomplete."""
        if self.phase is not Phase.BODY:
            return None
        method, target, headers = self._told
        return Head(method, _path_of(target), headers)

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
        if self._unread and self._plain is None and self._h11 is None:
            self._begin()
        if self._plain is not None:
            return self._complete_plain(self._plain)
        return None if self._h11 is None else self._parse(self._h11, events_max)

    def _begin(self) -> None:
        """Read the head without h11 if it is a usual one that came in one piece."""
        data, self._unread = self._unread, b""
        head = None if self._remembered is None else self._remembered.again(data)
        if head is None:
            head = plain_head(data, HEAD_BYTES_MAX, HEADERS_MAX)
            if head is None:
                self._fields = {}  # not those of the previous request, if this head is malformed
                self._h11 = h11.Connection(h11.SERVER, HEAD_BYTES_MAX)
                self.feed(data)
                return
            self._fields = head.fields
            self._check_names(head.fields["host"])
            self._remembered = RememberedHead.of(head, data)
        self._fields = head.fields
        self._check_length()
        self._may_have_body = head.method != "HEAD"
        self._is_chunked = True
        self._plain = head
        self.feed(data[head.size :])

    def _complete_plain(self, head: PlainHead) -> Request | None:
        if len(self._body) < head.body_bytes:
            return None
        self._unread = bytes(self._body[head.body_bytes :])
        del self._body[head.body_bytes :]
        return self._complete()

    def _parse(self, protocol: h11.Connection, events_max: int) -> Request | None:
        try:
            for _ in range(events_max):
                event = protocol.next_event()
                if isinstance(event, h11.Request):
                    self._begin_unusual(protocol, event)
                elif isinstance(event, h11.Data):
                    self._add(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    self._unread = protocol.trailing_data[0]
                    return self._complete()
                else:
                    self._check_chunking()
                    return None
        except h11.RemoteProtocolError as error:
            raise _malformed(error) from None
        self.has_more = True
        self._check_chunking()
        return None

    def go_ahead(self) -> bytes:
        """The 100 response for a client that waits for it; empty for any other."""
        if self._h11 is None or not self._h11.they_are_waiting_for_100_continue:
            return b""
        permission = h11.InformationalResponse(status_code=100, headers=[], reason=_PHRASES[100])
        return self._h11.send(permission) or b""

    def _begin_unusual(self, protocol: h11.Connection, head: h11.Request) -> None:
        before, self._fed_bytes = self._fed_bytes, len(protocol.trailing_data[0])
        if before - self._fed_bytes > HEAD_BYTES_MAX:  # h11 checks incomplete heads only
            raise _head_too_long()
        if head.http_version not in _VERSIONS:
            raise HttpError(505, "Only HTTP/1.1 and HTTP/1.0 are spoken here: send one of them.")
        if len(head.headers) > HEADERS_MAX:
            raise HttpError(431, f"More than {HEADERS_MAX} header fields: send fewer.")
        fields: dict[str, list[str]] = {}
        for name, value in head.headers:
            fields.setdefault(name.decode(), []).append(value.decode("latin-1"))
        self._fields = fields
        self._check_origins(head)
        self._check_framing(head)
        self._may_have_body = head.method != b"HEAD"
        self._is_chunked = head.http_version == b"1.1"
        self._head = head

    def _check_framing(self, head: h11.Request) -> None:
        if "transfer-encoding" not in self._fields:
            self._check_length()
        elif "content-length" in self._fields or head.http_version < b"1.1":
            # RFC 9112, 6.1: both together, or a transfer coding in HTTP/1.0, "might indicate an
            # attempt to perform request smuggling".
            raise HttpError(
                400, "Send either a Content-Length or, in HTTP/1.1, Transfer-Encoding: chunked."
            )

    def _check_length(self) -> None:
        lengths = self._fields.get("content-length")
        if lengths and int(lengths[0]) > self._limit + NEWLINE_BYTES:
            raise self._too_large()

    def _check_origins(self, head: h11.Request) -> None:
        """Check the `Host`, and the host of the target where it has one."""
        names = self._fields.get("host", [""])
        if not head.target.startswith(b"/") and head.target != b"*":
            names = [*names, _authority_of(head)]
        self._check_names(names)

    def _check_names(self, names: Sequence[str]) -> None:
        origins = self._fields.get("origin", ())
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
        body = bytes(self._body)
        if len(body) > self._limit and len(body.rstrip(b"\r\n")) > self._limit:
            raise self._too_large()
        method, target, headers = self._told
        query = target.partition("?")[2]
        request = Request(method, _path_of(target), headers, body, query=query)
        self._is_alone = not self._is_chunked or "close" in _listed(self._fields, "connection")
        self._plain = self._h11 = self._head = None
        self._fed_bytes = 0
        self._limit = self._body_bytes_max
        self._body.clear()
        return request

    @property
    def _told(self) -> tuple[str, str, Mapping[str, str]]:
        """Method, target and headers of a head."""
        if self._plain is not None:
            return self._plain.method, self._plain.target, self._plain.headers
        assert self._head is not None
        headers = {name: ", ".join(values) for name, values in self._fields.items()}
        return self._head.method.decode(), self._head.target.decode(), headers

    @property
    def cors(self) -> Headers:
        """The headers by which a browser lets a page read the response to this request."""
        return cors_headers(self._fields, self._origins.origins)

    # -- writing; raises `ValueError` for a response that HTTP does not allow

    def whole(self, status: int, headers: Headers, body: bytes) -> bytes:
        """A whole response."""
        framing = "" if status in _HAS_NO_BODY else f"Content-Length: {len(body)}"
        head = self._composed(status, headers, framing)
        self._is_answered = True
        return head + body if self._may_have_body else head

    def close(self) -> None:
        """The connection ends with the response that follows."""
        self._is_alone = True

    def begin(self, status: int, headers: Headers) -> bytes:
        """The head of a response of unknown length: chunked, or until the connection closes."""
        if _names_close(headers):
            self._is_chunked = False
        is_framed = self._is_chunked and status not in _HAS_NO_BODY
        return self._composed(status, headers, "Transfer-Encoding: chunked" if is_framed else "")

    def more(self, *data: bytes) -> Sequence[bytes]:
        """A part of the body in pieces: one chunk, where the response is chunked."""
        if not self._may_have_body:
            return ()
        if not self._is_chunked:
            return data
        size = sum(map(len, data))
        return (b"%x\r\n" % size, *data, b"\r\n") if size else ()

    def end(self) -> bytes:
        self._is_answered = True
        return b"0\r\n\r\n" if self._is_chunked and self._may_have_body else b""

    def next_cycle(self) -> bool:
        """Prepare for the next request; False when the connection must close."""
        may_go_on = self._is_answered and not self._is_alone
        self._is_answered = False
        return may_go_on

    def _composed(self, status: int, headers: Headers, framing: str) -> bytes:
        """The head of a response; `framing` is the field that tells where the body ends."""
        if status in _HAS_NO_BODY:
            self._may_have_body = False
        if cors := self.cors:
            given = {name.lower() for name, _ in headers}
            headers = (*headers, *(each for each in cors if each[0].lower() not in given))
        lines, names_close = _lines(status, tuple(headers))
        if framing:
            lines += framing + "\r\n"
        if names_close:
            self._is_alone = True
        elif self._is_alone:
            lines += "Connection: close\r\n"
        return (lines + "\r\n").encode("latin-1")


@lru_cache(maxsize=64)  # a server sends the same fields again and again
def _lines(status: int, headers: tuple[tuple[str, str], ...]) -> tuple[str, bool]:
    """The first lines of a response, and whether they say that the connection ends with it."""
    lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"]
    for name, value in headers:
        line = f"{name}: {value}"
        if _FIELD.fullmatch(line) is None:
            raise ValueError(f"this field cannot be sent: {line[:100]!r}")
        lines.append(line + "\r\n")
    return "".join(lines), _names_close(headers)


def _names_close(headers: Headers) -> bool:
    return any((name.lower(), value) == ("connection", "close") for name, value in headers)


def _listed(fields: Mapping[str, Sequence[str]], name: str) -> list[str]:
    """The elements of a header that is a list, in lower case."""
    return [each.strip().lower() for line in fields.get(name, ()) for each in line.split(",")]


def _authority_of(head: h11.Request) -> str:
    """The host of a target in absolute form, which replaces the header (RFC 9112, 3.2.2)."""
    try:
        parts = urlsplit(head.target.decode())
    except ValueError:
        parts = None
    if head.method == b"CONNECT" or parts is None or parts.scheme not in ("http", "https"):
        raise HttpError(400, "The request's target is not a path: send the path of the endpoint.")
    return parts.netloc


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


def is_field(name: str, value: str) -> bool:
    """Whether a response may have this field; those that say where its body ends may not."""
    return _FIELD.fullmatch(f"{name}: {value}") is not None
