"""Webhooks of real servers reach real receivers, whatever fails, hangs or is killed."""

import http.client
import json
import ssl
import stat
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio
from msgspec.structs import replace
from standardwebhooks import Webhook

from streams.clock import wall
from streams.journal.sqlite import open_sqlite_journal
from streams.journal.webhooks import SaveWebhook
from streams.process.webhooks import post_webhook
from streams.webhooks import sender as senders
from streams.webhooks.receivers import addresses_of
from streams.webhooks.sender import Sender
from streams.webhooks.signatures import Signer
from tests.rigs.command import run
from tests.rigs.journals import applied
from tests.rigs.redis_servers import running
from tests.rigs.webhooks import OTHER_SECRET, SECRET, queue, webhook
from tests.wire.process import APP, CLI, ServerProcess, kept_port, wait_until
from tests.wire.raw import DEADLINE_S, method_is
from tests.wire.verbs import PLAIN, POSITIONS, STREAMS, called, start

LEASE_DEADLINE_S: Final = senders.LEASE_S + DEADLINE_S


class Listening:
    """`mcp-streams webhook listen`, and what it has printed."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        self._printed = folder / f"arrived-{time.monotonic_ns()}.jsonl"
        self.url = f"http://127.0.0.1:{port}/"
        self.port = port
        words = ["webhook", "listen", "--port", str(port), "--json", *options]
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [*CLI, *words], stdout=printed, stderr=subprocess.PIPE, text=True
            )
        assert self.process.stderr is not None
        assert "listening at" in self.process.stderr.readline()

    @property
    def arrivals(self) -> list[dict[str, Any]]:
        """All requests, in the order in which they came."""
        lines = self._printed.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def taken(self) -> list[dict[str, Any]]:
        """Those that were answered with success."""
        return [each for each in self.arrivals if each["status"] == 204]

    def end(self) -> None:
        """SIGKILL, and reap. A second call does nothing."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def listening(folder: Path, port: int, *options: str) -> Iterator[Listening]:
    receiver = Listening(folder, port, *options)
    try:
        yield receiver
    finally:
        receiver.end()


def test_a_receiver_that_starts_first_makes_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "app.db.webhook-secret"
    with listening(tmp_path, 0, "--secret-file", str(path)):
        assert path.read_text().startswith("whsec_")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_receiver_whose_output_is_closed_ends() -> None:
    words = [*CLI, "webhook", "listen", "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        port = process.stderr.readline().rstrip("/\n").rpartition(":")[2]
        process.stdout.close()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=DEADLINE_S)
        connection.request("POST", "/", b"{}")
        assert process.wait(DEADLINE_S) == 141
        assert process.stderr.read() == ""
        connection.close()


def test_a_port_that_is_none_is_refused() -> None:
    done = run("webhook", "listen", "--port", "65536")
    assert (done.returncode, done.shown) == (2, ["--port: write a number, 0 to 65535."])


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def port() -> int:
    return kept_port()


def options(port: int, secret_file: Path, *more: str) -> tuple[str, ...]:
    url = f"http://127.0.0.1:{port}/"
    secret = ("--webhook-secret-file", str(secret_file))
    return ("--webhook", url, *secret, "--webhook-private", *more)


