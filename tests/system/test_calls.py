"""The driver of short calls: every answer is checked, on every transport."""

import os
import sys
import time
from functools import partial

import msgspec
import pytest
import trio

from benchmarks import calls
from benchmarks.calls import (
    ECHO,
    KEYED,
    NOTE,
    HttpDriver,
    PipeDriver,
    Plan,
    WebSocketDriver,
    answered,
    check_answer,
    cpu_s,
    response_in,
)
from benchmarks.mixed import Process, Work
from benchmarks.numbered import Lost
from benchmarks.peers import Missing
from benchmarks.peers.echo import ECHOES
from benchmarks.servers import (
    APP,
    bare_server,
    http_server,
    listening,
    stdio_server,
    websocket_server,
)
from benchmarks.suites.calls import fsyncs, owner
from tests.rigs import HERE

FAULTY = HERE / "faulty_echo.py"
SHORT = Plan(ramp_s=0.0, timed_s=0.01)
PATIENCE_S = 100
IN_FLIGHT = 3

SERVERS = {"http": http_server, "websocket": websocket_server, "stdio": stdio_server}
ANSWER = b'{"jsonrpc":"2.0","id":7,"result":{"content":[{"type":"text","text":"7"}]}}'


def driver_of(transport, served, journal):
    if transport == "stdio":
        return PipeDriver(served.command, partial(owner, journal))
    if transport == "websocket":
        return WebSocketDriver(served.url, [served.pid])
    return HttpDriver(served.url, [served.pid], IN_FLIGHT)


async def driven(make, tool):
    def run():
        driver = make()
        try:
            return driver.calls(IN_FLIGHT, tool, SHORT)
        finally:
            driver.close()

    with trio.fail_after(PATIENCE_S):
        return await trio.to_thread.run_sync(run)


@pytest.mark.parametrize("tool", [ECHO, KEYED, NOTE], ids=["echo", "keyed", "note"])
@pytest.mark.parametrize("transport", SERVERS)
async def test_calls_are_counted_and_timed(transport, tool, tmp_path):
    journal = tmp_path / "journal.db"
    async with SERVERS[transport](APP, journal) as served:
        took = await driven(lambda: driver_of(transport, served, journal), tool)
    assert took.per_s > 0
    assert 0 < took.p50_ms <= took.p99_ms
    assert took.server_us > 0
    assert took.driver_us > 0


@pytest.mark.parametrize(
    ("mistake", "tool"), [("stale", ECHO), ("failing", ECHO), ("mute", NOTE)], ids=str
)
@pytest.mark.parametrize("transport", SERVERS)
async def test_a_server_that_answers_wrongly_is_found_out(transport, mistake, tool, tmp_path):
    journal = tmp_path / "journal.db"
    async with SERVERS[transport](f"{FAULTY}:{mistake}", journal) as served:
        with pytest.raises(Lost):
            await driven(lambda: driver_of(transport, served, journal), tool)


@pytest.mark.parametrize("kind", ["trio", "uvicorn"])
async def test_the_limits_answer_as_a_server_does(kind):
    if kind == "uvicorn":
        pytest.importorskip("httptools")
    async with bare_server(kind) as served:
        took = await driven(
            lambda: HttpDriver(served.url, [served.pid], IN_FLIGHT, has_sessions=False), ECHO
        )
    assert took.per_s > 0


@pytest.mark.parametrize("name", ECHOES)
async def test_a_peer_answers_every_call(name):
    try:
        peer = ECHOES[name]()
    except Missing as error:
        pytest.skip(f"{name}: {error}")
    if peer.transport == "stdio":
        assert (await driven(lambda: PipeDriver(peer.command), ECHO)).per_s > 0
        return
    async with listening(peer.command) as served:
        took = await driven(
            lambda: HttpDriver(served.url, [served.pid], IN_FLIGHT, has_sessions=peer.has_sessions),
            ECHO,
        )
    assert took.per_s > 0


