"""Key sets from an issuer that does not mean well: real sockets, and no thread is left behind."""

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from streams.auth import jwks
from streams.auth.jwks import fetcher

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

# A beginning, and an end that is repeated, a piece at a time and without an end.
DRIPS = {
    "nothing": (b"", b""),
    "a status line": (b"HTTP/1.1 2", b"0"),
    "a header": (HEAD + b"X: ", b"x"),
    "headers": (HEAD, b"X: y\r\n"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body": (HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "a body without a length": (HEAD + b"\r\n", b" "),
    "a body in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@contextmanager
def dripping(first: bytes, piece: bytes) -> Iterator[int]:
    """An issuer that goes on for ever, at one byte or so each 10 ms; yields its port."""
    is_over = threading.Event()
    threads: list[threading.Thread] = []

    def drip(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.sendall(first)
            while not is_over.wait(0.01):
                connection.sendall(piece)

    def accept(door: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = door.accept()
                threads.append(threading.Thread(target=drip, args=[connection]))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        accepting = threading.Thread(target=accept, args=[door])
        accepting.start()
        try:
            yield door.getsockname()[1]
        finally:
            is_over.set()
            door.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize(
    ("scheme", "drip"),
    [*itertools.product(["http"], DRIPS), ("https", "nothing"), ("https", "TLS")],
)
def test_an_issuer_that_drips_is_given_up(
    monkeypatch: pytest.MonkeyPatch, scheme: str, drip: str
) -> None:
    """The timeout of a socket begins anew with each byte."""
    monkeypatch.setattr(jwks, "FETCH_S", 0.3)
    first, piece = DRIPS.get(drip, (b"\x16\x03\x03\x40\x00", b"\x00"))
    before = set(threading.enumerate())
    late = pytest.raises(OSError, match=r"no answer within 0\.3 s|timed out")
    with dripping(first, piece) as port, late:
        fetcher(f"{scheme}://127.0.0.1:{port}/keys")()
    for thread in set(threading.enumerate()) - before:
        thread.join()  # the timer, which was cancelled or has come to its end


def test_a_redirection_is_not_followed() -> None:
    first = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n"
    with dripping(first, b"") as port, pytest.raises(ConnectionError, match="HTTP 302"):
        fetcher(f"http://127.0.0.1:{port}/keys")()
