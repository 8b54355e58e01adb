"""One POST: to the given address, with the head of the answer, whatever follows."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trustme

from transports.http.post import HEAD_BYTES_MAX, INTERIM_MAX, post

PATIENCE_S = 30.0
Answering = Callable[[trio.abc.Stream], Awaitable[None]]


@asynccontextmanager
async def receiver(
    *pieces: bytes, ssl_context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that sends these pieces to each client; its port, and what it has received."""
    received: list[bytes] = []

    async def serve(stream: trio.abc.Stream) -> None:
        if ssl_context is not None:
            stream = trio.SSLStream(stream, ssl_context, server_side=True)
        try:
            received.append(await stream.receive_some(65_536))
            for piece in pieces:
                await stream.send_all(piece)
            await stream.aclose()
        except (trio.BrokenResourceError, ssl.SSLError):
            return  # the client has what it wants, or wants no such server

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        with trio.fail_after(PATIENCE_S):
            yield listener.socket.getsockname()[1], received
        nursery.cancel_scope.cancel()


async def test_the_request_goes_to_the_given_address_and_names_the_host() -> None:
    async with receiver(b"HTTP/1.1 204 No Content\r\n\r\n") as (port, received):
        url = f"http://nowhere.invalid:{port}/in?a=b"
        answer = await post(url, ["127.0.0.1"], {"webhook-id": "msg_1"}, b'{"a":1}')
    assert (answer.status, answer.fields) == (204, {})
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /in?a=b HTTP/1.1\r\n")
    assert f"host: nowhere.invalid:{port}".encode() in head.lower()
    assert b"content-type: application/json" in head.lower()
    assert b"webhook-id: msg_1" in head.lower()
    assert body == b'{"a":1}'


async def test_a_url_without_a_path_has_the_path_of_the_root() -> None:
    async with receiver(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (port, received):
        await post(f"http://127.0.0.1:{port}", ["127.0.0.1"], {}, b"{}")
    assert received[0].startswith(b"POST / HTTP/1.1\r\n")


async def test_a_redirect_is_an_answer() -> None:
    head = b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\nretry-after: 7\r\n\r\n"
    async with receiver(head) as (port, received):
        answer = await post(f"http://a.invalid:{port}/", ["127.0.0.1"], {}, b"{}")
    assert (answer.status, answer.fields["retry-after"]) == (302, "7")
    assert len(received) == 1


async def test_an_interim_response_is_none() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"
    async with receiver(interim) as (port, _):
        assert (await post(f"http://a.invalid:{port}/", ["127.0.0.1"], {}, b"{}")).status == 200


async def test_a_body_without_an_end_is_not_read() -> None:
    endless = [b"x" * 65_536] * 1000
    async with receiver(b"HTTP/1.1 200 OK\r\n\r\n", *endless) as (port, _):
        assert (await post(f"http://a.invalid:{port}/", ["127.0.0.1"], {}, b"{}")).status == 200


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\na: " + b"x" * HEAD_BYTES_MAX],
)
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    async with receiver(answer) as (port, _):
        with pytest.raises(OSError, match=r"a\.invalid: no answer"):
            await post(f"http://a.invalid:{port}/", ["127.0.0.1"], {}, b"{}")


async def test_of_several_addresses_the_first_that_answers_is_used() -> None:
    async with receiver(b"HTTP/1.1 200 OK\r\n\r\n") as (port, _):
        places = ["127.0.0.2", "127.0.0.1"]
        assert (await post(f"http://a.invalid:{port}/", places, {}, b"{}")).status == 200


async def test_no_address_is_an_error() -> None:
    with pytest.raises(OSError, match="no address"):
        await post("http://a.invalid/", [], {}, b"{}")


async def test_the_certificate_is_that_of_the_name() -> None:
    authority, ours = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("hooks.example").configure_cert(ours)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with receiver(b"HTTP/1.1 200 OK\r\n\r\n", ssl_context=ours) as (port, _):
        url = f"https://hooks.example:{port}/"
        assert (await post(url, ["127.0.0.1"], {}, b"{}", ssl_context=trusting)).status == 200
        for name, context in (("other.example", trusting), ("hooks.example", None)):
            url = f"https://{name}:{port}/"
            with pytest.raises(OSError, match="certificate"):
                await post(url, ["127.0.0.1"], {}, b"{}", ssl_context=context)


@pytest.mark.parametrize(
    "interim",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\na: " + b"x" * 12_000 + b"\r\n\r\n",
    ],
)
async def test_interim_responses_without_end_are_an_error(interim: bytes) -> None:
    async with receiver(*[interim] * 100_000) as (port, _):
        with pytest.raises(OSError, match=r"no answer: (more than|too many)"):
            await post(f"http://a.invalid:{port}/", ["127.0.0.1"], {}, b"{}")


async def test_a_few_interim_responses_are_none() -> None:
    few = b"HTTP/1.1 100 Continue\r\n\r\n" * INTERIM_MAX + b"HTTP/1.1 200 OK\r\n\r\n"
    async with receiver(few) as (port, _):
        assert (await post(f"http://a.invalid:{port}/", ["127.0.0.1"], {}, b"{}")).status == 200


@pytest.mark.parametrize("id", ["a\r\nx: y", "é☃"])
async def test_a_header_that_http_does_not_allow_is_no_failure_of_the_receiver(id: str) -> None:
    with pytest.raises(ValueError, match=r"header value|ascii"):
        await post("http://a.invalid/", [], {"webhook-id": id}, b"{}")


@pytest.mark.parametrize("url", ["", "http://[x", "http://a:99999/", "file:///a", "http://a..b/"])
async def test_a_url_that_cannot_be_used_is_no_failure_of_the_receiver(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has words of its own)
        await post(url, ["127.0.0.1"], {}, b"{}")
