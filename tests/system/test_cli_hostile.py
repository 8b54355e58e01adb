"""The command against servers that break the protocol: it ends, with an error of one line."""

import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

from streams.cli.actions.output import harmless
from streams.logs import CONTROLS
from tests.rigs.command import Done, run
from tests.rigs.scripted_http import EVENTS, Asked, Script, http_server
from tests.wire.process import CLI

Json = dict[str, Any]
RUDE = "a\x1b[2J\x7f\x9b31m\u202e\u2066\u2028\u200f\ny"
WITHIN_S = 60.0


def server(answer: Callable[[Asked], Awaitable[object]], *, at: str = "tools/call") -> Script:
    """A plain MCP server, except for its answer to one method."""

    async def script(asked: Asked) -> None:
        message = json.loads(asked.body or b"{}")
        if message.get("method") == at:
            await answer(asked)
        elif message.get("method") == "initialize":
            hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {}}
            body = {"jsonrpc": "2.0", "id": message["id"], "result": hello}
            await asked.respond("200 OK", json.dumps(body).encode())
        else:
            await asked.respond("405 Method Not Allowed" if asked.method == "GET" else "202 OK")

    return script


def saying(*lines: bytes) -> Callable[[Asked], Awaitable[object]]:
    """Answer with these events, in which `ID` is replaced by the id of the request."""

    async def answer(asked: Asked) -> None:
        request_id = json.dumps(json.loads(asked.body)["id"]).encode()
        await asked.start(EVENTS)
        for line in lines:
            await asked.write(b"data: " + line.replace(b"ID", request_id) + b"\n\n")
        await asked.finish()

    return answer


async def command(script: Script, *words: str) -> Done:
    async with http_server(script) as hostile:
        call = partial(run, "call", hostile.url, "t", *words, within_s=WITHIN_S)
        return await trio.to_thread.run_sync(call)


FINAL = b'{"jsonrpc":"2.0","id":ID,"result":{"content":[]}}'


def result(value: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":ID,"result":%b}' % value


def error(value: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":ID,"error":%b}' % value


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([result(b'{"content":"abc"}')], 0),
        ([result(b'{"content":[1,"x",{"text":[]}],"isError":"no"}')], 0),
        ([result(b"null")], 0),
        ([result(b'{"structuredContent":[[]],"content":{}}')], 0),
        ([result(b"[" * 900 + b"]" * 900)], None),
        ([result(b"[" * 100_000 + b"]" * 100_000)], None),
        ([result(b'{"content":[{"text":"\\ud800"}]}')], None),
        ([result(b"1e999")], None),
        ([error(b'"no"')], 1),
        ([error(b"null")], 1),
        ([error(b'{"code":"x","message":[]}')], 1),
        ([error(b'{"code":-1,"message":%b}' % json.dumps(RUDE * 9_999).encode())], 1),
        ([b'{"jsonrpc":"2.0","id":ID}'], 1),
        ([b'{"jsonrpc":"2.0","id":ID,"result":{},"error":{}}'], None),
        ([b'{"jsonrpc":"2.0","id":1.5,"result":{}}', b"[]", b"nonsense", b'"', FINAL], 0),
        ([b'{"jsonrpc":"2.0","id":[],"method":"x"}', b'{"jsonrpc":"1.0"}', FINAL, FINAL], 0),
        (
            [
                b'{"jsonrpc":"2.0","method":"notifications/progress","params":[]}',
                b'{"jsonrpc":"2.0","method":"notifications/message","params":7}',
                b'{"jsonrpc":"2.0","method":"notifications/message","params":%b}'
                % (b"[" * 5_000 + b"]" * 5_000),
                FINAL,
            ],
            0,
        ),
    ],
)
@pytest.mark.parametrize("words", [(), ("--json",)], ids=["plain", "json"])
async def test_whatever_a_server_answers_ends_in_a_code(
    lines: list[bytes], code: int | None, words: tuple[str, ...]
) -> None:
    done = await command(server(saying(*lines)), *words)
    assert "Traceback" not in done.stderr
    assert done.returncode in ({0, 1, 3, 4} if code is None else {code})
    assert done.returncode == 0 or len(done.shown) >= 1
    assert max(map(len, done.shown), default=0) < 10_000
    if done.returncode == 0 and words:
        json.loads(done.stdout)