@contextmanager
def two_replicas(
    folder: Path, given: Sequence[str]
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers with these options on one store."""
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    with (
        running("redis", folder / "store", "--appendonly", "yes") as store,
        ServerProcess(one, store=store.url, options=given) as first,
        ServerProcess(other, store=store.url, options=given) as second,
    ):
        yield first, second


def add(server: ServerProcess, times: int = 1) -> None:
    """Make calls to their results."""
    with server.connect("ws-streams") as peer:
        peer.initialize(PLAIN)
        for number in range(times):
            assert called(peer, "add", a=number, b=0).result["content"][0]["text"] == str(number)


# Servers that are killed


async def make_due(path: Path) -> None:
    """Make all webhooks due, as after a while: on a slow machine attempts have timed out."""
    async with open_sqlite_journal(path) as journal:
        waiting = await journal.webhooks(limit=999)
        await applied(journal, *(SaveWebhook(replace(each, due_at=0.0)) for each in waiting))


def test_every_event_of_a_server_that_is_killed_arrives(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    """Each time it is killed between the end of calls and the delivery of their events."""
    rounds, calls = 3, 5
    secret = ("--secret-file", str(secret_file))
    with ServerProcess(tmp_path, options=options(port, secret_file)) as server:
        with listening(tmp_path, port, *secret, "--hang") as receiver:
            for _ in range(rounds):
                before = len(receiver.arrivals)
                add(server, calls)
                wait_until("it has begun", lambda n=before: len(receiver.arrivals) > n)
                server.restart()
            server.kill()
            tried = {each["id"] for each in receiver.arrivals}
        trio.run(make_due, server.journal)
        with listening(tmp_path, port, *secret) as receiver:
            server.start()
            wait_until(
                "all events arrive",
                lambda: len({each["id"] for each in receiver.taken}) >= rounds * calls,
            )
            server.stop()
            taken = receiver.taken
    assert len({each["id"] for each in taken}) == rounds * calls, "and no other"
    assert len({each["event"]["data"]["streamId"] for each in taken}) == rounds * calls
    assert all(each["isVerified"] for each in taken)
    assert {each["event"]["type"] for each in taken} == {"call.completed"}
    assert tried <= {each["id"] for each in taken}, "an id stays the same"


def test_a_call_that_is_killed_with_its_server_is_told_as_failed(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    with (
        listening(tmp_path, port, "--secret-file", str(secret_file)) as receiver,
        ServerProcess(tmp_path, options=options(port, secret_file, "--webhook-content")) as server,
    ):
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            start(peer, "forever")
        server.restart()
        wait_until("it is told", lambda: receiver.taken)
        [arrival] = receiver.taken
        assert arrival["event"]["type"] == "call.failed"
        assert arrival["event"]["data"]["error"]["data"]["reason"] == "interrupted"


def test_of_two_replicas_one_sends_an_event_and_another_takes_over(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    secret = ("--secret-file", str(secret_file))
    with two_replicas(tmp_path, options(port, secret_file)) as (first, second):
        with listening(tmp_path, port, *secret) as receiver:
            for server in (first, second):
                add(server, 5)
            wait_until("all arrive", lambda: len(receiver.taken) >= 10)
            assert len({each["id"] for each in receiver.taken}) == len(receiver.taken) == 10
        with listening(tmp_path, port, *secret, "--hang") as receiver:
            add(first)
            wait_until("an attempt is under way", lambda: receiver.arrivals)
            first.kill()
            [tried] = receiver.arrivals
        with listening(tmp_path, port, *secret) as receiver:
            deadline = time.monotonic() + LEASE_DEADLINE_S
            while not receiver.taken:
                assert time.monotonic() < deadline, "it is not taken over"
                time.sleep(0.05)
            [taken] = receiver.taken
            assert taken["id"] == tried["id"]


def test_a_question_whose_client_has_left_is_told_wherever_it_was(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    """It was asked by one replica, and its client left another one."""
    with (
        two_replicas(tmp_path, options(port, secret_file)) as (first, second),
        listening(tmp_path, port, "--secret-file", str(secret_file)) as receiver,
    ):
        with first.connect("ws-streams") as peer:
            peer.initialize(STREAMS)
            stream = start(peer, "ask")
            peer.expect(method_is("elicitation/create"))
            with second.connect("ws-streams") as again:
                again.initialize(STREAMS)
                again.request("stream/resume", stream.with_token)
                again.expect(method_is("elicitation/create"))
                assert receiver.arrivals == []
        wait_until("it is told", lambda: receiver.taken)
        [arrival] = receiver.taken
        assert arrival["event"]["type"] == "call.question"


# Receivers that fail


async def send_one(
    folder: Path,
    url: str,
    until: Callable[[], object],
    alongside: Callable[[], Awaitable[None]] | None = None,
    *,
    schedule: Sequence[float] = (0.02,),
) -> None:
    """Send a webhook to this URL from a journal in a file, with short pauses, until that is so."""
    post = partial(post_webhook, ssl.create_default_context())
    resolve = partial(addresses_of, is_private_allowed=True)
    async with open_sqlite_journal(folder / "queue.db", durability="process") as journal:
        await applied(journal, SaveWebhook(webhook(1, url, due_at=wall())))
        signer = Signer([SECRET])
        sender = Sender(journal, queue(), signer, post, resolve=resolve, schedule=schedule)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run)
            if alongside is not None:
                nursery.start_soon(alongside)
            with trio.fail_after(DEADLINE_S):
                while not until() or await journal.count_webhooks():
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()


async def test_a_receiver_that_fails_20_times_gets_it(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    with listening(tmp_path, port, "--secret-file", str(secret_file), "--fail", "20") as receiver:
        await send_one(tmp_path, receiver.url, lambda: receiver.taken)
        assert [each["status"] for each in receiver.arrivals] == [503] * 20 + [204]
        assert {each["id"] for each in receiver.arrivals} == {"msg_1"}
        assert all(each["isVerified"] for each in receiver.arrivals)


async def test_a_receiver_that_hangs_and_is_killed_gets_it_after_that(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(senders, "ATTEMPT_S", 0.5)
    receivers = [Listening(tmp_path, port, "--hang")]

    async def take_its_place() -> None:
        while len(receivers[0].arrivals) < 2:  # so one attempt has timed out
            await trio.sleep(0.02)
        receivers[0].end()
        receivers.append(await trio.to_thread.run_sync(Listening, tmp_path, port))

    try:
        url = f"http://127.0.0.1:{port}/"
        await send_one(
            # The pauses grow: the next receiver may take seconds to start.
            tmp_path,
            url,
            lambda: receivers[-1].taken,
            take_its_place,
            schedule=[0.02, 0.05, 0.2, 0.5, 1, 2, 5],
        )
        [taken] = receivers[-1].taken
        assert taken["id"] == "msg_1"
    finally:
        for each in receivers:
            each.end()


async def test_a_redirect_is_not_followed(tmp_path: Path, port: int) -> None:
    statuses = iter([b"301 Moved", b"307 Temporary Redirect", b"204 No Content"])
    asked = 0

    async def redirect(stream: trio.SocketStream) -> None:
        nonlocal asked
        asked += 1
        await stream.receive_some(65_536)
        location = f"location: http://127.0.0.1:{port}/elsewhere\r\n".encode()
        await stream.send_all(b"HTTP/1.1 " + next(statuses) + b"\r\n" + location + b"\r\n")
        await stream.aclose()

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/"
    serve = partial(trio.serve_listeners, redirect, [listener])
    with listening(tmp_path, port) as elsewhere:
        await send_one(tmp_path, url, lambda: asked == 3, serve)
        assert elsewhere.arrivals == []


# Refusals


def test_a_private_address_gets_nothing_unless_that_is_allowed(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    secret = ("--webhook-secret-file", str(secret_file))
    given = ("--webhook", f"https://127.0.0.1:{port}/", *secret)
    with (
        listening(tmp_path, port) as receiver,
        ServerProcess(tmp_path, options=given) as server,
    ):
        add(server)
        server.hear("leads to 127.0.0.1, which is not public")
        assert receiver.arrivals == []


def posted(port: int, headers: Mapping[str, str], body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request("POST", "/", body, dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_receiver_refuses_what_another_has_signed(
    tmp_path: Path, port: int, secret_file: Path
) -> None:
    body = b'{"type":"call.completed"}'
    ours, other = Signer([SECRET]), Signer([OTHER_SECRET])
    with listening(tmp_path, port, "--secret-file", str(secret_file)) as receiver:
        assert posted(port, other.headers("msg_1", wall(), body), body) == 401
        assert posted(port, ours.headers("msg_1", wall() - 600, body), body) == 401
        assert posted(port, ours.headers("msg_1", wall(), b"{}"), body) == 401
        assert posted(port, {}, body) == 401
        headers = ours.headers("msg_1", wall(), body)
        Webhook(SECRET).verify(body, headers)
        assert posted(port, headers, body) == 204
        wait_until("all are printed", lambda: len(receiver.arrivals) == 5)
        assert [each["isVerified"] for each in receiver.arrivals] == [False] * 4 + [True]


def test_a_made_secret_is_private_and_the_log_says_where(tmp_path: Path, port: int) -> None:
    given = ("--webhook", f"http://127.0.0.1:{port}/", "--webhook-private")
    with ServerProcess(tmp_path, options=given) as server:
        path = tmp_path / "journal.db.webhook-secret"
        server.hear(f"cat {path}")
        assert path.stat().st_mode & 0o777 == 0o600
        made = path.read_text().strip()
        with listening(tmp_path, port, "--secret-file", str(path)) as receiver:
            add(server)
            wait_until("it arrives", lambda: receiver.taken)
        server.restart()
        assert path.read_text().strip() == made
        assert made not in "".join(server.log)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--webhook", "http://example.com/"), "--webhook-private"),
        (("--webhook", "example.com"), "https://HOST/PATH"),
        (("--webhook-allow", "https://"), "https://HOST/PATH"),
        (("--webhook", "https://e.com/", "--webhook-secret-file", "/no/file"), "/no/file"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    done = run("serve", APP, "--ws", "127.0.0.1:0", *words, cwd=tmp_path, env=state)
    assert done.returncode == 2
    assert why in done.stderr


def test_replicas_must_have_a_secret_in_common(tmp_path: Path) -> None:
    with running("redis", tmp_path / "store") as store:
        over = ("--journal", store.url, "--webhook", "https://example.com/")
        done = run("serve", APP, "--ws", "127.0.0.1:0", *over, cwd=tmp_path)
    assert done.returncode == 2
    assert "--webhook-secret-file" in done.stderr