@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        ("say(id, text); say(id, text)", "no answer to"),
        ("say(id + 1, str(id + 1))", "no answer to"),
        ("say(id, text + ' ')", "the text of the call"),
        ("print('no JSON', flush=True)", "an answer was expected"),
        ("sys.exit()", "the server has ended"),
    ],
)
async def test_a_server_on_pipes_must_answer_each_call_once(mistake, why):
    program = (
        "import json, sys\n"
        "def say(id, text):\n"
        "    content = [{'type': 'text', 'text': text}]\n"
        "    result = {'serverInfo': {}, 'content': content}\n"
        "    print(json.dumps({'id': id, 'result': result}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    asked = json.loads(line)\n"
        "    if asked['method'] == 'initialize':\n"
        "        say(0, '')\n"
        "    elif asked['method'] == 'tools/call':\n"
        "        id, text = asked['id'], asked['params']['arguments']['text']\n"
        f"        {mistake}\n"
    )
    with pytest.raises(Lost, match=why):
        await driven(lambda: PipeDriver([sys.executable, "-c", program]), ECHO)


async def test_a_server_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(calls, "TIMEOUT_S", 0.1)
    with pytest.raises(TimeoutError):
        await driven(
            lambda: PipeDriver([sys.executable, "-c", "import sys; sys.stdin.read()"]), ECHO
        )


def test_an_answer_has_the_number_of_its_call_as_its_text():
    assert answered(ANSWER) == 7
    assert answered(b'{"jsonrpc":"2.0","method":"notifications/message","params":{}}') is None
    for wrong in (
        ANSWER.replace(b'"7"', b'"8"'),
        ANSWER.replace(b'"id":7,', b""),
        ANSWER.replace(b'"content"', b'"isError":true,"content"'),
        b'{"jsonrpc":"2.0","id":7,"error":{"code":-32603,"message":"no"}}',
        ANSWER[:-1],
    ):
        with pytest.raises(Lost):
            answered(wrong)


@pytest.mark.parametrize(
    ("messages", "tool"),
    [([], ECHO), ([ANSWER, ANSWER], ECHO), ([ANSWER.replace(b"7", b"8")], ECHO), ([ANSWER], NOTE)],
)
def test_a_response_has_the_one_answer_and_its_log_messages(messages, tool):
    with pytest.raises(Lost):
        check_answer(messages, 7, tool)


PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENT = b"id: a_0\r\ndata: \r\n\r\nid: a_1\r\ndata: %b\r\n\r\n" % ANSWER


@pytest.mark.parametrize(
    ("whole", "closes"),
    [
        (PLAIN + b"Content-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER), False),
        (
            EVENTS
            + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT),
            False,
        ),
        (EVENTS + b"connection: close\r\n\r\n" + EVENT, True),
    ],
    ids=["length", "chunks", "end"],
)
def test_a_response_is_read_as_soon_as_it_is_whole(whole, closes):
    for size in range(len(whole)):
        assert response_in(whole[:size]) is None
    response = response_in(whole, is_ended=closes)
    assert response == ([ANSWER], closes)


@pytest.mark.parametrize("came", [b"", PLAIN[:9], b"HTTP/1.1 503 Busy\r\n\r\n"])
def test_half_a_head_and_a_refusal_are_no_response(came):
    with pytest.raises(Lost):
        response_in(came, is_ended=True)


def test_the_cpu_time_of_a_process_includes_all_of_its_work():
    before = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - before[1] < 0.02:
        pass
    assert cpu_s(os.getpid()) - before[0] >= 0.02


def test_syncs_are_timed(tmp_path):
    took = fsyncs(tmp_path / "file", SHORT)
    assert 0 < took.p50_ms <= took.p99_ms


# The mixed load


@pytest.mark.parametrize("mistake", ["lossy", "twisted", "curt"])
async def test_a_client_that_resumes_beside_the_calls_finds_mistakes(mistake, tmp_path, capfd):
    app = f"{HERE / 'faulty_fill.py'}:{mistake}"
    async with websocket_server(app, tmp_path / "journal.db") as served:
        with pytest.raises(Lost):
            await trio.to_thread.run_sync(Process, "resume", Work(served.url, resumed=50))
    assert "Lost" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mistake", "work"),
    [("gapped", Work(idle=0, live=1)), ("chatty", Work(idle=1, live=0))],
    ids=["gapped", "chatty"],
)
async def test_a_mistake_in_an_idle_stream_or_a_live_one_is_found(mistake, work, tmp_path, capfd):
    def run(url):
        crowd = Process("crowd", msgspec.structs.replace(work, url=url))
        try:
            while True:
                crowd.ask(b"well?")
        finally:
            crowd.close()

    with trio.fail_after(PATIENCE_S):
        async with websocket_server(f"{FAULTY}:{mistake}", tmp_path / "journal.db") as served:
            with pytest.raises(Lost, match="has ended"):
                await trio.to_thread.run_sync(run, served.url)
    assert "Lost" in capfd.readouterr().err