async def endless_interim(asked: Asked) -> None:
    while True:
        await asked.stream.send_all(b"HTTP/1.1 102 Processing\r\n\r\n")


async def endless_headers(asked: Asked) -> None:
    await asked.stream.send_all(b"HTTP/1.1 200 OK\r\n")
    while True:
        await asked.stream.send_all(b"X: y\r\n" * 1_000)


async def endless_empty_data(asked: Asked) -> None:
    await asked.start(EVENTS)
    while True:
        await asked.write(b"data:\n" * 10_000)


async def endless_data(asked: Asked) -> None:
    await asked.start(EVENTS)
    await asked.write(b"data: ")
    while True:
        await asked.write(b"x" * 100_000)


async def redirect(asked: Asked) -> None:
    there = "Location: http://evil/$(touch x)\r\n"
    await asked.respond("302 Found", extra=there)


@pytest.mark.parametrize(
    "answer", [endless_interim, endless_headers, endless_empty_data, endless_data, redirect]
)
@pytest.mark.parametrize("at", ["initialize", "tools/call"])
async def test_what_has_no_end_ends_in_a_line_of_error(
    answer: Callable[[Asked], Awaitable[object]], at: str
) -> None:
    done = await command(server(answer, at=at))
    assert done.returncode in {1, 3}
    assert len(done.shown) <= 2, done.stderr  # a line of the log, and the error
    assert "$(touch" not in done.stderr


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["plain", "json"])
@pytest.mark.parametrize("is_error", [False, True])
async def test_a_server_controls_no_terminal(words: tuple[str, ...], *, is_error: bool) -> None:
    rude = json.dumps(RUDE, ensure_ascii=False).encode()
    params = b'{"level":%b,"data":%b}' % (rude, rude)
    progress = b'{"progressToken":ID,"progress":1,"message":%b}' % rude
    last = error(b'{"code":1,"message":%b}' % rude) if is_error else FINAL
    lines = [
        b'{"jsonrpc":"2.0","method":"notifications/message","params":%b}' % params,
        b'{"jsonrpc":"2.0","method":"notifications/progress","params":%b}' % progress,
        b'{"jsonrpc":"2.0","method":%b,"params":[%b]}' % (rude, rude),
        last if is_error else result(b'{"content":[],"odd":%b}' % rude),
    ]
    done = await command(server(saying(*lines)), *words)
    assert done.returncode == is_error
    assert not CONTROLS.search(done.stderr + done.stdout)
    if words:
        shown = [json.loads(line) for line in done.shown[:3]]
        assert shown[0]["params"]["data"] == RUDE
        assert is_error or json.loads(done.stdout)["odd"] == RUDE


async def test_a_locale_that_lacks_a_character_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    text = json.dumps({"content": [{"type": "text", "text": "é\u2028語"}]}, ensure_ascii=False)
    for words in ((), ("--json",)):
        done = await command(server(saying(result(text.encode()))), *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert "\\xe9\\u2028\\u8a9e" in done.stdout


async def test_text_for_a_terminal_is_harmless_too() -> None:
    block = json.dumps({"type": "text", "text": RUDE}, ensure_ascii=False).encode()
    lines = (result(b'{"content":[%b]}' % block),)
    async with http_server(server(saying(*lines))) as hostile:
        ear, theirs = os.openpty()
        words = [*CLI, "call", hostile.url, "t"]
        process = await trio.run_process(words, stdin=subprocess.DEVNULL, stdout=theirs)
        os.close(theirs)
        shown = os.read(ear, 65_536).decode()
        os.close(ear)
    assert process.returncode == 0
    assert shown.replace("\r\n", "\n") == harmless(RUDE) + "\n"
